"""Quantisers: the values of a payload as few bits each, and back.

Values come as consecutive segments, one per tensor; scales and tables are kept per segment (`e3m0`: per block of one).
The bytes are these fp32 metadata, then the codes of all values in one string of bits. Values are finite by contract;
what is decoded is finite too, and depends on nothing but the bytes and the lengths.

    name         bits      metadata bytes of a segment    coding what was decoded
    fp32         32        0                              gives it again
    bf16, fp16   16        0                              gives it again
    int8         8         4 + 1024                       comes near it: bins lie around its own mean
    stat(B)      log2 B    4 + 4 B                        comes near it
    sym2         2         8                              gives it again
    e3m0         4         4 for each block               gives it again
    sign         1         4, or 0 if unscaled            gives it again
    linear(B)    log2 B    8                              gives it again, to rounding
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtide.codec.pack import pack_bits, packed_nbytes, unpack_bits
from lowtide.errors import ConfigError, PayloadError

Data = bytes | memoryview
Codes = NDArray[np.unsignedinteger]
Numbers = NDArray[Any]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

_RANGE = float(np.finfo(np.float32).min), float(np.finfo(np.float32).max)
_MEDIAN_OF = 4096  # values of a segment that its median is taken over, at most


@runtime_checkable
class Quantizer(Protocol):
    """Values to bytes and back; `code` and `parameter` name it on the wire and never change."""

    @property
    def name(self) -> str:
        """What it is called in reports."""

    @property
    def code(self) -> int:
        """Its number on the wire."""

    @property
    def parameter(self) -> int:
        """What else a receiver must know: bins, width or block, or 0."""

    @property
    def bits(self) -> int:
        """Bits of one value, metadata aside."""

    def nbytes(self, lengths: Tensor) -> int:
        """The length of what `encode` gives, by formula."""

    def encode(self, values: Tensor, lengths: Tensor) -> bytes:
        """The bytes of fp32 values that divide into segments of these lengths."""

    def decode(self, data: Data, lengths: Tensor) -> Tensor:
        """The fp32 values again, on the CPU; `PayloadError` where no encoder could have written the bytes."""


@dataclass(frozen=True, eq=False)
class _Segments:
    """Consecutive segments of a list of values; any of them may be empty."""

    lengths: NDArray[np.int64]
    total: int

    @classmethod
    def of(cls, lengths: Tensor) -> _Segments:
        counts = lengths.cpu().numpy().astype(np.int64)
        return cls(counts, int(counts.sum()))

    def host(self, values: Tensor) -> Floats:
        """The values as fp32 numbers on the host."""
        if values.numel() != self.total:
            raise ConfigError(f"segments of {self.total} values in all do not fit {values.numel()} values")
        return values.detach().cpu().float().contiguous().view(-1).numpy()

    def starts(self) -> NDArray[np.int64]:
        return np.cumsum(self.lengths) - self.lengths

    def reduce(self, operation: np.ufunc, values: Numbers, dtype: type = np.float64) -> Doubles:
        """One number a segment, as a double; zero for empty ones."""
        result = np.zeros(len(self.lengths))
        some = self.lengths > 0
        result[some] = operation.reduceat(values, self.starts()[some], dtype=dtype)
        return result

    def mean(self, values: Numbers) -> Doubles:
        return self.reduce(np.add, values) / np.maximum(self.lengths, 1)

    def spread(self, each: Numbers) -> Numbers:
        """A number of each segment, repeated for each of its values."""
        return np.repeat(each, self.lengths)

    def blocks(self, size: int) -> _Segments:
        """Cut further into blocks of `size`; the last block of a segment may be shorter."""
        number = -(-self.lengths // size)
        lengths = np.full(int(number.sum()), size, np.int64)
        some = number > 0
        lengths[np.cumsum(number)[some] - 1] = (self.lengths - (number - 1) * size)[some]
        return _Segments(lengths, self.total)

    def keys(self, stride: int, codes: Codes) -> NDArray[np.int32]:
        """Where the entry of each code stands in a table with `stride` entries a segment."""
        keys = np.repeat(np.arange(len(self.lengths), dtype=np.int32) * np.int32(stride), self.lengths)
        keys += codes  # in place: at full width there are four bytes for every value
        return keys

    def look_up(self, table: Numbers, codes: Codes) -> Tensor:
        """The entry of `table[segment, code]` for each value."""
        entries = torch.from_numpy(table.astype(np.float32, order="C")).view(-1)
        return entries.index_select(0, torch.from_numpy(self.keys(table.shape[1], codes)))


class _Scheme(Protocol):
    """What makes a quantiser with metadata: how it measures, and what its codes mean."""

    def write(self, segments: _Segments, values: Floats) -> tuple[Numbers, Codes]:
        """Metadata `[segments, columns]` and the code of each value."""

    def read(self, segments: _Segments, metadata: Floats, codes: Codes) -> Tensor:
        """The value of each code; refuses metadata and codes that `write` never gives."""


@dataclass(frozen=True)
class Coded:
    """A code for each value, and fp32 metadata for each segment, or each block of `block` values of one."""

    name: str
    code: int
    parameter: int
    bits: int
    columns: int
    scheme: _Scheme
    block: int = 0

    def nbytes(self, lengths: Tensor) -> int:
        """`4 * columns` for each segment, then `bits` for each value."""
        segments = self._segments(lengths)
        return 4 * self.columns * len(segments.lengths) + packed_nbytes(segments.total, self.bits)

    def encode(self, values: Tensor, lengths: Tensor) -> bytes:
        """Metadata, then codes."""
        segments = self._segments(lengths)
        metadata, codes = self.scheme.write(segments, segments.host(values))
        return b"".join((metadata.astype("<f4").tobytes(), pack_bits(codes, self.bits).data))

    def decode(self, data: Data, lengths: Tensor) -> Tensor:
        """The value that each code has under the metadata of its segment."""
        segments = self._segments(lengths)
        raw = np.frombuffer(data, np.uint8)
        expected, cut = self.nbytes(lengths), 4 * self.columns * len(segments.lengths)
        if len(raw) != expected:
            raise PayloadError(f"{self.name} values take {expected} bytes, but {len(raw)} are here")
        metadata = raw[:cut].view("<f4").astype(np.float32).reshape(len(segments.lengths), self.columns)
        if not np.isfinite(metadata).all():
            raise PayloadError(f"the metadata of {self.name} values are not finite")
        return self.scheme.read(segments, metadata, unpack_bits(raw[cut:], segments.total, self.bits))

    def _segments(self, lengths: Tensor) -> _Segments:
        segments = _Segments.of(lengths)
        return segments.blocks(self.block) if self.block else segments


@dataclass(frozen=True)
class _Cast:
    """The code is the bit pattern of the value in another floating-point type."""

    dtype: torch.dtype

    def write(self, segments: _Segments, values: Floats) -> tuple[Numbers, Codes]:
        if self.dtype == torch.float32:
            return np.zeros(0), values.view(np.uint32)
        limit = torch.finfo(self.dtype).max  # beyond it a cast would give infinity
        return np.zeros(0), torch.from_numpy(values).clamp(-limit, limit).to(self.dtype).view(torch.uint16).numpy()

    def read(self, segments: _Segments, metadata: Floats, codes: Codes) -> Tensor:
        values = torch.from_numpy(codes).view(self.dtype).float()
        if not np.isfinite(values.numpy()).all():
            raise PayloadError(f"values of {self.dtype} are not finite")
        return values


@dataclass(frozen=True)
class _Stat:
    """`step = width * sd / bins` and `code = clamp(round((v - mean) / step) + bins / 2, 0, bins - 1)`."""

    bins: int
    width: int = 6

    def write(self, segments: _Segments, values: Floats) -> tuple[Numbers, Codes]:
        center = segments.mean(values).astype(np.float32)  # as receivers will see it
        # In double precision, as two fp32 values may be farther apart than fp32 can tell.
        distance = np.subtract(values, segments.spread(center), dtype=np.float64)
        variance = segments.reduce(np.add, distance * distance) / np.maximum(segments.lengths - 1, 1)
        steps = segments.spread(_inverse(self.width / self.bins * np.sqrt(variance)))
        steps *= distance
        steps = np.rint(steps, out=steps) + self.bins // 2
        codes = np.clip(steps, 0, self.bins - 1, out=steps).astype(np.uint8)
        keys, size = segments.keys(self.bins, codes), len(center) * self.bins
        means = np.bincount(keys, distance, size) / np.maximum(np.bincount(keys, minlength=size), 1)
        return np.column_stack([center, np.clip(means, *_RANGE).reshape(-1, self.bins)]), codes

    def read(self, segments: _Segments, metadata: Floats, codes: Codes) -> Tensor:
        return segments.look_up(np.clip(metadata[:, :1].astype(np.float64) + metadata[:, 1:], *_RANGE), codes)


@dataclass(frozen=True)
class _Sym2:
    """Bit 0: over the median magnitude; bit 1: negative. Both classes decode to their mean magnitude."""

    def write(self, segments: _Segments, values: Floats) -> tuple[Numbers, Codes]:
        magnitude = np.abs(values)
        large = magnitude > segments.spread(_medians(segments, magnitude))
        number = segments.reduce(np.add, large.view(np.uint8), np.uint32)
        # Each class is summed alone: the difference of two sums would lose a small one, and be inexact.
        upper = magnitude * large
        magnitude -= upper
        low = segments.reduce(np.add, magnitude) / np.maximum(segments.lengths - number, 1)
        high = segments.reduce(np.add, upper) / np.maximum(number, 1)
        codes = large.view(np.uint8) + np.uint8(2) * (values < 0)
        return np.column_stack([low, np.where(number > 0, high, low)]), codes

    def read(self, segments: _Segments, metadata: Floats, codes: Codes) -> Tensor:
        if (metadata < 0).any() or (metadata[:, 0] > metadata[:, 1]).any():
            raise PayloadError("mean magnitudes of sym2 are negative or fall")
        return segments.look_up(np.column_stack([metadata, 0 - metadata]), codes)  # 0 - 0 is no -0.0


@dataclass(frozen=True)
class _E3m0:
    """Bits 0 to 2: 0 for zero, else `e` for `scale * 2 ** (e - 7)`; bit 3: negative."""

    def write(self, segments: _Segments, values: Floats) -> tuple[Numbers, Codes]:
        ratio = np.abs(values)
        scale = segments.reduce(np.maximum, ratio, np.float32).astype(np.float32)
        ratio /= segments.spread(np.where(scale > 0, scale, np.float32(1)))  # a block may be all zeros
        # Half a unit of the exponent more carries everything from 0.75 of a power of two on into its exponent.
        exponent = ((ratio.view(np.int32) + np.int32(0x400000)) >> 23) - 120
        codes = np.maximum(np.clip(exponent, 0, 7).astype(np.uint8), ratio >= 2**-7)
        return scale, codes + np.uint8(8) * ((values < 0) & (codes > 0))

    def read(self, segments: _Segments, metadata: Floats, codes: Codes) -> Tensor:
        if (metadata < 0).any() or (codes == 8).any():
            raise PayloadError("e3m0 has a negative scale or a negative zero")
        levels = np.array([0.0, *(2.0**exponent for exponent in range(-6, 1))])
        return segments.look_up(metadata * np.concatenate([levels, 0 - levels]), codes)


@dataclass(frozen=True)
class _Sign:
    """One bit: negative; zero counts as positive."""

    scaled: bool

    def write(self, segments: _Segments, values: Floats) -> tuple[Numbers, Codes]:
        scale = segments.mean(np.abs(values)) if self.scaled else np.zeros(0)
        return scale, (values < 0).view(np.uint8)

    def read(self, segments: _Segments, metadata: Floats, codes: Codes) -> Tensor:
        if (metadata < 0).any():
            raise PayloadError("a mean magnitude of sign is negative")
        scale = metadata if self.scaled else np.ones((len(metadata), 1))  # then metadata have no column
        return segments.look_up(np.column_stack([scale, 0 - scale]), codes)


@dataclass(frozen=True)
class _Linear:
    """`code = round((v - least) / step)` with `step = (largest - least) / (bins - 1)`."""

    bins: int

    def write(self, segments: _Segments, values: Floats) -> tuple[Numbers, Codes]:
        least, largest = segments.reduce(np.minimum, values), segments.reduce(np.maximum, values)
        steps = np.subtract(values, segments.spread(least), dtype=np.float64)
        steps *= segments.spread(_inverse((largest - least) / (self.bins - 1)))
        return np.column_stack([least, largest]), np.rint(steps).astype(np.uint8)

    def read(self, segments: _Segments, metadata: Floats, codes: Codes) -> Tensor:
        least, largest = metadata[:, :1].astype(np.float64), metadata[:, 1:].astype(np.float64)
        if (least > largest).any():
            raise PayloadError("the least value of a linear segment is over its largest")
        share = np.arange(self.bins) / (self.bins - 1)  # mixed in this way, both ends are exact
        return segments.look_up(np.clip((1 - share) * least + share * largest, least, largest), codes)


def fp32() -> Quantizer:
    """Values as they are."""
    return Coded("fp32", 1, 0, bits=32, columns=0, scheme=_Cast(torch.float32))


def bf16() -> Quantizer:
    """Eight bits of mantissa, the range of fp32."""
    return Coded("bf16", 2, 0, bits=16, columns=0, scheme=_Cast(torch.bfloat16))


def fp16() -> Quantizer:
    """Eleven bits of mantissa, magnitudes up to 65504."""
    return Coded("fp16", 3, 0, bits=16, columns=0, scheme=_Cast(torch.float16))


def int8(width: int = 6) -> Quantizer:
    """256 bins over 6 or 12 standard deviations, each decoded to its mean."""
    if width not in (6, 12):
        raise ConfigError(f"int8 covers a width of 6 or 12 standard deviations, not {width}")
    return Coded("int8", 4, width, bits=8, columns=257, scheme=_Stat(256, width))


def stat(bins: int) -> Quantizer:
    """2 to 256 bins over 6 standard deviations, each decoded to its mean."""
    bits = _power_of_two("stat", bins)
    return Coded(f"stat({bins})", 5, bins, bits, columns=1 + bins, scheme=_Stat(bins))


def sym2() -> Quantizer:
    """Two bits: sign, and over or under the median magnitude.

    >>> v, lengths = torch.tensor([1.0, -2.0, 3.0, -6.0]), torch.tensor([4])
    >>> sym2().decode(sym2().encode(v, lengths), lengths)
    tensor([ 1.5000, -1.5000,  4.5000, -4.5000])
    """
    return Coded("sym2", 6, 0, bits=2, columns=2, scheme=_Sym2())


def e3m0(block: int = 256) -> Quantizer:
    """Four bits: sign and exponent, with a scale a block.

    >>> v, lengths = torch.tensor([1.0, -0.4, 0.3, 0.001]), torch.tensor([4])
    >>> e3m0().decode(e3m0().encode(v, lengths), lengths)
    tensor([ 1.0000, -0.5000,  0.2500,  0.0000])
    """
    if not 1 <= block <= 65535:
        raise ConfigError(f"a block of e3m0 has 1 to 65535 values, not {block}")
    return Coded("e3m0", 7, block, bits=4, columns=1, scheme=_E3m0(), block=block)


def sign(*, scaled: bool = True) -> Quantizer:
    """One bit; decoded to the mean magnitude, or to one."""
    return Coded("sign", 8, int(scaled), bits=1, columns=int(scaled), scheme=_Sign(scaled))


def linear(bins: int) -> Quantizer:
    """2 to 256 levels from the least value to the largest; the cheapest of the 8-bit ones for small tensors."""
    bits = _power_of_two("linear", bins)
    return Coded(f"linear({bins})", 9, bins, bits, columns=2, scheme=_Linear(bins))


def by_bits(bits: int) -> Quantizer:
    """The quantiser that an option `bits` means.

    >>> by_bits(2).name
    'sym2'
    """
    known = {1: sign(), 2: sym2(), 4: stat(16), 8: int8(), 16: bf16(), 32: fp32()}
    if bits not in known:
        choices = ", ".join(f"{number} ({quantizer.name})" for number, quantizer in known.items())
        raise ConfigError(f"no quantiser has bits={bits}\nhint: bits is one of {choices}")
    return known[bits]


def _power_of_two(name: str, bins: int) -> int:
    """The exponent of a number of bins."""
    if bins not in (2, 4, 8, 16, 32, 64, 128, 256):
        raise ConfigError(f"{name} has 2, 4, 8, ... 256 bins, not {bins}")
    return bins.bit_length() - 1


def _inverse(steps: Doubles) -> Doubles:
    """`1 / step`, and 0 for a step of 0, which puts all values into one bin."""
    return np.divide(1, steps, out=np.zeros_like(steps), where=steps > 0)


def _medians(segments: _Segments, magnitude: Floats) -> Floats:
    """The lower median magnitude of each segment's sample.

    Magnitudes order as the whole numbers that their bits are. So one sort does for all segments: by the number of the
    segment in the upper half of a word, the magnitude in the lower.
    """
    number = np.minimum(segments.lengths, _MEDIAN_OF)
    picked = _Segments(number, int(number.sum()))
    first = picked.starts()
    order = np.arange(picked.total) - picked.spread(first)
    place = picked.spread(segments.starts()) + order * picked.spread(segments.lengths) // picked.spread(number)
    words = picked.spread(np.arange(len(number), dtype=np.uint64) << np.uint64(32))
    words |= magnitude[place].view(np.uint32)
    words.sort()
    # An empty segment takes some other one's median; it has no value to compare with it.
    middle = words[first + (number - 1) // 2] if picked.total else np.zeros(len(number), np.uint64)
    return (middle & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.float32)
