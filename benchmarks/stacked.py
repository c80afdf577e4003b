"""N replicas of one model on a leading axis, trained together, with a session of lowtide's own on every slice.

The first replica's thread trains all of them at once, on any device. Rounds are what they are anywhere: `attach` on a
model whose parameters are one slice of the block, on the host, with lowtide's lockstep in between. So methods, bytes
and agreed models are those of N machines, up to the rounding of a batched matrix product.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from lowtide import Method, Session, Settings, attach
from lowtide.messages import Gather, Tag
from lowtide.tensors import trainable
from lowtide.transport.ledger import Totals
from lowtide.transport.meter import Meter
from lowtide.transport.simulated import Lockstep, Simulated

Loss = Callable[[Any, Tensor], Tensor]
Tensors = dict[str, Tensor]
SMALL = 1e-6  # as in torch's clip_grad_norm_


class Block:
    """One tensor `[replicas, *shape]` for each parameter, all in one piece of memory, so that one copy moves them.

    `here` is where training is; `host` is where rounds are, the same memory if training is on the host.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], replicas: int, device: torch.device) -> None:
        sizes = [replicas * torch.Size(shape).numel() for shape in shapes.values()]
        self._places = dict(zip(shapes, zip(accumulate([0, *sizes]), sizes, strict=False), strict=True))
        self._shapes = {name: (replicas, *shape) for name, shape in shapes.items()}
        self.here = torch.zeros(sum(sizes), device=device)
        on_host = self.here.device.type == "cpu"
        self.host = self.here if on_host else torch.zeros(sum(sizes), pin_memory=True)

    def views(self, memory: Tensor) -> Tensors:
        """The tensors inside `here` or `host`."""
        return {
            name: memory[start : start + size].view(self._shapes[name]) for name, (start, size) in self._places.items()
        }

    def fetch(self) -> None:
        """From the device to the host."""
        if self.host is not self.here:
            self.host.copy_(self.here)

    def store(self) -> None:
        """From the host to the device."""
        if self.host is not self.here:
            self.here.copy_(self.host)


class _Objective(nn.Module):
    """The loss as the forward of a module, which is what `functional_call` can call."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Tensor) -> Tensor:
        return self.loss(self.model, batch)


class Stack:
    """N equal copies of a model, their gradients, and one optimizer for all.

    `optimizer` makes it from parameter groups: matrices, which may decay, and the rest. Elementwise optimizers act on
    stacked tensors as they do on each slice; `clip` bounds each replica's own gradient norm. With `graph` a CUDA graph
    replays forward and backward, for models so small that launching their kernels takes longer than running them.

    >>> stack = Stack(nn.Linear(3, 1), 2, lambda model, x: model(x).square().mean(), torch.optim.SGD)
    >>> stack.gradients(torch.ones(2, 5, 3)).shape
    torch.Size([2])
    """

    def __init__(
        self,
        model: nn.Module,
        replicas: int,
        loss: Loss,
        optimizer: Callable[[list[dict[str, Any]]], Optimizer],
        *,
        clip: float | None = None,
        device: torch.device | str = "cpu",
        graph: bool = False,
    ) -> None:
        self.replicas, self.clip = replicas, clip
        self.device = torch.device(device)
        self.model = copy.deepcopy(model)
        first = trainable(self.model)
        shapes = {name: tuple(parameter.shape) for name, parameter in first.items()}
        self.values = Block(shapes, replicas, self.device)
        self.slopes = Block(shapes, replicas, self.device)
        with torch.no_grad():
            for name, view in self.values.views(self.values.here).items():
                view.copy_(first[name])
        self.values.fetch()
        slopes = self.slopes.views(self.slopes.here)
        self.parameters = {n: view.requires_grad_() for n, view in self.values.views(self.values.here.detach()).items()}
        for name, parameter in self.parameters.items():
            parameter.grad = slopes[name]
        matrices = [parameter for parameter in self.parameters.values() if parameter.dim() > 2]
        others = [parameter for parameter in self.parameters.values() if parameter.dim() <= 2]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = optimizer([group for group in groups if group["params"]])
        self._objective = _Objective(self.model.to(self.device), loss)
        self._graph = _Graph(self._gradients) if graph and self.device.type == "cuda" else None

    def gradients(self, batch: Tensor) -> Tensor:
        """The gradients of all replicas, clipped; `batch` is `[replicas, ...]`. Their losses."""
        batch = batch.to(self.device)
        return self._gradients(batch) if self._graph is None else self._graph(batch)

    def _gradients(self, batch: Tensor) -> Tensor:
        self.slopes.here.zero_()
        losses = vmap(self._loss)(self.parameters, batch)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        if self.clip is not None:
            with torch.no_grad():
                self._clip(self.clip)
        return losses.detach()

    def loss(self, parameters: Tensors, batch: Tensor) -> Tensor:
        """The loss of one model, which these parameters make, without a gradient."""
        with torch.no_grad():
            values = {name: tensor.to(self.device) for name, tensor in parameters.items()}
            return self._loss(values, batch.to(self.device))

    def step(self, rate: float) -> None:
        """One step of all replicas."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    def mean(self) -> Tensors:
        """The mean model."""
        return {name: parameter.detach().mean(0) for name, parameter in self.parameters.items()}

    def slice(self, rank: int) -> nn.Module:
        """Replica `rank` as a model on the host; its parameters and gradients are the stack's own memory."""
        model = copy.deepcopy(self.model).cpu()
        values, slopes = self.values.views(self.values.host.detach()), self.slopes.views(self.slopes.host)
        for name, parameter in trainable(model).items():
            parameter.data, parameter.grad = values[name][rank], slopes[name][rank]
        return model

    def _loss(self, parameters: Tensors, batch: Tensor) -> Tensor:
        named = {f"model.{name}": tensor for name, tensor in parameters.items()}
        # on a GPU the plain formula is the one that batches forward and backward
        backend = SDPBackend.MATH if self.device.type != "cpu" else SDPBackend.FLASH_ATTENTION
        with sdpa_kernel([backend, SDPBackend.MATH]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*batching rule.*")
            loss: Tensor = functional_call(self._objective, named, (batch,))
        return loss

    def _clip(self, limit: float) -> None:
        slopes = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        norms = torch.stack([slope.flatten(1).square().sum(1) for slope in slopes]).sum(0).sqrt()
        scale = (limit / (norms + SMALL)).clamp(max=1.0)
        for slope in slopes:
            slope.mul_(scale.view(-1, *[1] * (slope.dim() - 1)))


class _Graph:
    """A function of one tensor of a fixed shape, recorded at its first call and replayed from then on."""

    def __init__(self, work: Callable[[Tensor], Tensor]) -> None:
        self._work = work
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batch: Tensor) -> Tensor:
        if self._graph is None:
            self._record(batch)
        assert self._graph is not None
        self._batch.copy_(batch)
        self._graph.replay()
        return self._result.clone()

    def _record(self, batch: Tensor) -> None:
        self._batch = batch.clone()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):  # what is set up at a first call must not be recorded
                self._work(self._batch)
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._result = self._work(self._batch)


class _Follower(Optimizer):
    """The optimizer of one slice, for its hooks: the step of all slices is made in `act`."""

    def __init__(self, model: nn.Module, rate: float, act: Callable[[], None]) -> None:
        super().__init__(model.parameters(), {"lr": rate})
        self._act = act

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self._act()


@dataclass(frozen=True)
class Moved:
    """What one replica moved, in bytes, the comparison at the start left out.

    `closing` is that part of the payload with which replicas that drifted are averaged in the end.
    """

    payload: int
    sent: int
    received: int
    dense_reference: int
    closing: int
    rounds: int

    @classmethod
    def of(cls, meter: Meter, rounds: int) -> Moved:
        """The sums over what a meter counted."""
        total = sum((each for cause, each in meter.ledger.by_cause.items() if cause != "start"), Totals())
        closing = sum(event.totals.payload for event in meter.events if event.tag.plan == "final")
        return cls(total.payload, total.sent, total.received, total.dense_reference, closing, rounds)


@dataclass
class Training:
    """One run: a method on a stack, a batch `[replicas, ...]` and a rate for each step.

    `watch` is called in one thread only, at the steps of `points`, with the agreed model, which it may read.
    """

    stack: Stack
    method: Method | None
    batches: Iterable[Tensor]
    rate: Callable[[int], float]
    points: frozenset[int] = frozenset()
    watch: Callable[[int, Tensors], None] = lambda _step, _agreed: None
    losses: list[Tensor] = field(default_factory=list)

    def run(self) -> tuple[Moved, ...]:
        """Train; what each replica moved. Afterwards every slice holds the agreed model."""
        return Lockstep(self.stack.replicas).run(lambda transport: _Slice(self, transport).run())


class _Slice:
    """One replica of a training, in its thread. Rank 0 also trains, while the others wait or have nothing to do.

    Nobody waits except around a round: there all meet before it, when the slices are up to date, and after it, so
    that training goes on only from what all have committed.
    """

    def __init__(self, training: Training, transport: Simulated) -> None:
        self.training, self.transport = training, transport
        self.leads = transport.rank == 0
        self.meetings = 0
        self.now = 0
        stack = training.stack
        self.model = stack.slice(transport.rank)
        self.follower = _Follower(self.model, training.rate(0), self.act)
        self.session: Session = attach(
            self.model,
            self.follower,
            training.method or "local_sgd",
            transport=transport,
            settings=Settings(check_every=0, start="check"),
        )

    def run(self) -> Moved:
        stack = self.training.stack
        self._meet()  # by now all have taken their first anchor
        for step, batch in enumerate(self.training.batches, start=1):
            self.now = step
            self.follower.param_groups[0]["lr"] = self.training.rate(step)
            if self.leads:
                self.training.losses.append(stack.gradients(batch).mean())
            if self._acts(before=True):
                self._meet(stack.slopes.fetch)
            self.follower.step()
            if self._acts(before=False):
                self._meet()
                if self.leads:
                    stack.values.store()
            if self.leads and step in self.training.points:
                self.training.watch(step, self._agreed())
        self._meet(stack.values.fetch)
        self.session.close()
        self._meet()
        if self.leads:
            stack.values.store()
        return Moved.of(self.session.meter, self.session.stats().rounds)

    def act(self) -> None:
        """Between the hooks of the follower: the step of all replicas."""
        stack = self.training.stack
        if self._acts(before=True):
            self._meet()
        if self.leads:
            if self._acts(before=True):
                stack.slopes.store()
            stack.step(self.training.rate(self.now))
        if self._acts(before=False):
            self._meet(stack.values.fetch)

    def _acts(self, *, before: bool) -> bool:
        """Whether a round of this step reads or writes a slice."""
        return any(
            each.plan.before_step == before
            and (each.launches(self.now) or each.plan.when.lands(self.now, each.fragment) is not None)
            for each in self.session.engine.rounds
        )

    def _meet(self, first: Callable[[], None] | None = None) -> None:
        """Go on when all are here; `first` is done by the one that trains, before the others go on."""
        if self.leads and first is not None:
            first()
        self.meetings += 1
        self.transport.start(Gather(b""), Tag("meeting", self.meetings)).finish()

    def _agreed(self) -> Tensors:
        """The model last agreed on; the mean one where replicas differ."""
        stack = self.training.stack
        if self.session.method.private:
            return stack.mean()
        stack.values.fetch()
        with self.session.anchor() as model:
            return {name: parameter.detach().clone() for name, parameter in trainable(model).items()}
