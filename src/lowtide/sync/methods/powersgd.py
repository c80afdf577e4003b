"""PowerSGD: low-rank gradients with error feedback."""

from __future__ import annotations

from lowtide.sync.exchange import low_rank
from lowtide.sync.outer import inner
from lowtide.sync.plan import Method, Plan
from lowtide.sync.residual import error_feedback
from lowtide.sync.signal import gradient
from lowtide.sync.when import every


def powersgd(*, rank: int = 4, seed: int = 0) -> Method:
    """The mean gradient's best guess of rank `rank`, by one power iteration a step; what is left over is kept.

    State: residual and the factors (1 P and a little). Payload a step: 4 rank sum(m + n) bytes over the matrices,
    and the small tensors dense.

    >>> powersgd(rank=2).plans[0].exchange.rank
    2
    """
    plan = Plan(
        when=every(1),
        signal=gradient(),
        # nothing fades: a guess of low rank leaves most of a gradient out
        residual=error_feedback(1.0),
        exchange=low_rank(rank, seed=seed),
        outer=inner(),
    )
    return Method("powersgd", (plan,), {"rank": rank, "seed": seed}, "PowerSGD (arXiv 1905.13727)", "residual, factors")
