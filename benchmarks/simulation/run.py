"""Eight replicas in one process against one replica with eight times the batch: the ratio of their token rates.

    make bench NAME=simulation
    make bench NAME=simulation ARGS=--table

Both sides are the same plain loop; they take turns, so that whatever else the machine does meets both. The simulated
side pays for eight optimizers, smaller matrix products, rounds and hand-overs between threads. Where its time goes is
in the results: gradients, optimizer steps, and the rest, which is rounds and hand-overs.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import record  # noqa: E402
from workload import WORKLOADS, Side  # noqa: E402

from lowtide import Settings, attach, simulate  # noqa: E402
from lowtide.train.attach import resolve  # noqa: E402
from lowtide.train.simulate import current_replica  # noqa: E402

REPLICAS = 8
METHODS = ("local_sgd", "decoupled")


@dataclass(frozen=True)
class Case:
    """A model, the ratio to reach, and how long it is trained: turns of one period each."""

    model: str
    goal: float
    turns: int = 6
    period: int = 20


CASES = (Case("gpt 0.66M", 0.90), Case("gpt 5M", 0.90, turns=3, period=10), Case("resnet-18 0.7M", 0.75))


class Lockstep:
    """The simulated side: models that stay, attached anew in every turn."""

    def __init__(self, config: record.Record, replicas: int) -> None:
        self._config = config
        work = WORKLOADS[config["model"]]
        # each replica has batches of its own, as the other side has them in one
        self.sides = [
            Side(work, [work.data(work.batch, 100 * rank + seed) for seed in range(2)]) for rank in range(replicas)
        ]
        self.rounds = 0.0

    def train(self, steps: int) -> float:
        """Seconds from the first replica's first step to the last one's last; attaching is left out."""
        method = resolve(self._config["method"], {"period": self._config["period"]})
        began, ended = [], []

        def worker() -> None:
            slot = current_replica()
            assert slot is not None
            side = self.sides[slot.rank]
            session = attach(side.model, side.optimizer, method, settings=Settings(check_every=0))
            began.append(time.perf_counter())
            side.train(steps)
            ended.append(time.perf_counter())
            spent = session.stats().seconds
            self.rounds += spent["encode"] + spent["decode"]
            session.detach()  # a turn is a whole period: there is no last round to close with

        simulate(worker, replicas=len(self.sides))
        return max(ended) - min(began)


def measure(config: record.Record) -> record.Record:
    """Train both sides in turns."""
    work = WORKLOADS[config["model"]]
    many = Lockstep(config, REPLICAS)
    one = Side(work, [work.data(REPLICAS * work.batch, seed) for seed in range(2)])
    one.train(2)
    many.train(2)
    one.backward = one.step = many.rounds = 0.0
    for side in many.sides:
        side.backward = side.step = 0.0
    steps = config["period"]
    seconds: dict[str, list[float]] = {"one": [], "many": []}
    used = {"one": 0.0, "many": 0.0}
    for _ in range(config["turns"]):
        begun = time.process_time()
        seconds["one"].append(sum(one.train(steps)))
        middle = time.process_time()
        seconds["many"].append(many.train(steps))
        used["one"], used["many"] = used["one"] + middle - begun, used["many"] + time.process_time() - middle
    by_cpu = used["one"] / used["many"]
    ratios = [a / b for a, b in zip(seconds["one"], seconds["many"], strict=True)]
    total = config["turns"] * steps
    parts = {
        "one, gradients": one.backward / total,
        "one, optimizer": one.step / total,
        "many, gradients": sum(side.backward for side in many.sides) / total,
        "many, rounds": many.rounds / total,
    }
    whole = sum(seconds["many"]) / total
    # a step of the last replica to come waits for no one, so the optimizer's time is what is left of all time
    parts["many, optimizer and hand-over"] = whole - parts["many, gradients"] - parts["many, rounds"]
    return {
        "ratio": statistics.median(ratios),
        "cpu_ratio": by_cpu,
        "ratios": [round(each, 4) for each in ratios],
        "step_seconds": {name: sum(each) / total for name, each in seconds.items()},
        "parts": parts,
        "shown": f"{statistics.median(ratios):.3f} of the rate of one replica, {by_cpu:.3f} by CPU time; "
        + ", ".join(f"{name} {1e3 * each:.1f} ms" for name, each in parts.items()),
    }


def runs(cases: Sequence[Case]) -> list[tuple[str, record.Record]]:
    """Every model with every method; the machine is part of what is measured."""
    return [
        (f"{case.model}: {method}", asdict(case) | {"method": method} | record.machine())
        for case in cases
        for method in METHODS
    ]


def table(results: Sequence[record.Record]) -> str:
    """The README's table."""
    parts = ("one, gradients", "one, optimizer", "many, gradients", "many, optimizer and hand-over", "many, rounds")
    header = ["model", "method", "machine", "threads", "rate of 8 / rate of 1", "by CPU time", "goal"]
    rows = []
    for each in results:
        config = each["config"]
        rates = [f"{each[name]:.3f}" for name in ("ratio", "cpu_ratio")]
        where = [config["model"], config["method"], each["cpu"], each["threads"]]
        rows.append([*where, *rates, config["goal"], *(f"{1e3 * each['parts'][part]:.1f}" for part in parts)])
    return record.markdown([*header, *(f"{part}, ms" for part in parts)], rows)


def main() -> int:
    """Do what is asked; the exit code is 1 if a run failed."""
    given = record.parser(__doc__, HERE / "results" / "runs.jsonl").parse_args()
    if given.table:
        record.fill(HERE / "README.md", {"simulation": table(record.read_all(given.results))})
        return 0
    torch.set_num_threads(given.threads)
    if not given.quick:
        return int(record.carry_out(runs(CASES), measure, given) > 0)
    with tempfile.TemporaryDirectory() as folder:
        given.out, given.results = Path(folder) / "quick.jsonl", Path(folder)
        failed = record.carry_out(runs([Case("gpt 0.11M", 0.0, turns=2, period=4)]), measure, given)
        print(table(record.read(given.out)))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
