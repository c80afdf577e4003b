"""Signals: what a plan wants made common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lowtide.sync.replica import GRADIENTS, PARAMETERS, Replica
from lowtide.tensors import Layout


class Signal(Protocol):
    """Reads a buffer from a replica; `target` says what the agreed value is written to."""

    @property
    def target(self) -> str:
        """What is read from the replica, and written to it."""

    @property
    def anchored(self) -> bool:
        """Whether the plan remembers the value last agreed on."""

    def read(self, replica: Replica, layout: Layout, anchor: Tensor | None, out: Tensor) -> Tensor:
        """The signal, written into `out`."""


@dataclass(frozen=True)
class Gradient:
    """The gradient of this step, before the inner optimizer sees it."""

    target: str = GRADIENTS
    anchored: bool = False

    def read(self, replica: Replica, layout: Layout, anchor: Tensor | None, out: Tensor) -> Tensor:
        return replica.read(GRADIENTS, layout, out)


@dataclass(frozen=True)
class Delta:
    """Anchor minus parameters: what the inner steps since the last round descended.

    With a `pull` the signal is `anchor - parameters - pull * anchor`: gossip needs the anchors' mean as well.
    """

    pull: float = 0.0
    target: str = PARAMETERS
    anchored: bool = True

    def read(self, replica: Replica, layout: Layout, anchor: Tensor | None, out: Tensor) -> Tensor:
        assert anchor is not None
        # into `out` first, so that no third buffer is needed
        replica.read(PARAMETERS, layout, out)
        # this way round it stands where a gradient stands: rules subtract it
        torch.sub(anchor, out, out=out)
        # parameters in 16 bits cannot hold the anchor exactly; what they lack is no step that anybody took
        layout.add_rounding(anchor, out, -1.0)
        # a plain delta does not pay for another pass over memory
        return out.sub_(anchor, alpha=self.pull) if self.pull else out


@dataclass(frozen=True)
class Live:
    """The parameters themselves, or a tensor of the optimizer's state."""

    target: str
    anchored: bool = False

    def read(self, replica: Replica, layout: Layout, anchor: Tensor | None, out: Tensor) -> Tensor:
        return replica.read(self.target, layout, out)


def gradient() -> Signal:
    """This step's gradient."""
    return Gradient()


def delta(*, pull: float = 0.0) -> Signal:
    """What the inner steps since the last round did."""
    return Delta(pull)


def parameters() -> Signal:
    """The parameters."""
    return Live(PARAMETERS)


def optimizer_state(name: str) -> Signal:
    """A tensor that the inner optimizer keeps for each parameter, such as `exp_avg`."""
    return Live(name)
