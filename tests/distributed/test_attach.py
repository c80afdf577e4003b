from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.distributed.attach_ranks import SOME, STEPS, STRUCK, free_port, trained
from tests.train.loops import METHODS, adamw, batch, net, rank
from torch import nn

from lowtide import attach, simulate

ROOT = Path(__file__).parents[2]
LIMIT = 90.0
pytestmark = pytest.mark.distributed


@pytest.fixture
def ranks(tmp_path):
    """Run a scenario; what each rank wrote, and the exit codes."""

    def run(scenario: str, size: int) -> tuple[dict, dict[str, list[int]]]:
        command = [sys.executable, "-m", "tests.distributed.attach_ranks", scenario, str(tmp_path), str(size)]
        done = subprocess.run(
            command, timeout=LIMIT, capture_output=True, text=True, check=False, cwd=ROOT, env=environment()
        )
        assert done.returncode == 0, done.stderr
        codes = json.loads(done.stdout.splitlines()[-1])
        seen = {str(path.relative_to(tmp_path))[:-5]: json.loads(path.read_text()) for path in tmp_path.rglob("*.json")}
        assert scenario == "killed" or set(codes[scenario]) == {0}, done.stderr
        return seen, codes

    return run


def environment() -> dict[str, str]:
    """Ours, with one thread and without what another launcher may have left."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


def simulated(names, size: int) -> list[dict]:
    """The same runs in one process."""
    return list(simulate(lambda: {name: trained(name) for name in names}, replicas=size).returns)


def test_processes_and_simulation_give_the_same_bits_and_the_same_bytes(ranks):
    seen, _ = ranks("every_method", 3)
    for number, expected in enumerate(simulated(METHODS, 3)):
        for name in METHODS:
            assert seen[str(number)][name] == expected[name], name


@pytest.mark.parametrize("size", [2, 4])
def test_a_loop_of_any_number_of_processes_is_the_simulated_one(ranks, size):
    seen, _ = ranks("some_methods", size)
    for number, expected in enumerate(simulated(SOME, size)):
        assert seen[str(number)] == expected
    assert len({json.dumps([run[:2] for run in each.values()]) for each in seen.values()}) == 1


@pytest.mark.parametrize(("scenario", "size"), [("attached_again", 2), ("subgroup_again", 4)])
def test_a_process_may_attach_again(ranks, scenario, size):
    seen, _ = ranks(scenario, size)
    assert len(seen) == size
    for found in seen.values():
        # the same loop from the same start, whatever ran before it
        assert len({json.dumps(run) for run in found.values()}) == 1


@pytest.mark.faults
def test_a_killed_process_is_named_and_the_others_are_as_before_the_round(ranks):
    """The ranks themselves compare parameters and state, and fail if they differ."""
    seen, codes = ranks("killed", 3)
    for name in STRUCK:
        assert codes[name] == [0, 0, -9], name
        for number in (0, 1):
            found = seen[f"{name}/{number}"]
            assert found["ranks"] == [2], found
            assert found["seconds"] < 15.0  # of a time-out of 20
        assert seen[f"{name}/0"]["step"] == seen[f"{name}/1"]["step"]


def test_replicas_that_do_not_fit_are_told_alike(ranks):
    seen, _ = ranks("mismatched", 3)
    assert seen["0"] == seen["1"] == seen["2"]
    assert seen["0"] == {
        "model": "AgreementError: replicas differ in parameters: "
        "tensor 0 is weight (2, 3) float32 on rank 0 and weight (3, 3) float32 on rank 2\n"
        "hint: build the same model everywhere, and freeze the same parts before you attach",
        "method": "AgreementError: replicas differ in method: "
        "rank 0 has diloco(period=3, outer_lr=0.7, momentum=0.9, bits=32); "
        "rank 1 has diloco(period=3, outer_lr=0.7, momentum=0.9, bits=32); "
        "rank 2 has diloco(period=4, outer_lr=0.7, momentum=0.9, bits=32)\n"
        "hint: give every replica the same method and options",
        "start": seen["0"]["start"],
        "fine": "",
    }
    assert re.fullmatch(
        r"AgreementError: replicas differ in their first parameters: "
        r"rank 0: (\w{12}), rank 1: \1, rank 2: (?!\1)\w{12}\n.*",
        seen["0"]["start"],
    )


def test_a_default_group_of_the_users_own_is_used_and_left_alone(ranks):
    seen, _ = ranks("default_group", 2)
    for number, expected in enumerate(simulated(SOME, 2)):
        found = seen[str(number)]
        assert found["used"] == ["ProcessGroup"] * len(SOME)
        assert found["alive"] == 2
        assert {name: found[name] for name in SOME} == {name: run[:2] for name, run in expected.items()}


def test_a_replica_that_leaves_by_an_exception_is_heard_at_once(ranks):
    seen, _ = ranks("left_by_one", 3)
    assert seen["2"]["kind"] == "FileNotFoundError"
    for number in ("0", "1"):
        assert seen[number]["kind"] == "PeerLostError"
        assert "rank 2 stopped" in seen[number]["text"]
        assert "FileNotFoundError" in seen[number]["text"]
        assert seen[number]["seconds"] < 20.0  # of a time-out of 60


def test_stopping_with_a_message_on_its_way_and_going_on_is_never_having_stopped(ranks):
    seen, _ = ranks("saved", 2)
    assert seen["0"] == seen["1"]
    assert seen["0"]["resumed"] == seen["0"]["whole"]


def unsharded(name: str) -> list[float]:
    """What two replicas that are not sharded come to, from the start of the weights."""

    def worker():
        model = net(rank())
        model.drop.p = 0.0
        optimizer = adamw(model)
        method, options, _ = METHODS[name]
        with attach(model, optimizer, method, **options):
            for step in range(1, STEPS):
                x, y = batch(step, rank())
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        return model.first.weight.detach().flatten()[:20]

    return simulate(worker, replicas=2).returns[0]


def test_islands_of_sharded_models_agree_shard_by_shard(ranks):
    seen, _ = ranks("islands", 4)
    places = {tuple(found["place"]): found for found in seen.values()}
    assert sorted(places) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for name in ("local_sgd", "decoupled", "streaming", "ddp"):
        found = {place: each[name] for place, each in places.items()}
        assert all(each["sharded"] for each in found.values())
        # every shard is laid out as what its process holds
        assert found[0, 0]["shapes"]["second.weight"] == found[0, 1]["shapes"]["second.weight"] == [55, 40]
        for shard in (0, 1):
            assert found[0, shard]["shard"] == found[1, shard]["shard"]
            assert found[0, shard]["fingerprint"] == found[1, shard]["fingerprint"]
        assert found[0, 0]["shard"] != found[0, 1]["shard"]
        assert len({each["whole"] for each in found.values()}) == 1
        assert found[0, 0]["rounds"] >= 2
        if name in ("local_sgd", "ddp"):
            # element by element, so sharding makes no difference
            torch.testing.assert_close(torch.tensor(found[0, 0]["first"]), unsharded(name), rtol=2e-3, atol=2e-4)


def test_the_example_under_torchrun_prints_what_the_simulation_prints():
    example = [str(ROOT / "examples" / "plain_loop.py"), "--method", "decoupled", "--steps", "5", "--period", "2"]

    def fingerprints(command: list[str]) -> list[str]:
        done = subprocess.run(
            command, timeout=LIMIT, capture_output=True, text=True, check=False, cwd=ROOT, env=environment()
        )
        assert done.returncode == 0, done.stderr
        lines = re.findall(r"rank \d of 2: .* after 5 steps, 3 rounds, .* fingerprint \w{16}", done.stdout)
        assert len(lines) == 2, done.stdout
        return sorted(lines)

    options = ["--nproc-per-node", "2", "--master-port", str(free_port())]
    launched = fingerprints([sys.executable, "-m", "torch.distributed.run", *options, *example])
    assert launched == fingerprints([sys.executable, *example, "--simulate", "2"])
    assert len({line[-16:] for line in launched}) == 1
