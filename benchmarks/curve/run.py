"""At one byte budget a step: how often to agree, and how much to send each time.

    make corpus                                  once: the text
    make bench NAME=curve                        everything that is still to do, run by run
    make bench NAME=curve ARGS='--only "1x*"'    one budget
    make bench NAME=curve ARGS=--table           the README's tables from the results

A budget is payload bytes a replica and step. It starts from `decoupled` with period 20 and density 1/32 ("1x"); the
others are 4 and 16 times that. For each period the density is chosen so that real payloads of a real delta take that
many bytes, small tensors and headers included; methods that send densely get the period that the budget allows.
`results/calibration.json` keeps what was chosen, so that every machine does the same runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import record  # noqa: E402
from trial import DEMO_LR, MODELS, STDLIB, Trial, parser, runner, text_of  # noqa: E402

from lowtide import Method  # noqa: E402
from lowtide.sync import ModelReplica, Round  # noqa: E402
from lowtide.tensors import Layout, entries, trainable  # noqa: E402
from lowtide.train.attach import resolve  # noqa: E402
from lowtide.train.data import Corpus, single_pass  # noqa: E402
from lowtide.train.models import GPT  # noqa: E402
from lowtide.transport.cost import emitted  # noqa: E402

SEEDS = (0, 1, 2)
BUDGETS = (1, 4, 16)
PERIODS = (40, 20, 10, 5, 2)
REFERENCE: dict[str, Any] = {"period": 20, "density": 1 / 32, "transform": "none"}
BEST: dict[str, Any] = {"feedback": 0.6, "outer_lr": 1.0}  # of the study's levers at period 20
TILE = 4096
CALIBRATION_STEPS = 40


@dataclass(frozen=True)
class Entry:
    """A method whose density (at each of `periods`) or whose period (where there are none) the budget decides."""

    label: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    periods: tuple[int, ...] = ()
    every_step: bool = False
    trial: dict[str, Any] = field(default_factory=dict)


def methods() -> list[Entry]:
    """What competes. A method that cannot meet a budget in this many steps is left out there."""
    return [
        Entry("decoupled none", "decoupled", {"transform": "none"}, PERIODS),
        Entry("decoupled dct", "decoupled", {"transform": "dct"}, PERIODS),
        Entry("decoupled none, feedback 0.7", "decoupled", {"transform": "none", "feedback": 0.7}, (40, 20)),
        Entry("decoupled none, feedback 0.8", "decoupled", {"transform": "none", "feedback": 0.8}, (40, 20, 10, 5)),
        Entry("decoupled none, feedback 0.6, rate 1.0", "decoupled", {"transform": "none", **BEST}, PERIODS),
        Entry("decoupled dct, feedback 0.6, rate 1.0", "decoupled", {"transform": "dct", **BEST}, (20, 10, 5)),
        Entry("sparseloco", "sparseloco", {}, PERIODS),
        Entry("sparseloco, feedback 0.6, rate 1.0", "sparseloco", BEST, (20, 10, 5)),
        Entry("demo, 2 bits", "demo", {"bits": 2}, every_step=True, trial={"inner": "sgd", "lr": DEMO_LR}),
        Entry("sparta", "sparta", {}, every_step=True),
        Entry("local_sgd", "local_sgd"),
        Entry("diloco 1.0, 0.6", "diloco", {"outer_lr": 1.0, "momentum": 0.6}),
        Entry("diloco 1.0, 0.6", "diloco", {"outer_lr": 1.0, "momentum": 0.6}),
        Entry("diloco 1.0, 0.6, 8 bits", "diloco", {"outer_lr": 1.0, "momentum": 0.6, "bits": 8}),
        Entry("diloco 1.0, 0.8, 2 bits", "diloco", {"outer_lr": 1.0, "momentum": 0.8, "bits": 2}),
        Entry("diloco 1.0, 0.6, 2 bits", "diloco", {"outer_lr": 1.0, "momentum": 0.6, "bits": 2}),
        Entry("streaming 1.0, 0.8, 4 bits", "streaming_diloco", {"fragments": 2, "outer_lr": 1.0, "momentum": 0.8}),
    ]


class Probe:
    """A model before and after some real steps: what a round would send of it."""

    def __init__(self, base: Trial, corpus: Corpus) -> None:
        torch.manual_seed(0)
        self._before = GPT(MODELS[base.model]())
        torch.manual_seed(0)
        self._after = GPT(MODELS[base.model]())
        trial = replace(base, warmup=5, steps=CALIBRATION_STEPS)
        optimizer = trial.optimizer([{"params": list(self._after.parameters())}])
        share = single_pass(corpus.train, 1, 0, base.batch, base.context)
        for step in range(min(CALIBRATION_STEPS, len(share))):
            optimizer.zero_grad()
            self._after.loss(share[step]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        self.parameters = sum(parameter.numel() for parameter in trainable(self._after).values())

    def payload(self, method: Method) -> int:
        """Bytes of one round, over all fragments."""
        plan = method.plans[0]
        layout = Layout.build(entries(self._before, trainable(self._before)), plan.exchange.chunker)
        rounds = Round(plan, layout, "probe", size=8)
        rounds.start(_replica(self._before), torch.device("cpu"))
        return emitted(rounds.outgoing(_replica(self._after), 1), 0)


def _replica(model: GPT) -> ModelReplica:
    return ModelReplica(trainable(model), [torch.optim.SGD(model.parameters(), lr=1.0)])


def calibrate(base: Trial, corpus: Corpus, budgets: Sequence[int] = BUDGETS) -> dict[str, Any]:
    """For each budget, the options with which each method takes that many bytes a step."""
    probe = Probe(base, corpus)
    reference = probe.payload(resolve("decoupled", REFERENCE)) / REFERENCE["period"]
    found: dict[str, Any] = {}
    for budget in budgets:
        for entry in methods():
            for period, options in _fitted(entry, probe, budget * reference, base.steps):
                place = "every step" if entry.every_step else f"H{period}"
                found[f"{budget}x: {place} {entry.label}"] = options
    return {"parameters": probe.parameters, "reference_bytes_a_step": reference, "options": found}


def _fitted(entry: Entry, probe: Probe, bytes_a_step: float, steps: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """The options that come nearest to the budget, none where nothing is within a fifth of it."""
    if not entry.periods and not entry.every_step:
        # dense: the bytes of a round are given, and the period follows
        options = entry.options | {"period": 100}
        step = options.get("fragments", 1)
        period = round(probe.payload(resolve(entry.method, options)) / bytes_a_step / step) * step
        # a run of which less than two rounds are left compares nothing
        if 2 * step <= period <= steps // 2:
            yield period, entry.options | {"period": period}
        return
    for period in entry.periods or (1,):
        clock = {} if entry.every_step else {"period": period}

        def size(kept: int, clock: dict[str, Any] = clock) -> int:
            return probe.payload(resolve(entry.method, entry.options | clock | {"density": kept / TILE}))

        kept = nearest(size, period * bytes_a_step)
        if abs(size(kept) / (period * bytes_a_step) - 1) < 0.2:
            yield period, entry.options | clock | {"density": kept / TILE}


def nearest(size: Callable[[int], int], target: float) -> int:
    """The number from 1 to a whole tile whose size, which grows with it, is nearest to the target.

    >>> nearest(lambda kept: 10 * kept + 7, 52.1)
    5
    """
    low, high = 1, TILE
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if size(middle) < target else (low, middle)
    return min((each for each in (low - 1, low) if each >= 1), key=lambda each: abs(size(each) - target))


def runs(calibration: dict[str, Any], base: Trial, seeds: Sequence[int]) -> list[tuple[str, record.Record]]:
    """All runs by name, one budget after the other, all runs of a seed together."""
    by_label = {entry.label: entry for entry in methods()}
    found = []
    for budget in BUDGETS:
        for seed in seeds:
            for name, options in calibration["options"].items():
                if name.startswith(f"{budget}x: "):
                    entry = by_label[_label(name)]
                    trial = replace(base, method=entry.method, options=options, seed=seed, **entry.trial)
                    found.append((f"{name}: seed {seed}", trial.config()))
    return found


def _label(name: str) -> str:
    """The method's label in `4x: H20 label` and `4x: every step label`."""
    clock = name.partition(": ")[2]
    return clock.removeprefix("every step ") if clock.startswith("every step ") else clock.partition(" ")[2]


def tables(results: Sequence[record.Record], calibration: dict[str, Any]) -> dict[str, str]:
    """The README's tables."""
    found = {}
    for budget in BUDGETS:
        here: dict[str, list[record.Record]] = {}
        for each in results:
            if each["name"].startswith(f"{budget}x: "):
                here.setdefault(each["name"].split(": ")[1], []).append(each)
        spent = budget * calibration["reference_bytes_a_step"]
        rows = [_line(label, several, spent) for label, several in here.items()]
        header = ["period and method", "density", "payload bytes a step", "of the budget", "validation loss", "seeds"]
        found[f"budget {budget}x"] = record.markdown(header, sorted(rows, key=lambda row: str(row[4])))
    return found


def _line(label: str, several: Sequence[record.Record], budget: float) -> list[object]:
    """One row: what was measured in the runs, not what was calibrated. The last mean of drifting replicas is apart."""
    config = several[0]["config"]
    spent = sum(each["bytes"]["payload"] - each["bytes"]["closing"] for each in several)
    spent /= len(several) * config["steps"]
    density = config["options"].get("density")
    losses = [each["loss"] for each in several]
    shown = record.mean_and_spread(losses) if None not in losses else "not finite"
    kept = f"1/{1 / density:,.0f}" if density else "1"
    return [label, kept, f"{spent:,.0f}", f"{spent / budget:.2f}", shown, len(several)]


def main() -> int:
    """Do what is asked; the exit code is 1 if a run failed."""
    made = parser(__doc__, HERE / "results" / "runs.jsonl", SEEDS)
    made.add_argument("--calibrate", action="store_true", help="choose densities and periods anew, and stop")
    given = made.parse_args()
    kept = HERE / "results" / "calibration.json"
    if given.table:
        record.fill(HERE / "README.md", tables(record.read_all(kept.parent), json.loads(kept.read_text())))
        return 0
    if given.quick:
        return quick(given)
    corpus = text_of(given.text)
    base = Trial(method=None, steps=given.steps, text=corpus.digest)
    if given.calibrate or not kept.is_file():
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps(calibrate(base, corpus), indent=1) + "\n")
    if given.calibrate:
        return 0
    todo = runs(json.loads(kept.read_text()), base, given.seeds)
    return int(record.carry_out(todo, runner(given), given) > 0)


def quick(given: argparse.Namespace) -> int:
    """A toy of the same shape: one budget, one period."""
    given.text = STDLIB
    corpus = text_of(STDLIB)
    base = Trial(method=None, steps=8, batch=2, replicas=2, model="gpt_tiny", warmup=2, points=2, windows=16)
    calibration = calibrate(base, corpus, budgets=(4,))
    chosen = ("4x: H2 decoupled none:", "4x: H5 decoupled none:", "4x: H5 sparseloco:")
    todo = [(name, config) for name, config in runs(calibration, base, [0]) if name.startswith(chosen)]
    with tempfile.TemporaryDirectory() as folder:
        given.out, given.results = Path(folder) / "quick.jsonl", Path(folder)
        failed = record.carry_out(todo, runner(given), given)
        print(tables(record.read(given.out), calibration)["budget 4x"])
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
