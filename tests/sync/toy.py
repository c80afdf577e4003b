"""Replicas in one process with nothing between them: the legs of a round are carried by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lowtide.messages import Gather, Group, Inbox, Message, Scatter, Sum
from lowtide.sync import Method, ModelReplica, Report, Round
from lowtide.sync.merge import Rebase
from lowtide.tensors import Layout, entries, trainable
from lowtide.train.overrides import pieces
from lowtide.train.saved import load_round, save_round


def deliver(messages: Sequence[Message]) -> list[Inbox]:
    """What a perfect network makes of one message from each replica."""
    ranks = tuple(range(len(messages)))
    match messages[0]:
        case Gather():
            return [Inbox(ranks, tuple(m.payload for m in messages)) for _ in ranks]
        case Sum(first):
            total = torch.zeros_like(first)
            for message in messages:
                total += message.tensor
            return [Inbox(ranks, total=total.clone()) for _ in ranks]
        case Scatter():
            return [Inbox(ranks, tuple(m.payloads[rank] for m in messages)) for rank in ranks]
        case Group():
            return [Inbox(m.members, tuple(messages[j].payload for j in m.members)) for m in messages]
    raise AssertionError(messages[0])


def nbytes(message: Message) -> int:
    """Bytes of payload in a message."""
    if isinstance(message, Sum):
        return message.tensor.numel() * message.tensor.element_size()
    return sum(map(len, message.payloads)) if isinstance(message, Scatter) else len(message.payload)


class Net(nn.Module):
    """Two matrices (one with ragged edges), an embedding-like table and vectors: every part of a layout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(70, 96)
        self.norm = nn.LayerNorm(96)
        self.second = nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.norm(self.first(x))))


MATRICES = ((96, 70), (64, 96))
VECTORS = (96, 96, 96, 64)
SIZE = sum(rows * cols for rows, cols in MATRICES) + sum(VECTORS)


@dataclass
class Cluster:
    """N replicas of `Net` on the same regression task, each with its own data.

    `order` says whose data each replica takes. `sent` lists `(step, round, leg, cause, bytes of each replica)`.
    """

    method: Method
    size: int
    lr: float = 0.05
    adam: bool = False
    seed: int = 0
    order: Sequence[int] | None = None
    weights: Sequence[float] | None = None
    nets: list[Net] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    rounds: list[list[Round]] = field(default_factory=list)
    step: int = 0
    sent: list[tuple[int, str, int, str, tuple[int, ...]]] = field(default_factory=list)
    reports: list[list[Report]] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        start, self.target = Net().state_dict(), Net()
        for rank in range(self.size):
            net = Net()
            net.load_state_dict(start)
            kind = torch.optim.AdamW if self.adam else torch.optim.SGD
            optimizer = kind(net.parameters(), lr=self.lr)
            replica = ModelReplica(trainable(net), [optimizer])
            mine = []
            for piece in pieces(self.method, entries(net, trainable(net)), {}):
                layout = Layout.build(piece.entries, piece.plan.exchange.chunker)
                one = Round(piece.plan, layout, piece.name, fragment=piece.fragment, rank=rank, size=self.size)
                one.start(replica, torch.device("cpu"))
                mine.append(one)
            self.nets.append(net)
            self.optimizers.append(optimizer)
            self.rounds.append(mine)
        self.replicas = [ModelReplica(trainable(n), [o]) for n, o in zip(self.nets, self.optimizers, strict=True)]

    @property
    def rows(self) -> list[list[Round]]:
        """The rounds of all replicas that belong together."""
        return [list(row) for row in zip(*self.rounds, strict=True)]

    def launch(self, row: list[Round], **options: Any) -> None:
        """Every replica's message leaves."""
        weights = self.weights or [1.0] * self.size
        for one, replica, weight in zip(row, self.replicas, weights, strict=True):
            one.outgoing(replica, self.step, weight=weight, **options)

    def leg(self, row: list[Round]) -> bool:
        """Carry the oldest open message of each; whether a further leg follows."""
        flights = [next(flight for flight in one.flights if flight.outcome is None) for one in row]
        messages = [flight.leg.message for flight in flights]
        here = (self.step, row[0].name, flights[0].tag.leg, flights[0].leg.cause)
        self.sent.append((*here, tuple(nbytes(message) for message in messages)))
        answers = [one.incoming(inbox) for one, inbox in zip(row, deliver(messages), strict=True)]
        assert len({answer is None for answer in answers}) == 1
        return answers[0] is not None

    def land(self, row: list[Round], *, final: bool = False) -> list[Report]:
        """Carry what is left of the oldest event, and commit it."""
        while row[0].flights[0].outcome is None:
            self.leg(row)
        reports = [one.commit(replica, final=final) for one, replica in zip(row, self.replicas, strict=True)]
        self.reports.append(reports)
        if getattr(row[0].plan.merge, "anchors", False) and reports[0].closed is None:
            for rank, replica in enumerate(self.replicas):
                for other in self.rounds[rank]:
                    other.adopt(replica)
        for rank, report in enumerate(reports):
            if report.sick:
                for other in self.rounds[rank]:
                    other.revert(self.replicas[rank])
        return reports

    def gradients(self) -> None:
        for rank, net in enumerate(self.nets):
            source = rank if self.order is None else self.order[rank]
            generator = torch.Generator().manual_seed(1000 * self.step + source)
            x = torch.randn(16, 70, generator=generator)
            net.zero_grad()
            with torch.no_grad():
                y = self.target(x)
            nn.functional.mse_loss(net(x), y).backward()

    def train(self, steps: int, around: Callable[[list[Round]], None] | None = None) -> Cluster:
        """Inner steps with the rounds that are due; `around` is called before each launch instead of nothing."""
        for _ in range(steps):
            self.step += 1
            self.gradients()
            for row in self.rows:
                if row[0].plan.before_step:
                    self.due(row, around)
            for optimizer in self.optimizers:
                optimizer.step()
            for row in self.rows:
                if not row[0].plan.before_step:
                    self.due(row, around)
        return self

    def due(self, row: list[Round], around: Callable[[list[Round]], None] | None = None) -> None:
        """What a row has to do at this step."""
        if row[0].launches(self.step):
            if around is not None:
                around(row)
            self.launch(row)
        lands = row[0].plan.when.lands(self.step, row[0].fragment)
        if lands == 0:
            for one, replica in zip(row, self.replicas, strict=True):
                one.commit_nothing(replica)
        elif lands is not None and row[0].flights and row[0].flights[0].step <= lands:
            self.land(row)

    def finish(self) -> Cluster:
        """Land what is on its way, then one last round where there were steps since the last."""
        for row in self.rows:
            while row[0].flights:
                keeps = isinstance(row[0].plan.merge, Rebase) and row[0].flights[0].step < self.step
                self.land(row, final=not keeps)
        for row in self.rows:
            if self.step > row[0].last_step and not row[0].plan.before_step:
                self.launch(row, last=True)
                self.land(row, final=True)
        return self

    def saved(self) -> list[dict[str, Any]]:
        """Everything that a checkpoint holds, by rank."""
        return [
            copy.deepcopy({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": self.step})
            | {"rounds": [save_round(one) for one in mine]}
            for net, optimizer, mine in zip(self.nets, self.optimizers, self.rounds, strict=True)
        ]

    def restore(self, saved: list[dict[str, Any]]) -> Cluster:
        """Go on from `saved`."""
        for rank, state in enumerate(copy.deepcopy(saved)):
            self.step = state["step"]
            self.nets[rank].load_state_dict(state["net"])
            self.optimizers[rank].load_state_dict(state["optimizer"])
            for one, kept in zip(self.rounds[rank], state["rounds"], strict=True):
                load_round(one, kept, same_world=True)
        return self

    def parameters(self, rank: int = 0) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.nets[rank].parameters()])

    def everyone(self) -> torch.Tensor:
        """The parameters of all replicas, `[replicas, parameters]`."""
        return torch.stack([self.parameters(rank) for rank in range(self.size)])

    def alike(self) -> bool:
        """Whether all replicas have the same bits."""
        everyone = self.everyone()
        return bool((everyone == everyone[0]).all())

    def spread(self) -> float:
        everyone = self.everyone()
        return float((everyone - everyone.mean(0)).abs().max())

    def variance(self) -> float:
        """The mean squared distance from the mean model."""
        everyone = self.everyone().double()
        return float((everyone - everyone.mean(0)).square().sum(1).mean())

    def loss(self, rank: int = 0) -> float:
        x = torch.randn(256, 70, generator=torch.Generator().manual_seed(7))
        with torch.no_grad():
            return float(nn.functional.mse_loss(self.nets[rank](x), self.target(x)))


def same(one: Any, other: Any) -> bool:
    """Whether two nests of dicts, lists, tensors and plain values are equal, bit for bit (a NaN equals itself)."""
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(raw(one), raw(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)
