"""One of N threads runs at a time: the one that holds the baton."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

Switch = Callable[[int | None, int | None], None]


class Baton:
    """Passes between ranks when its holder waits or leaves, always to the lowest rank that can go on.

    When none can, `settle` says which of the waiting ones now can: all that is outside of this class. `on_switch` is
    told each pass, as (from, to), in the thread that lets go; None stands for the time before and after.
    """

    def __init__(self, size: int, settle: Callable[[], Collection[int]], on_switch: Switch | None = None) -> None:
        self._settle = settle
        self._on_switch = on_switch
        # A semaphore each, not one condition: a pass wakes the one thread that is meant.
        self._turn = [threading.Semaphore(0) for _ in range(size)]
        self._ready = set(range(size))
        self._holder: int | None = None
        self._turn[0].release()

    def enter(self, rank: int) -> None:
        """Wait for the first turn; called once by each thread."""
        self._turn[rank].acquire()
        # Only rank 0 finds no holder: its turn was given before any thread had one to pass.
        if self._holder is None:
            self._switch(rank)

    def wait(self, rank: int) -> None:
        """Let others run until `settle` lets this rank go on."""
        self._ready.discard(rank)
        self._pass()
        self._turn[rank].acquire()

    def leave(self, rank: int) -> None:
        """Let go for good; called once by each thread."""
        self._ready.discard(rank)
        self._pass()

    def _pass(self) -> None:
        if not self._ready:
            self._ready.update(self._settle())
        following = min(self._ready, default=None)
        # The switch is told before the release: from then on the next thread runs.
        self._switch(following)
        if following is not None:
            self._turn[following].release()

    def _switch(self, following: int | None) -> None:
        if self._on_switch is not None and following != self._holder:
            self._on_switch(self._holder, following)
        self._holder = following
