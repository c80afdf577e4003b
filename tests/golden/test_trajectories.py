"""Golden trajectories: twelve steps of every method on generated data, as they were when they were last looked at.

A change that is not meant to alter numbers must leave these files alone. One that is meant to rewrites them with
LOWTIDE_REWRITE_GOLDEN=1, and the difference is part of its review. Processors round differently, so values are
compared to one part in ten thousand; sizes are exact except where positions are coded, which may move a little.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.contract.test_methods import ALL_METHODS, Case, every_method
from tests.sync.toy import Cluster

FOLDER = Path(__file__).parent / "trajectories"
STEPS = 12
VALUES = {"rel": 1e-4}
CODED = {"rel": 0.02}


def rounded(value: float) -> float:
    """Six significant digits."""
    return float(f"{value:.6g}")


def trajectory(case: Case) -> dict[str, Any]:
    """Losses of the first replica at every step, of all at the end, how far their mean moved, and each message."""
    cluster = case.cluster()
    start = cluster.parameters()
    losses = []
    for _ in range(STEPS):
        cluster.train(1)
        losses.append(rounded(cluster.loss()))
    return {
        "method": str(case.method),
        "losses": losses,
        "last": [rounded(cluster.loss(rank)) for rank in range(case.size)],
        "moved": rounded(float((cluster.everyone().mean(0) - start).norm())),
        "messages": [list(sent[:4]) for sent in cluster.sent],
        "bytes": [list(sent[4]) for sent in cluster.sent],
    }


def path(case: Case) -> Path:
    return FOLDER / f"{case.name}.json"


def written(record: dict[str, Any]) -> str:
    """One line for each entry, so that a change shows where it is."""
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in record.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


@every_method
def test_a_method_does_what_it_did(case):
    found = trajectory(case)
    if os.environ.get("LOWTIDE_REWRITE_GOLDEN") == "1":
        FOLDER.mkdir(exist_ok=True)
        path(case).write_text(written(found))
    golden = json.loads(path(case).read_text())
    assert found.keys() == golden.keys()
    assert found["method"] == golden["method"]
    assert found["messages"] == golden["messages"]
    for name in ("losses", "last", "moved"):
        assert found[name] == pytest.approx(golden[name], **VALUES), name
    for mine, theirs in zip(found["bytes"], golden["bytes"], strict=True):
        assert mine == (pytest.approx(theirs, **CODED) if coded(case) else theirs)


def coded(case: Case) -> bool:
    """Whether the method says positions, whose code has no fixed length."""
    codecs = [getattr(plan.exchange, name, None) for plan in case.method.plans for name in ("codec", "up")]
    return any(codec is not None and not codec.select.shared for codec in codecs)


def test_every_file_belongs_to_a_method():
    assert {file.stem for file in FOLDER.glob("*.json")} == {case.name for case in ALL_METHODS}


def test_a_trajectory_is_told_from_another():
    """The tolerances are no wider than what methods differ by."""
    records = {file.stem: json.loads(file.read_text()) for file in FOLDER.glob("*.json")}
    alike = [
        (one, other)
        for one in records
        for other in records
        if one < other
        and records[one]["moved"] == pytest.approx(records[other]["moved"], **VALUES)
        and records[one]["messages"] == records[other]["messages"]
    ]
    assert alike == []


def test_the_toy_task_is_the_same_everywhere():
    """Generated data: if this differs, the trajectories cannot agree."""
    cluster = Cluster(ALL_METHODS[0].method, 2)
    assert cluster.loss() == pytest.approx(0.2667000, rel=1e-5)
