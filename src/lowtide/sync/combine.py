"""Combine rules: the coefficients of many replicas to one value a position, always added in rank order.

Every mean honours the weights that the payloads carry; with equal weights it is the plain one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from lowtide.codec import Coefficients


class Combine(Protocol):
    """Many to one. Works on a range of positions at a time, so that it stays in cache."""

    def prepare(self, parts: Sequence[Coefficients]) -> Sequence[Coefficients]:
        """What needs to see whole payloads, once an event."""

    def block(self, parts: Sequence[Coefficients], start: int, stop: int, out: Tensor) -> Tensor:
        """The combined values of positions `start .. stop`, written into `out`."""


@dataclass(frozen=True)
class Mean:
    """`sum w_i x_i / sum w_i`; a position that a replica did not send counts as zero."""

    def prepare(self, parts: Sequence[Coefficients]) -> Sequence[Coefficients]:
        return parts

    def block(self, parts: Sequence[Coefficients], start: int, stop: int, out: Tensor) -> Tensor:
        total = sum(part.weight for part in parts)
        # no weight at all means no change, not 0 / 0
        return weighted_sum(parts, start, stop, out).div_(total) if total else out.zero_()


@dataclass(frozen=True)
class MeanOfContributors:
    """At each position the mean over those replicas that sent it."""

    def prepare(self, parts: Sequence[Coefficients]) -> Sequence[Coefficients]:
        return parts

    def block(self, parts: Sequence[Coefficients], start: int, stop: int, out: Tensor) -> Tensor:
        # where nobody sends anything, 0 / tiny = 0; beside a real weight it is lost in rounding
        weight = torch.full_like(out, torch.finfo(out.dtype).tiny)
        # weights are kept position by position, since each has contributors of its own
        out.zero_()
        for part in parts:
            value, index = part.within(start, stop)
            if index is None:
                out.add_(value, alpha=part.weight)
                weight.add_(part.weight)
            else:
                add_at(out, index, value, part.weight)
                add_at(weight, index, torch.ones_like(value), part.weight)
        return out.div_(weight)


@dataclass(frozen=True)
class ClipToMedian:
    """Each payload is scaled down to at most the median norm of all, then combined by `then`."""

    then: Combine

    def prepare(self, parts: Sequence[Coefficients]) -> Sequence[Coefficients]:
        parts = self.then.prepare(parts)
        # who abstained has norm zero and would pull the median down
        present = [part for part in parts if part.weight > 0]
        if len(present) < 2:
            return parts
        # in double: these squares are added up over the whole model
        norms = torch.stack([torch.linalg.vector_norm(part.value, dtype=torch.float64) for part in present])
        median = float(norms.quantile(0.5))
        return [
            # a new tensor: ours is also what leaves our residual, and that must not shrink
            replace(part, value=part.value * (median / float(norm))) if float(norm) > median else part
            for part, norm in zip(present, norms, strict=True)
        ]

    def block(self, parts: Sequence[Coefficients], start: int, stop: int, out: Tensor) -> Tensor:
        return self.then.block(parts, start, stop, out)


@dataclass(frozen=True)
class SignOfMean:
    """The sign of what `then` gives: a weighted vote."""

    then: Combine

    def prepare(self, parts: Sequence[Coefficients]) -> Sequence[Coefficients]:
        return self.then.prepare(parts)

    def block(self, parts: Sequence[Coefficients], start: int, stop: int, out: Tensor) -> Tensor:
        # zero stays zero: a tie, or a position that nobody sent, moves nothing
        return self.then.block(parts, start, stop, out).sign_()


def weighted_sum(parts: Sequence[Coefficients], start: int, stop: int, out: Tensor) -> Tensor:
    """`sum w_i x_i` over a range of positions, in the order of the parts."""
    out.zero_()
    # in turn, since another order rounds otherwise and replicas would part
    for part in parts:
        value, index = part.within(start, stop)
        if index is None:
            out.add_(value, alpha=part.weight)
        else:
            add_at(out, index, value, part.weight)
    return out


def add_at(out: Tensor, index: Tensor, value: Tensor, weight: float) -> Tensor:
    """`out[index] += weight * value`; no index comes twice, so nothing depends on an order."""
    if out.device.type == "cpu" and weight == 1:
        # the same sums, in half the time
        return out.scatter_add_(0, index, value)
    return out.index_add_(0, index, value, alpha=weight)


def mean() -> Combine:
    """The mean over all who took part."""
    return Mean()


def mean_of_contributors() -> Combine:
    """The mean over those who sent a position."""
    return MeanOfContributors()


def clip_to_median(then: Combine | None = None) -> Combine:
    """Scale payloads to at most the median norm first."""
    return ClipToMedian(then or MeanOfContributors())


def sign_of_mean(then: Combine | None = None) -> Combine:
    """Only the sign of the mean."""
    return SignOfMean(then or Mean())
