"""Outer rules: from the combined signal to the next agreed value, element by element.

A round calls a rule on one range of the buffer after another, so that it works in cache: everything in `Seen` is a
slice of that range, and a rule must not look further.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lowtide.errors import ConfigError

COUNTER = "rounds"  # the one memory of a rule that is a number, not a buffer


@dataclass(frozen=True)
class Seen:
    """What an outer rule sees beside the combined signal; `None` where the rule did not ask for it.

    `fresh` is anchor minus parameters now; `signal` and `sent` are what this replica had and what it got across;
    `replicas` counts those who took part; `scale` is below 1 for a round that was cut short; `rounds` counts those
    that were agreed on, this one included, for a rule whose memory asks for it.
    """

    anchor: Tensor | None = None
    signal: Tensor | None = None
    fresh: Tensor | None = None
    sent: Tensor | None = None
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    replicas: int = 1
    scale: float = 1.0
    rounds: int = 1


class Outer(Protocol):
    """One step of the agreed value."""

    @property
    def anchored(self) -> bool:
        """Whether it steps an anchor; else it gives the agreed value itself."""

    @property
    def memory(self) -> tuple[str, ...]:
        """Names of the buffers that the rule keeps, zero at first; `rounds` is a counter."""

    @property
    def needs(self) -> frozenset[str]:
        """Which of `signal`, `fresh` and `sent` it reads."""

    @property
    def private(self) -> bool:
        """Whether its result differs between replicas: then they drift."""

    def step(self, combined: Tensor, seen: Seen) -> Tensor:
        """The next agreed value; anchor and memory are changed in place, `combined` may be."""


@dataclass(frozen=True)
class Rule:
    """What most rules have in common: an anchor, nothing else kept, nothing more to see, equal everywhere."""

    anchored: bool = True
    memory: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()
    private: bool = False


@dataclass(frozen=True)
class Assign(Rule):
    """The combined value is the agreed one."""

    anchored: bool = False

    def step(self, combined: Tensor, seen: Seen) -> Tensor:
        return combined


@dataclass(frozen=True)
class AssignDelta(Rule):
    """`signal + combined - sent`: only what was exchanged changes."""

    anchored: bool = False
    needs: frozenset[str] = frozenset({"signal", "sent"})
    private: bool = True

    def step(self, combined: Tensor, seen: Seen) -> Tensor:
        assert seen.signal is not None and seen.sent is not None
        # where nobody sent, both are zero and the signal comes through bit for bit
        return combined.sub_(seen.sent).add_(seen.signal)


@dataclass(frozen=True)
class SGD(Rule):
    """`anchor -= lr * combined`."""

    lr: float = 1.0

    def step(self, combined: Tensor, seen: Seen) -> Tensor:
        assert seen.anchor is not None
        return seen.anchor.sub_(combined, alpha=self.lr * seen.scale)


@dataclass(frozen=True)
class SignSGD(Rule):
    """`anchor -= lr * sign(combined)`."""

    lr: float = 1e-3

    def step(self, combined: Tensor, seen: Seen) -> Tensor:
        assert seen.anchor is not None
        return seen.anchor.sub_(combined.sign_(), alpha=self.lr * seen.scale)


@dataclass(frozen=True)
class Momentum(Rule):
    """`M = mu M + G; anchor -= lr (G + mu M)` with Nesterov's look-ahead, `anchor -= lr M` without."""

    memory: tuple[str, ...] = ("momentum",)
    lr: float = 0.7
    mu: float = 0.9
    nesterov: bool = True

    def step(self, combined: Tensor, seen: Seen) -> Tensor:
        assert seen.anchor is not None
        # a round that was cut short makes a shorter step, but is remembered in full
        momentum = seen.memory["momentum"].mul_(self.mu).add_(combined)
        # into `combined`, which nobody reads again; the momentum is state
        change = combined.add_(momentum, alpha=self.mu) if self.nesterov else momentum
        return seen.anchor.sub_(change, alpha=self.lr * seen.scale)


@dataclass(frozen=True)
class Adam(Rule):
    """Adam on the combined delta, as a server optimizer."""

    memory: tuple[str, ...] = ("first", "second", "rounds")
    lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-3  # large: positions that hardly ever move would else make huge steps

    def step(self, combined: Tensor, seen: Seen) -> Tensor:
        assert seen.anchor is not None
        low, high = self.betas
        first = seen.memory["first"].mul_(low).add_(combined, alpha=1 - low)
        second = seen.memory["second"].mul_(high).addcmul_(combined, combined, value=1 - high)
        # a new tensor: the memory itself stays without bias correction
        root = (second / (1 - high**seen.rounds)).sqrt_().add_(self.eps)
        return seen.anchor.addcdiv_(first, root, value=-self.lr * seen.scale / (1 - low**seen.rounds))


@dataclass(frozen=True)
class Inner(Rule):
    """The combined gradient (or its sign) goes to the inner optimizer."""

    anchored: bool = False
    sign: bool = False

    def step(self, combined: Tensor, seen: Seen) -> Tensor:
        return combined.sign_() if self.sign else combined


@dataclass(frozen=True)
class Private(Rule):
    """`anchor -= lr (fresh + beta m)`, where m is the private momentum with the agreed part written back.

    Every replica steps along its own delta, so replicas drift apart; published as such, kept for comparison.
    """

    needs: frozenset[str] = frozenset({"fresh"})
    private: bool = True
    lr: float = 0.7
    beta: float = 0.95

    def step(self, combined: Tensor, seen: Seen) -> Tensor:
        assert seen.anchor is not None and seen.fresh is not None
        return seen.anchor.sub_(combined.mul_(self.beta).add_(seen.fresh), alpha=self.lr * seen.scale)


@dataclass(frozen=True)
class Consensus(Rule):
    """Gossip: `m = a m - lr (combined + pull * anchor); anchor += m`, with the pull that the signal left out.

    With `pull = gamma / lr` this is momentum on the group's mean delta plus `gamma` times the way to its mean anchor.
    """

    memory: tuple[str, ...] = ("momentum",)
    private: bool = True
    lr: float = 0.7
    mu: float = 0.5
    pull: float = 1.0

    def step(self, combined: Tensor, seen: Seen) -> Tensor:
        assert seen.anchor is not None
        # each member sent minus pull times its anchor: this leaves the way from their mean to ours
        way = combined.add_(seen.anchor, alpha=self.pull)
        momentum = seen.memory["momentum"].mul_(self.mu).sub_(way, alpha=self.lr)
        return seen.anchor.add_(momentum, alpha=seen.scale)


@dataclass(frozen=True)
class Eager(Rule):
    """Own part fresh, the others' one round late: `G = fresh / N + (combined - sent / N)`, then the inner rule."""

    needs: frozenset[str] = frozenset({"fresh", "sent"})
    private: bool = True
    then: Outer = field(default_factory=Momentum)

    def step(self, combined: Tensor, seen: Seen) -> Tensor:
        assert seen.fresh is not None and seen.sent is not None
        # our part of `combined` was used a round ago, as `fresh`: it comes off here
        share = 1.0 / seen.replicas
        return self.then.step(combined.add_(seen.fresh, alpha=share).sub_(seen.sent, alpha=share), seen)


def _rate(name: str, value: float) -> float:
    # written so that NaN fails as well
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be positive, not {value!r}\nhint: 0.8 is usual without momentum, 0.7 with 0.9")
    return float(value)


def _mu(value: float) -> float:
    # at 1 nothing is ever forgotten, and steps grow without bound
    if not 0 <= value < 1:
        raise ConfigError(f"momentum must be in [0, 1), not {value!r}\nhint: 0.9 needs many rounds, 0.6 to 0.8 few")
    return float(value)


def assign() -> Outer:
    """Take the combined value as it is."""
    return Assign()


def assign_delta() -> Outer:
    """Change only what was exchanged."""
    return AssignDelta()


def sgd(lr: float = 1.0) -> Outer:
    """Step along the combined delta."""
    return SGD(lr=_rate("outer_lr", lr))


def sign_sgd(lr: float = 1e-3) -> Outer:
    """Step along the sign of the combined delta."""
    return SignSGD(lr=_rate("outer_lr", lr))


def nesterov(lr: float = 0.7, momentum: float = 0.9) -> Outer:
    """Nesterov momentum on the combined delta."""
    return Momentum(lr=_rate("outer_lr", lr), mu=_mu(momentum))


def heavy_ball(lr: float = 0.7, momentum: float = 0.9) -> Outer:
    """Plain momentum on the combined delta."""
    return Momentum(lr=_rate("outer_lr", lr), mu=_mu(momentum), nesterov=False)


def adam(lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99), eps: float = 1e-3) -> Outer:
    """Adam on the combined delta."""
    return Adam(lr=_rate("outer_lr", lr), betas=(_mu(betas[0]), _mu(betas[1])), eps=eps)


def inner(*, sign: bool = False) -> Outer:
    """Hand the combined gradient to the inner optimizer."""
    return Inner(sign=sign)


def private_nesterov(lr: float = 0.7, beta: float = 0.95) -> Outer:
    """The published rule of decoupled momentum: own delta plus own momentum."""
    return Private(lr=_rate("outer_lr", lr), beta=_mu(beta))


def consensus(lr: float = 0.7, momentum: float = 0.5, pull: float = 1.0) -> Outer:
    """Momentum on a small group's mean, with a pull together."""
    return Consensus(lr=_rate("outer_lr", lr), mu=_mu(momentum), pull=pull)


def eager(then: Outer) -> Outer:
    """Use the own part at once and the others' one round later; `then` steps the anchor along both."""
    if not then.anchored or then.needs:
        # it is handed a delta in the parameters' basis and nothing else
        raise ConfigError(f"eager needs a rule that steps an anchor, not {then}\nhint: eager(nesterov(0.7, 0.9))")
    return Eager(memory=then.memory, then=then)


def zeros(outer: Outer, size: int, device: torch.device) -> dict[str, Tensor]:
    """The rule's memory before the first round."""
    return {name: torch.zeros(1 if name == COUNTER else size, device=device) for name in outer.memory}
