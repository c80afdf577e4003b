"""A replica's share of a data loader, with a cursor that all replicas move together."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, SequentialSampler

from lowtide.errors import ConfigError, StateError

logger = logging.getLogger("lowtide")


@dataclass
class Cursor:
    """How far all replicas together have come: the epoch, and the samples (or items) of it that were used.

    `drawn` is the state of the generator that an order of the loader's own was drawn from; `None` where we dealt.
    """

    epoch: int = 0
    position: int = 0
    drawn: Tensor | None = None
    length: int | None = field(default=None, compare=False)  # of the loader that it belongs to

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"epoch": self.epoch, "position": self.position, "drawn": self.drawn}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Cursor:
        """The cursor that `state_dict` wrote, for any number of replicas."""
        if state["epoch"] < 0 or state["position"] < 0:
            raise StateError(
                f"a data cursor cannot stand at epoch {state['epoch']}, position {state['position']}\n"
                "hint: the checkpoint is damaged"
            )
        return cls(state["epoch"], state["position"], state["drawn"])

    def take(self, other: Cursor) -> None:
        """Stand where another stands; shards that hold this one go on from there."""
        self.epoch, self.position, self.drawn = other.epoch, other.position, other.drawn

    def advance(self) -> None:
        """Begin the next epoch."""
        self.epoch, self.position, self.drawn = self.epoch + 1, 0, None


@dataclass
class _Deal(Sampler[int]):
    """Deals one global order out in batches: first a batch for rank 0, then one for rank 1, and so on."""

    length: int
    batch: int
    rank: int
    size: int
    shuffle: bool
    seed: int
    cursor: Cursor = field(default_factory=Cursor)

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.cursor.epoch)
            order = torch.randperm(self.length, generator=generator).tolist()
        else:
            order = list(range(self.length))
        round_ = self.batch * self.size
        for start in range(self.cursor.position, self.length - round_ + 1, round_):
            first = start + self.rank * self.batch
            yield from order[first : first + self.batch]

    def __len__(self) -> int:
        return max(0, self.length - self.cursor.position) // (self.batch * self.size) * self.batch


class Shard:
    """The batches of one replica; iterating again goes on where the last loop stopped, or with the next epoch.

    A `DataLoader` over a dataset with a length is dealt out anew, so that nothing is loaded for others; any other
    iterable is read by all, and each takes its turn. All replicas get equally many batches: what is left over at
    the end of an epoch is skipped. A single replica gets the loader's own batches.
    """

    def __init__(self, loader: Iterable[Any], cursor: Cursor, rank: int, size: int, seed: int) -> None:
        self.cursor = cursor
        streams = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
        length = len(loader) if isinstance(loader, Sized) and not streams else None
        if cursor.length not in (None, length):
            raise ConfigError(
                f"a loader of length {length} cannot share the place of one of length {cursor.length}\n"
                "hint: name each loader: sync.shard(loader, name='valid')"
            )
        cursor.length = length
        self._rank, self._size = rank, size
        self._loader = loader
        self._dealt: DataLoader[Any] | None = None
        # a batch counts by its samples, so that other batches and other worlds can go on from there
        self._each, self._shuffles = 1, False
        if isinstance(loader, DataLoader) and not streams:
            self._each = loader.batch_size or 1
            self._shuffles = not isinstance(loader.sampler, SequentialSampler)
            if size > 1:
                self._dealt = _dealt(loader, cursor, rank, size, seed)

    def __len__(self) -> int:
        if self._dealt is not None:
            return len(self._dealt)
        return (len(self._loader) - self.cursor.position // self._each) // self._size  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        cursor = self.cursor
        if cursor.position and self._shuffles and (cursor.drawn is None) != (self._dealt is not None):
            # in another order, samples that were used would come again
            logger.warning("the rest of epoch %d is skipped: one replica has another order than several", cursor.epoch)
            cursor.advance()
        for batch in self._turns() if self._dealt is None else self._dealt:
            cursor.position += self._each * self._size
            yield batch
        cursor.advance()

    def _turns(self) -> Iterator[Any]:
        """Every `size`-th item of the loader's own order, only as long as all ranks get one."""
        own = getattr(self._loader, "generator", None)
        generator = own if isinstance(own, torch.Generator) else torch.default_generator
        done = -(-self.cursor.position // self._each)
        now = generator.get_state()
        if not done or self.cursor.drawn is None:
            self.cursor.drawn = now
        generator.set_state(self.cursor.drawn)
        items = iter(self._loader)
        if done:
            # the order is drawn again as it was, then the generator goes on from where it is
            for _ in islice(items, done):
                pass
            generator.set_state(now)
        while len(turn := list(islice(items, self._size))) == self._size:
            yield turn[self._rank]


def _dealt(loader: DataLoader[Any], cursor: Cursor, rank: int, size: int, seed: int) -> DataLoader[Any]:
    """The same loader with our sampler in place of its own."""
    dataset: Dataset[Any] = loader.dataset
    length, batch = len(dataset), loader.batch_size or 1  # type: ignore[arg-type]
    sampler = loader.sampler
    once = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == length
    )
    if loader.batch_size is None or not once:
        raise ConfigError(
            f"cannot deal out a loader with batch_size={loader.batch_size} and this {type(sampler).__name__}\n"
            "hint: pass a DataLoader with shuffle=True or False, or shard it yourself by sync.rank"
        )
    if length < batch * size:
        raise ConfigError(
            f"{length} samples do not give {size} replicas a batch of {batch}\nhint: a smaller batch, or fewer replicas"
        )
    return DataLoader(
        dataset,
        batch_size=batch,
        sampler=_Deal(length, batch, rank, size, type(sampler) is RandomSampler, seed, cursor),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
