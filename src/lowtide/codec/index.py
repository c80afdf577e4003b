"""Coding of the kept positions: plain, as Golomb-coded gaps, or as a bitmap; whichever is shortest.

Positions come in runs (tiles, usually): `counts[i]` ascending positions in `[0, span)`. Both sides know counts and
span, so the counting floor is `sum(log2 binom(span, counts[i]))` bits. All three codings are canonical: bytes that
the encoder could not have written are refused.

Golomb coding splits a gap (positions skipped) into `quotient, remainder = divmod(gap, m)`. A remainder takes `low`
bits, `low = floor(log2 m)`, or one more when it is at least `short = 2 ** (low + 1) - m`. The parts stand in three
streams, each LSB first and filled up to a byte, so that each decodes in a few vector operations:

    fixed    `low` bits of every remainder: `r` if `r < short` else `(r + short) >> 1`
    extra    one bit, `(r + short) & 1`, of those that need it
    unary    every quotient as that many zeros and a one

The last byte of `unary` holds the last one, and no stream says its length: it follows from the streams before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from lowtide.codec.pack import pack_bits, packed_nbytes, unpack_bits
from lowtide.errors import ConfigError, PayloadError

Integers = NDArray[np.integer]
Unsigned = NDArray[np.unsignedinteger]

MAX_DIVISOR = 65535
_SAMPLE = 128  # chunks of the gaps, and gaps in each, that the divisor is chosen by
_BLOCK = 1 << 15  # gaps whose places are found at once, in a core's own cache


class Coding(IntEnum):
    """How positions are written; the numbers are on the wire and never change."""

    NONE = 0
    PACKED = 1
    RICE = 2
    BITMAP = 3


@dataclass(frozen=True)
class IndexBlock:
    """Coded positions: the coding, its parameter (bits of a position, divisor, or 0) and the bytes."""

    coding: int
    parameter: int
    data: bytes


def encode_index(index: Integers, counts: Integers, span: int) -> IndexBlock:
    """The shortest coding of the positions; of equal ones the simplest.

    >>> block = encode_index(np.array([3, 9, 40, 0, 63]), np.array([3, 2]), 64)
    >>> block.coding.name, block.parameter, block.data.hex()
    ('PACKED', 6, '4382023f')
    """
    runs = _Runs.of(counts, span)
    rice = _Golomb.split(runs.gaps(index))
    # Gaps with divisor 1 are the bitmap less what follows the last position of each run: a bitmap wins full runs only.
    nbytes = {Coding.PACKED: runs.packed_nbytes, Coding.BITMAP: runs.bitmap_nbytes, Coding.RICE: rice.nbytes}
    coding = min(nbytes, key=lambda kind: nbytes[kind])
    if coding == Coding.PACKED:
        return IndexBlock(coding, runs.width, pack_bits(index, runs.width).tobytes())
    if coding == Coding.RICE:
        return IndexBlock(coding, rice.divisor, rice.join())
    return IndexBlock(coding, 0, runs.bitmap(index))


def decode_index(block: IndexBlock, counts: Integers, span: int, *, behind: bool = False) -> NDArray[np.int64]:
    """The positions again; `PayloadError` for all bytes that are no canonical coding.

    Each is counted inside its run, or from the start of the first one, if runs lie one `behind` the other.

    >>> counts = np.array([3, 2])
    >>> decode_index(encode_index(np.array([3, 9, 40, 0, 63]), counts, 64), counts, 64).tolist()
    [3, 9, 40, 0, 63]
    """
    runs = _Runs.of(counts, span)
    if block.coding == Coding.RICE and 1 <= block.parameter <= MAX_DIVISOR:
        return runs.undo_gaps(block.data, block.parameter, behind=behind)
    base = runs.bases() if behind else np.int64(0)
    if block.coding == Coding.PACKED and block.parameter == runs.width:
        return runs.unpack(block.data) + base
    if block.coding == Coding.BITMAP and block.parameter == 0:
        return runs.unbitmap(block.data) + base
    raise PayloadError(f"no coding of positions: coding={block.coding}, parameter={block.parameter}, span={span}")


def index_nbytes(coding: int, parameter: int, index: Integers, counts: Integers, span: int) -> int:
    """The length that positions have in a given coding, by formula.

    >>> index_nbytes(Coding.RICE, 11, np.array([3, 9, 40, 0, 63]), np.array([3, 2]), 64)
    5
    """
    runs = _Runs.of(counts, span)
    if coding == Coding.PACKED:
        return packed_nbytes(runs.total, parameter)
    if coding == Coding.RICE:
        return _Golomb.split(runs.gaps(index), parameter).nbytes
    return runs.bitmap_nbytes if coding == Coding.BITMAP else 0


@dataclass(frozen=True, eq=False)
class _Runs:
    """Runs of ascending positions below `span`, as both sides know them."""

    counts: NDArray[np.int64]
    span: int
    total: int

    @classmethod
    def of(cls, counts: Integers, span: int) -> _Runs:
        counts = np.asarray(counts, np.int64).reshape(-1)
        if not 1 <= span <= 1 << 31:
            raise ConfigError(f"a run has 1 to 2**31 positions, not {span}")
        if counts.size and not 0 <= int(counts.min()) <= int(counts.max()) <= span:
            raise ConfigError(f"a run keeps 0 to {span} positions, not {counts.min()} to {counts.max()}")
        return cls(counts, span, int(counts.sum()))

    @property
    def width(self) -> int:
        """Bits of a position written plainly."""
        return (self.span - 1).bit_length()

    @property
    def packed_nbytes(self) -> int:
        return packed_nbytes(self.total, self.width)

    @property
    def bitmap_nbytes(self) -> int:
        return packed_nbytes(len(self.counts) * self.span, 1)

    def starts(self) -> NDArray[np.int64]:
        """Where each run that is not empty begins in the list of all positions."""
        return (np.cumsum(self.counts) - self.counts)[self.counts > 0]

    def bases(self) -> NDArray[np.int64]:
        """For each position, what to add to it so that runs lie one behind the other."""
        return np.repeat(np.arange(len(self.counts), dtype=np.int64) * self.span, self.counts)

    def gaps(self, index: Integers) -> Unsigned:
        """Positions skipped before each kept one, in a narrow type: that is what makes all that follows fast."""
        positions = np.asarray(index).reshape(-1)
        if positions.size != self.total:
            raise ConfigError(f"counts add up to {self.total}, but {positions.size} positions are given")
        if self.total == 0:
            return np.zeros(0, np.uint16)
        # Half of the type stays free, see below.
        narrow = positions.astype(np.uint16 if self.span <= 1 << 15 else np.uint32)
        gaps = np.empty_like(narrow)
        np.subtract(narrow[1:], narrow[:-1], out=gaps[1:])
        gaps -= narrow.dtype.type(1)
        starts = self.starts()
        gaps[starts] = narrow[starts]
        # A descent wraps around to a gap in the upper half of the type, which no run can have.
        if int(gaps.max()) >= self.span or int(positions.min()) < 0 or int(positions.max()) >= self.span:
            raise ConfigError(f"positions must ascend in each run and lie in [0, {self.span})")
        return gaps

    def undo_gaps(self, data: bytes, divisor: int, *, behind: bool) -> NDArray[np.int64]:
        """Positions from the three streams of gaps.

        The `j`-th one of `unary` stands at place `j` plus the sum of the quotients so far. So with a running sum of
        `remainder - (divisor - 1)`, the sum of all gaps so far plus their number is `divisor * (place + 1) + running`.
        What a run adds to it is known before the running sum is made, and taken off where the next one starts.
        """
        filled = np.flatnonzero(self.counts)
        counts = self.counts[filled]
        places, remainders = _read_streams(data, self.total, divisor, int(((self.span - counts) // divisor).sum()))
        if self.total == 0:
            return places
        index = places
        index += 1
        index *= divisor
        running = remainders.astype(np.int64)
        running -= divisor - 1
        starts = self.starts()
        # In 64 bits nothing overflows: places are limited by the bytes that are here, divisors by 16 bits.
        ends = np.diff(index[starts + counts - 1], prepend=0) + np.add.reduceat(running, starts)
        if int(ends.max()) > self.span:
            raise PayloadError(f"a position is {int(ends.max()) - 1}, but a run has {self.span}")
        if behind:
            # the same sum then runs on from tile to tile: a second pass over all positions is saved
            running[starts[1:]] += np.diff(filled) * self.span
            running[0] += filled[0] * self.span
        running[starts[1:]] -= ends[:-1]
        running[0] -= 1
        index += np.cumsum(running, out=running)
        return index

    def unpack(self, data: bytes) -> NDArray[np.int64]:
        """Positions written plainly."""
        index = unpack_bits(data, self.total, self.width).astype(np.int64)
        falls = np.diff(index) <= 0
        falls[self.starts()[1:] - 1] = False  # from one run to the next
        if falls.any() or (index.size and int(index.max()) >= self.span):
            raise PayloadError(f"positions must ascend in each run and lie in [0, {self.span})")
        return index

    def bitmap(self, index: Integers) -> bytes:
        """One bit a position."""
        bits = np.zeros(len(self.counts) * self.span, np.uint8)
        bits[self.bases() + np.asarray(index).reshape(-1)] = 1
        return pack_bits(bits, 1).tobytes()

    def unbitmap(self, data: bytes) -> NDArray[np.int64]:
        """Positions whose bit is set; each run must have as many as `counts` says."""
        bits = unpack_bits(data, len(self.counts) * self.span, 1)
        found = bits.reshape(-1, self.span).sum(axis=1, dtype=np.int64)
        if not np.array_equal(found, self.counts):
            raise PayloadError(f"a bitmap marks {found.sum()} positions, {self.total} of them where they should be")
        return np.flatnonzero(bits.view(np.bool_)) - self.bases()


@dataclass(frozen=True, eq=False)
class _Golomb:
    """Gaps split for one divisor, before they are written as bits."""

    divisor: int
    quotients: Unsigned
    fixed: Unsigned
    extra: Unsigned
    unary: int

    @property
    def nbytes(self) -> int:
        """The length of the three streams."""
        return _streams_nbytes(self.divisor, len(self.fixed), len(self.extra), self.unary)

    @classmethod
    def split(cls, gaps: Unsigned, divisor: int = 0) -> _Golomb:
        """The parts for `divisor`, or for the best one."""
        divisor = divisor or _best_divisor(gaps)
        low, short = _remainder_code(divisor)
        quotients = gaps // gaps.dtype.type(divisor)
        remainders = gaps - quotients * gaps.dtype.type(divisor)
        if divisor < 256:
            remainders = remainders.astype(np.uint8)
        long = remainders >= short
        # For a power of two nothing is long, and `short` could be too large for the type: its low bits are zero.
        moved = remainders + remainders.dtype.type(short & (2**low - 1))
        fixed = remainders + long * ((moved >> 1) - remainders)
        extra = np.compress(long, moved & 1)
        return cls(divisor, quotients, fixed, extra, len(gaps) + int(quotients.sum(dtype=np.int64)))

    def join(self) -> bytes:
        """The three streams."""
        unary = np.zeros(self.unary, np.uint8)
        ones, order, place = np.empty(_BLOCK, np.int64), np.arange(_BLOCK), 0
        for start in range(0, len(self.quotients), _BLOCK):
            block = np.cumsum(self.quotients[start : start + _BLOCK], out=ones[: len(self.quotients) - start])
            block += order[: len(block)] + place
            unary[block] = 1
            place = int(block[-1]) + 1
        streams = ((self.fixed, _remainder_code(self.divisor)[0]), (self.extra, 1), (unary, 1))
        return b"".join(pack_bits(values, width).tobytes() for values, width in streams)


def _remainder_code(divisor: int) -> tuple[int, int]:
    """Bits of a short remainder, and the number of short remainders."""
    low = divisor.bit_length() - 1
    return low, (2 << low) - divisor


def _best_divisor(gaps: Unsigned) -> int:
    """The divisor that codes a sample of the gaps in the fewest bits; the smallest of several.

    For random positions it lies at `ln 2` times the mean distance; where they crowd together it is smaller. The
    sample is made of whole chunks: single gaps at even distances could all be the first of their run.
    """
    if len(gaps) > _SAMPLE * _SAMPLE:
        gaps = gaps[: len(gaps) // _SAMPLE * _SAMPLE].reshape(_SAMPLE, -1)[:, :_SAMPLE].ravel()
    if not len(gaps):
        return 1
    usual = math.log(2) * (float(gaps.mean()) + 1)
    # Eighths of an octave: the length changes by less than a thousandth from one to the next.
    tried = sorted({min(max(round(usual * 2 ** (step / 8)), 1), MAX_DIVISOR) for step in range(-24, 9)})
    return min(tried, key=lambda divisor: _gaps_nbytes(gaps, divisor))


def _gaps_nbytes(gaps: Unsigned, divisor: int) -> int:
    """What the gaps would take, without splitting them for good."""
    quotients = gaps // gaps.dtype.type(divisor)
    num_long = int(np.count_nonzero(gaps - quotients * gaps.dtype.type(divisor) >= _remainder_code(divisor)[1]))
    return _streams_nbytes(divisor, len(gaps), num_long, len(gaps) + int(quotients.sum(dtype=np.int64)))


def _streams_nbytes(divisor: int, fixed: int, extra: int, unary: int) -> int:
    """The length of three streams with so many remainders, longer remainders, and bits of quotients."""
    low = _remainder_code(divisor)[0]
    return packed_nbytes(fixed, low) + packed_nbytes(extra, 1) + packed_nbytes(unary, 1)


def _read_streams(data: bytes, total: int, divisor: int, room: int) -> tuple[NDArray[np.int64], Unsigned]:
    """Places of the ones in `unary`, and remainders; `room` bounds the sum of the quotients."""
    raw = np.frombuffer(data, np.uint8)
    low, short = _remainder_code(divisor)
    cut = packed_nbytes(total, low)
    fixed = unpack_bits(raw[:cut], total, low)
    if low >= 8:
        fixed = fixed.astype(np.uint16)  # a remainder has up to one bit more than its code
    long = fixed >= short
    num_long = int(np.count_nonzero(long))
    stop = cut + packed_nbytes(num_long, 1)
    extra = np.zeros(total, np.uint8)
    extra[np.flatnonzero(long)] = unpack_bits(raw[cut:stop], num_long, 1)
    remainders = fixed + extra + long * (fixed - fixed.dtype.type(short & (2**low - 1)))
    unary = raw[stop:]
    if 8 * len(unary) > total + room + 7:
        raise PayloadError(f"{len(unary)} bytes of quotients, but {total} of them take at most {total + room} bits")
    # Counted before they are listed: of hostile bytes every bit could be a one, and a place takes eight bytes.
    bits = np.unpackbits(unary, bitorder="little").view(np.bool_)
    found = np.count_nonzero(bits)
    if found != total or (len(unary) and not unary[-1]):
        raise PayloadError(f"{found} quotients in {len(unary)} bytes, expected {total} and the last in the last byte")
    return np.flatnonzero(bits), remainders
