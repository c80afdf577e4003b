"""What a round may see of a replica: buffers to read and to write, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowtide.errors import ModelError
from lowtide.tensors import Layout, local

PARAMETERS, GRADIENTS = "parameters", "gradients"


class Replica(Protocol):
    """One copy of the model in training. `what` is `parameters`, `gradients` or a name in the optimizer's state."""

    def read(self, what: str, layout: Layout, out: Tensor) -> Tensor:
        """Copy the tensors of a layout into a buffer."""

    def write(self, what: str, layout: Layout, buffer: Tensor) -> None:
        """Copy a buffer back."""

    def learning_rate(self) -> float:
        """The inner optimizer's present rate."""

    def base_rate(self) -> float:
        """The rate that a schedule scales, or the present one if there is no schedule."""


@dataclass(frozen=True)
class ModelReplica:
    """A live model and its optimizers."""

    parameters: Mapping[str, nn.Parameter]
    optimizers: Sequence[Optimizer]

    def read(self, what: str, layout: Layout, out: Tensor) -> Tensor:
        return layout.gather([self._tensor(what, entry.name) for entry in layout.entries], out)

    def write(self, what: str, layout: Layout, buffer: Tensor) -> None:
        if what == GRADIENTS:
            for entry in layout.entries:
                parameter = self.parameters[entry.name]
                if parameter.grad is None:
                    # unused here, it may have been used elsewhere: it takes the mean as well
                    parameter.grad = torch.zeros_like(parameter)
        layout.scatter(buffer, [self._tensor(what, entry.name) for entry in layout.entries])

    def learning_rate(self) -> float:
        # the first group stands for all: a schedule scales them alike
        rate = self.optimizers[0].param_groups[0]["lr"]
        return float(rate)

    def base_rate(self) -> float:
        # torch's schedules keep the unscaled rate under this name
        group = self.optimizers[0].param_groups[0]
        return float(group.get("initial_lr", group["lr"]))

    def _tensor(self, what: str, name: str) -> Tensor:
        parameter = self.parameters[name]
        if what == PARAMETERS:
            return local(parameter)
        if what == GRADIENTS:
            gradient = parameter.grad
            if gradient is None:
                # not stored: an inner optimizer skips a missing gradient, but decays under a zero one
                return torch.zeros_like(local(parameter))
            if gradient.layout != torch.strided:
                raise ModelError(
                    f"{name} has a {gradient.layout} gradient\nhint: build its nn.Embedding with sparse=False"
                )
            return local(gradient)
        return local(self._state(what, name, parameter))

    def _state(self, what: str, name: str, parameter: nn.Parameter) -> Tensor:
        for optimizer in self.optimizers:
            # get, since a look into this defaultdict would leave an empty entry in checkpoints
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get(what), Tensor):
                kept: Tensor = state[what]
                return kept
        kinds = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
        raise ModelError(f"{kinds} keeps no {what!r} for {name}\nhint: this method needs an Adam-like inner optimizer")


def nonfinite(buffer: Tensor) -> bool:
    """Whether a buffer holds a NaN or an infinity, in one pass: both show in the extremes."""
    # not a sum, which may overflow where every element is finite
    low, high = torch.aminmax(buffer)
    return not bool(torch.isfinite(low) & torch.isfinite(high))
