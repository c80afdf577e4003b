"""What replicas tell one another beside their rounds: who they are, where they start, that they are still one model."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from lowtide.errors import AgreementError
from lowtide.messages import Gather, Inbox, Message, Scatter, Tag
from lowtide.sync import Round
from lowtide.tensors import buffers, canonical, local
from lowtide.transport.base import Transport

_PIECE = 1 << 26  # bytes of parameters that are copied at a time
_HINT = {
    "lowtide": "install the same version everywhere",
    "torch": "install the same version everywhere: another one may round otherwise",
    "method": "give every replica the same method and options",
    "overrides": "give every replica the same overrides",
    "plans": "make the method of the same parts everywhere",
    "parameters": "build the same model everywhere, and freeze the same parts before you attach",
    "settings": "give every replica the same settings",
}


def ask(transport: Transport, message: Message, cause: str, number: int = 0) -> Inbox:
    """One exchange outside any plan, at once."""
    return transport.start(message, Tag(cause, number, cause=cause)).finish()


def agree(
    transport: Transport, model: nn.Module, rounds: Sequence[Round], card: Mapping[str, str], *, check: bool
) -> None:
    """Compare what all run, then begin from rank 0's model, or refuse where models differ if that is to be checked."""
    names = [_described(name, parameter) for name, parameter in model.named_parameters()]
    names += [f"{_described(name, buffer)} buffer" for name, buffer in buffers(model).items()]
    # shapes and types of everything, frozen parts and buffers too: they are copied, and copies of other sizes would mix
    layouts = "/".join(round_.layout.identity.hex() for round_ in rounds)
    plans = "\n".join(f"{round_.name} {round_.plan!r}" for round_ in rounds)
    # parts of a user's own may show their address, which says nothing
    ours = {"parameters": _short("\n".join([*names, layouts])), "plans": _short(re.sub(r" at 0x\w+", "", plans))}
    introduce(transport, {**card, **ours}, names)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()} | buffers(model)
    if check:
        same_everywhere(transport, "their first parameters", digest(tensors.values()), "start")
    else:
        copy_from_first(transport, tensors)


def _described(name: str, tensor: Tensor) -> str:
    """A tensor as replicas compare it."""
    kind = str(tensor.dtype).removeprefix("torch.")
    frozen = " frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
    return f"{canonical(name)} {tuple(local(tensor).shape)} {kind}{frozen}"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def introduce(transport: Transport, card: Mapping[str, str], names: Sequence[str]) -> None:
    """Compare what every replica runs; all raise the same error where they differ."""
    mine = json.dumps({**card, "names": list(names)}).encode()
    cards = [json.loads(payload) for payload in ask(transport, Gather(mine), "start").payloads]
    # in the order of the card: another version explains whatever else differs
    for field in card:
        values = [str(other.get(field)) for other in cards]
        if len(set(values)) > 1:
            said = "; ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))
            if field == "parameters":
                said = _first_difference([other["names"] for other in cards])
            raise AgreementError(
                f"replicas differ in {field}: {said}\nhint: {_HINT.get(field, 'start all replicas alike')}"
            )


def _first_difference(lists: Sequence[Sequence[str]]) -> str:
    """The first parameter that is not the same everywhere."""
    for rank, names in enumerate(lists[1:], start=1):
        for number in range(max(len(names), len(lists[0]))):
            here, there = (part[number] if number < len(part) else "nothing" for part in (lists[0], names))
            if here != there:
                return f"tensor {number} is {here} on rank 0 and {there} on rank {rank}"
    return "the same parameters are laid out differently"


def digest(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of tensors' bytes, as hex."""
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(_raw(tensor).numpy().data)
    return state.hexdigest()


def same_everywhere(transport: Transport, name: str, own: str, cause: str) -> None:
    """Compare a digest; all raise the same error where it differs."""
    digests = [bytes(payload).hex() for payload in ask(transport, Gather(bytes.fromhex(own)), cause).payloads]
    if len(set(digests)) > 1:
        said = ", ".join(f"rank {rank}: {value[:12]}" for rank, value in enumerate(digests))
        raise AgreementError(
            f"replicas differ in {name}: {said}\nhint: they are no longer one model; restart from a checkpoint"
        )


def copy_from_first(transport: Transport, tensors: Mapping[str, Tensor]) -> None:
    """Rank 0's tensors to all, if any differ; in two hops, so that nobody's line carries more than twice the model.

    Rank 0 deals the bytes out in equal shares, then everybody passes its share on to all.
    """
    own = bytes.fromhex(digest(tensors.values()))
    if len(set(ask(transport, Gather(own), "start").payloads)) == 1:
        return
    # one buffer, not tensor by tensor: every exchange waits for the slowest line
    flat = torch.cat([_raw(tensor) for tensor in tensors.values()])
    for number, piece in enumerate(torch.split(flat, _PIECE)):
        shares = _shares(piece, transport.size) if transport.rank == 0 else (b"",) * transport.size
        dealt = ask(transport, Scatter(shares), "start", number).payloads[0]
        whole = b"".join(ask(transport, Gather(dealt), "start", number).payloads)
        piece.copy_(torch.from_numpy(np.frombuffer(whole, np.uint8).copy()))
    sizes = [local(tensor).numel() * tensor.element_size() for tensor in tensors.values()]
    for raw, tensor in zip(torch.split(flat, sizes), tensors.values(), strict=True):
        _put(raw, tensor)


def _shares(piece: Tensor, size: int) -> tuple[bytes, ...]:
    bounds = [len(piece) * part // size for part in range(size + 1)]
    data = piece.numpy()
    return tuple(data[start:stop].tobytes() for start, stop in pairwise(bounds))


def _raw(tensor: Tensor) -> Tensor:
    """A tensor's bytes, on the host; a copy."""
    return local(tensor.detach()).cpu().contiguous().flatten().clone().view(torch.uint8)


def _put(raw: Tensor, tensor: Tensor) -> None:
    target = local(tensor.detach())
    # a copy, since what stands before it may leave it unaligned
    target.copy_(raw.clone().view(target.dtype).view(target.shape))
