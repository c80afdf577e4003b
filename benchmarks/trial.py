"""One training run of the studies: a small GPT on text that no run sees twice, N replicas, one method.

Everything that decides the outcome is in the run's configuration, the digest of the text among it; whether it was
trained on a CPU or a GPU is not, since that changes only the rounding.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import record
import torch
from record import ROOT, Record
from stacked import Moved, Stack, Tensors, Training
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from lowtide.tensors import trainable
from lowtide.train.attach import resolve
from lowtide.train.data import Corpus, single_pass, stdlib_text, text_corpus, windows
from lowtide.train.models import GPT, GPTConfig, gpt_small_study, gpt_tiny

TEXT = ROOT / "data" / "linux-6.1"
STDLIB = Path("stdlib")  # what every machine has, for quick runs
TRAIN_BYTES, VALIDATION_BYTES = 24_000_000, 1_000_000
MODELS: dict[str, Callable[[], GPTConfig]] = {"gpt_small_study": gpt_small_study, "gpt_tiny": gpt_tiny}
LR, DEMO_LR = 4e-3, 3e-3  # the best of the study's search
CHUNK = 256  # windows that are evaluated at a time


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run. `method` is None for one replica alone, with a replica's batch and nobody to agree with.

    The rate rises over `warmup` steps to `lr` and falls as a cosine to a tenth of it. `points` are how many times the
    agreed model is evaluated, on `windows` windows, with four times as many at the end.
    """

    method: str | None
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    model: str = "gpt_small_study"
    replicas: int = 8
    steps: int = 1000
    batch: int = 8
    context: int = 64
    inner: str = "adamw"
    lr: float = LR
    warmup: int = 50
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    points: int = 10
    windows: int = 512
    text: str = ""

    def config(self) -> Record:
        """The run as plain values."""
        return asdict(self) | {"betas": list(self.betas)}

    def rate(self, step: int) -> float:
        """The inner learning rate of a step, counted from 1; at 0 it is the peak.

        >>> trial = Trial(method=None, lr=1.0, warmup=10, steps=110)
        >>> [round(trial.rate(step), 3) for step in (0, 5, 10, 60, 110)]
        [1.0, 0.5, 1.0, 0.55, 0.1]
        """
        if step <= self.warmup:
            return self.lr * (step / self.warmup if step else 1.0)
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi * done)))

    def optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """The inner optimizer."""
        if self.inner == "sgd":
            return SGD(groups, lr=self.lr, weight_decay=0.0)
        return AdamW(groups, lr=self.lr, betas=self.betas, weight_decay=self.weight_decay, fused=True)


def text_of(path: Path) -> Corpus:
    """The training and validation text, cut to the studies' size; the digest is that of what is left."""
    if path == STDLIB:
        corpus = stdlib_text(max_bytes=1_000_000)
    elif path.exists():
        corpus = text_corpus(path, max_bytes=TRAIN_BYTES)
    else:
        raise SystemExit(
            f"no text at {path}\n"
            "hint: 'make corpus' makes the studies' text on a Debian machine; --text PATH takes any text or folder"
        )
    train, validation = corpus.train[:TRAIN_BYTES], corpus.validation[:VALIDATION_BYTES]
    digest = hashlib.sha256(train.numpy().data)
    digest.update(validation.numpy().data)
    return Corpus(train, validation, digest.hexdigest()[:12])


def run(config: Record, *, text: Path, device: str = "cpu", graph: bool = False) -> Record:
    """Train, and say what came of it."""
    trial = Trial(**config)
    corpus = text_of(text)
    if trial.text not in ("", corpus.digest):
        raise SystemExit(f"the run is for a text with digest {trial.text}, {text} has {corpus.digest}")
    torch.manual_seed(trial.seed)
    model = GPT(MODELS[trial.model]())
    stack = Stack(model, trial.replicas, _loss, trial.optimizer, clip=trial.clip, device=device, graph=graph)
    measure = _Measure(stack, corpus.validation, trial)
    training = Training(
        stack,
        None if trial.method is None else resolve(trial.method, trial.options),
        _Batches(corpus.train, trial),
        trial.rate,
        frozenset(trial.steps * part // trial.points for part in range(1, trial.points + 1)),
        measure,
    )
    sides = training.run()
    final = measure.loss({name: tensor[0] for name, tensor in stack.parameters.items()}, 4 * trial.windows)
    names = [each.name for each in fields(Moved) if each.name != "rounds"]
    moved = {name: round(sum(getattr(side, name) for side in sides) / len(sides)) for name in names}
    return {
        "parameters": sum(parameter.numel() for parameter in trainable(model).values()),
        "bytes": moved,
        "rounds": sides[0].rounds,
        "losses": measure.losses,
        "training_losses": [round(float(loss), 4) for loss in training.losses[:: max(1, trial.steps // 50)]],
        "loss": final,
        "device": device,
        "shown": f"loss {final:.4f}, {moved['payload'] / 1e6:.3g} MB from each replica",
    }


def parser(document: str | None, results: Path, seeds: Sequence[int]) -> argparse.ArgumentParser:
    """The options of a benchmark that trains."""
    made = record.parser(document, results)
    made.add_argument("--text", type=Path, default=TEXT, metavar="PATH", help="a text, or a folder of texts")
    made.add_argument("--device", default="cpu", help="where training is; rounds are on the CPU")
    made.add_argument("--graph", action="store_true", help="on a GPU: replay forward and backward as a CUDA graph")
    made.add_argument("--seeds", type=lambda text: [int(each) for each in text.split(",")], default=list(seeds),
                      metavar="0,1,2", help="seeds of model and data")  # fmt: skip
    made.add_argument("--steps", type=int, default=1000, help="steps of each run")
    return made


def runner(given: argparse.Namespace) -> Callable[[Record], Record]:
    """`run` with the place of the text and the device bound, fit to be sent to another process."""
    return partial(run, text=given.text, device=given.device, graph=given.graph)


def _loss(model: GPT, batch: Tensor) -> Tensor:
    return model.loss(batch)


class _Batches:
    """The batches of all replicas together, `[replicas, batch, context + 1]`, for each step."""

    def __init__(self, tokens: Tensor, trial: Trial) -> None:
        shape = (trial.replicas, trial.batch, trial.context)
        replicas, batch, context = shape
        self._shares = [
            single_pass(tokens, replicas, rank, batch, context, seed=trial.seed) for rank in range(replicas)
        ]
        self._steps = trial.steps
        if len(self._shares[0]) < self._steps:
            raise SystemExit(f"the text holds {len(self._shares[0])} steps of fresh tokens, the run has {self._steps}")

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.stack([share[step] for share in self._shares]) for step in range(self._steps))


class _Measure:
    """The validation loss of an agreed model, on windows spread evenly over the held-out text."""

    def __init__(self, stack: Stack, tokens: Tensor, trial: Trial) -> None:
        self._stack, self._trial = stack, trial
        self._windows = windows(tokens, trial.context)
        self.losses: list[tuple[int, float]] = []

    def __call__(self, step: int, agreed: Tensors) -> None:
        self.losses.append((step, round(self.loss(agreed, self._trial.windows), 5)))

    def loss(self, parameters: Tensors, count: int) -> float:
        """The mean over `count` windows."""
        count = min(count, len(self._windows))
        places = torch.arange(count) * len(self._windows) // count
        batch = torch.stack([self._windows[int(place)] for place in places])
        parts = [float(self._stack.loss(parameters, part)) * len(part) for part in torch.split(batch, CHUNK)]
        return round(sum(parts) / count, 5)
