"""Every error that lowtide raises on purpose.

    LowtideError
    ├── ConfigError      an option or argument that cannot work        (ValueError)
    ├── ModelError       a model or optimizer that cannot be attached  (ValueError)
    ├── StateError       saved state that does not fit this run        (ValueError)
    ├── PayloadError     bytes that are not a valid payload            (ValueError)
    ├── AgreementError   replicas that do not run the same thing       (RuntimeError)
    └── TransportError   the network failed                            (RuntimeError)
        └── PeerLostError    named replicas died or fell silent

Each message says what was wrong, with the values, and then what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LowtideError(Exception):
    """Base of all errors that lowtide raises on purpose."""


class ConfigError(LowtideError, ValueError):
    """An option or argument that cannot work."""


class ModelError(LowtideError, ValueError):
    """A model or optimizer that cannot be attached."""


class StateError(LowtideError, ValueError):
    """Saved state that does not fit this run."""


class PayloadError(LowtideError, ValueError):
    """Bytes that are not a valid payload."""


class AgreementError(LowtideError, RuntimeError):
    """Replicas that do not run the same thing."""


class TransportError(LowtideError, RuntimeError):
    """The network failed; the local state is as it was before the round."""


class PeerLostError(TransportError):
    """Named replicas died or fell silent."""

    def __init__(self, message: str, *, ranks: Iterable[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


def unknown(kind: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that does not exist, with the nearest one that does.

    >>> print(unknown("method", "dilocco", ["ddp", "diloco"]))
    unknown method 'dilocco'; known: ddp, diloco
    hint: did you mean 'diloco'?
    """
    names = sorted(known)
    message = f"unknown {kind} {name!r}; known: {', '.join(names) or 'none'}"
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        message += f"\nhint: did you mean {close[0]!r}?"
    return ConfigError(message)
