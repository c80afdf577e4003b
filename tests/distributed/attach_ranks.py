"""Real processes for test_attach.py: `python -m tests.distributed.attach_ranks SCENARIO FOLDER SIZE` forks the ranks.

Each rank writes what it saw to FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.train.loops import METHODS, Run, adamw, batch, case, net, rank, sgd, until_it_fails
from torch import nn

import lowtide
from lowtide import LowtideError, PeerLostError, Settings, attach
from lowtide.messages import Message, Tag
from lowtide.train.agreement import digest
from lowtide.transport.process_group import ProcessGroup, from_environment

STEPS = 9
LIMIT = Settings(timeout=20.0, check_every=1)


def trained(name: str, transport: Any = None) -> list[Any]:
    """One run of a named case, as a plain loop does it: what must be the same in a simulation."""
    torch.manual_seed(rank())
    run = case(name, settings=LIMIT, transport=transport).train(1, STEPS)
    run.sync.close()
    stats = run.sync.stats()
    return [run.sync.fingerprint(), run.digest(), stats.rounds, stats.sent, stats.received]


def over_one_transport(names: Iterable[str]) -> dict[str, Any]:
    """Cases one after the other."""
    transport = from_environment(timeout=20.0, startup=20.0)
    found = {name: trained(name, transport) for name in names}
    transport.close()
    return found


def attached_again(_size: int) -> dict[str, Any]:
    """Three sessions one after the other, each with a transport of its own from the launcher's variables."""
    return {str(time_): trained("decoupled") for time_ in range(3)}


def subgroup_again(_size: int) -> dict[str, Any]:
    """The same for a transport over one half of the user's own group."""
    dist.init_process_group("gloo")
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    found = {}
    for time_ in range(2):
        transport = ProcessGroup(halves[dist.get_rank() // 2], timeout=20.0)
        found[str(time_)] = trained("decoupled", transport)
        transport.close()
    dist.destroy_process_group()
    return found


def every_method(_size: int) -> dict[str, Any]:
    """All that there is."""
    return over_one_transport(METHODS)


def some_methods(_size: int) -> dict[str, Any]:
    """One of each kind."""
    return over_one_transport(SOME)


SOME = ("ddp", "decoupled", "decoupled_sharded", "streaming")
# two legs, on its way while steps go on, a question first, a gradient
STRUCK = ("decoupled_sharded", "streaming", "fda", "ddp")


class Struck:
    """A transport whose process dies right after it has started a message."""

    def __init__(self, inner: ProcessGroup, deadly: int) -> None:
        self.inner, self.deadly = inner, deadly
        self.rank, self.size = inner.rank, inner.size

    def start(self, message: Message, tag: Tag) -> Any:
        """Start it, and die if it is the one."""
        pending = self.inner.start(message, tag)
        self.deadly -= tag.cause in ("round", "monitor")
        if not self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return pending

    def receive(self, source: int, tag: Tag) -> Any:
        """As the wrapped transport."""
        return self.inner.receive(source, tag)

    def close(self) -> None:
        """As the wrapped transport."""
        self.inner.close()


def killed(name: str) -> dict[str, Any]:
    """The last rank dies in its fourth message; the others must be as before the round."""
    transport: Any = from_environment(timeout=20.0, startup=20.0)
    if transport.rank == transport.size - 1:
        transport = Struck(transport, 4)
    run = case(name, settings=LIMIT, transport=transport)
    began = time.monotonic()
    step, error = until_it_fails(run)
    assert isinstance(error, PeerLostError), repr(error)
    seconds = time.monotonic() - began
    # the session can be left, and training goes on alone
    run.sync.detach()
    run.train(step + 1, step + 2)
    transport.close()
    return {"ranks": error.ranks, "text": str(error), "seconds": seconds, "step": step}


def mismatched(size: int) -> dict[str, Any]:
    """What each rank is told when the last one has another model, method or version."""

    def told(worker: Callable[[], object]) -> str:
        try:
            worker()
        except LowtideError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def fits() -> None:
        run = Run(extra={"settings": LIMIT}).train(1, 2)
        run.sync.close()

    dist.init_process_group("gloo")
    last = rank() == size - 1
    found = {
        "model": told(lambda: attach(model := nn.Linear(3, 2 + last), sgd(model), settings=LIMIT)),
        "method": told(lambda: Run("diloco", {"period": 3 + last}, extra={"settings": LIMIT})),
        "start": told(lambda: Run(seed=int(last), extra={"settings": Settings(timeout=20.0, start="check")})),
        # and after all that an attach that works
        "fine": told(fits),
    }
    dist.destroy_process_group()
    return found


def default_group(size: int) -> dict[str, Any]:
    """The user's own group is used, and is theirs again afterwards."""
    dist.init_process_group("gloo")
    used = []
    found = {}
    for name in SOME:
        torch.manual_seed(rank())
        run = case(name, settings=LIMIT)
        used.append(type(run.sync.meter.transport).__name__)
        run.train(1, STEPS)
        run.sync.close()
        found[name] = [run.sync.fingerprint(), run.digest()]
    alive = torch.ones(1)
    dist.all_reduce(alive)
    dist.destroy_process_group()
    return {"used": used, "alive": alive.item(), "size": size, **found}


def left_by_one(size: int) -> dict[str, Any]:
    """One rank leaves by an exception: the others hear why, at once."""
    run = case("decoupled", settings=Settings(timeout=60.0))
    began = time.monotonic()
    try:
        with run.sync:
            run.train(1, 5)
            if rank() == size - 1:
                (Path("no such") / "disk").touch()
            run.train(6, 9)
    except (FileNotFoundError, PeerLostError) as error:
        kind, text = type(error).__name__, str(error)
    return {"kind": kind, "text": text, "seconds": time.monotonic() - began}


def islands(size: int) -> dict[str, Any]:
    """Two islands of two shards each: FSDP inside, lowtide between equal shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("island", "shard"))
    island, shard = mesh.get_coordinate()
    transport = ProcessGroup(mesh["island"].get_group(), timeout=20.0)
    found: dict[str, Any] = {"place": [island, shard]}
    for name in ("local_sgd", "decoupled", "streaming", "ddp"):
        method, options, _ = METHODS[name]
        model = net(island)  # the first island's is copied
        model.drop.p = 0.0
        for part in (model.first, model.second, model):
            fully_shard(part, mesh=mesh["shard"])
        optimizer = adamw(model)
        sync = attach(model, optimizer, method, transport=transport, settings=LIMIT, **options)
        shapes = {entry.name: entry.shape for round_ in sync.engine.rounds for entry in round_.layout.entries}
        for step in range(1, STEPS):
            # both shards of an island see the same data, so that an unsharded replica can be compared
            x, y = batch(step, island)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        sync.close()
        whole = [p.full_tensor().detach() for p in model.parameters()]
        found[name] = {
            "shapes": {key: list(shape) for key, shape in shapes.items()},
            "sharded": all(isinstance(p, DTensor) for p in model.parameters()),
            "shard": digest(model.parameters()),
            "whole": digest(whole),
            "fingerprint": sync.fingerprint(),
            "first": whole[0].flatten()[:20].tolist(),
            "rounds": sync.stats().rounds,
        }
    transport.close()
    dist.destroy_process_group()
    return found


def saved(size: int) -> dict[str, Any]:
    """Stop with a message on its way, and go on in the same processes with all objects made anew."""
    dist.init_process_group("gloo")
    whole = trained("streaming")
    torch.manual_seed(rank())
    first = case("streaming", settings=LIMIT).train(1, 4)
    assert first.sync.engine.waiting
    checkpoint = first.saved()
    # all leave together; nobody waits for the others' messages
    first.sync.detach()
    torch.manual_seed(1234)
    second = case("streaming", settings=LIMIT).load(checkpoint).train(5, STEPS)
    second.sync.close()
    dist.destroy_process_group()
    return {"whole": whole[:2], "resumed": [second.sync.fingerprint(), second.digest()], "size": size}


SCENES = (
    *(every_method, some_methods, mismatched, default_group, left_by_one, islands, saved),
    *(attached_again, subgroup_again),
)
SCENARIOS = {each.__name__: each for each in SCENES}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def world(work: Callable[[], dict[str, Any]], size: int, results: Path) -> list[int]:
    """Fork the ranks of one world and wait for them; their exit codes."""
    os.environ |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    children = []
    for number in range(size):
        child = os.fork()  # torch is imported once; no thread runs yet
        if child == 0:
            os.environ["RANK"] = str(number)
            code = 1
            try:
                (results / f"{number}.json").write_text(json.dumps(work()))
                code = 0
            except BaseException:  # noqa: BLE001 - a child must not come back into the parent's code
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main(scenario: str, folder: str, size: str) -> None:
    """Run a scenario; `killed` once for each method, in a world of its own."""
    codes = {}
    if scenario == "killed":
        for name in STRUCK:
            (Path(folder) / name).mkdir()
            codes[name] = world(lambda name=name: killed(name), int(size), Path(folder) / name)
    else:
        codes[scenario] = world(lambda: SCENARIOS[scenario](int(size)), int(size), Path(folder))
    sys.stdout.write(json.dumps(codes))


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert lowtide.__version__
    main(*sys.argv[1:])
