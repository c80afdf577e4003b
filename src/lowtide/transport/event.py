"""One event on a mesh: agree on it, move the data, check what came.

First every rank tells every peer what it is about to do (a `Header`), and all come to the same verdict. Only
then do the payloads move, in blocks of the announced sizes, and each is checked against its digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from lowtide.errors import ConfigError, TransportError
from lowtide.messages import Gather, Group, Inbox, Message, Scatter, Send, Sum, Tag
from lowtide.transport.cost import chunk_bounds
from lowtide.transport.frame import DIGEST_BYTES, FRAME_BYTES, Header, digest, header_of, unpack_header, verdict
from lowtide.transport.lane import describe
from lowtide.transport.mesh import RETURNS, SENDS, Blocks, Mesh

Reduce = Callable[[Tensor], Tensor]
Swap = Callable[[Blocks, Blocks], None]


class Events:
    """Runs events over one mesh. `swap` and `reduce` replace the data path where a device has a better one."""

    def __init__(self, mesh: Mesh, max_bytes: int, *, swap: Swap | None = None, reduce: Reduce | None = None) -> None:
        self.mesh = mesh
        self._max_bytes = max_bytes
        self._swap: Swap = swap or mesh.swap
        self._reduce = reduce

    def run(self, message: Message, tag: Tag) -> Inbox:
        """Move one message and return the inbox; what `check` refuses must not come here."""
        # The lane's thread has a grad mode of its own.
        with torch.no_grad():
            if isinstance(message, Sum):
                return self._sum(message, tag)
            if isinstance(message, Send):
                return self._send(message, tag)
            return self._share(message, tag)

    def receive(self, source: int, tag: Tag) -> Inbox:
        """Take the payload that `source` sends to this rank."""
        frame = _empty(FRAME_BYTES)
        self.mesh.swap((), [(source, frame)], SENDS)
        theirs = unpack_header(_bytes(frame), source)
        verdict([header_of(Send(b"", self.mesh.rank), tag, rank=self.mesh.rank, size=self.mesh.size), theirs])
        self._bound(theirs)
        # Asked for only now, that the size is known and allowed.
        block = _empty(theirs.nbytes)
        self.mesh.swap((), [(source, block)], SENDS)
        return Inbox((source,), (_checked(block, theirs, tag),))

    def _share(self, message: Gather | Scatter | Group, tag: Tag) -> Inbox:
        """Everybody involved gets a payload of everybody else."""
        rank, ranks = self.mesh.rank, involved(message, self.mesh.size)
        if isinstance(message, Scatter):
            out = dict(enumerate(message.payloads))
            blocks = {peer: _block(out[peer]) for peer in ranks if peer != rank}
        else:
            # One object for all peers: copied to a tensor once, hashed once.
            out = dict.fromkeys(ranks, message.payload)
            blocks = dict.fromkeys((peer for peer in ranks if peer != rank), _block(message.payload))
        theirs = self._agree(message, tag, {peer: out[peer] for peer in blocks})
        came = {peer: _empty(header.nbytes) for peer, header in theirs.items()}
        self._swap(blocks.items(), came.items())
        payloads = (out[peer] if peer == rank else _checked(came[peer], theirs[peer], tag) for peer in ranks)
        return Inbox(ranks, tuple(payloads))

    def _sum(self, message: Sum, tag: Tag) -> Inbox:
        """Cut the tensor in a chunk per rank; each rank adds its own in rank order and gives the result back.

        Half the hops of a ring at its bytes, and the order of additions is the same on every rank and in
        the simulator: all are bit-equal.
        """
        rank, ranks = self.mesh.rank, tuple(range(self.mesh.size))
        if self._reduce is not None:
            # The backend checks nothing: shapes and turns are agreed on first here, too.
            self._agree(message, tag, dict.fromkeys(self.mesh.peers, b""))
            return Inbox(ranks, total=self._reduce(message.tensor.detach().clone()))
        # gloo moves memory of the CPU; for a tensor that lives there and is contiguous these are views.
        flat = message.tensor.detach().to("cpu").contiguous().reshape(-1)
        chunks = [flat[start:stop] for start, stop in chunk_bounds(len(flat), self.mesh.size)]
        out = {peer: _raw(chunks[peer]) for peer in self.mesh.peers}
        theirs = self._agree(message, tag, {peer: _view(block) for peer, block in out.items()})
        came = {peer: torch.empty_like(chunks[rank]) for peer in self.mesh.peers}
        self.mesh.swap(out.items(), [(peer, _raw(chunk)) for peer, chunk in came.items()])
        for peer, chunk in came.items():
            _check(_view(_raw(chunk)), theirs[peer].checksum, peer, tag)
        total = torch.empty_like(flat)
        results = [total[start:stop] for start, stop in chunk_bounds(len(flat), self.mesh.size)]
        # Rank by rank, ours among them, not as they come in.
        results[rank].copy_(sum_in_order([came.get(peer, chunks[rank]) for peer in ranks]))
        self._return(results, tag)
        return Inbox(ranks, total=total.reshape(message.tensor.shape).to(message.tensor.device))

    def _return(self, results: list[Tensor], tag: Tag) -> None:
        """Give our finished chunk to all and take theirs, each with its digest behind it."""
        rank, peers = self.mesh.rank, self.mesh.peers
        mine = _raw(results[rank])
        seal = _block(digest(_view(mine)))
        digests = {peer: _empty(DIGEST_BYTES) for peer in peers}
        out = [(peer, block) for peer in peers for block in (mine, seal)]
        into = [(peer, block) for peer in peers for block in (_raw(results[peer]), digests[peer])]
        # Under a tag of their own: a quick peer returns its chunk while a slow one still sends its part.
        self.mesh.swap(out, into, RETURNS)
        for peer in peers:
            _check(_view(_raw(results[peer])), _bytes(digests[peer]), peer, tag)

    def _send(self, message: Send, tag: Tag) -> Inbox:
        header = header_of(message, tag, rank=self.mesh.rank, size=self.mesh.size).announcing(message.payload)
        # Both at once: the receiver takes the payload as soon as the header has told it the size.
        blocks = (_block(header.pack()), _block(message.payload))
        self.mesh.swap([(message.to, block) for block in blocks], (), SENDS)
        return Inbox((self.mesh.rank,))

    def _agree(self, message: Message, tag: Tag, out: Mapping[int, bytes | memoryview]) -> dict[int, Header]:
        """Swap headers with all peers in `out`, and raise on all ranks alike if they do not fit."""
        ours = header_of(message, tag, rank=self.mesh.rank, size=self.mesh.size)
        seen: dict[int, Header] = {}  # a payload that goes to all is hashed once
        for data in out.values():
            seen.setdefault(id(data), ours.announcing(data))
        blocks = {peer: _block(seen[id(data)].pack()) for peer, data in out.items()}
        came = {peer: _empty(FRAME_BYTES) for peer in out}
        self.mesh.swap(blocks.items(), came.items())
        theirs = {peer: unpack_header(_bytes(block), peer) for peer, block in came.items()}
        verdict([ours, *theirs.values()])
        # After the verdict, which all reach together; a size is the business of whoever has to take it.
        for header in theirs.values():
            self._bound(header)
        return theirs

    def _bound(self, header: Header) -> None:
        if header.nbytes > self._max_bytes:
            raise TransportError(
                f"rank {header.rank} announced {header.nbytes} bytes; at most {self._max_bytes} are taken\n"
                "hint: raise max_bytes if payloads are really that large"
            )


def check(message: Message, rank: int, size: int, max_bytes: int | None = None) -> None:
    """Refuse a message that cannot be sent by `rank` of `size`, before anything moves.

    >>> check(Send(b"", to=3), rank=0, size=2)
    Traceback (most recent call last):
    lowtide.errors.ConfigError: cannot send to rank 3: this is rank 0 of 2
    hint: name another rank, 0 to 1
    """
    if isinstance(message, Send):
        check_peer("send to", message.to, rank, size)
    if isinstance(message, Scatter) and len(message.payloads) != size:
        raise ConfigError(
            f"a Scatter needs a payload per rank: got {len(message.payloads)} for {size} ranks\n"
            "hint: an empty payload costs nothing"
        )
    if isinstance(message, Group) and not _is_group(message.members, rank, size):
        raise ConfigError(
            f"group members must be ascending ranks below {size} that hold the sender {rank}: {message.members}\n"
            "hint: tuple(sorted({*members, rank}))"
        )
    largest = max(map(len, _payloads(message)), default=0)
    if max_bytes is not None and largest > max_bytes:
        raise ConfigError(
            f"a payload of {largest} bytes is over max_bytes={max_bytes}\nhint: raise max_bytes on all ranks"
        )


def check_peer(verb: str, peer: int, rank: int, size: int) -> None:
    """Refuse a peer that does not exist or is this rank."""
    if peer == rank or not 0 <= peer < size:
        hint = f"name another rank, 0 to {size - 1}" if size > 1 else "a world of one has nobody to talk to"
        raise ConfigError(f"cannot {verb} rank {peer}: this is rank {rank} of {size}\nhint: {hint}")


def involved(message: Message, size: int) -> tuple[int, ...]:
    """The ranks that take part in an event, in order."""
    return message.members if isinstance(message, Group) else tuple(range(size))


def sum_in_order(tensors: Iterable[Tensor]) -> Tensor:
    """The sum, added one after the other in the tensors' own dtype; a tensor of its own."""
    first, *others = tensors
    total = first.detach().clone()
    for tensor in others:
        total += tensor.detach()
    return total


def _is_group(members: tuple[int, ...], rank: int, size: int) -> bool:
    # Ascending, so that all members write the same tuple and its hash can be compared.
    return rank in members and set(members) <= set(range(size)) and all(low < high for low, high in pairwise(members))


def _payloads(message: Message) -> tuple[bytes, ...]:
    if isinstance(message, Scatter):
        return message.payloads
    return () if isinstance(message, Sum) else (message.payload,)


def _checked(block: Tensor, header: Header, tag: Tag) -> bytes:
    data = _bytes(block)
    _check(data, header.checksum, header.rank, tag)
    return data


def _check(data: bytes | memoryview, checksum: bytes, source: int, tag: Tag) -> None:
    if digest(data) != checksum:
        raise TransportError(
            f"the payload of rank {source} was damaged on the way in {describe(tag)}: its digest does not fit\n"
            f"hint: check memory and network of rank {source} and of this rank"
        )


def _empty(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def _block(data: bytes) -> Tensor:
    """Bytes as a tensor; a copy, since torch cannot hold memory that must not be written."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _empty(0)


def _raw(tensor: Tensor) -> Tensor:
    """A flat tensor's own memory as bytes, in any dtype."""
    return tensor.view(torch.uint8) if len(tensor) else _empty(0)


def _view(block: Tensor) -> memoryview:
    return memoryview(block.numpy())  # type: ignore[arg-type]  # numpy's buffer protocol is untyped before 3.12


def _bytes(block: Tensor) -> bytes:
    return bytes(_view(block))
