"""When a plan acts: the steps at which each fragment's messages leave and land.

Steps count from 1. `land(step, fragment)` names the launch whose outcome is applied at that step; 0 stands for
the time before the first launch (only `eager` applies a step then), `None` for "nothing lands now".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lowtide.errors import ConfigError


class When(Protocol):
    """The clock of a plan."""

    @property
    def fragments(self) -> int:
        """How many parts of the model have a clock of their own."""

    @property
    def period(self) -> int:
        """Steps from one launch of a fragment to its next."""

    @property
    def delay(self) -> int:
        """Steps that a message has to arrive in."""

    def launches(self, step: int, fragment: int) -> bool:
        """Whether a message leaves after this step."""

    def lands(self, step: int, fragment: int) -> int | None:
        """The launch whose outcome is applied after this step."""


@dataclass(frozen=True)
class Every:
    """Every `period` steps; lands `delay` steps later."""

    period: int
    delay: int = 0
    fragments: int = 1

    def launches(self, step: int, fragment: int) -> bool:
        # step 0 is the common start: there is nothing to agree on yet
        return step > 0 and step % self.period == 0

    def lands(self, step: int, fragment: int) -> int | None:
        # asked of the step at which it left, so that both ends follow one rule
        sent = step - self.delay
        return sent if self.launches(sent, fragment) else None


@dataclass(frozen=True)
class Switch:
    """Every step up to `start`, then every `period` steps."""

    start: int
    period: int
    delay: int = 0
    fragments: int = 1

    def launches(self, step: int, fragment: int) -> bool:
        # counted from the switch, so that the first gap is a whole period
        return 0 < step <= self.start or (step > self.start and (step - self.start) % self.period == 0)

    def lands(self, step: int, fragment: int) -> int | None:
        return step if self.launches(step, fragment) else None


@dataclass(frozen=True)
class Staggered:
    """Each fragment every `period` steps, the fragments spread evenly over the period."""

    fragments: int
    period: int
    delay: int = 0

    def launches(self, step: int, fragment: int) -> bool:
        # the last fragment closes the period, so a single one acts as `every` does
        offset = (fragment + 1) * self.period // self.fragments % self.period
        return step > 0 and step % self.period == offset

    def lands(self, step: int, fragment: int) -> int | None:
        sent = step - self.delay
        return sent if self.launches(sent, fragment) else None


@dataclass(frozen=True)
class OneLate:
    """Every `period` steps a message leaves and the one before it is applied: communication has a whole period."""

    period: int
    fragments: int = 1

    @property
    def delay(self) -> int:
        return self.period

    def launches(self, step: int, fragment: int) -> bool:
        return step > 0 and step % self.period == 0

    def lands(self, step: int, fragment: int) -> int | None:
        return step - self.period if self.launches(step, fragment) else None


def _steps(name: str, value: int, least: int = 1) -> int:
    try:
        whole = int(value)
    except (TypeError, ValueError, OverflowError):  # text, NaN, infinity
        whole = least - 1
    # 20.0 out of a file means 20; 20.5 is a mistake
    if whole != value or whole < least:
        raise ConfigError(
            f"{name} must be a whole number of at least {least}, not {value!r}\nhint: it counts optimizer steps"
        )
    return whole


def every(period: int, *, delay: int = 0) -> When:
    """One round every `period` inner steps, applied `delay` steps after it began."""
    _steps("period", period)
    # zero is no delay at all, and fits a period of one step too
    if _steps("delay", delay, 0) and delay >= period:
        raise ConfigError(
            f"delay must be shorter than the period: delay={delay}, period={period}\nhint: one message at a time"
        )
    return Every(period, delay)


def switch(start: int, period: int) -> When:
    """Every step until `start`, then every `period` steps."""
    return Switch(_steps("start", start, 0), _steps("period", period))


def staggered(fragments: int, period: int, *, delay: int = 0) -> When:
    """`fragments` parts of the model, each on its own beat of one period."""
    _steps("fragments", fragments)
    _steps("period", period)
    _steps("delay", delay, 0)
    if period % fragments:
        raise ConfigError(
            f"period must be a multiple of the fragment count: period={period}, fragments={fragments}\n"
            f"hint: period={-(-period // fragments) * fragments} is the next valid value"
        )
    if delay and delay >= period // fragments:
        raise ConfigError(
            f"delay must be shorter than a fragment's beat: delay={delay}, period/fragments={period // fragments}\n"
            "hint: one fragment at a time is on its way"
        )
    return Staggered(fragments, period, delay)


def one_late(period: int) -> When:
    """Each round applies what the round before it sent."""
    return OneLate(_steps("period", period))
