"""SparseLoCo: local steps, error feedback, the largest entries at 2 bits, no outer momentum."""

from __future__ import annotations

from lowtide.codec import Quantizer, by_bits, chain, stat, top_k
from lowtide.sync.combine import clip_to_median, mean_of_contributors
from lowtide.sync.exchange import gathered
from lowtide.sync.outer import sgd
from lowtide.sync.plan import Method, Plan
from lowtide.sync.residual import error_feedback
from lowtide.sync.signal import delta
from lowtide.sync.when import every


def sparseloco(
    *,
    period: int = 30,
    density: float = 1 / 64,
    bits: int = 2,
    feedback: float = 0.95,
    outer_lr: float = 1.0,
    clip: bool = False,
) -> Method:
    """`e = beta e + delta; e -= Q(top-k(e)); anchor -= eta * mean over contributors`.

    At 2 bits values go to the means of four statistical bins, as in its production runs; `clip` scales every payload
    to at most the median norm first.

    State: anchor, residual (2 P). Payload a round: about density * (bits + index bits) / 8 P bytes.

    >>> sparseloco().plans[0].residual.beta
    0.95
    """
    values: Quantizer = stat(4) if bits == 2 else by_bits(bits)
    # most positions come from one replica: a mean over all would divide them by the number of replicas
    rule = mean_of_contributors()
    plan = Plan(
        when=every(period),
        signal=delta(),
        residual=error_feedback(feedback),
        exchange=gathered(chain(top_k(density), values), clip_to_median(rule) if clip else rule),
        outer=sgd(outer_lr),
    )
    options = {
        "period": period,
        "density": density,
        "bits": bits,
        "feedback": feedback,
        "outer_lr": outer_lr,
        "clip": clip,
    }
    return Method("sparseloco", (plan,), options, "SparseLoCo (arXiv 2508.15706)", "anchor, residual")
