"""The errors egeria raises; each says what was expected, what was found, and what to do next."""


class EgeriaError(Exception):
    """The base class of every error that egeria raises on purpose."""


class ConfigError(EgeriaError, ValueError):
    """A setting, a TOML file or an argument has a value outside its contract."""


class UnsupportedModelError(EgeriaError):
    """The model cannot be cut into layer modules; the message names the reason."""


class JournalError(EgeriaError):
    """A journal is missing, unreadable or written by a newer schema."""


class StateError(EgeriaError, ValueError):
    """A state handed to `load_state_dict` does not belong to this run."""


class UncacheableError(EgeriaError):
    """The frozen layers cannot be skipped; the message is the reason."""


def brief(error: BaseException) -> str:
    """Return an error on one line of at most 500 characters, for a message or the journal."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
