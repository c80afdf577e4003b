"""Data that every machine has: byte streams of text, cut into windows, and generated pictures.

Everything here is decided by its arguments: files are taken in the order of their paths, a file is held out by a
digest of its path, and all draws come from a generator seeded by the caller.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from lowtide.errors import ConfigError

Bytes = npt.NDArray[np.uint8]

SEPARATOR = b"\0"
HELD_OUT = 5  # of the 256 values of a digest's last byte: about 2 % of the files
SHAPES = 4


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text as bytes: `train` and `validation` are uint8 and share no file; `digest` is the SHA-256 of both."""

    train: Tensor
    validation: Tensor
    digest: str


@dataclass(frozen=True, eq=False)
class Windows(Dataset[Tensor]):
    """Windows of `context + 1` tokens, as int64: position i is predicted from the positions before it.

    `starts` holds where each window begins; with two axes an item is a whole batch.

    >>> data = windows(torch.arange(9, dtype=torch.uint8), context=4)
    >>> [window.tolist() for window in data]
    [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    """

    tokens: Tensor
    starts: Tensor
    context: int

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        places = self.starts[index].unsqueeze(-1) + torch.arange(self.context + 1)
        return self.tokens[places].long()

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))


def windows(tokens: Tensor, context: int, *, seed: int | None = None) -> Windows:
    """Windows that together predict every token once, in order; with a seed as many, at random places."""
    count = _at_least_one((len(tokens) - 1) // context, f"{len(tokens)} tokens hold no window of {context} + 1")
    if seed is None:
        return Windows(tokens, torch.arange(count) * context, context)
    draw = torch.Generator().manual_seed(seed)
    return Windows(tokens, torch.randint(len(tokens) - context, (count,), generator=draw), context)


def single_pass(tokens: Tensor, replicas: int, rank: int, batch: int, context: int, *, seed: int = 0) -> Windows:
    """One replica's batches `(batch, context + 1)` in which all replicas together see each token at most once.

    The windows are disjoint and in an order drawn from `seed`. Item s is step s, so a run resumes by its number. At
    each step N replicas see what one replica with N times the batch would see, and all have equally many steps.

    >>> tokens = torch.arange(12, dtype=torch.uint8)
    >>> [single_pass(tokens, replicas=2, rank=rank, batch=1, context=2)[0].tolist() for rank in (0, 1)]
    [[[0, 1, 2]], [[3, 4, 5]]]
    """
    if not 0 <= rank < replicas:
        raise ConfigError(f"rank {rank} of {replicas} replicas\nhint: ranks are 0 to {replicas - 1}")
    count, rows = len(tokens) // (context + 1), replicas * batch
    steps = _at_least_one(
        count // rows, f"{len(tokens)} tokens hold {count} windows, a step of all replicas takes {rows}"
    )
    # one order for all replicas, from which each takes its share: no two can draw the same window
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[: steps * rows]
    starts = order.view(steps, replicas, batch)[:, rank] * (context + 1)
    return Windows(tokens, starts.clone(), context)  # a view would keep all replicas' places alive


def stdlib_text(max_bytes: int | None = None) -> Corpus:
    """The source text of this Python's standard library, which every machine has; its digest tells the version.

    >>> corpus = stdlib_text(max_bytes=100_000)
    >>> corpus.train.dtype, 80_000 < len(corpus.train) + len(corpus.validation) <= 100_000
    (torch.uint8, True)
    """
    root = Path(sysconfig.get_path("stdlib"))
    others = {"site-packages", "dist-packages", "__pycache__"}
    paths = [path for path in root.rglob("*.py") if others.isdisjoint(path.relative_to(root).parts)]
    return _split_by_file(root, paths, max_bytes)


def text_corpus(path: str | Path, *, max_bytes: int | None = None) -> Corpus:
    """The corpus in a file or folder.

    A folder with `train.bin` and `validation.bin` (what `make corpus` leaves) is taken as it is and mapped, not read;
    of any other folder all files but the hidden ones are joined, and some of them held out; of a file the last
    fiftieth is held out. `max_bytes` limits the training text of the first kind and all text of the others.
    """
    path = Path(path)
    if path.is_file():
        text = _mapped(path)[:max_bytes]
        cut = len(text) - _at_least_one(len(text) // 50, f"{path} has {len(text)} bytes, too few to hold some out")
        return _corpus(text[:cut], text[cut:])
    if not path.is_dir():
        raise ConfigError(f"no file or folder {str(path)!r}\nhint: give a text, or a folder of texts")
    made = path / "train.bin", path / "validation.bin"
    if all(part.is_file() for part in made):
        return _corpus(_mapped(made[0])[:max_bytes], _mapped(made[1]))
    hidden = (part for part in path.rglob("*") if any(name.startswith(".") for name in part.relative_to(path).parts))
    return _split_by_file(path, [part for part in set(path.rglob("*")).difference(hidden) if part.is_file()], max_bytes)


def generated_images(classes: int = 10, count: int = 1024, size: int = 32, seed: int = 0) -> TensorDataset:
    """Pictures `(count, 3, size, size)` and labels: a striped shape whose form and slant of stripes make the class.

    Place, size, colours, phase and noise are drawn anew for each picture, so colour tells nothing and neither form
    nor stripes alone suffice. Forms are disc, square, diamond and ring; slants divide half a turn evenly.

    >>> images, labels = generated_images(classes=8, count=16, size=24).tensors
    >>> tuple(images.shape), labels.dtype
    ((16, 3, 24, 24), torch.int64)
    """
    if min(classes, count, size) < 1:
        raise ConfigError(f"classes {classes}, count {count}, size {size}\nhint: all of them positive")
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=draw)
    place = torch.rand(4, count, 1, 1, generator=draw)  # x, y, radius, phase
    colours = torch.rand(3, count, 3, 1, 1, generator=draw)  # two of the stripes, one behind
    axis = torch.linspace(-1, 1, size)
    # pixels as seen from the middle of the shape, which stays inside the picture
    x = axis.view(1, 1, -1) - 0.6 * (place[0] - 0.5)
    y = axis.view(1, -1, 1) - 0.6 * (place[1] - 0.5)
    # soft over about one pixel, so that small pictures keep the outline
    inside = torch.sigmoid(size * (0.45 + 0.3 * place[2] - _distance(x, y, labels % SHAPES)))
    slant = (labels // SHAPES).view(-1, 1, 1) * (math.pi / math.ceil(classes / SHAPES))
    wave = 10 * (x * slant.cos() + y * slant.sin()) + 2 * math.pi * place[3]
    inside, wave = inside.unsqueeze(1), (0.5 + 0.5 * wave.sin()).unsqueeze(1)
    images = torch.lerp(colours[2], torch.lerp(colours[0], colours[1], wave), inside) - 0.5
    return TensorDataset(images + 0.1 * torch.randn(images.shape, generator=draw), labels)


def _distance(x: Tensor, y: Tensor, shape: Tensor) -> Tensor:
    """How far from the middle of its shape each pixel is, in radii of a shape of about one area."""
    radius = (x * x + y * y).sqrt()
    square = 1.1 * torch.maximum(x.abs(), y.abs())
    diamond = 0.8 * (x.abs() + y.abs())
    ring = 0.3 + 1.5 * (radius - 0.45).abs()
    return torch.stack([radius, square, diamond, ring])[shape, torch.arange(len(shape))]


def _split_by_file(root: Path, paths: Iterable[Path], max_bytes: int | None) -> Corpus:
    """Join the files in the order of their paths, as many as fit, and hold some out."""
    names = sorted(path.relative_to(root).as_posix() for path in paths)
    texts, room = {}, math.inf if max_bytes is None else max_bytes
    for name in names:
        text = (root / name).read_bytes()
        room -= len(text) + len(SEPARATOR)
        if room < 0:
            break
        texts[name] = text
    if len(texts) < 2:
        raise ConfigError(
            f"{len(texts)} files of {root} fit into {max_bytes} bytes\nhint: two are needed, one of them held out"
        )
    digests = {name: hashlib.sha256(name.encode()).digest()[-1] for name in texts}
    # of few files none may fall under the bound; then the one nearest to it is held out
    bound = max(HELD_OUT, min(digests.values()) + 1)
    parts = [SEPARATOR.join(texts[name] for name in texts if (digests[name] < bound) == held) for held in (False, True)]
    train, validation = (np.frombuffer(bytearray(part), dtype=np.uint8) for part in parts)
    return _corpus(train, validation)


def _mapped(path: Path) -> Bytes:
    # copy on write: processes share the pages, and torch is given memory that it may write to
    return np.memmap(path, dtype=np.uint8, mode="c") if path.stat().st_size else np.empty(0, dtype=np.uint8)


def _corpus(train: Bytes, validation: Bytes) -> Corpus:
    digest = hashlib.sha256(hashlib.sha256(train.data).digest() + hashlib.sha256(validation.data).digest()).hexdigest()
    return Corpus(torch.from_numpy(train), torch.from_numpy(validation), digest)


def _at_least_one(count: int, otherwise: str) -> int:
    if count < 1:
        raise ConfigError(f"{otherwise}\nhint: more data, a shorter context or a smaller batch")
    return count
