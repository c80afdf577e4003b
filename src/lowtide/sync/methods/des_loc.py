"""DES-LOC: parameters and Adam's moments are averaged, each on its own clock."""

from __future__ import annotations

from lowtide.sync.exchange import summed
from lowtide.sync.outer import assign
from lowtide.sync.plan import Method, Plan
from lowtide.sync.signal import optimizer_state, parameters
from lowtide.sync.when import every


def des_loc(*, period: int = 32, first_period: int | None = None, second_period: int | None = None) -> Method:
    """Local SGD on parameters, `exp_avg` and `exp_avg_sq`, at periods 1 : 3 : 6 unless given.

    Needs an Adam-like inner optimizer.

    State: nothing. Payload a step: 4 P (1/period + 1/first_period + 1/second_period) bytes.

    >>> [plan.when.period for plan in des_loc(period=10).plans]
    [10, 30, 60]
    """
    clocks = {
        "parameters": period,
        # moments move slower than parameters, so they can be averaged more rarely
        "exp_avg": 3 * period if first_period is None else first_period,
        "exp_avg_sq": 6 * period if second_period is None else second_period,
    }
    signals = [parameters(), optimizer_state("exp_avg"), optimizer_state("exp_avg_sq")]
    plans = tuple(
        Plan(when=every(clock), signal=signal, exchange=summed(), outer=assign())
        for signal, clock in zip(signals, clocks.values(), strict=True)
    )
    options = {"period": period, "first_period": clocks["exp_avg"], "second_period": clocks["exp_avg_sq"]}
    return Method("des_loc", plans, options, "DES-LOC (arXiv 2505.22549)", "none")
