"""When a gate opens: the bound on the spread, and how it is set and kept.

All of it is arithmetic on numbers that every replica has, so that all decide alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowtide.errors import ConfigError

LONGEST = 2000  # steps after which a gate opens in any case, unless told otherwise


@dataclass(frozen=True)
class Trigger:
    """Opens when the spread is over `theta`, but not before `shortest` steps and never later than `longest`.

    mode       theta
    fixed      as given
    calibrate  the spread measured after the first round
    interval   after each round, interval * spread / steps of that round: holds the mean interval
    budget     as interval, with the interval recomputed from the bytes and steps that are left

    Where theta is to be measured, the first round takes `first` steps. With `rate_power` p, theta is multiplied by
    (rate / base rate)^p: a decaying rate would otherwise stop all rounds.
    """

    mode: str
    theta: float = math.nan
    interval: float = 0
    first: int = 1
    budget: float = math.inf
    steps: int = 0
    shortest: int = 1
    longest: int = LONGEST
    rate_power: float = 2.0

    def init(self) -> dict[str, Tensor]:
        """theta, the step of the last round, and bytes spent."""
        return {"theta": _number(self.theta), "last": _number(0), "spent": _number(0)}

    def opens(self, spread: float, step: int, rate: float, memory: dict[str, Tensor]) -> bool:
        """Whether this is the time. Strictly over the bound: with theta = 0 every change opens."""
        since = step - int(memory["last"])
        if since < self.shortest:
            return False
        if since >= self.longest:
            return True
        theta = float(memory["theta"])
        if math.isnan(theta):  # not measured yet: the first round has the length that was asked for
            return since >= self.first
        return bool(spread > theta * rate**self.rate_power)

    def agreed(self, spread: float, step: int, rate: float, cost: float, memory: dict[str, Tensor]) -> None:
        """Take note of a round, and set the bound for the next."""
        # a forced round may come at the step of the one before
        since = max(1, step - int(memory["last"]))
        # new tensors: until commit the old ones belong to the state
        memory["last"], memory["spent"] = _number(step), memory["spent"] + cost
        # at a rate of zero there is nothing to scale by
        here = spread / (rate**self.rate_power or 1.0)
        if self.mode == "calibrate" and math.isnan(float(memory["theta"])):
            memory["theta"] = _number(here)
        elif self.mode == "interval":
            memory["theta"] = _number(self.interval * here / since)
        elif self.mode == "budget":
            rounds = max(self.budget - float(memory["spent"]), 0.0) // max(cost, 1.0)
            interval = max(1.0, (self.steps - step) / rounds) if rounds else 0.0
            # nothing left to spend: only `longest` opens from here on
            memory["theta"] = _number(interval * here / since if rounds else math.inf)


def _number(value: float) -> Tensor:
    # in double, since bytes soon pass 2^24, where single precision stops counting
    return torch.tensor(float(value), dtype=torch.float64)


def trigger(
    theta: float | str,
    *,
    shortest: int = 1,
    longest: int | None = None,
    rate_power: float | None = None,
    check_every: int = 1,
) -> Trigger:
    """Read `theta`.

    a number            the bound itself
    calibrate:H         what is measured after H steps
    interval:H          so that rounds take H steps on average, 3 H at most
    epochs:M            so that rounds take M/2 checks on average and M at most, the first just one: FDA-Opt's rounds,
                        where a check comes once an epoch
    budget:BYTES/STEPS  so that rounds take so many bytes in so many steps

    >>> trigger("epochs:10", check_every=40).interval
    200.0
    """
    _ordered(shortest, longest)
    base = _fixed(theta) if isinstance(theta, int | float) else _measured(theta, check_every)
    power = base.rate_power if rate_power is None else rate_power
    return replace(base, shortest=shortest, longest=longest or base.longest, rate_power=power)


def _ordered(shortest: int, longest: int | None) -> None:
    if shortest < 1:
        raise ConfigError(f"min_interval must be at least 1, not {shortest}\nhint: it counts steps between rounds")
    if longest is not None and longest < shortest:
        raise ConfigError(
            f"max_interval must not be below min_interval: {longest} < {shortest}\nhint: leave out one of them"
        )


def _fixed(theta: float) -> Trigger:
    if not theta >= 0:
        raise ConfigError(
            f"theta must be at least 0, not {theta!r}\nhint: 0 agrees at every step; 'calibrate:50' measures"
        )
    return Trigger("fixed", float(theta))


def _measured(theta: str, check_every: int) -> Trigger:
    """The trigger of a mode, from its name and numbers."""
    mode, _, value = str(theta).partition(":")
    first, steps = _numbers(mode, value)
    count = int(first)
    modes = {
        "calibrate": Trigger(mode, first=count),
        # a bound is set anew only at a round, so one that is too high needs a `longest` to recover
        "interval": Trigger(mode, interval=count, first=count, longest=3 * count, rate_power=0.0),
        "epochs": Trigger(
            "interval", interval=count / 2 * check_every, first=check_every, longest=count * check_every, rate_power=0.0
        ),
        "budget": Trigger(mode, first=max(1, steps // 100), budget=first, steps=steps, longest=steps, rate_power=0.0),
    }
    if mode not in modes or not count:
        raise ConfigError(
            f"cannot read theta={theta!r}\n"
            "hint: a number, 'calibrate:50', 'interval:50', 'epochs:10' or 'budget:1e9/1000' (bytes/steps)"
        )
    return modes[mode]


def _numbers(mode: str, value: str) -> tuple[float, int]:
    """Bytes and steps of a budget, else a count and 1; zeros for what is no number over 0."""
    number, _, steps = value.partition("/")
    try:
        found = (float(number), int(steps)) if mode == "budget" else (float(int(value)), 1)
    except ValueError:
        return 0.0, 0
    return found if 0 < found[0] < math.inf and found[1] >= 1 else (0.0, 0)
