"""Hooks on a user's optimizers: a step counts when each of them has really made one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lowtide.errors import ModelError
from lowtide.tensors import trainable


def innermost(optimizer: object) -> object:
    """What really steps, under the wrappers of training frameworks; they need not be optimizers themselves."""
    inner = getattr(optimizer, "optimizer", None)
    while inner is not None:
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    return optimizer


def owned(parameters: dict[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that leave out a parameter of the model, or step one that it does not have."""
    held = {id(parameter) for optimizer in optimizers for parameter in held_by(optimizer)}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in held]
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ModelError(
            f"no optimizer given steps {shown}\nhint: pass all optimizers of this model, or freeze what is not trained"
        )
    known = {id(parameter) for parameter in parameters.values()}
    strange = [
        tuple(parameter.shape)
        for optimizer in optimizers
        for parameter in held_by(optimizer)
        if id(parameter) not in known and parameter.requires_grad
    ]
    if strange:
        raise ModelError(
            f"the optimizer steps {len(strange)} tensors that the model does not have, one of shape {strange[0]}\n"
            "hint: build it from model.parameters() of the model you attach"
        )


def held_by(optimizer: Optimizer) -> list[torch.Tensor]:
    """All tensors that an optimizer steps."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Watch:
    """Refuses a model or optimizer whose trained parameters are no longer those that were laid out."""

    def __init__(self, model: nn.Module, parameters: dict[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
        self.parameters = parameters
        self._model, self._optimizers = model, list(optimizers)
        self._trained, self._held = self._identities()

    def check(self) -> None:
        """To be called at every step: compares identities, which takes microseconds."""
        trained, held = self._identities()
        if trained != self._trained:
            now = trainable(self._model)
            changed = sorted(set(now) ^ set(self.parameters))
            changed = changed or [name for name in now if now[name] is not self.parameters[name]]
            raise ModelError(
                f"the trained parameters have changed since attach: {', '.join(changed[:3]) or 'their order'}\n"
                "hint: close the session, change requires_grad or parameters, then attach again"
            )
        if held != self._held:
            # groups may be cut anew, as long as they hold all of this model and nothing else
            owned(self.parameters, self._optimizers)
            self._held = held

    def _identities(self) -> tuple[list[int], list[int]]:
        trained = [id(parameter) for parameter in self._model.parameters() if parameter.requires_grad]
        return trained, [id(parameter) for optimizer in self._optimizers for parameter in held_by(optimizer)]


class StepHooks:
    """Calls `before` ahead of the first and `after` behind the last optimizer of every true step."""

    def __init__(
        self, optimizers: Sequence[Optimizer], before: Callable[[], None], after: Callable[[], None], *, gradients: bool
    ) -> None:
        self._optimizers = list(optimizers)
        self._before, self._after = before, after
        self._gradients = gradients
        self._stepped: set[int] = set()
        self._handles = [
            handle
            for optimizer in self._optimizers
            for handle in (optimizer.register_step_pre_hook(self._pre), optimizer.register_step_post_hook(self._post))
        ]

    def remove(self) -> None:
        """Give the optimizers back."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _pre(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._gradients or self._stepped:
            return
        if _under_scaler(inspect.currentframe()):
            raise ModelError(
                "methods on gradients cannot run under a GradScaler: each replica would skip other steps\n"
                "hint: train in bfloat16, or use a method on deltas such as decoupled or diloco"
            )
        # a closure computes its gradients inside the step, after this hook
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # torch passes the optimizer itself first
        if closure is not None:
            raise ModelError(
                "methods on gradients cannot run with a closure\nhint: call backward() before optimizer.step()"
            )
        self._before()

    def _post(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _skipped(optimizer):
            return
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self._optimizers):
            # before the call: an error in it must not shift the count
            self._stepped.clear()
            self._after()


def _skipped(optimizer: Optimizer) -> bool:
    """Whether a fused optimizer left this step out because a scaler found an overflow: its hooks fire all the same."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, torch.Tensor) and bool(found.item())


def _under_scaler(frame: FrameType | None, depth: int = 8) -> bool:
    """Whether a GradScaler is calling; it leaves no other mark on an optimizer that is not fused."""
    while frame is not None and depth:
        if isinstance(frame.f_locals.get("self"), torch.amp.GradScaler):
            return True
        frame, depth = frame.f_back, depth - 1
    return False
