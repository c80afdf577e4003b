"""SPARTA: a small random share of the parameters is averaged all the time."""

from __future__ import annotations

from lowtide.errors import ConfigError
from lowtide.sync.exchange import masked
from lowtide.sync.merge import rebase
from lowtide.sync.methods.diloco import diloco
from lowtide.sync.outer import assign_delta
from lowtide.sync.plan import Method, Plan
from lowtide.sync.signal import parameters
from lowtide.sync.when import every


def sparta(
    *,
    density: float = 0.005,
    period: int = 1,
    delay: int = 0,
    seed: int = 0,
    diloco_period: int | None = None,
    outer_lr: float | None = None,
    momentum: float | None = None,
) -> Method:
    """Every `period` steps the positions of a shared random mask take the replicas' mean; no index travels.

    What arrives is applied as a difference, so a `delay` loses no step. With `diloco_period` a DiLoCo plan runs beside
    it (`outer_lr` 0.7 and `momentum` 0.9 unless given), whose anchor SPARTA leaves alone; its rounds can then be rarer.

    State: nothing (anchor, momentum: 2 P with DiLoCo). Payload: 4 density P bytes an event.

    >>> [len(sparta().plans), len(sparta(diloco_period=500).plans)]
    [1, 2]
    """
    plan = Plan(
        when=every(period, delay=delay),
        signal=parameters(),
        exchange=masked(density, seed=seed),
        outer=assign_delta(),
        merge=rebase(),
    )
    beside = _beside(diloco_period, outer_lr, momentum)
    own = {"density": density, "period": period, "delay": delay, "seed": seed, "diloco_period": diloco_period}
    options: dict[str, object] = dict(own)
    if beside:
        # rate and momentum are shown only where they act
        options |= {"outer_lr": beside.options["outer_lr"], "momentum": beside.options["momentum"]}
    plans = (plan, *beside.plans) if beside else (plan,)
    state = "anchor, momentum" if beside else "none (private)"
    return Method("sparta", plans, options, "SPARTA (exogym)", state)


def _beside(period: int | None, outer_lr: float | None, momentum: float | None) -> Method | None:
    """The DiLoCo that runs beside, if any."""
    if period is not None:
        # DiLoCo's usual pair
        rate, mu = 0.7 if outer_lr is None else outer_lr, 0.9 if momentum is None else momentum
        return diloco(period=period, outer_lr=rate, momentum=mu)
    if (outer_lr, momentum) != (None, None):
        raise ConfigError(
            f"outer_lr={outer_lr}, momentum={momentum} belong to a DiLoCo plan, and there is none\n"
            "hint: give diloco_period too"
        )
    return None
