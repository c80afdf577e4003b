"""Eager DiLoCo: a whole period to send, one's own part used at once."""

from __future__ import annotations

from lowtide.sync.exchange import summed
from lowtide.sync.outer import eager as eager_rule
from lowtide.sync.outer import nesterov
from lowtide.sync.plan import Method, Plan
from lowtide.sync.signal import delta
from lowtide.sync.when import one_late


def eager(*, period: int = 30, outer_lr: float = 0.7, momentum: float = 0.9) -> Method:
    """`G = own delta / N + (last round's mean - own share of it)`, then Nesterov as in DiLoCo.

    The message of a round is applied at the next one, so it may take as long as the period. Replicas differ by
    their own fresh parts; `close` averages them.

    State: anchor, momentum, the delta on its way (3 P). Payload: 4 P bytes a round.

    >>> eager(period=20).private
    True
    """
    plan = Plan(
        when=one_late(period), signal=delta(), exchange=summed(), outer=eager_rule(nesterov(outer_lr, momentum))
    )
    options = {"period": period, "outer_lr": outer_lr, "momentum": momentum}
    return Method(
        "eager", (plan,), options, "eager updates (arXiv 2502.12996)", "anchor, momentum, delta in flight (private)"
    )
