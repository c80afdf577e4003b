"""What an attached session costs between rounds: the same plain loop with and without it, in turns, in one process.

    make bench NAME=overhead
    make bench NAME=overhead ARGS=--table

The loops take turns of a few steps, so that whatever else the machine does meets both. Two figures: the hook's own
time, from clocks in hooks of our own right before and behind it, and the ratio of the median steps, which holds
everything and is as noisy as the machine.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import record  # noqa: E402
from workload import WORKLOADS, Side  # noqa: E402

from lowtide import Settings, attach  # noqa: E402
from lowtide.train.attach import resolve  # noqa: E402

MODELS = ("mlp 0.02M", "gpt 0.66M", "gpt 5M", "resnet-18 0.7M")
METHODS: dict[str, dict[str, Any]] = {
    "decoupled": {"period": 10**6},
    "streaming_diloco": {"period": 3 * 10**6, "fragments": 3},
}
GOAL = 0.02  # of a step
WARM = 3


class Stopwatch:
    """Hooks around another one's on the same optimizer; they are called in the order in which they were made."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._began = 0.0
        self.seconds = [0.0]
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._begin)

    def close(self) -> None:
        """From now on, what is registered between is measured."""
        self._optimizer.register_step_pre_hook(self._end)
        self._optimizer.register_step_post_hook(self._next)

    def _begin(self, *_: object) -> None:
        self._began = time.perf_counter()

    def _end(self, *_: object) -> None:
        self.seconds[-1] += time.perf_counter() - self._began

    def _next(self, *_: object) -> None:
        self._end()
        self.seconds.append(0.0)


def measure(config: record.Record) -> record.Record:
    """Train both sides in turns."""
    work = WORKLOADS[config["model"]]
    batches = [work.data(work.batch, seed) for seed in range(4)]
    plain, attached = Side(work, batches), Side(work, batches)
    watch = Stopwatch(attached.optimizer)
    session = attach(
        attached.model,
        attached.optimizer,
        resolve(config["method"], METHODS[config["method"]]),
        settings=Settings(alone="method"),
    )
    watch.close()
    plain.train(WARM)
    attached.train(WARM)
    seconds: dict[str, list[float]] = {"plain": [], "attached": []}
    for turn in range(config["turns"]):
        order = (("plain", plain), ("attached", attached))
        for name, side in order if turn % 2 else order[::-1]:
            seconds[name] += side.train(config["steps"])
    assert not session.stats().rounds
    session.detach()
    steps = {name: statistics.median(each) for name, each in seconds.items()}
    own = statistics.median(watch.seconds[WARM:-1])
    share, ratio = own / steps["plain"], steps["attached"] / steps["plain"]
    return {
        "step_seconds": steps,
        "hook_seconds": own,
        "share": share,
        "ratio": ratio,
        "shown": f"hook {1e6 * own:.0f} us, {share:.2%} of a step of {1e3 * steps['plain']:.2f} ms; ratio {ratio:.3f}",
    }


def runs(models: Sequence[str], turns: int, steps: int) -> list[tuple[str, record.Record]]:
    """Every model with every method; the machine is part of what is measured."""
    return [
        (f"{model}: {method}", {"model": model, "method": method, "turns": turns, "steps": steps, **record.machine()})
        for model in models
        for method in METHODS
    ]


def table(results: Sequence[record.Record]) -> str:
    """The README's table."""
    header = ["model", "method", "machine", "threads", "step, ms", "hook, us", "share of a step", "attached / plain"]
    rows = [
        [each["config"]["model"], each["config"]["method"], each["cpu"], each["threads"],
         f"{1e3 * each['step_seconds']['plain']:.2f}", f"{1e6 * each['hook_seconds']:.0f}", f"{each['share']:.2%}",
         f"{each['ratio']:.3f}"]
        for each in results
    ]  # fmt: skip
    return record.markdown(header, rows)


def main() -> int:
    """Do what is asked; the exit code is 1 if a run failed."""
    given = record.parser(__doc__, HERE / "results" / "runs.jsonl").parse_args()
    if given.table:
        record.fill(HERE / "README.md", {"overhead": table(record.read_all(given.results))})
        return 0
    torch.set_num_threads(given.threads)
    if not given.quick:
        return int(record.carry_out(runs(MODELS, 40, 5), measure, given) > 0)
    with tempfile.TemporaryDirectory() as folder:
        given.out, given.results = Path(folder) / "quick.jsonl", Path(folder)
        failed = record.carry_out(runs(["mlp 0.02M", "gpt 0.11M"], 4, 3), measure, given)
        print(table(record.read(given.out)))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
