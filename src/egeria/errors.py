"""The errors egeria raises; each says what was expected, what was found, and what to do next."""

import re

# Of a URL: what stands before its host, and the values of what is named like a key.
_SECRETS = re.compile(
    r'(?P<user>:/{1,2})[^\s"\\]*(?=@)'
    r"""|(?P<key>(?:token|key|keyid|sig|signature|secret|password|pwd)=)[^\s&"'\\]+""",
    re.IGNORECASE,
)


def redact(text: str) -> str:
    """Return a text without the passwords and tokens of the URLs in it."""
    return _SECRETS.sub(lambda found: f"{found['user'] or found['key']}***", text)


def printable(text: str) -> str:
    """Return a text `redact`ed, and without what could steer a terminal."""
    shown = redact(text).replace("\N{NO-BREAK SPACE}", " ")
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in shown)


class EgeriaError(Exception):
    """The base class of every error that egeria raises on purpose."""

    def __str__(self) -> str:
        text = re.sub(r"(\S{100})\S{200,}", r"\1...", printable(super().__str__()))
        return text if len(text) < 1500 else f"{text[:1000]} ... {text[-400:]}"


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
    return printable(f"{type(error).__name__}: {' '.join(str(error).split())}")[:500]
