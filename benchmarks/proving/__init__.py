"""The proving ground: runs workloads under rival policies, and compares what came of them by their journals."""


class RefusedError(Exception):
    """The command cannot be done as asked; the message says what was found and what to do."""
