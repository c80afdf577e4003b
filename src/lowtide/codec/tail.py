"""How the tail is coded: the small tensors, for which few values and coarse steps are least safe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lowtide.errors import ConfigError, PayloadError

# The largest scale whose 127th multiple is still finite.
_MOST = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))


class Tail(Protocol):
    """Bytes for the tail of a buffer."""

    @property
    def code(self) -> int: ...

    def nbytes(self, lengths: tuple[int, ...]) -> int: ...

    def encode(self, tail: Tensor, lengths: tuple[int, ...]) -> bytes: ...

    def decode(self, data: memoryview, lengths: tuple[int, ...]) -> Tensor: ...


@dataclass(frozen=True)
class Full:
    """fp32 as it is."""

    code: int = 1

    def nbytes(self, lengths: tuple[int, ...]) -> int:
        return 4 * sum(lengths)

    def encode(self, tail: Tensor, lengths: tuple[int, ...]) -> bytes:
        return tail.cpu().numpy().astype("<f4").tobytes()

    def decode(self, data: memoryview, lengths: tuple[int, ...]) -> Tensor:
        return torch.from_numpy(np.frombuffer(data, "<f4").astype(np.float32))


@dataclass(frozen=True)
class Int8:
    """127 steps each way and one fp32 scale per tensor: value = code * scale, scale = max|v| / 127."""

    code: int = 2

    def nbytes(self, lengths: tuple[int, ...]) -> int:
        return sum(lengths) + 4 * len(lengths)

    def encode(self, tail: Tensor, lengths: tuple[int, ...]) -> bytes:
        values = tail.cpu().numpy()
        counts = np.array(lengths, np.int64)
        some = counts > 0  # a tensor without elements has a scale all the same: zero
        scale = np.zeros(len(counts), np.float32)
        if some.any():
            starts = np.cumsum(counts) - counts
            scale[some] = np.maximum.reduceat(np.abs(values), starts[some]) / np.float32(127)
        # else the largest value of a huge tensor would decode to infinity
        scale = np.minimum(scale, _MOST)
        # all zeros: any divisor will do but zero
        spread = np.repeat(np.where(scale > 0, scale, np.float32(1)), lengths)
        codes = np.clip(np.rint(values / spread), -127, 127).astype(np.int8)
        return bytes(scale.astype("<f4").tobytes() + codes.tobytes())

    def decode(self, data: memoryview, lengths: tuple[int, ...]) -> Tensor:
        scale = np.frombuffer(data, "<f4", len(lengths)).astype(np.float32)
        codes = np.frombuffer(data, np.int8, offset=4 * len(lengths))
        # no encoder writes -128, which has no positive twin; written so that a NaN fails as well
        if not ((scale >= 0) & (scale <= _MOST)).all() or (codes == -128).any():
            raise PayloadError(f"the tail has a scale outside of 0 to {_MOST:.3g}, or a code of -128")
        return torch.from_numpy(codes.astype(np.float32) * np.repeat(scale, lengths))


def tail_named(name: str) -> Tail:
    """`int8` or `fp32`."""
    known: dict[str, Tail] = {"int8": Int8(), "fp32": Full()}
    if name not in known:
        raise ConfigError(f"tail must be 'int8' or 'fp32', not {name!r}\nhint: tail='fp32' sends small tensors exactly")
    return known[name]
