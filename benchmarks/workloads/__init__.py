"""The workloads of the proving ground, by kind; `registry.WORKLOADS` names them all."""
