"""Models and plain loops for benchmarks of speed: real shapes, made-up data, nothing that takes long to set up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lowtide.train.data import generated_images
from lowtide.train.models import GPT, MLP, GPTConfig, gpt_small_study, gpt_tiny, resnet18

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Workload:
    """A model, how to make a batch of so many samples from a seed, and the loss."""

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[int, int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    batch: int


def gpt(name: str, config: GPTConfig, batch: int) -> Workload:
    """A GPT on random bytes."""

    def data(count: int, seed: int) -> Batch:
        draw = torch.Generator().manual_seed(seed)
        return (torch.randint(config.vocab_size, (count, config.context + 1), generator=draw),)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(model, GPT)
        return model.loss(*batch)

    return Workload(name, lambda: GPT(config), data, loss, batch)


def labelled(name: str, model: Callable[[], nn.Module], data: Callable[[int, int], Batch], batch: int) -> Workload:
    """A classifier."""

    def loss(built: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(built(batch[0]), batch[1])

    return Workload(name, model, data, loss, batch)


def pictures(count: int, seed: int) -> Batch:
    """Generated images, 32 x 32, of 10 classes."""
    return generated_images(count=count, seed=seed).tensors


def vectors(count: int, seed: int) -> Batch:
    """Noise with labels."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, 64, generator=draw), torch.randint(10, (count,), generator=draw)


WORKLOADS = {
    each.name: each
    for each in (
        gpt("gpt 0.66M", gpt_small_study(), 8),
        gpt("gpt 5M", GPTConfig(layers=6, width=256, context=128), 4),
        labelled("resnet-18 0.7M", lambda: resnet18(width=16, classes=10, small_images=True), pictures, 16),
        labelled("mlp 0.02M", lambda: MLP([64, 128, 64, 10]), vectors, 32),
        gpt("gpt 0.11M", gpt_tiny(), 2),
    )
}


@dataclass
class Side:
    """One model in training. `backward` and `step` are seconds spent there: forward and backward, the optimizer."""

    work: Workload
    batches: Sequence[Batch]
    seed: int = 0
    lr: float = 1e-3
    backward: float = 0.0
    step: float = 0.0

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.model = self.work.model()
        self.optimizer: Optimizer = AdamW(self.model.parameters(), lr=self.lr, fused=True)
        self.done = 0

    def train(self, steps: int) -> list[float]:
        """A plain loop; the seconds of each step."""
        seconds = []
        for _ in range(steps):
            begun = time.perf_counter()
            loss = self.work.loss(self.model, self.batches[self.done % len(self.batches)])
            loss.backward()  # type: ignore[no-untyped-call]
            middle = time.perf_counter()
            self.optimizer.step()
            self.optimizer.zero_grad()
            ended = time.perf_counter()
            self.backward, self.step = self.backward + middle - begun, self.step + ended - middle
            self.done += 1
            seconds.append(ended - begun)
        return seconds
