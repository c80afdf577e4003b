"""One whole round on a CPU: lowtide against a per-tensor implementation in plain PyTorch, side by side in one run.

A round is: delta, decay and add, cosine transform, selection, quantising and packing (ours only), the residual,
decoding of four peers' payloads, their mean over contributors, the inverse transform, the outer step, parameters.
The two take turns and the ratio of the medians is reported; absolute times of a shared machine mean nothing.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from reference import Tensorwise
from torch import Tensor

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import record  # noqa: E402 (neighbours, not a package)
from plain import Plain  # noqa: E402

from lowtide import decoupled  # noqa: E402
from lowtide.codec.index import decode_index, encode_index  # noqa: E402
from lowtide.messages import Gather, Inbox  # noqa: E402
from lowtide.sync import Round  # noqa: E402
from lowtide.tensors import Entry, Layout  # noqa: E402
from lowtide.train.models.gpt import gpt2_small_shapes  # noqa: E402
from lowtide.train.models.resnet import resnet50_shapes  # noqa: E402

PEERS = 4
SHAPES: dict[str, Callable[[], list[tuple[str, tuple[int, ...]]]]] = {
    "gpt2-small": gpt2_small_shapes,
    "resnet-50": resnet50_shapes,
    "quick": lambda: [("a", (256, 768)), ("b", (100, 100)), ("c", (768,))],
}


class Ours:
    """lowtide's round."""

    def __init__(self, tensors: dict[str, Tensor], density: float) -> None:
        plan = decoupled(period=1, density=density).plans[0]
        self.replica = Plain(tensors)
        self.layout = Layout.build([Entry(n, tuple(t.shape)) for n, t in tensors.items()], plan.exchange.chunker)
        self.round = Round(plan, self.layout, "round", rank=0, size=PEERS)
        self.round.start(self.replica, torch.device("cpu"))
        self.payloads: list[bytes] = []
        self.halves: dict[str, list[float]] = {"outgoing": [], "incoming": [], "commit": []}

    def prepare(self, disturb: Callable[[], None]) -> None:
        """Payloads as peers would send them."""
        for _ in range(PEERS):
            disturb()
            message = self.round.outgoing(self.replica, 1)
            assert isinstance(message, Gather)
            self.payloads.append(message.payload)
            self.round.drop()

    def __call__(self) -> None:
        begun = time.perf_counter()
        self.round.outgoing(self.replica, 1)
        encoded = time.perf_counter()
        self.round.incoming(Inbox(tuple(range(PEERS)), tuple(self.payloads)))
        decoded = time.perf_counter()
        self.round.commit(self.replica)
        done = time.perf_counter()
        self.round.state.event = 0  # the same payloads serve again
        for name, seconds in (
            ("outgoing", encoded - begun),
            ("incoming", decoded - encoded),
            ("commit", done - decoded),
        ):
            self.halves[name].append(seconds)

    def copies(self, numel: int) -> float:
        """Memory held beside the model, in copies of its parameters."""
        kept = [*self.round.state.shared.values(), *self.round.state.private.values(), *self.round.scratch.free]
        return sum(buffer.numel() for buffer in kept) / numel


class Theirs:
    """The same round, tensor by tensor; small tensors are left out of it."""

    def __init__(self, tensors: dict[str, Tensor], density: float) -> None:
        self.tensors = [
            Tensorwise(tensor.reshape(tensor.shape[0], -1).clone(), density)
            for tensor in tensors.values()
            if tensor.dim() > 1 and tensor.numel() >= 4096
        ]

    def __call__(self) -> None:
        for tensor in self.tensors:
            sent = tensor.encode()
            tensor.decode([sent] * PEERS)


def compare(config: record.Record) -> record.Record:
    """Both in turn, several times."""
    torch.manual_seed(config["seed"])
    tensors = {name: torch.randn(shape) * 0.02 for name, shape in SHAPES[config["shapes"]]()}
    noise = {name: torch.randn_like(tensor) * 1e-3 for name, tensor in tensors.items()}
    numel = sum(tensor.numel() for tensor in tensors.values())

    def disturb() -> None:
        for name, tensor in tensors.items():
            tensor.add_(noise[name])

    ours, theirs = Ours(tensors, config["density"]), Theirs(tensors, config["density"])
    ours.prepare(disturb)
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(config["repeats"]):
        disturb()
        for name, work in (("ours", ours), ("theirs", theirs)):
            begun = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - begun)
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = middle["theirs"] / middle["ours"]
    return {
        "parameters": numel,
        "payload": len(ours.payloads[0]),
        "times_smaller_than_fp32": 4 * numel / len(ours.payloads[0]),
        "ratio": ratio,
        "ratio_of_best": min(seconds["theirs"]) / min(seconds["ours"]),
        "share": {name: statistics.median(values) / middle["ours"] for name, values in ours.halves.items()},
        "copies": ours.copies(numel),
        "shown": f"{ratio:.2f}x the speed, {4 * numel / len(ours.payloads[0]):.0f}x smaller",
    }


def indices(config: record.Record) -> record.Record:
    """Speed of the index coding, and its size over the counting floor."""
    random = np.random.default_rng(config["seed"])
    span, tiles, count = 4096, config["tiles"], round(4096 * config["density"])
    keys = random.random((tiles, span), dtype=np.float32)
    index = np.sort(np.argpartition(keys, count, axis=1)[:, :count], axis=1).astype(np.int64).ravel()
    counts = np.full(tiles, count, dtype=np.int64)
    block = encode_index(index, counts, span)
    assert (decode_index(block, counts, span) == index).all()
    seconds: dict[str, list[float]] = {"encode": [], "decode": []}
    for _ in range(config["repeats"]):
        for name, work in (
            ("encode", lambda: encode_index(index, counts, span)),
            ("decode", lambda: decode_index(block, counts, span)),
        ):
            begun = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - begun)
    floor = tiles * (math.lgamma(span + 1) - math.lgamma(count + 1) - math.lgamma(span - count + 1)) / math.log(2) / 8
    speed = {
        f"{name}_millions_a_second": len(index) / statistics.median(values) / 1e6 for name, values in seconds.items()
    }
    over = len(block.data) / floor - 1
    return speed | {
        "coding": block.coding,
        "bits_an_index": 8 * len(block.data) / len(index),
        "over_floor": over,
        "shown": f"{speed['encode_millions_a_second']:.0f} and {speed['decode_millions_a_second']:.0f} M/s, "
        f"{100 * over:.1f} % over the floor",
    }


def work(config: record.Record) -> record.Record:
    """One run of either kind."""
    return indices(config) if config["kind"] == "indices" else compare(config)


def tasks(*, quick: bool) -> list[tuple[str, record.Record]]:
    """All runs."""
    if quick:
        return [
            ("quick", {"kind": "round", "shapes": "quick", "density": 1 / 32, "seed": 0, "repeats": 2}),
            ("quick-index", {"kind": "indices", "tiles": 100, "density": 1 / 32, "seed": 0, "repeats": 2}),
        ]
    rounds: list[tuple[str, record.Record]] = [
        (f"round-{shapes}-1/{part}", {"kind": "round", "shapes": shapes, "density": 1 / part, "seed": 0, "repeats": 9})
        for shapes in ("gpt2-small", "resnet-50")
        for part in (32, 64)
    ]
    return rounds + [
        (f"index-1/{part}", {"kind": "indices", "tiles": 30_000, "density": 1 / part, "seed": 0, "repeats": 9})
        for part in (16, 32, 64, 128)
    ]


def tables(records: list[record.Record]) -> dict[str, str]:
    """The README's tables."""
    rounds = [r for r in records if r["config"]["kind"] == "round"]
    coded = [r for r in records if r["config"]["kind"] == "indices"]
    return {
        "rounds": record.markdown(
            [
                "round",
                "speed over the reference",
                "payload, times under fp32",
                "copies of the parameters",
                "threads",
                "CPU",
            ],
            [
                [
                    r["name"],
                    f"{r['ratio']:.2f}x",
                    f"{r['times_smaller_than_fp32']:.0f}",
                    f"{r['copies']:.2f}",
                    r["threads"],
                    r["cpu"],
                ]
                for r in rounds
            ],
        ),
        "positions": record.markdown(
            ["positions", "encode, M/s", "decode, M/s", "bits each", "over the counting floor"],
            [
                [
                    r["name"],
                    f"{r['encode_millions_a_second']:.0f}",
                    f"{r['decode_millions_a_second']:.0f}",
                    f"{r['bits_an_index']:.2f}",
                    f"{100 * r['over_floor']:.2f} %",
                ]
                for r in coded
            ],
        ),
    }


def main() -> int:
    """Run what is missing, or make the tables."""
    options = record.parser(__doc__, HERE / "results" / "codec.jsonl").parse_args()
    if options.table:
        record.fill(HERE / "README.md", tables(record.read_all(HERE / "results")))
        return 0
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            options.out = Path(folder) / "quick.jsonl"
            return record.carry_out(tasks(quick=True), work, options)
    return record.carry_out(tasks(quick=False), work, options)


if __name__ == "__main__":
    sys.exit(main())
