"""A plan is one signal's whole way, a method is a few plans with a name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from lowtide.errors import ConfigError
from lowtide.sync.exchange import Exchange
from lowtide.sync.merge import Merge, replace
from lowtide.sync.outer import Outer, assign
from lowtide.sync.replica import GRADIENTS, PARAMETERS
from lowtide.sync.residual import Residual, no_residual
from lowtide.sync.signal import Signal
from lowtide.sync.when import When


@dataclass(frozen=True, kw_only=True)
class Plan:
    """When, what, with which memory, through whom, to what change, and what becomes of work done meanwhile."""

    when: When
    signal: Signal
    exchange: Exchange
    residual: Residual = field(default_factory=no_residual)
    outer: Outer = field(default_factory=assign)
    merge: Merge = field(default_factory=replace)

    def __post_init__(self) -> None:
        # unchecked, a delta would be assigned as if it were the parameters, and training would go on
        if self.signal.anchored != self.outer.anchored:
            rule, signal = type(self.outer).__name__, type(self.signal).__name__
            raise ConfigError(
                f"{rule} steps {'an' if self.outer.anchored else 'no'} anchor, which does not fit {signal}\n"
                "hint: a delta goes with sgd() or nesterov(), a gradient with inner(), all else with assign()"
            )
        self._can_wait()
        self._rule_can_read()

    def _can_wait(self) -> None:
        """Refuse a delay that a part cannot live with."""
        if self.before_step and self.when.delay:
            raise ConfigError(
                f"a gradient is needed at once, but delay={self.when.delay}\nhint: use a delta for overlap"
            )
        if self.residual.keeps and self.when.delay >= self.when.period:
            # the next message would leave before this one has said what the residual keeps
            raise ConfigError(
                f"a residual needs each round decided before the next, but delay={self.when.delay} is not under "
                f"period={self.when.period}\nhint: leave out the residual, or use every(period, delay=...)"
            )

    def _rule_can_read(self) -> None:
        """Refuse a rule that would find something else than it asks for."""
        mixes = self.exchange.transform.mixes
        # what was sent is in the codec's basis, the rule works on the parameters' own
        if mixes and self.outer.needs & {"sent", "signal"}:
            raise ConfigError(
                f"{type(self.outer).__name__} reads what was sent, so its codec cannot transform\nhint: leave out dct()"
            )
        if self.residual.keeps and "signal" in self.outer.needs:
            raise ConfigError(
                f"{type(self.outer).__name__} reads the signal itself, but a residual is added to it\n"
                "hint: leave out the residual"
            )

    @property
    def before_step(self) -> bool:
        """Whether the plan runs before the inner step: those on gradients do."""
        return self.signal.target == GRADIENTS

    @property
    def private(self) -> bool:
        """Whether replicas come out of a round with different models."""
        return self.exchange.private or self.outer.private

    @property
    def makes_common(self) -> bool:
        """Whether a round is about the parameters or their gradients, not about optimizer state."""
        return self.signal.target in (PARAMETERS, GRADIENTS)

    def shares(self, name: str) -> bool:
        """Whether a part of the exchange's memory is equal on all replicas."""
        # replicas that drift encode different signals, and their memories differ with them
        return name in self.exchange.shared_memory and not self.private


@dataclass(frozen=True)
class Method:
    """Plans that run in the order written, with the options they were made from.

    `reference` names where the method comes from; `state` says what a replica keeps, in copies of the parameters.
    """

    name: str
    plans: tuple[Plan, ...]
    options: Mapping[str, object] = field(default_factory=dict)
    reference: str = ""
    state: str = ""

    def __post_init__(self) -> None:
        if not self.plans:
            raise ConfigError(f"method {self.name!r} has no plan\nhint: give it at least one")
        # a caller's dictionary must not change under a method in use
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))

    @property
    def private(self) -> bool:
        """Whether replicas drift apart between or after rounds, so that their fingerprints differ."""
        return any(plan.private for plan in self.plans)

    def __str__(self) -> str:
        # None stands for the method's own choice and says nothing here
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items() if value is not None)
        return f"{self.name}({options})"
