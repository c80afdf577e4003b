"""Named tensors: select, lay out as tiles and back."""

from lowtide.tensors.chunk import Chunker, divisor, flat, tile, whole
from lowtide.tensors.grid import Grid, Tiles
from lowtide.tensors.layout import Entry, Layout
from lowtide.tensors.view import buffers, canonical, entries, local, trainable

__all__ = [
    "Chunker",
    "Entry",
    "Grid",
    "Layout",
    "Tiles",
    "buffers",
    "canonical",
    "divisor",
    "entries",
    "flat",
    "local",
    "tile",
    "trainable",
    "whole",
]
