"""SPARTA: a small random share of the parameters is averaged all the time."""

from __future__ import annotations

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
    outer_lr: float = 0.7,
    momentum: float = 0.9,
) -> Method:
    """Every `period` steps the positions of a shared random mask take the replicas' mean; no index travels.

    What arrives is applied as a difference, so a `delay` loses no step. With `diloco_period` a DiLoCo plan runs beside
    it, whose anchor SPARTA leaves alone; its rounds can then be much rarer.

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
    beside = () if diloco_period is None else diloco(period=diloco_period, outer_lr=outer_lr, momentum=momentum).plans
    options = {"density": density, "period": period, "delay": delay, "seed": seed, "diloco_period": diloco_period}
    # shown only where they act
    if beside:
        options |= {"outer_lr": outer_lr, "momentum": momentum}
    return Method(
        "sparta", (plan, *beside), options, "SPARTA (exogym)", "anchor, momentum" if beside else "none (private)"
    )
