"""What happens around every step of the inner optimizer: rounds, then buffers, the ledger, the log and the check."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from lowtide.sync import Method, Report
from lowtide.tensors import buffers, local
from lowtide.train.agreement import digest
from lowtide.train.buffers import synchronise
from lowtide.train.check import Check
from lowtide.train.ending import average
from lowtide.train.engine import Engine
from lowtide.train.hooks import Watch
from lowtide.transport.meter import Meter

logger = logging.getLogger("lowtide")


@dataclass
class Stepper:
    """Counts true optimizer steps and does at each of them what the method wants."""

    model: nn.Module
    watch: Watch
    method: Method
    engine: Engine
    meter: Meter
    policy: str
    check: Check
    on_round: Callable[[Report], None] | None = None
    on_step: Callable[[], None] | None = None
    steps: int = 0
    _reports: list[Report] = field(default_factory=list)

    def before(self) -> None:
        """What is due before the inner optimizer acts: plans on gradients."""
        self.watch.check()
        self._reports = self.engine.run(self.steps + 1, before=True)

    def after(self) -> None:
        """What is due after a true optimizer step."""
        self.steps += 1
        if self.on_step is not None:
            self.on_step()
        self.watch.check()
        reports, self._reports = self._reports + self.engine.run(self.steps, before=False), []
        self._settle(reports)

    def finish(self, *, scale: bool) -> None:
        """Land what is on its way and agree on the last steps; replicas that drifted end with their mean."""
        if self.steps and self.engine.rounds and self.engine.untouched:
            logger.warning(
                "%s: the run ended after %d steps, before its first round; a shorter period gives it some",
                *(self.method, self.steps),
            )
        self._settle(self.engine.finish(self.steps, scale=scale))
        # the last round has not made these equal, and one model is what a run is for
        if self.method.private and self.meter.size > 1 and self.engine.rounds:
            average(self.engine)
            synchronise(self.meter, buffers(self.model), self.policy)

    def fingerprint(self) -> str:
        """SHA-256 of what all replicas share; the parameters are a part of it where there is no anchor."""
        rounds = self.engine.rounds
        shared = [round_.state.shared[name] for round_ in rounds for name in sorted(round_.state.shared)]
        # without one the rest (factors, counters) could be equal while models differ
        if not any("anchor" in round_.state.shared for round_ in rounds):
            shared += [local(parameter) for parameter in self.watch.parameters.values()]
        return digest(shared)

    def _settle(self, reports: list[Report]) -> None:
        """What follows the rounds of a step."""
        rounds = {round_.name: round_ for round_ in self.engine.rounds}
        common = False
        for report in reports:
            if report.sick is not None:
                logger.warning(
                    "%s, event %d: %s is not finite on rank %d, which was left out",
                    *(report.plan, report.event, report.sick, self.meter.rank),
                )
            if report.closed is None:
                round_ = rounds[report.plan]
                self.meter.note_dense(4 * round_.layout.numel)
                # a plan on optimizer state says nothing about the parameters
                common = common or round_.plan.makes_common
        if common:
            synchronise(self.meter, buffers(self.model), self.policy)
            # replicas that drift by design have nothing to compare
            if not self.method.private:
                self.check.after_round(self.meter, self.fingerprint)
        # last, when all that belongs to the round is done: it may evaluate or save
        if self.on_round is not None:
            for report in reports:
                self.on_round(report)
