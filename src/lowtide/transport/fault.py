"""What broke a transport: the first error, kept, and raised again at every later call."""

from __future__ import annotations

import threading

from lowtide.errors import LowtideError, PeerLostError


class Fault:
    """Holds the first error of a transport; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: LowtideError | None = None

    @property
    def error(self) -> LowtideError | None:
        """The first error, or None while all is well."""
        return self._error

    def keep(self, error: LowtideError) -> bool:
        """Remember `error` if it is the first; True if it is."""
        with self._lock:
            if self._error is not None:
                return False
            self._error = error
            return True

    def check(self, prefix: str = "the transport is broken since: ") -> None:
        """Raise the first error again, if there is one.

        >>> fault = Fault()
        >>> fault.keep(PeerLostError("rank 2 died", ranks=[2]))
        True
        >>> fault.check()
        Traceback (most recent call last):
        lowtide.errors.PeerLostError: the transport is broken since: rank 2 died
        """
        # Without the lock: the error is set once and never taken back.
        if self._error is not None:
            raise again(self._error, prefix)


def again(error: LowtideError, prefix: str = "") -> LowtideError:
    """A fresh error of the same type: one exception object must not be raised in two threads.

    >>> again(PeerLostError("rank 2 died", ranks=[2])).ranks
    (2,)
    """
    if isinstance(error, PeerLostError):
        return PeerLostError(f"{prefix}{error}", ranks=error.ranks)
    return type(error)(f"{prefix}{error}")
