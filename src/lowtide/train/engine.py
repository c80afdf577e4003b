"""Runs the rounds of a method: when each leaves and lands, and what happens when the network fails."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lowtide.messages import Message
from lowtide.sync import Replica, Report, Round
from lowtide.sync.merge import Rebase, Replace
from lowtide.sync.when import OneLate
from lowtide.transport.base import Pending, Transport


@dataclass
class Seconds:
    """Where the time of the rounds went."""

    encode: float = 0.0
    wait: float = 0.0
    decode: float = 0.0


@dataclass
class Engine:
    """The rounds of one replica and the transport between it and the others.

    The only place where algorithm and network meet. An exchange that fails drops every open event: the model and
    the method's state are then as before, and the error goes to the caller.
    """

    rounds: Sequence[Round]
    replica: Replica
    transport: Transport
    weight: Callable[[], float]
    now: Callable[[], float] = time.perf_counter
    seconds: Seconds = field(default_factory=Seconds)
    done: int = 0
    dropped: int = 0
    _waiting: dict[str, deque[Pending]] = field(default_factory=dict)

    def run(self, step: int, *, before: bool) -> list[Report]:
        """Everything that is due at a step, before or after the inner optimizer has acted."""
        reports: list[Report] = []
        try:
            for round_ in self.rounds:
                # in the order written: a later plan sees what an earlier one has changed at this step
                if round_.plan.before_step == before:
                    reports += self._run(round_, step)
        except BaseException:
            self.drop()
            raise
        self.done += sum(report.closed is None for report in reports)
        return reports

    def finish(self, step: int, *, scale: bool) -> list[Report]:
        """Land what is on its way, then agree once more on what has not been agreed on."""
        reports: list[Report] = []
        try:
            for round_ in self.rounds:
                if isinstance(round_.plan.when, OneLate) and round_.flights and step > round_.flights[-1].step:
                    # what lands below uses the own part of these steps, so the others have to hear of it first
                    self._launch(round_, step, 1.0, last=True)
                while round_.flights:
                    # a rebased message keeps the steps since it left; the round after this one agrees on them
                    keeps = isinstance(round_.plan.merge, Rebase) and round_.flights[0].step < step
                    reports.append(self._land(round_, final=not keeps))
            for round_ in self.rounds:
                since = step - round_.last_step
                if since and not round_.plan.before_step:
                    self._launch(round_, step, since / round_.plan.when.period if scale else 1.0, last=True)
                    reports.append(self._land(round_, final=True))
        except BaseException:
            self.drop()
            raise
        self.done += sum(report.closed is None for report in reports)
        return reports

    def drop(self) -> None:
        """Forget every open event, without the network."""
        self.dropped += sum(len(round_.flights) for round_ in self.rounds)
        for round_ in self.rounds:
            round_.drop()
        self._waiting.clear()

    @property
    def untouched(self) -> bool:
        """Whether no event has begun yet."""
        return not any(round_.state.event or round_.flights for round_ in self.rounds)

    @property
    def waiting(self) -> bool:
        """Whether messages are on their way."""
        return any(self._waiting.values())

    def resend(self, round_: Round) -> None:
        """Start the messages of events that a checkpoint left open."""
        for flight in round_.flights:
            pending = self.transport.start(flight.leg.message, flight.tag)
            self._waiting.setdefault(round_.name, deque()).append(pending)

    def _run(self, round_: Round, step: int) -> list[Report]:
        reports: list[Report] = []
        if round_.launches(step):
            self._launch(round_, step, 1.0)
        landing = round_.plan.when.lands(step, round_.fragment)
        if landing is None:
            return reports
        if round_.flights and round_.flights[0].step <= landing:
            reports.append(self._land(round_))
        elif isinstance(round_.plan.when, OneLate):
            # the first round, or the one before was dropped: the own part is used all the same
            round_.commit_nothing(self.replica)
        return reports

    def _launch(self, round_: Round, step: int, scale: float, *, last: bool = False) -> None:
        begun = time.perf_counter()
        message = round_.outgoing(self.replica, step, weight=self.weight(), scale=scale, last=last)
        self._start(round_, message)
        self.seconds.encode += time.perf_counter() - begun

    def _start(self, round_: Round, message: Message) -> None:
        pending = self.transport.start(message, round_.tag)
        self._waiting.setdefault(round_.name, deque()).append(pending)

    def _land(self, round_: Round, *, final: bool = False) -> Report:
        message: Message | None = None
        while True:
            begun = self.now()
            inbox = self._waiting[round_.name].popleft().finish()
            self.seconds.wait += self.now() - begun
            arrived = time.perf_counter()
            message = round_.incoming(inbox)
            if message is None:
                break
            # a further leg overtakes what else is on its way: it belongs to the oldest event
            self._waiting[round_.name].appendleft(self.transport.start(message, round_.flights[0].tag))
            self.seconds.decode += time.perf_counter() - arrived
        report = round_.commit(self.replica, final=final)
        for other in self.rounds:
            if other is not round_ and report.sick:
                # whatever spoilt this part of the model has reached the others
                other.revert(self.replica)
            elif other is not round_ and report.closed is None and _moves_anchors(round_):
                other.adopt(self.replica)
        self.seconds.decode += time.perf_counter() - arrived
        return report


def _moves_anchors(round_: Round) -> bool:
    """Whether what a round made common is the new anchor of the other plans too."""
    return isinstance(round_.plan.merge, Replace) and round_.plan.merge.anchors
