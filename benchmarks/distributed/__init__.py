"""What freezing saves among several processes: bytes, iterations, and throughput over a slow network."""
