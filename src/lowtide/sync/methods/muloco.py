"""MuLoCo: DiLoCo around Muon."""

from __future__ import annotations

from lowtide.codec import by_bits, chain
from lowtide.sync.exchange import gathered, summed
from lowtide.sync.outer import nesterov
from lowtide.sync.plan import Method, Plan
from lowtide.sync.residual import error_feedback, no_residual
from lowtide.sync.signal import delta
from lowtide.sync.when import every


def muloco(
    *, period: int = 30, outer_lr: float = 0.9, momentum: float = 0.8, bits: int = 32, feedback: float | None = None
) -> Method:
    """DiLoCo's rounds for `torch.optim.Muon` on the hidden matrices and AdamW on the rest.

    Attach both: `attach(model, [muon, adamw], method="muloco")`; a step counts when each of them has made one. Rate and
    momentum suit 8 replicas; 0.7 and 0.6 one, 1.0 and 0.9 sixteen. With `bits` below 32 use `feedback=0.9`.

    State: anchor, momentum (2 P; a residual with feedback). Payload: bits/8 P bytes a round.

    >>> muloco().plans[0].outer.lr
    0.9
    """
    plan = Plan(
        when=every(period),
        signal=delta(),
        residual=no_residual() if feedback is None else error_feedback(feedback),
        exchange=summed() if bits == 32 else gathered(chain(by_bits(bits))),
        outer=nesterov(outer_lr, momentum),
    )
    options = {"period": period, "outer_lr": outer_lr, "momentum": momentum, "bits": bits, "feedback": feedback}
    state = "anchor, momentum" if feedback is None else "anchor, residual, momentum"
    return Method("muloco", (plan,), options, "MuLoCo (arXiv 2505.23725)", state)
