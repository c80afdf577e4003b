"""DiLoCo: local steps, then one outer Nesterov step on the mean delta."""

from __future__ import annotations

from lowtide.codec import by_bits, chain
from lowtide.sync.exchange import gathered, summed
from lowtide.sync.outer import nesterov
from lowtide.sync.plan import Method, Plan
from lowtide.sync.signal import delta
from lowtide.sync.when import every


def diloco(*, period: int = 30, outer_lr: float = 0.7, momentum: float = 0.9, bits: int = 32) -> Method:
    """`M = mu M + mean(delta); anchor -= eta (mean(delta) + mu M)` every `period` steps.

    The pair (0.7, 0.9) suits hundreds of rounds; with fewer, or periods under 30, momentum 0.6 to 0.8 is better.
    Below 32 bits payloads are gathered, since they cannot be added on the way.

    State: anchor, momentum (2 P). Payload: bits/8 P bytes a round.

    >>> diloco(period=100).plans[0].outer.mu
    0.9
    """
    exchange = summed() if bits == 32 else gathered(chain(by_bits(bits)))
    plan = Plan(when=every(period), signal=delta(), exchange=exchange, outer=nesterov(outer_lr, momentum))
    options = {"period": period, "outer_lr": outer_lr, "momentum": momentum, "bits": bits}
    return Method("diloco", (plan,), options, "DiLoCo (arXiv 2311.08105)", "anchor, momentum")
