"""Making runs: each in a process of its own, from its `run.json` to its journal."""
