"""What outlives a step: shared state, private state, and a message in flight."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lowtide.messages import Gather, Group, Message, Scatter, Send, Sum, Tag
from lowtide.sync.exchange import Closed, Leg, Me, Outcome

EXCHANGE, OUTER = "exchange.", "outer."  # whose memory a tensor is


@dataclass
class RoundState:
    """Everything one plan keeps for one fragment.

    `shared` is equal on all replicas (anchor, outer momentum, the exchange's common memory) and stands in the
    fingerprint; `private` is this replica's own (the residual); both are named tensors, so saving is saving them.
    """

    event: int = 0
    shared: dict[str, Tensor] = field(default_factory=dict)
    private: dict[str, Tensor] = field(default_factory=dict)

    def home(self, *, shared: bool) -> dict[str, Tensor]:
        """The one dictionary or the other."""
        return self.shared if shared else self.private

    def of_exchange(self) -> dict[str, Tensor]:
        """The exchange's memory; exchanges put new tensors into a copy of it and never write into the old ones."""
        # an exchange need not know which of its tensors are equal everywhere
        both = self.shared | self.private
        return {name.removeprefix(EXCHANGE): kept for name, kept in both.items() if name.startswith(EXCHANGE)}


@dataclass
class Scratch:
    """Buffers that are used again and again, since fresh memory of this size is slow to come by."""

    size: int
    device: torch.device
    free: list[Tensor] = field(default_factory=list)

    def take(self) -> Tensor:
        """A buffer with anything in it."""
        return self.free.pop() if self.free else torch.zeros(self.size, device=self.device)

    def give(self, *buffers: Tensor | None) -> None:
        """Hand buffers back."""
        self.free += [buffer for buffer in buffers if buffer is not None]


@dataclass
class Flight:
    """One event between launch and commit: only proposals, nothing that the state depends on yet.

    `signal` is what was encoded, residual added, in the basis of the exchange; after commit it becomes the residual.
    `sick` names the first tensor that was not finite: then the replica abstains. `tag` labels the present message.
    """

    event: int
    step: int
    me: Me
    signal: Tensor
    snapshot: Tensor | None
    leg: Leg
    tag: Tag
    sick: str | None = None
    scale: float = 1.0
    outcome: Outcome | Closed | None = None


def save_message(message: Message) -> dict[str, Tensor]:
    """A message as named tensors."""
    match message:
        case Sum(tensor):
            return {"sum": tensor}
        case Gather(payload):
            return {"gather": _bytes(payload)}
        case Group(payload, members):
            return {"group": _bytes(payload), "members": torch.tensor(members)}
        case Send(payload, to):
            return {"send": _bytes(payload), "to": torch.tensor(to)}
        case Scatter(payloads):
            # six digits, so that sorted names are in the order of ranks
            return {f"scatter.{number:06}": _bytes(payload) for number, payload in enumerate(payloads)}


def load_message(saved: dict[str, Tensor]) -> Message:
    """The message that `save_message` saved."""
    if "sum" in saved:
        return Sum(saved["sum"])
    if "gather" in saved:
        return Gather(saved["gather"].numpy().tobytes())
    if "group" in saved:
        return Group(saved["group"].numpy().tobytes(), tuple(saved["members"].tolist()))
    if "send" in saved:
        return Send(saved["send"].numpy().tobytes(), int(saved["to"]))
    return Scatter(tuple(saved[name].numpy().tobytes() for name in sorted(saved)))


def _bytes(payload: bytes) -> Tensor:
    # torch wants memory that it may write to, which bytes are not
    return torch.from_numpy(np.frombuffer(payload, np.uint8).copy())
