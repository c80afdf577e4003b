"""Data parallel: every step waits for the mean gradient."""

from __future__ import annotations

from lowtide.sync.exchange import summed
from lowtide.sync.outer import inner
from lowtide.sync.plan import Method, Plan
from lowtide.sync.signal import gradient
from lowtide.sync.when import every


def ddp() -> Method:
    """The mean gradient at every step, in fp32: the quality bar, and the most bytes.

    State: nothing. Payload: 4 P bytes a step.

    >>> ddp().plans[0].when.period
    1
    """
    plan = Plan(when=every(1), signal=gradient(), exchange=summed(), outer=inner())
    return Method("ddp", (plan,), reference="synchronous data parallel", state="none")
