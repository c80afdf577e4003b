"""One whole round on a GPU, and the copies of the buffer that bound it from below.

    python benchmarks/codec/device.py --shapes gpt2-small

Plain torch, no kernels of our own yet: the figure to reach with them stands in the design of the layout, and this file
says where the time goes until then.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import record  # noqa: E402 (a neighbour, not a package)
from run import PEERS, SHAPES, Ours  # noqa: E402

from lowtide.messages import Inbox  # noqa: E402


def milliseconds(work: Callable[[], object], repeats: int = 7) -> float:
    """Median over some runs, between two device events."""
    found = []
    for _ in range(repeats):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        work()
        ended.record()
        torch.cuda.synchronize()
        found.append(begun.elapsed_time(ended))
    return statistics.median(found)


def main() -> int:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=sorted(SHAPES), default="gpt2-small")
    parser.add_argument("--density", type=float, default=1 / 32)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing to measure", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape, device="cuda") * 0.02 for name, shape in SHAPES[options.shapes]()}
    ours = Ours(tensors, options.density)

    def disturb() -> None:
        for tensor in tensors.values():
            tensor.add_(torch.randn_like(tensor), alpha=1e-3)

    ours.prepare(disturb)
    round_, replica, buffer = ours.round, ours.replica, ours.round.grid.zeros(device="cuda")
    inbox = Inbox(tuple(range(PEERS)), tuple(ours.payloads))
    transform, grid = round_.plan.exchange.transform, round_.grid

    def whole() -> None:
        round_.outgoing(replica, 1)
        round_.incoming(inbox)
        round_.commit(replica)
        round_.state.event = 0

    whole()
    parts = {
        "whole round": milliseconds(whole),
        "copy of the buffer": milliseconds(buffer.clone),
        "gather": milliseconds(lambda: replica.read("parameters", ours.layout, buffer)),
        "scatter": milliseconds(lambda: replica.write("parameters", ours.layout, buffer)),
        "forward transform": milliseconds(lambda: transform.forward_(buffer, grid)),
        "inverse transform": milliseconds(lambda: transform.inverse_(buffer, grid)),
    }
    config = {"kind": "device", "shapes": options.shapes, "density": options.density, "peers": PEERS}
    print(json.dumps({"config": config, "milliseconds": parts} | record.surroundings()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
