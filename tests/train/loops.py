"""The plain loops that these tests train: a small model, data that depends on rank and step only, any method."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from lowtide import Session, Settings
from lowtide.errors import LowtideError, TransportError
from lowtide.messages import Inbox, Message, Tag
from lowtide.train.agreement import digest
from lowtide.train.simulate import current_replica

FEATURES, WIDTH, CLASSES = 6, 40, 110


class Net(nn.Module):
    """A matrix that is worth tiles (110 x 40), one that is not, vectors, dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.1)
        self.second = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(torch.relu(self.norm(self.first(x)))))


def net(seed: int = 0) -> Net:
    """A model whose weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net()


def rank() -> int:
    """Which replica this is, in a simulation or a launch; 0 alone."""
    slot = current_replica()
    return int(os.environ.get("RANK", "0")) if slot is None else slot.rank


def batch(step: int, source: int | None = None, size: int = 8) -> tuple[Tensor, Tensor]:
    """What a replica (this one unless told) sees at a step."""
    generator = torch.Generator().manual_seed(1000 * step + (rank() if source is None else source))
    x = torch.randn(size, FEATURES, generator=generator)
    return x, (x.sum(1) * 9).long() % CLASSES


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One ordinary step."""
    x, y = batch(step)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@dataclass
class Run:
    """One replica's model, optimizer and session."""

    method: Any = "decoupled"
    options: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    extra: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        self.model = net(self.seed)
        self.optimizer = self.make(self.model)
        self.sync: Session = lowtide.attach(self.model, self.optimizer, self.method, **self.extra, **self.options)

    def train(self, first: int, last: int) -> Run:
        """Steps `first` to `last`, both included."""
        for step in range(first, last + 1):
            step_once(self.model, self.optimizer, step)
        return self

    def saved(self) -> bytes:
        """A checkpoint, as bytes."""
        buffer = io.BytesIO()
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "sync": self.sync.state_dict(),
                "rng": torch.get_rng_state(),
            },
            buffer,
        )
        return buffer.getvalue()

    def load(self, saved: bytes) -> Run:
        """Go on from a checkpoint."""
        state = torch.load(io.BytesIO(saved), weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sync.load_state_dict(state["sync"])
        torch.set_rng_state(state["rng"])
        return self

    def all(self) -> dict[str, Any]:
        """Everything that training depends on, as tensors and plain values."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "sync": without_seconds(self.sync.state_dict()),
        }

    def digest(self) -> str:
        return digest(self.model.parameters())


def without_seconds(state: Any) -> Any:
    """A state without what a clock measured."""
    if isinstance(state, dict):
        return {name: without_seconds(value) for name, value in state.items() if name != "seconds"}
    return state


CHECKED = Settings(check_every=1)

# Every method, its options for short runs, and what it is usually trained with.
METHODS: dict[str, tuple[str, dict[str, Any], Callable[[nn.Module], torch.optim.Optimizer]]] = {
    "ddp": ("ddp", {}, sgd),
    "local_sgd": ("local_sgd", {"period": 4}, sgd),
    "post_local": ("local_sgd", {"period": 4, "switch_at": 3}, sgd),
    "diloco": ("diloco", {"period": 4}, adamw),
    "diloco_int8": ("diloco", {"period": 4, "bits": 8}, adamw),
    "decoupled": ("decoupled", {"period": 4}, adamw),
    "decoupled_plain": ("decoupled", {"period": 4, "transform": "none"}, sgd),
    "decoupled_sharded": ("decoupled", {"period": 4, "exchange": "sharded"}, sgd),
    "decoupled_nesterov": ("decoupled", {"period": 4, "preset": "nesterov"}, sgd),
    "authors": ("decoupled", {"period": 4, "preset": "authors"}, sgd),
    "resync": ("decoupled", {"period": 2, "preset": "resync"}, sgd),
    "demo": ("demo", {}, sgd),
    "sparseloco": ("sparseloco", {"period": 4}, adamw),
    "streaming": ("streaming_diloco", {"period": 6, "fragments": 2, "delay": 2}, adamw),
    "streaming_dense": ("streaming_diloco", {"period": 6, "fragments": 3, "delay": 1, "bits": 32}, sgd),
    "eager": ("eager", {"period": 4}, adamw),
    "sparta": ("sparta", {"density": 0.05}, sgd),
    "sparta_late": ("sparta", {"density": 0.05, "period": 3, "delay": 2}, sgd),
    "sparta_diloco": ("sparta", {"density": 0.05, "period": 2, "diloco_period": 6}, sgd),
    "noloco": ("noloco", {"period": 4}, sgd),
    "powersgd": ("powersgd", {"rank": 2}, sgd),
    "des_loc": ("des_loc", {"period": 2}, adamw),
    "fda": ("fda", {"theta": 1e-3}, sgd),
    "fda_calibrated": ("fda", {"theta": "interval:4", "estimator": "norm"}, sgd),
    "fda_late": ("fda", {"theta": 1e-3, "check_every": 3, "delay": 2}, adamw),
    "muloco": ("muloco", {"period": 4}, sgd),
}
PRIVATE = {"authors", "resync", "eager", "sparta", "sparta_late", "sparta_diloco", "noloco"}
CONSISTENT = [name for name in METHODS if name not in PRIVATE]


def case(name: str, **extra: Any) -> Run:
    """A replica that runs a named case."""
    method, options, make = METHODS[name]
    return Run(method, options, make, {"settings": CHECKED, **extra})


def errors(worker: Callable[[], object], replicas: int = 2) -> list[str]:
    """What each replica is told when all run `worker`: the kind of error and its text, or nothing."""

    def caught() -> str:
        try:
            worker()
        except (LowtideError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return list(lowtide.simulate(caught, replicas=replicas).returns)


def kept(run: Run) -> dict[str, Any]:
    """What the rounds keep, less the messages in flight."""
    rounds = run.sync.state_dict()["rounds"]
    return {name: {k: v for k, v in state.items() if k != "flights"} for name, state in rounds.items()}


def until_it_fails(run: Run, steps: int = 40) -> tuple[int, TransportError]:
    """Train until the network fails; everything but the inner step itself must then be as it was before."""
    before_step = run.sync.engine.rounds[0].plan.before_step
    for step in range(1, steps):
        state, shadow = kept(run), copy.deepcopy((run.model, run.optimizer))
        random = torch.get_rng_state()
        try:
            step_once(run.model, run.optimizer, step)
        except TransportError as error:
            model, optimizer = shadow
            if not before_step:
                # a fresh optimizer: the copied one still has our hooks
                plain = run.make(model)
                plain.load_state_dict(optimizer.state_dict())
                torch.set_rng_state(random)
                step_once(model, plain, step)
            expected, found = ([p.detach() for p in each.parameters()] for each in (model, run.model))
            wrong = [*differences(state, kept(run)), *differences(expected, found)]
            assert not wrong, wrong
            assert not run.sync.engine.waiting
            return step, error
    raise AssertionError("the network never failed")


@dataclass
class Flaky:
    """A replica's transport whose line goes down at one message: what all others started is lost with it."""

    inner: Any
    fails_at: int

    @property
    def rank(self) -> int:
        """As the wrapped transport."""
        return self.inner.rank

    @property
    def size(self) -> int:
        """As the wrapped transport."""
        return self.inner.size

    def start(self, message: Message, tag: Tag) -> Any:
        """As the wrapped transport, until it is time to fail."""
        if tag.cause in ("round", "monitor"):
            self.fails_at -= 1
        pending = self.inner.start(message, tag)
        return Failing(pending) if self.fails_at == 0 and tag.cause in ("round", "monitor") else pending

    def receive(self, source: int, tag: Tag) -> Any:
        """As the wrapped transport."""
        return self.inner.receive(source, tag)

    def close(self) -> None:
        """The wrapped transport belongs to the simulation."""


@dataclass(frozen=True)
class Failing:
    """A message that is lost."""

    pending: Any

    def finish(self) -> Inbox:
        """Fail, once all have come so far."""
        self.pending.finish()
        raise TransportError("the line is down")


def same(one: Any, other: Any) -> bool:
    """Whether two nests of dicts, lists, tensors and plain values are equal, bit for bit (a NaN equals itself)."""
    return not list(differences(one, other))


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """The places where two nests differ."""
    if isinstance(one, Tensor):
        equal = isinstance(other, Tensor) and one.shape == other.shape and one.dtype == other.dtype
        if not equal or digest([one]) != digest([other]):
            yield where
    elif isinstance(one, dict):
        if not isinstance(other, dict) or one.keys() != other.keys():
            yield f"{where}: {set(one) ^ set(other)}"
            return
        for name in one:
            yield from differences(one[name], other[name], f"{where}.{name}")
    elif isinstance(one, list | tuple):
        if len(one) != len(other):
            yield where
            return
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from differences(a, b, f"{where}[{number}]")
    elif one != other:
        yield f"{where}: {one!r} is not {other!r}"
