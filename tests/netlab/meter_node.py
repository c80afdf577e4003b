"""One node of test_meter.py: moves messages of each kind, and prints what the meter and the interface counted."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from lowtide.messages import Gather, Group, Scatter, Send, Sum, Tag
from lowtide.transport.meter import Meter
from lowtide.transport.process_group import from_environment

SEGMENT = 1448  # bytes of TCP's own in a full packet
HEADERS = 66  # Ethernet, IP and TCP with timestamps, for each packet
COUNTERS = Path("/sys/class/net/eth0/statistics")


def interface() -> tuple[int, int]:
    """Bytes (sent, received) of the interface without the packets' own headers."""
    counts = {name: int((COUNTERS / name).read_text()) for name in ("tx_bytes", "tx_packets", "rx_bytes", "rx_packets")}
    return tuple(counts[f"{way}_bytes"] - HEADERS * counts[f"{way}_packets"] for way in ("tx", "rx"))


def repeated() -> int:
    """Bytes that TCP has sent once more, since an answer was late: on a busy machine, in vain."""
    titles, values = (line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line[:4] == "Tcp:")
    return SEGMENT * int(dict(zip(titles, values, strict=True))["RetransSegs"])


def settle(meter: Meter, event: int) -> None:
    """A small event, after which all that was sent before has arrived everywhere; the meter counts it, too."""
    meter.start(Gather(b"x"), Tag("settle", event)).finish()


def move(meter: Meter, kind: str, nbytes: int) -> None:
    rank, size, tag = meter.rank, meter.size, Tag("plan", 0)
    members = tuple(range(size))
    messages = {
        "Gather": Gather(os.urandom(nbytes + 1000 * rank)),
        "Scatter": Scatter(tuple(os.urandom(nbytes + 1000 * peer) for peer in range(size))),
        "Group": Group(os.urandom(nbytes), members[:2] if rank < 2 else members[2:]),
        "Sum": Sum(torch.randn(nbytes // 4)),
    }
    if kind in messages:
        meter.start(messages[kind], tag).finish()
    elif rank == 0:
        meter.start(Send(os.urandom(nbytes), 1), tag).finish()
    elif rank == 1:
        meter.receive(0, tag).finish()


def main() -> None:
    node = os.environ["NODE"]
    os.environ |= {
        "LOWTIDE_RANK": node,
        "LOWTIDE_WORLD_SIZE": os.environ["NODES"],
        "LOWTIDE_ADDRESS": os.environ["ADDRESS"],
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    meter = Meter(from_environment(timeout=30.0, startup=30.0))
    seen = []
    for event, kind in enumerate(["Gather", "Sum", "Scatter", "Group", "Send", "Nothing"]):
        settle(meter, 2 * event)
        settle(meter, 2 * event + 1)
        before, again, counted = interface(), repeated(), meter.ledger.total
        if kind != "Nothing":
            move(meter, kind, 6_000_000)
        for extra in range(20 if kind == "Nothing" else 1):
            settle(meter, 1000 + 100 * event + extra)
        wire = [after - earlier for after, earlier in zip(interface(), before, strict=True)]
        total = meter.ledger.total
        metered = [total.sent - counted.sent, total.received - counted.received]
        seen.append({"kind": kind, "metered": metered, "wire": wire, "again": repeated() - again})
    settle(meter, 9999)
    # One write, so that the lines of nodes do not mix.
    sys.stdout.write(json.dumps({"rank": int(node), "seen": seen}) + "\n")
    sys.stdout.flush()
    meter.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
