"""Streaming DiLoCo: fragments in turn, sent while training goes on, at four bits."""

from __future__ import annotations

from lowtide.codec import chain, e3m0
from lowtide.errors import ConfigError
from lowtide.sync.exchange import gathered, summed
from lowtide.sync.merge import mix
from lowtide.sync.outer import nesterov
from lowtide.sync.plan import Method, Plan
from lowtide.sync.signal import delta
from lowtide.sync.when import staggered


def streaming_diloco(
    *,
    period: int = 30,
    fragments: int = 3,
    delay: int = 1,
    alpha: float = 0.5,
    outer_lr: float = 0.4,
    momentum: float = 0.9,
    bits: int = 4,
) -> Method:
    """DiLoCo on one fragment at a time; each message has `delay` steps to arrive.

    When it lands, `parameters = alpha * parameters + (1 - alpha) * agreed`, while the anchor becomes the agreed value
    itself. Fragments are strided over the blocks of the model. `bits` is 4 (sign and exponent, a scale per 256
    values) or 32. The rate 0.4 suits 2 replicas, 0.7 and more 8 or over.

    State: anchor, momentum (2 P), and the delta of the fragment that is on its way (P / fragments).
    Payload a round: 4.125/8 P bytes.

    >>> [streaming_diloco().plans[0].when.launches(step, 0) for step in (9, 10, 11)]
    [False, True, False]
    """
    if bits not in (4, 32):
        raise ConfigError(
            f"streaming_diloco sends 4 or 32 bits, not {bits}\nhint: bits=4 loses nothing that was measured"
        )
    plan = Plan(
        when=staggered(fragments, period, delay=delay),
        signal=delta(),
        exchange=summed() if bits == 32 else gathered(chain(e3m0(256))),
        outer=nesterov(outer_lr, momentum),
        merge=mix(alpha),
    )
    options = {
        "period": period, "fragments": fragments, "delay": delay, "alpha": alpha,
        "outer_lr": outer_lr, "momentum": momentum, "bits": bits,
    }  # fmt: skip
    return Method("streaming_diloco", (plan,), options, "Streaming DiLoCo (arXiv 2501.18512)", "anchor, momentum")
