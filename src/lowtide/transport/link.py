"""A simulated link: bandwidth, delay, jitter and loss, turned into seconds on a virtual clock."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

from lowtide.errors import ConfigError, unknown

_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)([a-z%]*)")
_FORM = "write a link as 'down:up/delay/jitter=time/loss=percent', such as 100mbit/40ms or 50mbit:10mbit/40ms/loss=1%"


@dataclass(frozen=True)
class Link:
    """What joins one replica to the others: `up` and `down` in bits a second, `delay` and `jitter` in seconds one way.

    A transfer takes `delay +- jitter + max(sent / up, received / down) / (1 - loss)`: both directions at once,
    lost packets sent again, jitter drawn evenly.

    >>> link = Link.parse("50mbit:10mbit/40ms")
    >>> link.transfer_seconds(1_250_000, 1_250_000)
    1.04
    """

    up: float
    down: float
    delay: float
    jitter: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        for name in ("up", "down"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive bits a second: {getattr(self, name)}\nhint: {_FORM}")
        if not 0 <= self.delay < math.inf:
            raise ConfigError(f"delay must be zero or more seconds: {self.delay}\nhint: {_FORM}")
        # Not beyond the delay: a packet that arrives before it leaves would have to be cut off, and bend the mean.
        if not 0 <= self.jitter <= self.delay:
            raise ConfigError(
                f"jitter must lie between 0 and the delay, {self.delay} s: {self.jitter}\n"
                "hint: a delay of d with jitter j varies between d - j and d + j"
            )
        if not 0 <= self.loss < 1:
            raise ConfigError(f"loss must lie in [0, 1): {self.loss}\nhint: one percent is 0.01, or loss=1% in text")

    @classmethod
    def parse(cls, text: str) -> Link:
        """Read `down:up/delay`, one rate standing for both, then any of `jitter=` and `loss=`.

        >>> Link.parse("100mbit/40ms/jitter=5ms/loss=1%")
        Link(up=100000000.0, down=100000000.0, delay=0.04, jitter=0.005, loss=0.01)
        """
        rates, *rest = text.strip().lower().split("/")
        if not rest:
            raise ConfigError(f"link {text!r} has no delay\nhint: {_FORM}")
        # Down before up, as providers print it.
        down, _, up = rates.partition(":")
        options = {}
        for option in rest[1:]:
            name, _, value = option.partition("=")
            if name not in ("jitter", "loss"):
                raise unknown("link option", name, ["jitter", "loss"])
            options[name] = _quantity(text, value, _TIMES if name == "jitter" else {"%": 0.01, "": 1.0})
        down_rate = _quantity(text, down, _RATES)
        up_rate = _quantity(text, up, _RATES) if up else down_rate
        return cls(up_rate, down_rate, _quantity(text, rest[0], _TIMES), **options)

    def transfer_seconds(self, sent: int, received: int, rng: random.Random | None = None, *, hops: int = 1) -> float:
        """Seconds to send and receive so many bytes, in `hops` turns over the link; `rng` draws the jitter."""
        # Each turn draws its own jitter; without a generator the mean is taken, as a planner wants it.
        turns = (rng.uniform(-self.jitter, self.jitter) if rng and self.jitter else 0.0 for _ in range(hops))
        return self.wire_seconds(sent, received) + sum(self.delay + turn for turn in turns)

    def wire_seconds(self, sent: int, received: int) -> float:
        """The part of a transfer for which the line is busy: all but the delay."""
        return max(sent / self.up, received / self.down) * 8 / (1 - self.loss)


def _quantity(link: str, text: str, units: dict[str, float]) -> float:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in units:
        names = ", ".join(filter(None, units))
        raise ConfigError(f"link {link!r}: {text!r} is no number with a unit of {names}\nhint: {_FORM}")
    return float(match[1]) * units[match[2]]
