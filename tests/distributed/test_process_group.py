from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowtide.messages import Gather, Scatter, Sum, Tag
from lowtide.transport.simulated import Lockstep

SCRIPT = Path(__file__).with_name("transport_ranks.py")
LIMIT = 90.0
pytestmark = pytest.mark.distributed


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def ranks(tmp_path):
    """Run a scenario; what each rank wrote, and the exit codes."""

    def run(scenario: str, size: int) -> tuple[dict[int, dict], list[int]]:
        command = [sys.executable, str(SCRIPT), scenario, str(tmp_path), str(size), str(free_port())]
        done = subprocess.run(command, timeout=LIMIT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return written(tmp_path), json.loads(done.stdout.splitlines()[-1])

    return run


def written(folder: Path) -> dict[int, dict]:
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}


def drawn(rank: int) -> torch.Tensor:
    return torch.randn(10_007, generator=torch.Generator().manual_seed(rank))


def simulated(size: int) -> list[list]:
    """What the scenarios' `shared` gives on each rank, by the simulator."""

    def worker(t):
        gathered = t.start(Gather(b"%d" % t.rank * (t.rank + 1)), Tag("plan", 0)).finish().payloads
        out = tuple(b"%d%d" % (t.rank, peer) for peer in range(t.size))
        scattered = t.start(Scatter(out), Tag("plan", 1)).finish().payloads
        total = t.start(Sum(drawn(t.rank)), Tag("plan", 2)).finish().total
        return [*(p.decode() for p in gathered), *(p.decode() for p in scattered), total.double().sum().item()]

    return list(Lockstep(size).run(worker))


def check_environment(seen: dict[int, dict], size: int) -> None:
    expected = simulated(size)
    for rank, found in seen.items():
        assert found["available"] == "launcher"
        assert found["untouched"]
        assert found["default"] == "group"
        assert found["rank"] == rank
        assert found["own"] == found["beside"] == expected[rank]
        assert found["device"][:-1] == expected[rank][:-1]
        assert found["device"][-1] == pytest.approx(expected[rank][-1], rel=1e-5)
        assert found["alive"] == size


def test_processes_agree_with_the_simulator_beside_any_default_group(ranks):
    seen, codes = ranks("environment", 3)
    assert codes == [0, 0, 0]
    check_environment(seen, 3)
    assert [seen[rank].get("part", [None])[0] for rank in range(3)] == [0, None, 1]
    assert seen[0]["part"][1] == 2
    assert seen[0]["part"][2:4] == ["0", "11"]


def test_our_own_variables_are_enough(ranks):
    seen, codes = ranks("ours", 2)
    assert codes == [0, 0]
    assert [seen[rank]["own"] for rank in range(2)] == simulated(2)


@pytest.mark.faults
def test_a_killed_process_ends_the_event_at_once_and_is_named(ranks):
    seen, codes = ranks("killed", 3)
    assert codes == [0, 0, -9]
    for rank in (0, 1):
        assert (seen[rank]["error"], seen[rank]["ranks"]) == ("PeerLostError", [2]), seen[rank]["text"]
        assert seen[rank]["seconds"] < 30.0  # of a time-out of 60


@pytest.mark.faults
def test_a_stopped_process_costs_the_time_out_and_is_named(ranks):
    seen, codes = ranks("stopped", 3)
    assert codes == [0, 0, -9]
    for rank in (0, 1):
        assert (seen[rank]["error"], seen[rank]["ranks"]) == ("PeerLostError", [2]), seen[rank]["text"]
        assert 1.0 < seen[rank]["seconds"] < 10.0  # of a time-out of 2


@pytest.mark.faults
def test_ctrl_c_ends_a_wait_and_the_others_hear_why(ranks):
    seen, codes = ranks("interrupted", 2)
    assert codes == [0, 0]
    assert seen[0]["error"] == "KeyboardInterrupt"
    assert seen[0]["seconds"] < 0.5
    assert (seen[1]["error"], seen[1]["ranks"]) == ("PeerLostError", [0])
    assert "rank 0 stopped during plan 'plan', event 1, leg 0: Ctrl-C" in seen[1]["text"]


def test_a_process_that_forgets_to_close_still_ends(ranks):
    seen, codes = ranks("forgotten", 2)
    assert codes == [0, 0]
    assert seen == {0: {"done": True}, 1: {"done": True}}


def test_torchrun_starts_it(tmp_path):
    options = ["--nproc-per-node", "2", "--master-port", str(free_port())]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(SCRIPT), "torchrun", str(tmp_path)]
    done = subprocess.run(command, timeout=LIMIT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = written(tmp_path)
    assert sorted(seen) == [0, 1]
    check_environment(seen, 2)
