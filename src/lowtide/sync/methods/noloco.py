"""NoLoCo: gossip in small groups instead of a round for all."""

from __future__ import annotations

from lowtide.sync.exchange import pairs
from lowtide.sync.outer import consensus
from lowtide.sync.plan import Method, Plan
from lowtide.sync.signal import delta
from lowtide.sync.when import every


def noloco(
    *,
    period: int = 50,
    group: int = 2,
    outer_lr: float = 0.7,
    momentum: float = 0.5,
    pull: float | None = None,
    seed: int = 0,
) -> Method:
    """`m = a m + b mean(parameters - anchor) + c (mean anchor - own anchor); anchor += m`, over a random group.

    `outer_lr` is b and `pull` c (equal unless given). Both means are linear in what a member has, so one tensor
    carries them: half of what sending parameters and anchors apart would take. Cost does not grow with the number
    of replicas; they stay close, not equal, and `close` averages them.

    State: anchor, momentum (2 P, private). Payload: 4 P bytes a round, to one peer.

    >>> noloco(period=50).private
    True
    """
    # the rule multiplies all that it gets by the outer rate, so the pull is a share of it
    strength = (outer_lr if pull is None else pull) / outer_lr
    plan = Plan(
        when=every(period),
        signal=delta(pull=strength),
        exchange=pairs(group, seed=seed),
        outer=consensus(outer_lr, momentum, strength),
    )
    options = {"period": period, "group": group, "outer_lr": outer_lr, "momentum": momentum, "pull": pull, "seed": seed}
    return Method("noloco", (plan,), options, "NoLoCo (arXiv 2506.10911)", "anchor, momentum (private)")
