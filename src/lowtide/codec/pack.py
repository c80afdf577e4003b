"""Bit packing: whole numbers of 0 to 32 bits each, side by side, least significant bit first.

Eight values of `width` bits fill exactly `width` bytes. So values travel through 64-bit words whose lanes are
folded together, pair by pair, in a fixed number of vector operations: no loop ever runs over values.

    lanes of 8 bits, 3 used     .....aaa .....bbb .....ccc .....ddd ...
    folded once (lanes of 16)   ..........bbbaaa ..........dddccc ...
    folded three times          one field of 24 bits: three bytes of the result
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lowtide.errors import ConfigError, PayloadError

Buffer = bytes | bytearray | memoryview | NDArray[np.uint8]
Words = NDArray[np.uint64]


def packed_nbytes(count: int, width: int) -> int:
    """Bytes that `count` values of `width` bits take: `ceil(count * width / 8)`.

    >>> packed_nbytes(3, 12)
    5
    """
    if not 0 <= width <= 32:
        raise ConfigError(f"a packed value has 0 to 32 bits, not {width}")
    return (count * width + 7) // 8


def pack_bits(values: NDArray[np.generic], width: int) -> NDArray[np.uint8]:
    """The values as a string of bits, LSB first, filled up with zero bits to a whole byte.

    Where the values already lie that way in memory, the result is a view of them.

    >>> pack_bits(np.array([1, 2, 3]), 4).tobytes().hex()
    '2103'
    """
    flat = np.ascontiguousarray(values).reshape(-1)
    nbytes = packed_nbytes(flat.size, width)
    _check_fits(flat, width)
    if width == 0:
        return np.zeros(0, np.uint8)
    if width == 1:
        return np.packbits(flat.astype(np.uint8, copy=False), bitorder="little")
    if width in (8, 16, 32):
        return flat.astype(f"<u{width // 8}", copy=False).view(np.uint8)
    if width < 8:
        return _pack_narrow(flat, width)[:nbytes]
    if width < 16:
        return _pack_middle(flat, width)[:nbytes]
    # Wider values are rare: here each bit takes a byte on its way.
    lanes = np.unpackbits(flat.astype("<u4").view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    return np.packbits(lanes[:, :width], bitorder="little")


def unpack_bits(data: Buffer, count: int, width: int) -> NDArray[np.unsignedinteger]:
    """Back to `count` values, in the smallest of uint8, uint16 and uint32 that holds `width` bits.

    Only what `pack_bits` makes is accepted: the length must be exact and the spare bits zero.

    >>> unpack_bits(bytes.fromhex("2103"), 3, 4).tolist()
    [1, 2, 3]
    """
    raw = np.frombuffer(data, np.uint8)
    _check_canonical(raw, count, width)
    if width == 0:
        return np.zeros(count, np.uint8)
    if width == 1:
        return np.unpackbits(raw, count=count, bitorder="little")
    if width in (8, 16, 32):
        return raw.view(f"<u{width // 8}").astype(f"u{width // 8}")
    if width < 8:
        return _unpack_narrow(raw, count, width)
    if width < 16:
        return _unpack_middle(raw, count, width)
    lanes = np.zeros((count, 32), np.uint8)
    lanes[:, :width] = np.unpackbits(raw, count=count * width, bitorder="little").reshape(count, width)
    return np.packbits(lanes, bitorder="little").view("<u4").astype(np.uint32)


def _check_fits(flat: NDArray[np.generic], width: int) -> None:
    """Refuse values that would run into their neighbours."""
    if not flat.size or (flat.dtype.kind == "u" and 8 * flat.itemsize <= width):
        return  # nothing of this type can be too large, so there is nothing to look at
    if not 0 <= int(flat.min()) <= int(flat.max()) < 1 << width:
        raise ConfigError(f"values {flat.min()} to {flat.max()} do not fit into {width} bits")


def _check_canonical(raw: NDArray[np.uint8], count: int, width: int) -> None:
    """Refuse a string of bits that `pack_bits` could not have made."""
    expected = packed_nbytes(count, width)
    if raw.size != expected:
        raise PayloadError(f"{count} values of {width} bits take {expected} bytes, but {raw.size} are here")
    spare = 8 * expected - count * width
    if spare and raw[-1] >> (8 - spare):
        raise PayloadError(f"the {spare} spare bits behind {count} values of {width} bits are not zero")


def _lane_mask(width: int, lane: int) -> np.uint64:
    """Ones in the low `width` bits of every lane of `lane` bits."""
    return np.uint64(sum(((1 << width) - 1) << shift for shift in range(0, 64, lane)))


def _fold(words: Words, width: int, lane: int) -> Words:
    """Close the gaps in words whose lanes hold `width` bits each; the whole is one field at the low end."""
    while lane < 64:
        upper = (words >> np.uint64(lane - width)) & (_lane_mask(width, 2 * lane) << np.uint64(width))
        words = (words & _lane_mask(width, 2 * lane)) | upper
        width, lane = 2 * width, 2 * lane
    return words


def _unfold(words: Words, width: int, lane: int) -> Words:
    """The inverse of `_fold`: spread one field of `64 / lane` values over lanes of `lane` bits."""
    wide = 64
    while wide > lane:
        half = np.uint64(width * wide // (2 * lane))
        low = _lane_mask(int(half), wide)
        upper = (words & (low << half)) << (np.uint64(wide // 2) - half)
        words = (words & low) | upper
        wide //= 2
    return words


def _eights(flat: NDArray[np.generic], dtype: str) -> NDArray[np.generic]:
    """The values as `dtype`, zero-padded to a multiple of eight."""
    if flat.size % 8 == 0:
        return flat.astype(dtype, copy=False)
    padded = np.zeros(-(-flat.size // 8) * 8, dtype)
    padded[: flat.size] = flat
    return padded


def _pack_narrow(flat: NDArray[np.generic], width: int) -> NDArray[np.uint8]:
    """Widths under 8: eight values make one word, whose low `width` bytes are the result."""
    words = _fold(_eights(flat, "u1").view("<u8"), width, 8)
    if width in (2, 4):  # the bytes of a word that count are a number of their own: no strides
        return words.astype(f"<u{width}").view(np.uint8)
    return words.astype("<u8", copy=False).view(np.uint8).reshape(-1, 8)[:, :width].reshape(-1)


def _unpack_narrow(raw: NDArray[np.uint8], count: int, width: int) -> NDArray[np.unsignedinteger]:
    if width in (2, 4) and raw.size % width == 0:
        words = raw.view(f"<u{width}").astype(np.uint64)
    else:
        words = _windows(raw, -(-count // 8), width, 0) & _lane_mask(8 * width, 64)
    return _unfold(words, width, 8).astype("<u8", copy=False).view(np.uint8)[:count]


def _pack_middle(flat: NDArray[np.generic], width: int) -> NDArray[np.uint8]:
    """Widths 9 to 15: eight values make two words of `4 * width` bits, joined to `width` bytes."""
    # Four values of up to 15 bits fit into a word, eight do not.
    halves = _fold(_eights(flat, "<u2").view("<u8"), width, 16).reshape(-1, 2)
    pairs = np.empty_like(halves)
    field = np.uint64(4 * width)
    np.bitwise_or(halves[:, 0], halves[:, 1] << field, out=pairs[:, 0])
    np.right_shift(halves[:, 1], np.uint64(64) - field, out=pairs[:, 1])
    return pairs.astype("<u8", copy=False).view(np.uint8).reshape(-1, 16)[:, :width].reshape(-1)


def _unpack_middle(raw: NDArray[np.uint8], count: int, width: int) -> NDArray[np.unsignedinteger]:
    groups = -(-count // 8)
    halves = np.empty((groups, 2), np.uint64)
    field = _lane_mask(4 * width, 64)
    halves[:, 0] = _windows(raw, groups, width, 0) & field
    # The second field begins at bit 4 * width, in the middle of a byte when the width is odd.
    halves[:, 1] = (_windows(raw, groups, width, width // 2) >> np.uint64(4 * (width % 2))) & field
    return _unfold(halves, width, 16).astype("<u8", copy=False).view("<u2").reshape(-1)[:count].astype(np.uint16)


def _windows(raw: NDArray[np.uint8], groups: int, stride: int, start: int) -> Words:
    """The 8 bytes from `start` on in each group of `stride` bytes, as words; zeros follow the end."""
    padded = np.zeros(groups * stride + 16, np.uint8)  # the last windows look beyond the end
    padded[: raw.size] = raw
    return np.ndarray((groups,), "<u8", padded.data, start, (stride,)).astype(np.uint64)
