"""The proving ground: runs workloads under rival policies, and compares what came of them by their journals."""
