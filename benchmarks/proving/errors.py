"""What the command line refuses, with the reason and the next step."""


class RefusedError(Exception):
    """The command cannot be done as asked; the message says what was found and what to do."""
