"""A replica that is only tensors: what the benchmarks of single rounds need."""

from __future__ import annotations

from torch import Tensor

from lowtide.tensors import Layout


class Plain:
    """Parameters without a model around them."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def read(self, _what: str, layout: Layout, out: Tensor) -> Tensor:
        """All tensors of the layout."""
        return layout.gather([self.tensors[entry.name] for entry in layout.entries], out)

    def write(self, _what: str, layout: Layout, buffer: Tensor) -> None:
        """Back into the tensors."""
        layout.scatter(buffer, [self.tensors[entry.name] for entry in layout.entries])

    def learning_rate(self) -> float:
        """No optimizer, no rate."""
        return 1.0

    base_rate = learning_rate
