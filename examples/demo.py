"""The demonstration: one small GPT, four replicas on a slow line, three ways to agree; then real processes.

Offline, about a minute on two cores. Text: the Python standard library's own sources.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch import Tensor

import lowtide
from lowtide.train.data import single_pass, stdlib_text
from lowtide.train.models.gpt import GPT, gpt_tiny

LINK = "50mbit/40ms"
REPLICAS, PROCESSES = 4, 2
BATCH, CONTEXT, PERIOD = 8, 64, 8
STEP_SECONDS = 0.05  # what a step takes on the simulated machines
RUNS = {
    "ddp": {},
    "diloco": {"period": PERIOD, "outer_lr": 1.0, "momentum": 0.6},
    "decoupled": {"period": PERIOD},
}


@dataclass
class Row:
    """One line of the table."""

    name: str
    state: str = "waiting"
    step: int = 0
    loss: float = float("nan")
    validation: float = float("nan")
    sent: int = 0
    seconds: float = float("nan")
    fingerprint: str = ""


class View:
    """The live table; plain lines where there is no terminal."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self.console = Console()
        self.live = Live(self.table(), console=self.console, refresh_per_second=4, transient=False)
        self._shown = 0.0

    def table(self) -> Table:
        """All rows as they stand."""
        table = Table(title=f"{REPLICAS} replicas over a simulated {LINK} line, then {PROCESSES} real processes")
        for name in ("method", "state", "step", "loss", "held out", "sent MB", "fewer", "time", "model"):
            table.add_column(name, justify="left" if name in ("method", "state") else "right", no_wrap=True)
        dense = self.rows[0].sent
        for row in self.rows:
            # fewer than ddp with as many replicas; another number of them sends something else anyway
            alike = row.sent and row.state == "done" and row.name in RUNS
            table.add_row(
                row.name,
                row.state,
                str(row.step),
                _number(row.loss),
                _number(row.validation),
                f"{row.sent / 1e6:.2f}",
                f"{dense / row.sent:.0f}x" if alike else "",
                "" if math.isnan(row.seconds) else f"{row.seconds:.0f} s",
                row.fingerprint[:6],
            )
        return table

    def update(self, *, now: bool = False) -> None:
        """Redraw, at most four times a second."""
        if now or time.monotonic() - self._shown > 0.25:
            self._shown = time.monotonic()
            self.live.update(self.table())


def train(name: str, steps: int, row: Row | None, view: View | None) -> tuple[float, int, str]:
    """One replica: a plain loop with lowtide attached. Returns validation loss, bytes sent, fingerprint."""
    torch.manual_seed(0)
    corpus = stdlib_text(6_000_000)
    model = GPT(gpt_tiny())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps + 1, pct_start=0.1)
    with lowtide.attach(model, optimizer, name, **RUNS[name]) as sync:
        stream = single_pass(corpus.train, sync.size, sync.rank, BATCH, CONTEXT)
        for step in range(steps):
            loss = model.loss(stream[step])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if row is not None and view is not None and sync.rank == 0:
                row.state, row.step, row.loss, row.sent = "training", step + 1, loss.item(), sync.stats().sent
                view.update()
    return validation(model, corpus.validation), sync.stats().sent, sync.fingerprint()


def validation(model: GPT, text: Tensor) -> float:
    """Mean loss over the start of the validation text."""
    width = CONTEXT + 1
    with torch.no_grad():
        return model.loss(text[: 256 * width].long().view(-1, width)).item()


def on_simulated_line(row: Row, view: View, steps: int) -> None:
    """N replicas in this process, on a virtual clock."""
    result = lowtide.simulate(
        lambda: train(row.name, steps, row, view), replicas=REPLICAS, link=LINK, step_seconds=STEP_SECONDS
    )
    row.validation, row.sent, row.fingerprint = result.returns[0]
    row.seconds, row.state = result.seconds, "done"
    if len(set(result.fingerprints)) != 1:
        raise SystemExit(f"{row.name}: replicas differ")


def on_processes(row: Row, view: View, steps: int) -> None:
    """The same loop in real processes that talk over this machine's loopback."""
    row.state = "training"
    view.update(now=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    common = os.environ | {"LOWTIDE_ADDRESS": address, "LOWTIDE_WORLD_SIZE": str(PROCESSES), "OMP_NUM_THREADS": "1"}
    begun = time.perf_counter()
    command = [sys.executable, __file__, "--worker", "--steps", str(steps)]
    replicas = [
        subprocess.Popen(command, env=common | {"LOWTIDE_RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(PROCESSES)
    ]
    answers = [replica.communicate()[0] for replica in replicas]
    if any(replica.returncode for replica in replicas):
        raise SystemExit("a process failed; its error stands above")
    results = [json.loads(answer.splitlines()[-1]) for answer in answers]
    row.validation, row.sent, row.fingerprint = results[0]
    row.step, row.seconds, row.state = steps, time.perf_counter() - begun, "done"
    if len({fingerprint for _, _, fingerprint in results}) != 1:
        raise SystemExit("the processes differ")


def main() -> None:
    """Train four times, and leave the figures as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.worker:
        print(json.dumps(train("decoupled", arguments.steps, None, None)))
        return
    rows = [Row(name) for name in RUNS]
    processes = Row("processes")
    view = View([*rows, processes])
    with view.live:
        for row in rows:
            on_simulated_line(row, view, arguments.steps)
            view.update(now=True)
        on_processes(processes, view, arguments.steps)
        view.update(now=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = arguments.out / "results.jsonl"
    report.write_text("".join(json.dumps(vars(row)) + "\n" for row in view.rows))
    view.console.print(
        f"decoupled sent {rows[0].sent / rows[2].sent:.0f}x less than ddp and "
        f"{rows[1].sent / rows[2].sent:.0f}x less than diloco; on this line that is "
        f"{rows[0].seconds:.0f} s, {rows[1].seconds:.0f} s and {rows[2].seconds:.0f} s.\n"
        f"'processes' is decoupled on {PROCESSES} real ones. In every run all replicas ended as one model.\n"
        f"Figures: {report}"
    )


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3f}"


if __name__ == "__main__":
    main()
