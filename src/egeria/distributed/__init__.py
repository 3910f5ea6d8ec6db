"""Training in several processes: agreement between ranks, DistributedDataParallel, FSDP2."""
