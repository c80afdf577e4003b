"""Every method at equal steps: a GPT of 0.66M parameters, 8 replicas, text that no run sees twice.

    make corpus                                                  once: the text
    make bench NAME=study                                        everything that is still to do, run by run
    make bench NAME=study ARGS='--only "H20: diloco*" --seeds 0' some of it
    make bench NAME=study ARGS=--table                           the README's tables from the results

Inner optimizer, rate and warm-up are the same for all methods on deltas, chosen by the runs called `search`; DeMo
replaces the inner optimizer, so its rate has a search of its own. Runs are in the order of their use: the search,
then what a claim needs, then levers and further methods. A second call does what the first did not finish.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import record  # noqa: E402
from trial import DEMO_LR, STDLIB, Trial, parser, runner, text_of  # noqa: E402

PERIODS = (20, 50)
SEEDS = (0, 1, 2)
SEARCH_SEED = 100  # no seed of the study
SEARCH = (1e-3, 2e-3, 4e-3, 8e-3)
DEMO_SEARCH = (3e-4, 1e-3, 3e-3, 1e-2)
PAIRS = ((0.7, 0.9), (1.0, 0.8), (1.2, 0.6), (0.5, 0.8), (1.0, 0.6), (1.0, 0.4), (0.7, 0.7))
DENSITIES = (32, 64)
USUAL = {"feedback": 0.9, "outer_lr": 0.8}


@dataclass(frozen=True)
class Entry:
    """One row of the table: a method with its options, the period left open where it has one."""

    label: str
    method: str | None
    options: dict[str, Any] = field(default_factory=dict)
    periodic: bool = True
    trial: dict[str, Any] = field(default_factory=dict)

    def at(self, period: int | None, base: Trial) -> Trial:
        """The run at a period."""
        options = dict(self.options)
        if period is not None and self.method == "fda":
            options["theta"] = f"interval:{period}"
        elif period is not None:
            options["period"] = period
        return replace(base, method=self.method, options=options, **self.trial)


def decoupled(density: int, transform: str, feedback: float, outer_lr: float) -> Entry:
    """The default method at 2 bits and 1 of `density`."""
    label = f"decoupled 1/{density} {transform}"
    options = {"feedback": feedback, "outer_lr": outer_lr}
    if options != USUAL:
        label += f", feedback {feedback}, rate {outer_lr}"
    return Entry(label, "decoupled", {"density": 1 / density, "bits": 2, "transform": transform, **options})


def entries() -> list[Entry]:
    """What the claims need, every method with what it was tuned over."""
    once = [
        Entry("ddp", "ddp", periodic=False),
        Entry("alone", None, periodic=False, trial={"replicas": 1}),
        Entry("demo 1/128", "demo", {"density": 1 / 128}, periodic=False, trial={"inner": "sgd", "lr": DEMO_LR}),
    ]
    pairs = [Entry(f"diloco {lr}, {mu}", "diloco", {"outer_lr": lr, "momentum": mu}) for lr, mu in PAIRS]
    ours = [decoupled(density, transform, **USUAL) for density in DENSITIES for transform in ("dct", "none")]
    others = [
        Entry("sparseloco 1/32", "sparseloco", {"density": 1 / 32}),
        Entry("sparseloco 1/64", "sparseloco", {"density": 1 / 64}),
        Entry("fda linear", "fda", {"estimator": "linear"}),
        Entry("streaming 0.7, 0.9", "streaming_diloco", {"fragments": 2, "outer_lr": 0.7, "momentum": 0.9}),
        Entry("streaming 1.0, 0.8", "streaming_diloco", {"fragments": 2, "outer_lr": 1.0, "momentum": 0.8}),
    ]
    return [*once, Entry("local_sgd", "local_sgd"), *pairs, *ours, *others]


def levers() -> list[Entry]:
    """What moves `decoupled` and its relatives, and methods that no claim needs."""
    grid = [
        decoupled(density, transform, feedback, lr)
        for density in DENSITIES
        for transform in ("none", "dct")
        for feedback in (0.6, 0.7, 0.8, 0.9, 0.95)
        for lr in (0.8, 1.0)
        if {"feedback": feedback, "outer_lr": lr} != USUAL
    ]
    tuned = {"feedback": 0.9, "outer_lr": 0.8}
    between = [decoupled(48, transform, feedback, 0.8) for transform in ("none", "dct") for feedback in (0.7, 0.8)]
    little = [
        decoupled(density, "none", feedback, lr)
        for density in DENSITIES
        for feedback in (0.2, 0.4, 0.5, 0.6)
        for lr in (1.0, 1.2)
        if (feedback, lr) != (0.6, 1.0)
    ]
    return [
        *grid,
        *between,
        *little,
        Entry("sparseloco 1/32, feedback 0.9, rate 0.8", "sparseloco", {"density": 1 / 32, **tuned}),
        Entry("sparseloco 1/64, feedback 0.9, rate 0.8", "sparseloco", {"density": 1 / 64, **tuned}),
        Entry("decoupled 1/32 dct, sharded", "decoupled", {"density": 1 / 32, "bits": 2, "exchange": "sharded"}),
        Entry("decoupled 1/32 none, 4 bits", "decoupled", {"density": 1 / 32, "bits": 4, "transform": "none"}),
        Entry("decoupled 1/8 none", "decoupled", {"density": 1 / 8, "bits": 2, "transform": "none"}),
        Entry("diloco 1.0, 0.8, 8 bits", "diloco", {"outer_lr": 1.0, "momentum": 0.8, "bits": 8}),
        Entry("noloco", "noloco", {"outer_lr": 0.7, "momentum": 0.5}),
        Entry("eager 0.5, 0.3", "eager", {"outer_lr": 0.5, "momentum": 0.3}),
    ]


def search(base: Trial) -> Iterator[tuple[str, Trial]]:
    """The runs that choose the inner rates."""
    for lr in SEARCH:
        start = replace(base, lr=lr, seed=SEARCH_SEED)
        yield f"search: ddp, lr {lr}", replace(start, method="ddp")
        yield f"search: local_sgd H20, lr {lr}", replace(start, method="local_sgd", options={"period": 20})
    for lr in DEMO_SEARCH:
        demo = Entry("demo", "demo", {"density": 1 / 128}, trial={"inner": "sgd", "lr": lr})
        yield f"search: demo, lr {lr}", demo.at(None, replace(base, seed=SEARCH_SEED))


def study(chosen: Sequence[Entry], base: Trial, seeds: Sequence[int], part: str = "") -> Iterator[tuple[str, Trial]]:
    """The runs of some rows: a period after the other, all seeds of a row together."""
    for period in PERIODS:
        for entry in chosen:
            if not entry.periodic and period != PERIODS[0]:
                continue
            place = f"H{period}" if entry.periodic else "every step"
            for seed in seeds:
                yield (
                    f"{part}{place}: {entry.label}: seed {seed}",
                    entry.at(period if entry.periodic else None, replace(base, seed=seed)),
                )


def runs(base: Trial, seeds: Sequence[int]) -> list[tuple[str, record.Record]]:
    """All runs by name, in the order of their use."""
    everything = [*search(base), *study(entries(), base, seeds), *study(levers(), base, seeds, "levers ")]
    return [(name, trial.config()) for name, trial in everything]


def tables(results: Sequence[record.Record]) -> dict[str, str]:
    """The README's tables."""
    found = {"search": _search_table(results), "made": _made(results)}
    for period in PERIODS:
        here = [each for each in results if each["name"].startswith((f"H{period}: ", "every step: "))]
        levers = [each for each in results if each["name"].startswith(f"levers H{period}: ")]
        found[f"period {period}"] = _table(here, period, _bar(here))
        found[f"levers {period}"] = _table(levers, period, _bar(here))
    return found


def _rows(results: Sequence[record.Record]) -> dict[str, list[record.Record]]:
    """The seeds of each row."""
    rows: dict[str, list[record.Record]] = {}
    for each in results:
        rows.setdefault(each["name"].split(": ")[1], []).append(each)
    return rows


def _bar(results: Sequence[record.Record]) -> dict[int, float]:
    """The loss of the best dense DiLoCo, by seed: what the others are measured against."""
    rows = [several for label, several in _rows(results).items() if label.startswith("diloco")]
    best = min(rows, key=_order, default=[])
    return {each["config"]["seed"]: each["loss"] for each in best}


def _table(results: Sequence[record.Record], period: int, bar: dict[int, float]) -> str:
    """Loss and bytes by row, the lowest loss first."""
    rows = _rows(results)
    header = ["method", "validation loss", "seeds", "above the best DiLoCo", "payload MB", "received MB",
              "times less payload than DiLoCo", "than DDP"]  # fmt: skip
    order = sorted(rows, key=lambda label: _order(rows[label]))
    return record.markdown(header, [_line(label, rows[label], period, bar) for label in order])


def _line(label: str, several: list[record.Record], period: int, bar: dict[int, float]) -> list[object]:
    payload, received = (sum(each["bytes"][n] for each in several) / len(several) for n in ("payload", "received"))
    dense = 4.0 * several[0]["parameters"] * several[0]["config"]["steps"]
    against = [each["loss"] - bar[each["config"]["seed"]] for each in several if each["config"]["seed"] in bar]
    less = [f"{dense / payload / part:,.1f}" if payload else "" for part in (period, 1)]
    return [label, _losses(several), len(several), record.mean_and_spread(against), f"{payload / 1e6:.3f}",
            f"{received / 1e6:.2f}", *less]  # fmt: skip


def _losses(several: Sequence[record.Record]) -> str:
    finite = [each["loss"] for each in several if each["loss"] is not None]
    return record.mean_and_spread(finite) if len(finite) == len(several) else "not finite"


def _order(several: Sequence[record.Record]) -> float:
    return sum(float("inf") if each["loss"] is None else each["loss"] for each in several) / len(several)


def _search_table(results: Sequence[record.Record]) -> str:
    found = {each["name"].removeprefix("search: "): each for each in results if each["name"].startswith("search: ")}
    rows = [[name, _losses([each])] for name, each in sorted(found.items())]
    return record.markdown(["run", "validation loss"], rows)


def _made(results: Sequence[record.Record]) -> str:
    """Where the runs were made."""
    count: dict[tuple[object, ...], list[float]] = {}
    for each in results:
        where = (each["gpu"] if each["device"] != "cpu" else each["cpu"], each["device"], each["threads"],
                 each["versions"]["torch"], (each["commit"] or "")[:10], each["source"])  # fmt: skip
        count.setdefault(where, []).append(each["seconds"]["real"])
    header = ["machine", "device", "threads", "torch", "commit", "source", "runs", "real seconds a run"]
    rows = [[*where, len(seconds), f"{sum(seconds) / len(seconds):.0f}"] for where, seconds in count.items()]
    return record.markdown(header, rows)


def main() -> int:
    """Do what is asked; the exit code is 1 if a run failed."""
    given = parser(__doc__, HERE / "results" / "runs.jsonl", SEEDS).parse_args()
    if given.table:
        record.fill(HERE / "README.md", tables(record.read_all(given.results)))
        return 0
    if given.quick:
        return quick(given)
    base = Trial(method=None, steps=given.steps, text=text_of(given.text).digest)
    return int(record.carry_out(runs(base, given.seeds), runner(given), given) > 0)


def quick(given: argparse.Namespace) -> int:
    """A toy of the same shape."""
    given.text = STDLIB
    base = Trial(method=None, steps=8, batch=2, replicas=2, model="gpt_tiny", warmup=2, points=2, windows=16)
    chosen = ("ddp", "alone", "diloco 1.0, 0.8", "decoupled 1/32 none")
    todo = [
        (f"quick: {entry.label}: seed 0", entry.at(4 if entry.periodic else None, base).config())
        for entry in entries()
        if entry.label in chosen
    ]
    with tempfile.TemporaryDirectory() as folder:
        given.out, given.results = Path(folder) / "quick.jsonl", Path(folder)
        failed = record.carry_out(todo, runner(given), given)
        print(_table(record.read(given.out), 4, {}))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
