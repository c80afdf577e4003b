"""The largest magnitudes of many tiles at once, with a fixed rule for ties.

Libraries leave open which of two equal values `topk` keeps. Here a bound is found first (the k-th magnitude of the
tile), then everything over it is kept, and of the values *at* it those with the lowest index.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

BLOCK = 64  # tiles handled at once: their magnitudes stay in a core's own cache

Padding = tuple[Tensor, Tensor]  # the tiles that have padding, and the mask of their valid positions


def largest(tiles: Tensor, counts: Tensor, padding: Padding | None = None) -> Tensor:
    """Flat positions, ascending, of the `counts[i]` largest magnitudes of tile `i`; padding is never chosen.

    >>> largest(torch.tensor([[1.0, -3.0, 2.0, 3.0]]), torch.tensor([2])).tolist()
    [1, 3]
    """
    # a partition takes the same time however many are kept; topk slows down with them
    if tiles.device.type != "cpu":
        return _on_device(tiles, counts, padding)
    hidden = np.empty(0, np.int64)
    if padding is not None and len(padding[0]):
        hidden = padding[0].numpy()
    starts = range(0, len(tiles), BLOCK)
    values, wanted = tiles.numpy(), counts.numpy()

    def work(start: int) -> np.ndarray:
        # a copy, so that hiding the padding leaves the signal alone
        magnitude = np.abs(values[start : start + BLOCK])
        first, last = np.searchsorted(hidden, [start, start + BLOCK])
        if padding is not None and last > first:
            # below zero, or padding could fill up a tile that has fewer values than wanted
            magnitude[hidden[first:last] - start] += np.where(padding[1][first:last].numpy(), 0.0, -np.inf).astype(
                np.float32
            )
        return _block(magnitude, wanted[start : start + BLOCK]) + start * tiles.shape[1]

    threads = min(torch.get_num_threads(), len(starts))
    if threads < 2:
        found = [work(start) for start in starts]
    else:
        # numpy leaves the interpreter's lock while it works, so threads do run side by side; each has one long share,
        # since handing over costs more than a block takes
        shares = [starts[len(starts) * i // threads : len(starts) * (i + 1) // threads] for i in range(threads)]
        with ThreadPoolExecutor(threads) as pool:
            found = [
                part for parts in pool.map(lambda share: [work(start) for start in share], shares) for part in parts
            ]
    return torch.from_numpy(np.concatenate(found)) if found else torch.zeros(0, dtype=torch.int64)


def _block(magnitude: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Positions in a block of tiles; tiles that want the same number share a call."""
    bound = np.empty(len(magnitude), np.float32)
    # few turns: only tiles with padding want another number than the rest
    for number in np.unique(wanted):
        same = wanted == number
        place = magnitude.shape[1] - max(number, 1)
        rows = magnitude if same.all() else magnitude[same]
        bound[same] = np.partition(rows, place, axis=1)[:, place]
    keep = magnitude >= bound[:, None]
    found = np.flatnonzero(keep)
    # no tile has fewer than it wants, so if there are not too many in all, none has more
    if len(found) == wanted.sum():
        return found
    # seldom more than a few tiles: equal magnitudes are rare, but for zeros
    tied = np.flatnonzero(keep.sum(1, dtype=np.int32) != wanted)
    over, at = magnitude[tied] > bound[tied, None], magnitude[tied] == bound[tied, None]
    room = wanted[tied] - over.sum(1)
    keep[tied] = np.where(wanted[tied, None] > 0, over | (at & (at.cumsum(1) <= room[:, None])), False)
    return np.flatnonzero(keep)


def kth_magnitude(magnitude: Tensor, number: int) -> Tensor:
    """The `number`-th largest value of each row."""
    if magnitude.device.type == "cpu":
        place = magnitude.shape[1] - number
        # copied, since a view would keep the whole partitioned block alive
        return torch.from_numpy(np.partition(magnitude.numpy(), place, axis=1)[:, place].copy())
    return magnitude.topk(number, dim=1).values[:, -1]


def keep_exactly(magnitude: Tensor, counts: Tensor, bound: Tensor) -> Tensor:
    """Flat positions of exactly `counts` values a row at or over the bound, lower indices first among equals."""
    over, at = magnitude > bound[:, None], magnitude == bound[:, None]
    room = counts.to(magnitude.device)[:, None] - over.sum(1, keepdim=True)
    return (over | (at & (at.cumsum(1) <= room))).flatten().nonzero().flatten()


def _on_device(tiles: Tensor, counts: Tensor, padding: Padding | None) -> Tensor:
    """The same in plain torch, for any device: the reference for the path above."""
    magnitude = tiles.abs()
    if padding is not None and len(padding[0]):
        edges, mask = (part.to(tiles.device) for part in padding)
        magnitude[edges] = magnitude[edges].masked_fill(~mask, -torch.inf)
    counts = counts.to(tiles.device)
    ranked = magnitude.topk(max(1, int(counts.max())), dim=1).values
    bound = ranked.gather(1, (counts - 1).clamp(min=0)[:, None]).flatten()
    return keep_exactly(magnitude, counts, bound)
