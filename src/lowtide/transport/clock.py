"""The virtual clock of one simulated replica: seconds of compute and of waiting."""

from __future__ import annotations

import time

from lowtide.errors import ConfigError


class Clock:
    """Counts compute as measured thread time while the replica runs, or as given seconds for each inner step.

    >>> clock = Clock(speed=0.5, step_seconds=1.0)
    >>> clock.step()
    >>> clock.wait_until(3.0)
    >>> clock.seconds, clock.compute, clock.wait
    (3.0, 2.0, 1.0)
    """

    def __init__(self, speed: float = 1.0, step_seconds: float | None = None) -> None:
        if not speed > 0:
            raise ConfigError(f"the speed of a replica must be positive: {speed}\nhint: 0.5 is half as fast as usual")
        if step_seconds is not None and not step_seconds >= 0:
            raise ConfigError(f"step_seconds must be zero or more: {step_seconds}\nhint: None measures")
        self.compute = 0.0
        self.wait = 0.0
        self._speed = speed
        self._step_seconds = step_seconds
        self._resumed: float | None = None  # the thread's time at the last reading; None while it does not run

    @property
    def seconds(self) -> float:
        """The time it is, with what has been computed up to now."""
        self._read()
        return self.compute + self.wait

    def advance(self, seconds: float) -> None:
        """Let so many seconds of compute pass, at usual speed."""
        self.compute += seconds / self._speed

    def step(self) -> None:
        """One inner step was taken: lets `step_seconds` pass, if compute is not measured."""
        if self._step_seconds is not None:
            self.advance(self._step_seconds)

    def wait_until(self, seconds: float) -> None:
        """Wait for a moment; one that is past costs nothing."""
        self.wait += max(seconds - self.seconds, 0.0)

    def resume(self) -> None:
        """The replica's thread runs from now on; called in it."""
        # Thread time, not wall time: what else the machine does is no part of the simulation.
        self._resumed = time.thread_time() if self._step_seconds is None else None

    def pause(self) -> None:
        """The replica's thread stops running; called in it."""
        self._read()
        self._resumed = None

    def _read(self) -> None:
        if self._resumed is not None:
            now = time.thread_time()
            self.advance(now - self._resumed)
            self._resumed = now
