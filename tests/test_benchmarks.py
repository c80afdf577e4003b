"""The benchmarks' own machinery: stacked replicas are real replicas, and results are added once and whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import lowtide
from lowtide.train.data import single_pass, stdlib_text
from lowtide.train.models import GPT, gpt_tiny
from lowtide.train.simulate import current_replica

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import record  # noqa: E402
import stacked  # noqa: E402
import trial  # noqa: E402

REPLICAS, STEPS = 3, 10
METHODS = {
    "ddp": {},
    "local_sgd": {"period": 4},
    "diloco": {"period": 5},
    "decoupled": {"period": 4},
    "streaming_diloco": {"period": 4, "fragments": 2},
    "fda": {"theta": "interval:3"},
    "powersgd": {"rank": 1},
    "noloco": {"period": 5},
    "eager": {"period": 4},
    "sparta": {"density": 0.1},
}


@pytest.fixture(scope="module")
def shares():
    text = stdlib_text(max_bytes=300_000).train
    return [single_pass(text, REPLICAS, rank, 2, 64) for rank in range(REPLICAS)]


def optimizer(groups):
    return torch.optim.AdamW(groups, lr=2e-3, weight_decay=0.1, fused=True)


def in_lockstep(method, shares):
    """The same training as a user writes it: a plain loop under `simulate`."""

    def worker():
        rank = current_replica().rank
        torch.manual_seed(0)
        model = GPT(gpt_tiny())
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() == 1]
        inner = optimizer([{"params": matrices}, {"params": others, "weight_decay": 0.0}])
        losses = []
        with lowtide.attach(model, inner, method, settings=lowtide.Settings(check_every=0, start="check")) as session:
            for step in range(STEPS):
                loss = model.loss(shares[rank][step])
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                inner.step()
                inner.zero_grad()
                losses.append(loss.item())
        return losses, stacked.Moved.of(session.meter, session.stats().rounds), dict(model.named_parameters())

    result = lowtide.simulate(worker, replicas=REPLICAS)
    losses = [sum(each) / REPLICAS for each in zip(*(side[0] for side in result.returns), strict=True)]
    return losses, [side[1] for side in result.returns], result.returns[0][2]


def in_a_stack(method, shares, points=(), watch=None):
    torch.manual_seed(0)
    stack = stacked.Stack(GPT(gpt_tiny()), REPLICAS, lambda model, batch: model.loss(batch), optimizer, clip=1.0)
    batches = [torch.stack([share[step] for share in shares]) for step in range(STEPS)]
    training = stacked.Training(stack, method, batches, lambda _: 2e-3, frozenset(points), watch or (lambda *_: None))
    moved = training.run()
    return [float(loss) for loss in training.losses], list(moved), stack


@pytest.mark.parametrize("name", METHODS)
def test_a_stack_trains_as_replicas_in_lockstep_do(name, shares):
    method = getattr(lowtide, name)(**METHODS[name])
    losses, moved, model = in_lockstep(method, shares)
    stacked_losses, stacked_moved, stack = in_a_stack(method, shares)
    assert stacked_losses == pytest.approx(losses, abs=1e-4)
    for parameter, tensor in model.items():
        torch.testing.assert_close(stack.parameters[parameter][0].detach(), tensor.detach(), atol=2e-3, rtol=0)
    for one, other in zip(stacked_moved, moved, strict=True):
        assert one.rounds == other.rounds and one.closing == other.closing
        assert one.payload == pytest.approx(other.payload, rel=0.01)


@pytest.mark.parametrize("name", METHODS)
def test_a_stack_on_a_device_of_its_own_memory_trains_alike(name, shares, monkeypatch):
    """What a GPU adds is that slices have to be fetched before a round and stored behind it."""
    method = getattr(lowtide, name)(**METHODS[name])
    points = {}
    expected, _, same = in_a_stack(method, shares, (4, 7), points.setdefault)
    plain = stacked.Block.__init__

    def apart(block, *arguments):
        plain(block, *arguments)
        block.host = block.here.clone()

    monkeypatch.setattr(stacked.Block, "__init__", apart)
    others = {}
    losses, _, stack = in_a_stack(method, shares, (4, 7), others.setdefault)
    assert losses == expected
    for parameter, tensor in same.parameters.items():
        assert torch.equal(stack.parameters[parameter], tensor)
        assert all(torch.equal(others[step][parameter], points[step][parameter]) for step in points)


def test_replicas_of_a_stack_end_as_one_model(shares):
    _, _, stack = in_a_stack(lowtide.decoupled(period=4), shares)
    for parameter in stack.parameters.values():
        assert torch.equal(parameter, parameter[:1].expand_as(parameter))


def test_the_agreed_model_is_the_anchor_and_training_goes_on_undisturbed(shares):
    seen = {}
    method = lowtide.local_sgd(period=4)
    watched, _, _ = in_a_stack(method, shares, (4, 6), seen.setdefault)
    alone, _, _ = in_a_stack(method, shares)
    assert watched == alone
    assert sorted(seen) == [4, 6]
    assert all(torch.equal(seen[4][name], seen[6][name]) for name in seen[4])


def test_a_replicas_gradient_is_clipped_by_its_own_norm():
    model = torch.nn.Linear(2, 1, bias=False)
    stack = stacked.Stack(model, 2, lambda model, x: model(x).sum(), torch.optim.SGD, clip=1.0)
    stack.gradients(torch.stack([torch.full((1, 2), 3.0), torch.full((1, 2), 0.1)]))
    norms = stack.parameters["weight"].grad.flatten(1).norm(dim=1)
    assert norms.tolist() == pytest.approx([1.0, 0.1 * 2**0.5], rel=1e-4)


def test_the_rate_rises_then_falls_to_a_tenth():
    each = trial.Trial(method=None, lr=1.0, warmup=5, steps=20)
    rates = [each.rate(step) for step in range(1, 21)]
    assert rates.index(max(rates)) == 4
    assert rates[:5] == sorted(rates[:5]) and rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


def test_a_run_says_which_text_it_is_for():
    config = trial.Trial(method=None, replicas=1, steps=1, text="another").config()
    with pytest.raises(SystemExit, match="digest another"):
        trial.run(config, text=trial.STDLIB)


def test_a_missing_text_is_said_with_what_to_do(tmp_path):
    with pytest.raises(SystemExit, match="make corpus"):
        trial.text_of(tmp_path / "nowhere")


def options(path, **changes):
    given = {
        "out": path,
        "results": path.parent / "results",
        "only": "*",
        "list": False,
        "jobs": 1,
        "threads": 1,
        "limit_seconds": float("inf"),
    }
    return Namespace(**given | changes)


def square(config):
    if config["number"] < 0:
        raise ValueError("negative")
    return {"square": config["number"] ** 2, "seconds": {"simulated": 1.0}}


def tasks(*numbers):
    return [(f"number {number}", {"number": number}) for number in numbers]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_second_call_does_what_the_first_left(tmp_path, jobs, capsys):
    path = tmp_path / "runs.jsonl"
    assert record.carry_out(tasks(1, 2), square, options(path)) == 0
    assert record.carry_out(tasks(1, 2, 3), square, options(path, jobs=jobs)) == 0
    results = record.read(path)
    assert [each["square"] for each in results] == [1, 4, 9]
    assert "3 runs, 1 of them still to do" in capsys.readouterr().out
    for each in results:
        assert each["seconds"]["simulated"] == 1.0 and each["seconds"]["real"] >= 0
        assert {"source", "commit", "versions", "cpu", "threads", "config", "key"} <= set(each)


def test_a_run_that_fails_is_counted_and_stops_no_other(tmp_path, capsys):
    path = tmp_path / "runs.jsonl"
    assert record.carry_out(tasks(-1, 2), square, options(path)) == 1
    assert [each["square"] for each in record.read(path)] == [4]
    assert "negative" in capsys.readouterr().err


def test_no_run_starts_after_the_limit(tmp_path):
    path = tmp_path / "runs.jsonl"
    record.carry_out(tasks(1, 2, 3), square, options(path, limit_seconds=-1.0))
    assert record.read(path) == []


def test_only_the_runs_that_fit_a_pattern_are_done(tmp_path):
    path = tmp_path / "runs.jsonl"
    record.carry_out(tasks(1, 2, 12), square, options(path, only="number 1*"))
    assert [each["square"] for each in record.read(path)] == [1, 144]


def test_a_line_that_was_cut_short_costs_that_line_only(tmp_path, capsys):
    path = tmp_path / "runs.jsonl"
    path.write_text('{"key": "a", "loss": 1}\n{"key": "b", "lo')
    record.append(path, {"key": "c", "loss": float("nan")})
    assert record.read(path) == [{"key": "a", "loss": 1}, {"key": "c", "loss": None}]
    assert "runs.jsonl:2" in capsys.readouterr().err


def test_a_block_takes_the_place_of_the_old_one(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- a -->\nold\n<!-- end a -->\nafter\n")
    record.fill(page, {"a": "new\n"})
    record.fill(page, {"a": "newer"})
    assert page.read_text() == "before\n<!-- a -->\nnewer\n<!-- end a -->\nafter\n"
    with pytest.raises(SystemExit, match="0 places"):
        record.fill(page, {"b": ""})


@pytest.mark.parametrize("name", ["study", "curve", "overhead", "simulation"])
def test_every_benchmark_has_a_quick_run(name):
    """It runs from anywhere, needs no data, and leaves nothing behind."""
    before = sorted((BENCHMARKS / name).rglob("*.json*"))
    call = [sys.executable, BENCHMARKS / name / "run.py", "--quick", "--threads", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(BENCHMARKS.parent / "src")}
    done = subprocess.run(call, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "| --- | --:" in done.stdout
    assert sorted((BENCHMARKS / name).rglob("*.json*")) == before


def test_the_tables_can_be_made_from_what_is_there():
    for name in ("study", "curve", "overhead", "simulation"):
        for path in (BENCHMARKS / name / "results").glob("*.jsonl"):
            for line in path.read_text().splitlines():
                each = json.loads(line)
                assert each["key"] == record.key_of(each["config"]), (path, each["name"])
