"""A codec from parts: transform, select, quantise, pack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from lowtide.codec import payload as frame
from lowtide.codec.base import Coefficients, Transform, Turn
from lowtide.codec.index import IndexBlock, decode_index, encode_index
from lowtide.codec.payload import Header, Section
from lowtide.codec.quantize import Quantizer, fp32
from lowtide.codec.select import Selector, TopK, all_
from lowtide.codec.tail import Tail, tail_named
from lowtide.codec.transform import DCT, Identity, identity
from lowtide.errors import ConfigError, PayloadError
from lowtide.tensors import Chunker, Grid, Layout, Tiles, tile, whole


@dataclass(frozen=True)
class Chain:
    """Transform, selector, quantiser and the coding of the tail, one after the other."""

    transform: Transform = field(default_factory=identity)
    select: Selector = field(default_factory=all_)
    quantizer: Quantizer = field(default_factory=fp32)
    tail: Tail = field(default_factory=lambda: tail_named("fp32"))
    chunker: Chunker = field(default_factory=tile)

    def __post_init__(self) -> None:
        count, most = self.select.count if isinstance(self.select, TopK) else None, self.chunker.most
        # a most of 0 means no limit; unchecked, this would only fail at the first round
        if count and 0 < most < count:
            raise ConfigError(
                f"top_k(count={count}) of tiles with {most} elements\nhint: at most {most} of a tile can be kept"
            )

    def encode(self, coefficients: Tensor, grid: Grid, turn: Turn) -> bytes:
        """The payload for one buffer that is already in the basis."""
        index = self.select.pick(coefficients, grid, turn, mixed=self.transform.mixes)
        values = (
            coefficients[: grid.body] if index is None else coefficients.index_select(0, index.to(coefficients.device))
        )
        # a quantiser scales each tensor by itself, so it must know where one ends
        lengths = self._lengths(grid, index)
        sections, blocks = ([], []) if self.select.shared else self._code_positions(grid, index)
        blocks.append(self.quantizer.encode(values, lengths))
        # last, since its length is known: that tells a receiver where the values end
        if grid.tail:
            blocks.append(self.tail.encode(grid.tail_view(coefficients), grid.tail))
        header = replace(self._header(grid, turn), sections=len(sections), count=values.numel(), weight=turn.weight)
        return frame.seal(header, sections, blocks)

    def abstain(self, grid: Grid, turn: Turn) -> bytes:
        """A header that says: nothing this time."""
        return frame.empty(self._header(grid, turn))

    def decode(self, payload: bytes, grid: Grid, turn: Turn) -> Coefficients:
        """Positions and values, bounds checked; the tail is appended in full."""
        header, sections, body = frame.unseal(payload)
        frame.expect(header, self._header(grid, turn))
        # after the check: even an abstention has to belong to this codec and event
        if header.kind == frame.NOTHING:
            if sections or len(body) or header.count:
                raise PayloadError(f"an abstaining payload carries nothing, this has {len(body)} bytes")
            return Coefficients.nothing(grid.size)
        # checked before anything is made that has this size
        if header.count > grid.body:
            raise PayloadError(f"{header.count} values for a buffer of {grid.body}")
        index, body = self._positions(header, sections, body, grid, turn)
        # what is left is values and tail, and its length is known: nothing may be missing or left over
        lengths = self._lengths(grid, index)
        tail_bytes = self.tail.nbytes(grid.tail) if grid.tail else 0
        expected = self.quantizer.nbytes(lengths) + tail_bytes
        if len(body) != expected:
            raise PayloadError(f"values and tail take {expected} bytes, this has {len(body)}")
        value = self.quantizer.decode(body[: expected - tail_bytes], lengths)
        if grid.tail:
            value = torch.cat([value, self.tail.decode(body[expected - tail_bytes :], grid.tail)])
            if index is not None:
                index = torch.cat([index, torch.arange(grid.body, grid.size)])
        # a finite code times a claimed scale may still overflow
        if value.numel() and not bool(torch.isfinite(torch.stack(torch.aminmax(value))).all()):
            raise PayloadError("the payload holds values that are not finite")
        return Coefficients(value, index, grid.size, header.weight)

    def nbytes(self, grid: Grid, index_bytes: int = 0, counts: Tensor | None = None) -> int:
        """The length of a payload by formula; `index_bytes` is what the coded positions take.

        `counts` holds the number of values of each tensor where the selector does not fix it.
        """
        lengths = self._lengths(grid, None) if counts is None else counts
        sections = 0 if self.select.shared else len(grid.groups) * frame.SECTION_BYTES
        tail = self.tail.nbytes(grid.tail) if grid.tail else 0
        return frame.HEADER_BYTES + sections + index_bytes + self.quantizer.nbytes(lengths) + tail

    def pack(self, tensor: Tensor, turn: Turn | None = None) -> bytes:
        """The payload of one plain tensor, without a plan around it."""
        layout = Layout.single(tensor.shape, self.chunker)
        buffer = layout.gather([tensor])
        return self.encode(self.transform.forward_(buffer, layout.grid), layout.grid, turn or Turn())

    def unpack(self, payload: bytes, shape: Sequence[int], turn: Turn | None = None) -> Tensor:
        """The plain tensor that a payload of `pack` says."""
        layout = Layout.single(shape, self.chunker)
        # a clone, since the inverse works in place and a dense tensor is the decoded one
        buffer = self.decode(payload, layout.grid, turn or Turn()).dense().clone()
        tensor = torch.empty(tuple(shape))
        layout.scatter(self.transform.inverse_(buffer, layout.grid), [tensor])
        return tensor

    def _header(self, grid: Grid, turn: Turn) -> Header:
        """The fields that sender and receiver must agree on."""
        # count and weight are left open: they are each sender's own
        codes = (self.transform.code, self.select.code, self.quantizer.code, self.tail.code, self.quantizer.parameter)
        return Header(
            frame.COEFFICIENTS, *codes, sections=0, weight=1.0, selection=self.select.selection,
            event=turn.event, count=0, grid=grid.identity,
        )  # fmt: skip

    def _lengths(self, grid: Grid, index: Tensor | None) -> Tensor:
        """How many values each tensor of the body has."""
        lengths = torch.zeros(grid.tensors, dtype=torch.int64)
        fixed = [self.select.counts(group) for group in grid.groups]
        if all(counts is not None for counts in fixed):
            for group, counts in zip(grid.groups, fixed, strict=True):
                assert counts is not None
                lengths.index_add_(0, group.owner, counts)
            return lengths
        assert index is not None
        index = index.cpu()
        for group in grid.groups:
            first, last = torch.searchsorted(index, torch.tensor([group.offset, group.stop])).tolist()
            owners = group.owner[(index[first:last] - group.offset) // group.span]
            lengths += torch.bincount(owners, minlength=grid.tensors)
        return lengths

    def _code_positions(self, grid: Grid, index: Tensor | None) -> tuple[list[Section], list[bytes]]:
        """One section a group: positions in each tile where their number is fixed, else over the whole group."""
        assert index is not None
        positions, sections, blocks = index.cpu().numpy(), [], []
        for group in grid.groups:
            first, last = np.searchsorted(positions, [group.offset, group.stop])
            inside = positions[first:last] - group.offset if group.offset else positions[first:last]
            counts, span = _runs(self.select, group, len(inside))
            # counted from the start of its run, a position takes the fewest bits
            block = encode_index(within_runs(inside, span) if len(counts) > 1 else inside, counts, span)
            sections.append(Section(block.coding, block.parameter, len(inside), len(block.data)))
            blocks.append(block.data)
        return sections, blocks

    def _positions(
        self, header: Header, sections: list[Section], body: memoryview, grid: Grid, turn: Turn
    ) -> tuple[Tensor | None, memoryview]:
        """The positions in the buffer, and the bytes behind their code."""
        if self.select.shared:
            # no values are needed: a shared selection depends on event and geometry alone
            index = self.select.pick(torch.empty(0), grid, turn, mixed=self.transform.mixes)
            expected = grid.body if index is None else index.numel()
            if sections or header.count != expected:
                raise PayloadError(f"{header.count} values in {len(sections)} sections, expected {expected} in none")
            return index, body
        # the sum bounds each section's count by the body, so none of them overflows below
        if len(sections) != len(grid.groups) or sum(section.count for section in sections) != header.count:
            raise PayloadError(
                f"{len(sections)} sections with {header.count} values for {len(grid.groups)} groups of tiles"
            )
        found = [torch.zeros(0, dtype=torch.int64)]
        for group, section in zip(grid.groups, sections, strict=True):
            found.append(self._section(group, section, body))
            body = body[section.nbytes :]
        # one group of tiles is the rule, and its positions are large
        return (found[1] if len(found) == 2 else torch.cat(found)), body

    def _section(self, group: Tiles, section: Section, body: memoryview) -> Tensor:
        """The positions of one group, from the front of the bytes that are left."""
        counts, span = _runs(self.select, group, section.count)
        # refused before any memory is set aside for what is claimed
        fits = section.nbytes <= len(body) and section.count == int(counts.sum())
        if not fits or section.count > group.count * group.span:
            raise PayloadError(f"a section of {section.count} positions in {section.nbytes} bytes does not fit")
        block = IndexBlock(section.coding, section.parameter, bytes(body[: section.nbytes]))
        positions = decode_index(block, counts, span, behind=True)
        if group.offset:
            positions += group.offset
        return torch.from_numpy(positions)


def _runs(select: Selector, group: Tiles, count: int) -> tuple[np.ndarray, int]:
    """Runs of positions that are coded each on its own: how many in each, and over how many positions."""
    fixed = select.counts(group)
    if fixed is None:
        return np.array([count], dtype=np.int64), group.count * group.span
    return fixed.numpy(), group.span


def within_runs(positions: np.ndarray, span: int) -> np.ndarray:
    """Positions counted from the start of their runs of equal length; narrow and without a division where it can be.

    >>> within_runs(np.array([1, 64, 130]), 64).tolist()
    [1, 0, 2]
    """
    if span & (span - 1) == 0 and span <= 1 << 16:
        return positions.astype(np.uint16) & np.uint16(span - 1)
    return positions % span


def chain(*parts: Transform | Selector | Quantizer, tail: str | None = None, chunker: Chunker | None = None) -> Chain:
    """A codec from its parts, in the order transform, selector, quantiser; any of them may be left out.

    The tail goes as int8 when the quantiser is coarser than 16 bits, else as fp32. Dense codecs without a transform
    use unpadded matrices, all others 64 x 64 tiles.
    """
    transform, select, quantizer = identity(), all_(), fp32()
    places = [_place(part) for part in parts]
    # strictly ascending: no part twice, none out of order
    if places != sorted(set(places)):
        raise ConfigError(
            f"chain takes at most one transform, selector and quantiser, in this order, not {parts!r}\n"
            "hint: chain(dct(64), top_k(1/32), sym2())"
        )
    for part in parts:
        if isinstance(part, Transform):
            transform = part
        elif isinstance(part, Selector):
            select = part
        else:
            quantizer = part
    # a selection that does not look at values would spend bytes on padding
    unpadded = isinstance(transform, Identity) and select.shared
    edge = transform.edge if isinstance(transform, DCT) else 64
    tail_code = tail_named(tail or ("fp32" if quantizer.bits >= 16 else "int8"))
    return Chain(transform, select, quantizer, tail_code, chunker or (whole() if unpadded else tile(edge)))


def _place(part: Transform | Selector | Quantizer) -> int:
    """Where in a chain a part stands."""
    for place, kind in enumerate((Transform, Selector, Quantizer)):
        if isinstance(part, kind):
            return place
    raise ConfigError(f"{part!r} is no transform, selector or quantiser\nhint: chain(dct(64), top_k(1/32), sym2())")
