"""The meter against the counters of real network interfaces; skipped where namespaces cannot be made."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PRIVATE = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child"]
pytestmark = pytest.mark.netlab


def why_not() -> str:
    """What is missing for a lab, or nothing."""
    for tool in ("unshare", "ip", "mount"):
        if shutil.which(tool) is None:
            return f"no {tool}: install util-linux and iproute2"
    probe = [*PRIVATE, "ip", "link", "add", "hub", "type", "bridge"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return f"no network namespaces with a bridge (root is needed): {done.stderr.strip()}" if done.returncode else ""


@pytest.fixture(scope="module")
def nodes() -> dict[int, dict[str, dict]]:
    """What each of three nodes counted, by rank and kind."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    command = [*PRIVATE, sys.executable, str(HERE / "lab.py"), "3", sys.executable, str(HERE / "meter_node.py")]
    done = subprocess.run(command, timeout=120, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["rank"]: {row["kind"]: row for row in line["seen"]} for line in lines}


def ways(nodes: dict[int, dict[str, dict]], kind: str) -> list[tuple[int, int, int]]:
    """For each rank and way: what the meter says, and the least and most that the interface says of it.

    What TCP sent twice was counted twice on its way out; of what it was on the way in, we only know the most.
    """
    rows = [found[kind] for _, found in sorted(nodes.items())]
    again = sum(row["again"] for row in rows)
    found = []
    for row in rows:
        (sent, received), (wire_sent, wire_received) = row["metered"], row["wire"]
        found.append((sent, wire_sent - row["again"], wire_sent - row["again"]))
        found.append((received, wire_received - again + row["again"], wire_received))
    return found


def test_every_node_has_counted_every_kind(nodes):
    kinds = ["Gather", "Sum", "Scatter", "Group", "Send", "Nothing"]
    assert {rank: list(found) for rank, found in nodes.items()} == dict.fromkeys(range(3), kinds)


@pytest.mark.parametrize("kind", ["Gather", "Sum", "Scatter", "Group", "Send"])
def test_the_meter_agrees_with_the_interface_within_two_percent(nodes, kind):
    large = [way for way in ways(nodes, kind) if way[0] > 1_000_000]
    assert len(large) >= 2
    for metered, least, most in large:
        assert 0.98 * least <= metered <= 1.02 * most, nodes


def test_even_tiny_events_are_counted_within_a_tenth(nodes):
    for metered, least, most in ways(nodes, "Nothing"):
        assert 0.9 * least <= metered <= 1.1 * most, nodes


def test_nothing_of_the_lab_is_left(nodes):
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    links = subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout
    assert "node0" not in names
    assert "port0" not in links
    assert nodes
