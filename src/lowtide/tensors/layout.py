"""Layout: named tensors to one flat buffer and back; the only place that flattens."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.errors import ModelError
from lowtide.tensors.chunk import Chunker, Cut
from lowtide.tensors.grid import Grid, Tiles

Strided = tuple[tuple[int, ...], tuple[int, ...], int]  # size, stride, offset: a view that is made in one call


@dataclass(frozen=True)
class Entry:
    """What is fixed about a tensor: name, shape and dtype, and the kind it is counted under."""

    name: str
    shape: tuple[int, ...]
    kind: str = "matrix"
    dtype: torch.dtype = torch.float32

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Patch:
    """One rectangle of one tensor and the equally shaped view of the buffer that it is copied to."""

    tensor: int
    source: Strided
    target: Strided


@dataclass(frozen=True, eq=False)
class Layout:
    """Where each tensor lies in the buffer.

    >>> from lowtide.tensors.chunk import tile
    >>> layout = Layout.build([Entry("w", (100, 128)), Entry("b", (100,))], tile(64))
    >>> layout.grid.groups[0].count, layout.grid.tail, layout.grid.size
    (4, (100,), 16484)
    >>> w, b = torch.randn(100, 128), torch.randn(100)
    >>> back = [torch.empty_like(w), torch.empty_like(b)]
    >>> layout.scatter(layout.gather([w, b]), back)
    >>> torch.equal(back[0], w) and torch.equal(back[1], b)
    True
    """

    entries: tuple[Entry, ...]
    chunker: Chunker
    grid: Grid
    patches: tuple[Patch, ...]
    padding: tuple[Strided, ...]

    @classmethod
    def build(cls, entries: Iterable[Entry], chunker: Chunker) -> Layout:
        """Lay out `entries` in their order: tiles first, grouped by tile shape, then the tail."""
        entries = tuple(entries)
        names = [entry.name for entry in entries]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ModelError(f"two tensors share a name: {', '.join(twice)}\nhint: give each parameter its own name")
        cuts = [chunker.cut(entry.shape) if entry.numel else None for entry in entries]
        groups: list[Tiles] = []
        patches: list[Patch] = []
        padding: list[Strided] = []
        offset = 0
        owners = iter(range(len(entries)))
        shapes = list(dict.fromkeys((cut.tile_rows, cut.tile_cols) for cut in cuts if cut))
        # tiles of one shape stand together, so that a codec handles them in one call
        for shape in shapes:
            placed = [
                (number, cut) for number, cut in enumerate(cuts) if cut and (cut.tile_rows, cut.tile_cols) == shape
            ]
            pieces = [_Piece(number, cut, entries[number].numel) for number, cut in placed]
            group = _stack(pieces, offset, [next(owners) for _ in pieces])
            start = offset
            for piece in pieces:
                patches += piece.patches(start)
                padding += piece.padding(start)
                start += piece.count * piece.span
            groups.append(group)
            offset = group.stop
        tail = [(number, entry.numel) for number, entry in enumerate(entries) if cuts[number] is None]
        for number, numel in tail:
            patches.append(Patch(number, ((numel,), (1,), 0), ((numel,), (1,), offset)))
            offset += numel
        grid = Grid(tuple(groups), tuple(numel for _, numel in tail), _digest(entries, chunker))
        return cls(entries, chunker, grid, tuple(patches), tuple(padding))

    @classmethod
    def single(cls, shape: Sequence[int], chunker: Chunker) -> Layout:
        """The layout of one plain tensor: an activation, a pooled embedding."""
        return cls.build([Entry("tensor", tuple(shape))], chunker)

    @property
    def identity(self) -> bytes:
        """A digest of names, shapes and cut; replicas compare it before data flows."""
        return self.grid.origin

    @property
    def numel(self) -> int:
        """Elements of all tensors, padding left out."""
        return sum(entry.numel for entry in self.entries)

    def restrict(self, keep: Callable[[Entry], bool]) -> Layout:
        """The layout of a part of the tensors: a fragment, a stage, a subnetwork."""
        return Layout.build([entry for entry in self.entries if keep(entry)], self.chunker)

    def gather(self, tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        """Copy tensors `[..., *shape]` into a buffer `[..., size]`, as fp32; padding becomes zero."""
        lead = self._lead(tensors)
        if out is None:
            device = tensors[0].device if tensors else None
            out = torch.empty(*lead, self.grid.size, device=device)
        with torch.no_grad():
            # views are made by strides, which mean what they say on contiguous memory only
            flat = [tensor.detach().contiguous() for tensor in tensors]
            targets = [_view(out, patch.target, len(lead)) for patch in self.patches]
            sources = [_view(flat[patch.tensor], patch.source, len(lead)) for patch in self.patches]
            if targets:
                torch._foreach_copy_(targets, sources)
            # a used buffer may hold anything there
            self.clear_padding(out)
        return out

    def scatter(self, buffer: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy a buffer back into the tensors, in their own dtypes."""
        lead = self._lead(tensors)
        with torch.no_grad():
            flat = [
                t.detach() if t.is_contiguous() else torch.empty_like(t, memory_format=torch.contiguous_format)
                for t in tensors
            ]
            targets = [_view(flat[patch.tensor], patch.source, len(lead)) for patch in self.patches]
            sources = [_view(buffer, patch.target, len(lead)) for patch in self.patches]
            if targets:
                torch._foreach_copy_(targets, sources)
            # tensors in another memory format were written beside, and are copied once more
            for tensor, copy in zip(tensors, flat, strict=True):
                if not tensor.is_contiguous():
                    tensor.detach().copy_(copy)

    def clear_padding(self, buffer: Tensor) -> None:
        """Zero what no tensor owns."""
        views = [_view(buffer, pad, buffer.dim() - 1) for pad in self.padding]
        if views:
            torch._foreach_zero_(views)

    def add_rounding(self, exact: Tensor, buffer: Tensor, alpha: float) -> None:
        """Add `alpha` times what the tensors' own dtypes lose of `exact`; nothing where they are fp32."""
        for patch in self.patches:
            dtype = self.entries[patch.tensor].dtype
            if dtype.itemsize < 4:
                kept = _view(exact, patch.target, 0)
                _view(buffer, patch.target, 0).add_(kept - kept.to(dtype).float(), alpha=alpha)

    def first_nonfinite(self, buffer: Tensor) -> str | None:
        """The name of the first tensor of a buffer that holds a NaN or an infinity."""
        for patch in self.patches:
            if not bool(torch.isfinite(_view(buffer, patch.target, 0)).all()):
                return self.entries[patch.tensor].name
        return None

    def shares(self, weights: Sequence[float] | None = None) -> tuple[tuple[str, float], ...]:
        """How a message splits over kinds of tensors, as fractions; by elements unless `weights` says."""
        weights = weights or [entry.numel for entry in self.entries]
        total = sum(weights) or 1.0
        kinds: dict[str, float] = {}
        for entry, weight in zip(self.entries, weights, strict=True):
            kinds[entry.kind] = kinds.get(entry.kind, 0.0) + weight / total
        return tuple(sorted(kinds.items()))

    def _lead(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """The leading axes that all tensors share in front of their declared shapes."""
        if len(tensors) != len(self.entries):
            raise ModelError(f"the layout holds {len(self.entries)} tensors, but {len(tensors)} were given")
        leads = set()
        for entry, tensor in zip(self.entries, tensors, strict=True):
            axes = tensor.dim() - len(entry.shape)
            if axes < 0 or tuple(tensor.shape[axes:]) != entry.shape:
                raise ModelError(
                    f"{entry.name} has shape {tuple(tensor.shape)}, but was laid out as {entry.shape}\n"
                    "hint: attach after the model has its final shape"
                )
            leads.add(tuple(tensor.shape[:axes]))
        if len(leads) > 1:
            raise ModelError(f"tensors disagree about their leading axes: {sorted(leads)}")
        return leads.pop() if leads else ()


@dataclass(frozen=True)
class _Piece:
    """One tensor's tiles within its group."""

    tensor: int
    cut: Cut
    numel: int

    @property
    def span(self) -> int:
        return self.cut.tile_rows * self.cut.tile_cols

    @property
    def down(self) -> int:
        return -(-self.cut.rows // self.cut.tile_rows)

    @property
    def across(self) -> int:
        return -(-self.cut.cols // self.cut.tile_cols)

    @property
    def count(self) -> int:
        return -(-self.numel // self.span) if self.cut.flat else self.down * self.across

    def patches(self, start: int) -> list[Patch]:
        """The rectangles of the tensor, at most four: full tiles, right strip, bottom strip, corner."""
        if self.cut.flat:
            return [Patch(self.tensor, ((self.numel,), (1,), 0), ((self.numel,), (1,), start))]
        cut = self.cut
        found: list[Patch] = []
        for row, height, tall in _runs(cut.rows, cut.tile_rows):
            for col, width, wide in _runs(cut.cols, cut.tile_cols):
                size = (tall, height, wide, width)
                source = (cut.tile_rows * cut.cols, cut.cols, cut.tile_cols, 1)
                target = (self.across * self.span, cut.tile_cols, self.span, 1)
                here = (row * self.across + col) * self.span + start
                there = row * cut.tile_rows * cut.cols + col * cut.tile_cols
                found.append(Patch(self.tensor, (size, source, there), (size, target, here)))
        return found

    def padding(self, start: int) -> list[Strided]:
        """Views of the buffer that lie inside our tiles, but in no tensor."""
        if self.cut.flat:
            rest = self.count * self.span - self.numel
            return [((rest,), (1,), start + self.numel)] if rest else []
        cut = self.cut
        found: list[Strided] = []
        rows, cols = cut.rows % cut.tile_rows, cut.cols % cut.tile_cols
        if rows:
            first = start + (self.down - 1) * self.across * self.span + rows * cut.tile_cols
            found.append(((self.across, (cut.tile_rows - rows) * cut.tile_cols), (self.span, 1), first))
        if cols:
            first = start + (self.across - 1) * self.span + cols
            size = (self.down, cut.tile_rows, cut.tile_cols - cols)
            found.append((size, (self.across * self.span, cut.tile_cols, 1), first))
        return found


def _digest(entries: Iterable[Entry], chunker: Chunker) -> bytes:
    """What tells layouts apart."""
    text = "\n".join(f"{entry.name} {entry.shape}" for entry in entries) + chunker.name
    return hashlib.sha256(text.encode()).digest()[:16]


def _runs(length: int, edge: int) -> list[tuple[int, int, int]]:
    """Cut an axis into its full tiles and the rest: `(first tile, elements in a tile, tiles)`."""
    full, rest = divmod(length, edge)
    return ([(0, edge, full)] if full else []) + ([(full, rest, 1)] if rest else [])


def _stack(pieces: list[_Piece], offset: int, owners: list[int]) -> Tiles:
    """The tiles of all pieces as one group, with the masks of those that hold padding."""
    count, span = sum(piece.count for piece in pieces), pieces[0].span
    cut = pieces[0].cut
    owner = torch.repeat_interleave(torch.tensor(owners), torch.tensor([piece.count for piece in pieces]))
    padded = [pad for piece, start in _starts(pieces) for pad in piece.padding(start)]
    valid, edges, mask = (
        torch.full((count,), span),
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(0, span, dtype=torch.bool),
    )
    if padded:
        # the padding's own views, laid over a map of the group: no second description of where it is
        inside = torch.ones(count * span, dtype=torch.bool)
        torch._foreach_zero_([_view(inside, pad, 0) for pad in padded])
        valid = inside.view(count, span).sum(1)
        edges = (valid < span).nonzero().flatten()
        mask = inside.view(count, span)[edges]
    return Tiles(offset, count, cut.tile_rows, cut.tile_cols, owner, valid, edges, mask)


def _starts(pieces: list[_Piece]) -> list[tuple[_Piece, int]]:
    """Each piece with its first element, counted from the start of the group."""
    found, start = [], 0
    for piece in pieces:
        found.append((piece, start))
        start += piece.count * piece.span
    return found


def _view(tensor: Tensor, strided: Strided, lead: int) -> Tensor:
    """A strided view behind `lead` leading axes."""
    size, stride, offset = strided
    shape = tuple(tensor.shape[:lead]) + size
    return tensor.as_strided(shape, tuple(tensor.stride()[:lead]) + stride, tensor.storage_offset() + offset)
