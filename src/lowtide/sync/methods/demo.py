"""DeMo: a decaying momentum at every step, of which only the strongest cosine coefficients travel."""

from __future__ import annotations

from lowtide.codec import by_bits, chain, top_k, transform_named
from lowtide.sync.combine import mean_of_contributors
from lowtide.sync.exchange import gathered
from lowtide.sync.outer import inner
from lowtide.sync.plan import Method, Plan
from lowtide.sync.residual import error_feedback
from lowtide.sync.signal import gradient
from lowtide.sync.when import every


def demo(
    *, density: float = 1 / 128, feedback: float = 0.999, bits: int = 32, transform: str = "dct", sign: bool = True
) -> Method:
    """`e = beta e + gradient; send the top of DCT(e); gradient = sign of what all sent`.

    Made for plain SGD inside, whose rate it takes: with `sign` the step is `lr * sign(...)`. The residual is the
    momentum, so the inner optimizer should have none. Clip gradients before the optimizer's step as usual.

    State: residual (1 P). Payload a step: about density * (bits + 8.4) / 8 P bytes at density 1/128.

    >>> demo().plans[0].before_step
    True
    """
    codec = chain(transform_named(transform), top_k(density), by_bits(bits))
    plan = Plan(
        when=every(1),
        signal=gradient(),
        residual=error_feedback(feedback),
        exchange=gathered(codec, mean_of_contributors()),
        outer=inner(sign=sign),
    )
    options = {"density": density, "feedback": feedback, "bits": bits, "transform": transform, "sign": sign}
    return Method("demo", (plan,), options, "DeMo (arXiv 2411.19870)", "residual")
