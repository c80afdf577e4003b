"""Local SGD and post-local SGD: train apart, then take the mean."""

from __future__ import annotations

from lowtide.sync.exchange import summed
from lowtide.sync.outer import sgd
from lowtide.sync.plan import Method, Plan
from lowtide.sync.signal import delta
from lowtide.sync.when import every, switch


def local_sgd(*, period: int = 20, switch_at: int | None = None) -> Method:
    """Every `period` steps all replicas continue from the mean of their parameters.

    With `switch_at` they agree at every step until then (post-local SGD). What travels is the delta, which has the
    same mean and a smaller range. The inner optimizers' moments stay local.

    State: anchor (1 P). Payload: 4 P bytes a round.

    >>> local_sgd(period=20).plans[0].when.launches(40, 0)
    True
    """
    when = every(period) if switch_at is None else switch(switch_at, period)
    # a whole step along the mean delta ends at the mean of the parameters
    plan = Plan(when=when, signal=delta(), exchange=summed(), outer=sgd(1.0))
    options = {"period": period, "switch_at": switch_at}
    return Method("local_sgd", (plan,), options, "FedAvg; post-local SGD (arXiv 1808.07217)", "anchor")
