"""A small network lab: `lab.py NODES COMMAND...` runs a command on each of 2 to 4 nodes, joined by a bridge.

It must be started in private namespaces, which the kernel removes with the last process in them, whatever happens:

    unshare --net --mount --pid --fork --kill-child python lab.py 3 python node.py

Each node is a network namespace with an `eth0` at 10.77.0.(1 + number). The command finds NODE, NODES and
ADDRESS (of node 0) in its environment. Needs root and iproute2. What the nodes print comes out line by line.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PORT = 29_500


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def address(node: int) -> str:
    return f"10.77.0.{1 + node}"


def build(nodes: int) -> None:
    """Everything stays in this process's own namespaces: names too, since /run/netns is a private folder."""
    Path("/run/netns").mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "lab", "/run/netns"], check=True)
    ip("link", "add", "hub", "type", "bridge")
    ip("link", "set", "hub", "up")
    for node in range(nodes):
        name = f"node{node}"
        ip("netns", "add", name)
        ip("link", "add", f"port{node}", "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", f"port{node}", "master", "hub", "up")
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "addr", "add", f"{address(node)}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        # On a busy machine TCP takes a late answer for a loss and probes with what it has sent: not so here.
        quiet = "echo 0 > /proc/sys/net/ipv4/tcp_early_retrans; echo 0 > /proc/sys/net/ipv4/tcp_recovery"
        ip("netns", "exec", name, "sh", "-c", quiet)


def run(nodes: int, command: list[str]) -> int:
    """Start the command on all nodes; the first failure is the exit code."""
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", f"node{node}", *command],
            env={**os.environ, "NODE": str(node), "NODES": str(nodes), "ADDRESS": f"{address(0)}:{PORT}"},
        )
        for node in range(nodes)
    ]
    return next((code for code in [process.wait() for process in processes] if code), 0)


if __name__ == "__main__":
    if os.getpid() != 1:
        sys.exit("start me in namespaces of my own: unshare --net --mount --pid --fork --kill-child ...")
    build(int(sys.argv[1]))
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
