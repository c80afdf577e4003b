"""The comparison of fingerprints: whether the replicas are still one model."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lowtide.errors import AgreementError
from lowtide.messages import Gather
from lowtide.train.agreement import ask
from lowtide.transport.base import Transport

_SHARE = 0.01  # of the time between rounds that hashing may take when no period is given
_MOST = 1000


@dataclass
class Check:
    """Compares fingerprints every `every` rounds; 0 never, None so often that it takes about 1 % of the time.

    With None the first comparison measures what it costs; all replicas take the largest period that any of them needs.
    """

    every: int | None
    rounds: int = 0
    _since: float = field(default_factory=time.perf_counter)

    def state_dict(self) -> dict[str, int | None]:
        """The period, once it is known, and how many rounds were counted."""
        return {"every": self.every, "rounds": self.rounds}

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        """Go on counting, so that all replicas compare at the same rounds."""
        self.every, self.rounds = state["every"], state["rounds"] or 0

    def after_round(self, transport: Transport, fingerprint: Callable[[], str]) -> None:
        """Count a round, and compare if it is time; all replicas raise the same error if they differ."""
        self.rounds += 1
        if self.every == 0 or transport.size == 1 or (self.every is not None and self.rounds % self.every):
            return
        begun = time.perf_counter()
        own = bytes.fromhex(fingerprint())
        seconds, between = time.perf_counter() - begun, max(begun - self._since, 1e-6)
        wanted = min(_MOST, math.ceil(seconds / (_SHARE * between / self.rounds)))
        answers = ask(transport, Gather(struct.pack("<i", wanted) + own), "check", self.rounds).payloads
        if self.every is None:
            self.every = max(1, *(struct.unpack_from("<i", answer)[0] for answer in answers))
        fingerprints = [answer[4:] for answer in answers]
        if len(set(fingerprints)) > 1:
            said = ", ".join(f"rank {rank} {value.hex()[:12]}" for rank, value in enumerate(fingerprints))
            raise AgreementError(
                f"replicas are not one model after round {self.rounds}: {said}\n"
                "hint: something else writes to the parameters, or machines round otherwise; restart from a checkpoint"
            )
