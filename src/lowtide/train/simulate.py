"""The same plain loop N times in one process: a thread for each replica, a baton passed at every round."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from lowtide.transport.link import Link
from lowtide.transport.simulated import Lockstep, Simulated

T = TypeVar("T")


class Attached(Protocol):
    """What `attach` leaves in the slot of a simulated replica."""

    def fingerprint(self) -> str:
        """A hash of all that must be equal on every replica."""

    def stats(self) -> object:
        """What the session counted."""


@dataclass
class ReplicaSlot:
    """The replica that runs in this thread: its transport, and the sessions that were attached in it."""

    rank: int
    size: int
    transport: Simulated
    sessions: list[Attached] = field(default_factory=list)

    def inner_step(self) -> None:
        """An inner step was taken; the virtual clock counts it if `step_seconds` was given."""
        self.transport.clock.step()


@dataclass(frozen=True)
class SimulationResult(Generic[T]):
    """What a simulation leaves, by rank; fingerprint and stats are those of the last session of each replica.

    `seconds` is when the slowest replica was done, on the virtual clock; `compute_seconds` and
    `wait_seconds` add up to each replica's own time.
    """

    fingerprints: tuple[str, ...]
    returns: tuple[T, ...]
    stats: tuple[object, ...]
    seconds: float
    compute_seconds: tuple[float, ...]
    wait_seconds: tuple[float, ...]


# A context variable, not a thread's: it stays right in tasks and callbacks that the worker starts.
_CURRENT: ContextVar[ReplicaSlot | None] = ContextVar("lowtide-replica", default=None)


def current_replica() -> ReplicaSlot | None:
    """The simulated replica that runs in this thread, or None outside of `simulate`."""
    return _CURRENT.get()


def simulate(
    worker: Callable[[], T],
    replicas: int = 4,
    link: Link | str | None = None,
    seed: int = 0,
    *,
    speeds: Sequence[float] | None = None,
    step_seconds: float | None = None,
) -> SimulationResult[T]:
    """Run `worker` once for each replica, in lockstep, as N processes would run it.

    The global generators of torch, numpy and random belong to whichever replica runs and start from `seed + rank`;
    the caller's are put back. Time passes on a virtual clock: compute as measured (or `step_seconds` an inner
    step), divided by the replica's speed; messages as `link` says. The first error of any replica is raised.

    >>> result = simulate(lambda: current_replica().rank, replicas=3)
    >>> result.returns
    (0, 1, 2)
    """
    generators = _Generators(replicas, seed)
    world = Lockstep(replicas, link, seed=seed, speeds=speeds, step_seconds=step_seconds, on_switch=generators.switch)
    ends: dict[int, tuple[str, object]] = {}

    def replica(transport: Simulated) -> T:
        slot = ReplicaSlot(transport.rank, transport.size, transport)
        _CURRENT.set(slot)  # a thread has a context of its own, so nothing needs to be put back
        value = worker()
        # Still in the replica's turn: a session may draw or compute for its fingerprint.
        last = slot.sessions[-1] if slot.sessions else None
        ends[slot.rank] = (last.fingerprint(), last.stats()) if last is not None else ("", None)
        return value

    # What the caller draws after a simulation does not depend on it.
    with generators.kept():
        returns = world.run(replica)
    return SimulationResult(
        fingerprints=tuple(ends[rank][0] for rank in range(replicas)),
        returns=returns,
        stats=tuple(ends[rank][1] for rank in range(replicas)),
        seconds=max(clock.seconds for clock in world.clocks),
        compute_seconds=tuple(clock.compute for clock in world.clocks),
        wait_seconds=tuple(clock.wait for clock in world.clocks),
    )


@dataclass(frozen=True)
class _Streams:
    """The state of all global generators."""

    torch: Tensor
    numpy: Any
    python: Any
    cuda: list[Tensor] | None

    @classmethod
    def read(cls) -> _Streams:
        cuda = torch.cuda.get_rng_state_all() if _cuda_runs() else None
        return cls(torch.get_rng_state(), np.random.get_state(), random.getstate(), cuda)  # noqa: NPY002 - users' code may use it

    def write(self) -> None:
        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)  # noqa: NPY002 - users' code may use it
        random.setstate(self.python)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)


class _Generators:
    """Gives each replica the global generators as if it were alone in a process."""

    def __init__(self, replicas: int, seed: int) -> None:
        self._seeds = [seed + rank for rank in range(replicas)]
        self._streams: dict[int, _Streams] = {}

    def switch(self, holder: int | None, following: int | None) -> None:
        """The baton passes from one rank to another; None stands for before and after."""
        if holder is not None:
            self._streams[holder] = _Streams.read()
        if following is None:
            return
        # Seeds are set at the first turn, as a process sets them at its start.
        if following in self._streams:
            self._streams[following].write()
        else:
            self._seed(self._seeds[following])

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put the caller's own streams back at the end."""
        streams = _Streams.read()
        try:
            yield
        finally:
            streams.write()

    @staticmethod
    def _seed(seed: int) -> None:
        # As torch.manual_seed does it, less its list of calls that wait for a GPU.
        torch.default_generator.manual_seed(seed)
        if _cuda_runs():
            torch.cuda.manual_seed_all(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 - users' code may use it
        random.seed(seed)


def _cuda_runs() -> bool:
    """Whether CUDA has generators by now; asking for them would start it."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
