"""Decoupled momentum: the outer momentum is a private signal, and only its strong part is made common."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from lowtide.codec import Chain, by_bits, chain, top_k, transform_named
from lowtide.codec.select import checked_density
from lowtide.errors import unknown
from lowtide.sync.combine import mean_of_contributors
from lowtide.sync.exchange import Exchange, gathered, sharded, summed
from lowtide.sync.merge import replace
from lowtide.sync.outer import assign, nesterov, private_nesterov, sgd
from lowtide.sync.plan import Method, Plan
from lowtide.sync.residual import error_feedback, momentum
from lowtide.sync.signal import delta, parameters
from lowtide.sync.when import every
from lowtide.tensors import divisor

_REFERENCE = "decoupled momentum (arXiv 2510.03371)"


@dataclass(frozen=True)
class _Options:
    """What a preset fills and the caller may override."""

    period: int = 30
    density: float = 1 / 32
    bits: int = 2
    transform: str = "dct"
    feedback: float = 0.9
    outer_lr: float = 0.8
    exchange: str = "gathered"


_PRESETS = {
    None: _Options(),
    "nesterov": _Options(density=1 / 8, feedback=0.95, outer_lr=0.5),
    "authors": _Options(period=128, density=1 / 128, bits=32, feedback=0.95, outer_lr=0.7),
    "resync": _Options(density=1 / 128, bits=32, feedback=0.5, outer_lr=0.7),
}
_RESYNC_EVERY = 5  # rounds


def decoupled(
    *,
    period: int | None = None,
    density: float | None = None,
    bits: int | None = None,
    transform: str | None = None,
    feedback: float | None = None,
    outer_lr: float | None = None,
    exchange: str | None = None,
    preset: str | None = None,
) -> Method:
    """Local steps; the delta joins a private, leaky momentum; its strongest cosine coefficients are exchanged.

        e = beta e + delta;  q = top-k(DCT(e)) at 2 bits;  e -= q;  anchor -= eta * IDCT(mean over contributors of q)

    All replicas stay one model, bit for bit. Options not given come from the preset, else: period 30, density 1/32,
    bits 2, transform "dct" (or "none"), feedback 0.9, outer_lr 0.8, exchange "gathered" (or "sharded", whose cost a
    machine does not grow with their number).

    Presets. `authors`: the published rule, in which every replica also steps along its own delta, so that they drift;
    `resync`: the same with a dense average of the parameters every 5 rounds; `nesterov`: a common momentum on top,
    for high densities.

    State: anchor, residual (2 P). Payload a round: about density * (bits + index bits) / 8 P bytes, where an index
    takes 6.5 bits at density 1/32 and 7.5 at 1/64.

    >>> str(decoupled(period=128, preset="nesterov")).startswith("decoupled(period=128, density=0.125, bits=2")
    True
    """
    options = _chosen(
        preset, period=period, density=density, bits=bits, transform=transform, feedback=feedback,
        outer_lr=outer_lr, exchange=exchange,
    )  # fmt: skip
    shown = dataclasses.asdict(options) | {"preset": preset}
    if preset in ("authors", "resync"):
        return Method(
            "decoupled", _published(options, resync=preset == "resync"), shown, _REFERENCE, "anchor, momentum (private)"
        )
    plan = Plan(
        when=every(options.period),
        signal=delta(),
        residual=error_feedback(options.feedback),
        exchange=_exchange(options),
        outer=nesterov(options.outer_lr, 0.5) if preset == "nesterov" else sgd(options.outer_lr),
    )
    state = "anchor, residual, momentum" if preset == "nesterov" else "anchor, residual"
    return Method("decoupled", (plan,), shown, _REFERENCE, state)


def _chosen(preset: str | None, **given: Any) -> _Options:
    """The preset's options, with those that were given in their place."""
    if preset not in _PRESETS:
        raise unknown("preset", str(preset), [name for name in _PRESETS if name])
    return dataclasses.replace(_PRESETS[preset], **{name: value for name, value in given.items() if value is not None})


def _codec(options: _Options, *, density: float | None = None, bits: int | None = None) -> Chain:
    return chain(transform_named(options.transform), top_k(density or options.density), by_bits(bits or options.bits))


def _exchange(options: _Options) -> Exchange:
    if options.exchange == "gathered":
        return gathered(_codec(options), mean_of_contributors())
    if options.exchange == "sharded":
        # what comes down is the mean of many: it needs more of it and finer, or the owners' residuals lag behind
        down = _codec(options, density=min(1.0, 4 * options.density), bits=4)
        return sharded(_codec(options), down, mean_of_contributors())
    raise unknown("exchange", options.exchange, ["gathered", "sharded"])


def _published(options: _Options, *, resync: bool) -> tuple[Plan, ...]:
    """The rule as its authors run it: 64 x 64 divisor tiles, 32 of each, small tensors through the codec as well."""
    codec = chain(
        transform_named(options.transform),
        # a number, not a share: the published code keeps as many of a small tile as of a large one
        top_k(count=max(1, round(4096 * checked_density(options.density)))),
        by_bits(options.bits),
        chunker=divisor(64),
    )
    plan = Plan(
        when=every(options.period),
        signal=delta(),
        residual=momentum(options.feedback),
        exchange=gathered(codec, mean_of_contributors()),
        outer=private_nesterov(options.outer_lr, options.feedback),
    )
    if not resync:
        return (plan,)
    average = Plan(
        when=every(_RESYNC_EVERY * options.period),
        signal=parameters(),
        exchange=summed(),
        outer=assign(),
        # without it the next round would step from anchors that still lie apart
        merge=replace(anchors=True),
    )
    return plan, average
