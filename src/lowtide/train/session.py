"""A session: what `attach` returns, a model that agrees with others while a plain loop trains it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from lowtide.errors import LowtideError
from lowtide.messages import Gather
from lowtide.sync import Method
from lowtide.sync.replica import PARAMETERS
from lowtide.tensors import local
from lowtide.train.agreement import ask, digest
from lowtide.train.engine import Engine
from lowtide.train.saved import (
    VERSION,
    check_rounds,
    load_rounds,
    refuse_other_method,
    refuse_other_model,
    refuse_other_replica,
    save_round,
)
from lowtide.train.settings import Settings
from lowtide.train.shard import Cursor, Shard
from lowtide.train.stats import Stats, stats_of
from lowtide.train.stepper import Stepper
from lowtide.transport.ledger import Ledger
from lowtide.transport.meter import Meter


@dataclass
class Session:
    """One replica's side of a run. Made by `attach`; training goes on in the user's own loop.

    As a context manager it is closed at the end; an exception leaves it without a last round. `rank` and `size` say
    which replica this is, and of how many.
    """

    method: Method
    stepper: Stepper
    engine: Engine
    meter: Meter
    settings: Settings
    release: Callable[[], None] | None = None
    cursors: dict[str, Cursor] = field(default_factory=dict)
    rank: int = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.rank, self.size = self.meter.rank, self.meter.size

    def shard(self, loader: Iterable[Any], *, name: str = "train", seed: int = 0) -> Shard:
        """This replica's share of a loader; its place is kept under `name` and is part of `state_dict`."""
        return Shard(loader, self.cursors.setdefault(name, Cursor()), self.rank, self.size, seed)

    def any(self, flag: bool) -> bool:  # noqa: FBT001 (the flag is all there is to say)
        """Whether any replica says so: for a stop that all make together. All must ask at the same step."""
        if self.size == 1:
            return bool(flag)
        answers = ask(self.meter, Gather(bytes([bool(flag)])), "stop", self.stepper.steps)
        return any(payload != b"\0" for payload in answers.payloads)

    def fingerprint(self) -> str:
        """SHA-256 of all that the replicas share: anchors and outer momenta, or the parameters where there are none."""
        return self.stepper.fingerprint()

    def stats(self) -> Stats:
        """What was done and moved up to now."""
        return stats_of(self.stepper.steps, self.engine, self.meter.ledger)

    @contextmanager
    def anchor(self) -> Iterator[nn.Module]:
        """The model with the parameters last agreed on; the live ones come back at the end."""
        live = {name: local(parameter).detach().clone() for name, parameter in self.stepper.watch.parameters.items()}
        for round_ in self.engine.rounds:
            if round_.anchor is not None:
                self.engine.replica.write(PARAMETERS, round_.layout, round_.anchor)
        try:
            yield self.stepper.model
        finally:
            with torch.no_grad():
                for name, parameter in self.stepper.watch.parameters.items():
                    local(parameter).copy_(live[name])

    def state_dict(self) -> dict[str, Any]:
        """All that the method keeps: anchors, momenta, residuals, messages in flight, counters, the data cursors.

        To be saved together with the model and its optimizer, by every replica for itself.
        """
        return {
            "version": VERSION,
            "method": str(self.method),
            "rank": self.rank,
            "size": self.size,
            "model": digest(local(parameter) for parameter in self.stepper.watch.parameters.values()),
            "steps": self.stepper.steps,
            "rounds": {round_.name: save_round(round_) for round_ in self.engine.rounds},
            "done": self.engine.done,
            "dropped": self.engine.dropped,
            "checked": self.stepper.check.state_dict(),
            "meter": self.meter.state_dict(),
            "cursors": {name: cursor.state_dict() for name, cursor in self.cursors.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`. First attach, then load the model, the optimizer and this: in that order.

        With another number of replicas, what they share is kept and what was private starts anew.
        """
        rounds = self.engine.rounds
        refuse_other_method(state, str(self.method), [round_.name for round_ in rounds])
        refuse_other_replica(state, self.rank, self.size)
        refuse_other_model(state, [local(parameter) for parameter in self.stepper.watch.parameters.values()])
        here = state["size"] == self.size and state["rank"] == self.rank
        check_rounds(rounds, state["rounds"], same_world=here)
        cursors = {name: Cursor.from_state(cursor) for name, cursor in state["cursors"].items()}
        ledger = Ledger.from_dict(state["meter"])
        # nothing is changed before this line, so that a state that is refused leaves the session as it was
        self.engine.drop()
        load_rounds(rounds, self.engine.replica, state, same_world=here)
        self.stepper.steps = state["steps"]
        self.stepper.check.load_state_dict(state["checked"])
        self.engine.done, self.engine.dropped = state["done"], state["dropped"]
        self.meter.ledger = ledger
        for name, cursor in cursors.items():
            self.cursors.setdefault(name, Cursor()).take(cursor)
        # what was on its way is sent once more: every replica resumes at the same step, so all do
        for round_ in rounds:
            self.engine.resend(round_)

    def close(self) -> None:
        """Run the last partial round, then give the model back. Replicas that drifted end with their mean."""
        if self.release is None:
            return
        try:
            self.stepper.finish(scale=self.settings.scale_last)
        finally:
            self.detach()

    def detach(self) -> None:
        """Give the model back as it is, without a last round and without the network."""
        release, self.release = self.release, None
        try:
            if release is not None:
                release()
        finally:
            self.engine.drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
            return
        # peers that wait for us are told why they wait in vain
        self.meter.abort(f"{kind.__name__}: {error}" if isinstance(error, LowtideError) else kind.__name__)
        self.detach()
