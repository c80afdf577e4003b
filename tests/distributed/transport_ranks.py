"""Real processes for test_process_group.py: `transport_ranks.py SCENARIO FOLDER SIZE PORT` forks one for each rank.

Each rank writes what it saw to FOLDER/RANK.json. Under torchrun, `transport_ranks.py torchrun FOLDER` is one rank.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from lowtide.errors import LowtideError
from lowtide.messages import Gather, Scatter, Sum, Tag
from lowtide.transport.process_group import ProcessGroup, available, from_environment


def tag(event: int) -> Tag:
    return Tag("plan", event)


def drawn(rank: int) -> torch.Tensor:
    return torch.randn(10_007, generator=torch.Generator().manual_seed(rank))


def shared(transport) -> list:
    """One event of each kind, in plain values."""
    rank, size = transport.rank, transport.size
    gathered = transport.start(Gather(b"%d" % rank * (rank + 1)), tag(0)).finish().payloads
    scattered = transport.start(Scatter(tuple(b"%d%d" % (rank, peer) for peer in range(size))), tag(1)).finish()
    total = transport.start(Sum(drawn(rank)), tag(2)).finish().total
    return [*(p.decode() for p in gathered), *(p.decode() for p in scattered.payloads), total.double().sum().item()]


def environment(_rank: int) -> dict:
    """Our own group, torch's default group, one beside it, one of a part of it: all at the same time."""
    before = available()
    own = from_environment(timeout=20.0, startup=20.0)
    seen = {"available": before, "own": shared(own), "untouched": not dist.is_initialized()}
    dist.init_process_group("gloo")
    beside = ProcessGroup(timeout=20.0)
    seen |= {"default": available(), "beside": shared(beside), "rank": beside.rank}
    through_device = ProcessGroup(timeout=20.0, device="cpu")
    seen["device"] = shared(through_device)
    members = dist.new_group([0, 2] if beside.size > 2 else [0])
    if isinstance(members, dist.ProcessGroup):
        part = ProcessGroup(members, timeout=20.0)
        seen["part"] = [part.rank, part.size, *shared(part)]
        part.close()
    for transport in (own, beside, through_device):
        transport.close()
    mine = torch.ones(1)
    dist.all_reduce(mine)
    dist.destroy_process_group()
    return seen | {"alive": mine.item()}


def ours(rank: int) -> dict:
    """The launcher's variables of lowtide, which leave torchrun's alone."""
    size, port = (os.environ.pop(name) for name in ("WORLD_SIZE", "MASTER_PORT"))
    os.environ |= {"LOWTIDE_RANK": str(rank), "LOWTIDE_WORLD_SIZE": size, "LOWTIDE_ADDRESS": f"127.0.0.1:{port}"}
    transport = from_environment(timeout=20.0, startup=20.0)
    seen = shared(transport)
    transport.close()
    return {"own": seen}


def failure(transport, message) -> dict:
    """How the event ends for a survivor."""
    began = time.monotonic()
    try:
        transport.start(message, tag(1)).finish()
    except LowtideError as error:
        seconds = time.monotonic() - began
        transport.close()
        ranks = getattr(error, "ranks", None)
        return {"error": type(error).__name__, "text": str(error), "ranks": ranks, "seconds": seconds}
    return {"error": None}


def struck(rank: int, blow: signal.Signals, timeout: float) -> dict:
    transport = from_environment(timeout=timeout, startup=20.0)
    transport.start(Gather(b""), tag(0)).finish()
    message = Gather(bytes(30_000_000))
    if rank == 2:
        transport.start(message, tag(1))
        time.sleep(0.01)  # so that it strikes somewhere in the transfer
        os.kill(os.getpid(), blow)
    return failure(transport, message)


def killed(rank: int) -> dict:
    return struck(rank, signal.SIGKILL, timeout=60.0)


def stopped(rank: int) -> dict:
    return struck(rank, signal.SIGSTOP, timeout=2.0)


def interrupted(rank: int) -> dict:
    transport = from_environment(timeout=20.0, startup=20.0)
    if rank == 1:
        transport.start(Gather(b""), tag(0)).finish()
        return failure(transport, Gather(b""))
    pressed = []

    def press() -> None:
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    transport.start(Gather(b""), tag(0)).finish()
    pending = transport.receive(1, tag(1))  # which never comes
    threading.Timer(0.1, press).start()
    try:
        pending.finish()
    except KeyboardInterrupt:
        seconds = time.monotonic() - pressed[0]
        transport.abort("Ctrl-C")
        transport.close()
        return {"error": "KeyboardInterrupt", "seconds": seconds}
    return {"error": None}


def forgotten(rank: int) -> dict:
    """Ends without closing anything, in the middle of a message."""
    transport = from_environment(timeout=20.0, startup=20.0)
    transport.start(Gather(b"x"), tag(0)).finish()
    transport.receive(1 - rank, tag(1))
    return {"done": True}


SCENARIOS = {each.__name__: each for each in (environment, ours, killed, stopped, interrupted, forgotten)}


def run_rank(scenario: str, folder: Path, rank: int) -> None:
    seen = SCENARIOS[scenario](rank)
    (folder / f"{rank}.json").write_text(json.dumps(seen))


def main(scenario: str, folder: str, size: str, port: str) -> None:
    os.environ |= {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    children = []
    for rank in range(int(size)):
        child = os.fork()  # torch is imported once; no thread runs yet
        if child == 0:
            os.environ["RANK"] = str(rank)
            run_rank(scenario, Path(folder), rank)
            sys.exit(0)
        children.append(child)
    codes = []
    for rank, child in enumerate(children):
        if scenario == "stopped" and rank == 2:
            os.kill(child, signal.SIGKILL)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    sys.stdout.write(json.dumps(codes))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "torchrun":
        run_rank("environment", Path(sys.argv[2]), int(os.environ["RANK"]))
    else:
        main(*sys.argv[1:])
