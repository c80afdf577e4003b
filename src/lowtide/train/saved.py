"""A session as named tensors and plain values, and back: residuals and messages in flight included."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lowtide.errors import StateError
from lowtide.messages import Tag
from lowtide.sync import Replica, Round
from lowtide.sync.exchange import Leg, Me
from lowtide.sync.state import Flight, load_message, save_message
from lowtide.train.agreement import digest

VERSION = 1
logger = logging.getLogger("lowtide")


def refuse_other_method(state: Mapping[str, Any], method: str, rounds: Sequence[str]) -> None:
    """Refuse what a newer lowtide or another method has saved; a single replica has no rounds."""
    if state.get("version", VERSION) > VERSION:
        raise StateError(
            f"the checkpoint has version {state['version']}, this lowtide reads up to {VERSION}\n"
            "hint: install a newer lowtide"
        )
    saved = state.get("rounds", {})
    if state.get("method") != method or (saved and rounds and set(saved) != set(rounds)):
        raise StateError(
            f"the checkpoint was made by {state.get('method')}, this session runs {method}\n"
            "hint: attach with the same method, options and overrides"
        )


def refuse_other_replica(state: Mapping[str, Any], rank: int, size: int) -> None:
    """Refuse to send another replica's messages, where the others would send their own."""
    if state["size"] != size or state["rank"] == rank:
        return
    flying = [name for name, saved in state["rounds"].items() if saved["flights"]]
    if flying:
        raise StateError(
            f"rank {rank} cannot send what rank {state['rank']} had on its way: {', '.join(flying)}\n"
            "hint: give every replica its own checkpoint"
        )


def refuse_other_model(state: Mapping[str, Any], parameters: Sequence[Tensor]) -> None:
    """Refuse parameters that are not those of the checkpoint: attaching has copied rank 0's over them, for example."""
    if state["model"] != digest(parameters):
        raise StateError(
            "the model does not hold the parameters that were saved with this state\n"
            "hint: first attach, then load the model, the optimizer and the session"
        )


def save_round(round_: Round) -> dict[str, Any]:
    """Everything one round keeps. Events that were decided are always committed, so none is saved."""
    return {
        "identity": round_.layout.identity.hex(),
        "event": round_.state.event,
        "last_step": round_.last_step,
        "shared": {name: tensor.clone() for name, tensor in round_.state.shared.items()},
        "private": {name: tensor.clone() for name, tensor in round_.state.private.items()},
        "flights": [_save_flight(flight) for flight in round_.flights],
    }


def check_rounds(rounds: Sequence[Round], saved: Mapping[str, Any], *, same_world: bool) -> None:
    """Refuse what does not fit, before anything is changed."""
    for round_ in rounds if saved else ():
        one = saved[round_.name]
        if one["identity"] != round_.layout.identity.hex():
            raise StateError(
                f"the checkpoint of {round_.name} was made for other parameters\n"
                "hint: build the same model, with the same parts frozen"
            )
        _fits(round_.name, _lasting(round_, round_.state.shared), one["shared"])
        if same_world:
            _fits(round_.name, _lasting(round_, round_.state.private), one["private"])


def load_rounds(rounds: Sequence[Round], replica: Replica, state: Mapping[str, Any], *, same_world: bool) -> None:
    """Go on from what was saved; a replica that was alone has saved no rounds, and one that is alone runs none."""
    saved = state["rounds"]
    if bool(saved) != bool(rounds):
        logger.warning("one of checkpoint and session is of a single replica: anchors are the present parameters")
    for round_ in rounds:
        if saved:
            load_round(round_, saved[round_.name], same_world=same_world)
        else:
            round_.last_step = state["steps"]
            round_.adopt(replica)


def load_round(round_: Round, saved: dict[str, Any], *, same_world: bool) -> None:
    """Go on from what was saved; as another replica or in another world only from what all replicas share."""
    round_.drop()
    state = round_.state
    state.event, round_.last_step = saved["event"], saved["last_step"]
    state.shared = _taken(round_, state.shared, saved["shared"])
    if same_world:
        state.private = _taken(round_, state.private, saved["private"])
        round_.flights = [_load_flight(round_, flight) for flight in saved["flights"]]
        return
    if round_.plan.private and "anchor" in saved["private"]:
        state.private["anchor"].copy_(saved["private"]["anchor"])
    state.private = _lasting(round_, state.private)
    for name, tensor in state.private.items():
        if name == "residual" or name.startswith("outer."):
            tensor.zero_()
    lost = [name for name in saved["private"] if name != "anchor"] + ["messages in flight"] * bool(saved["flights"])
    if lost:
        logger.warning("%s: saved by another replica or world, so these start anew: %s", round_.name, ", ".join(lost))


def _lasting(round_: Round, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without what an exchange makes only at its first event."""
    first = round_.plan.exchange.init(round_.grid, round_.device)
    return {
        name: tensor
        for name, tensor in own.items()
        if not name.startswith("exchange.") or name.removeprefix("exchange.") in first
    }


def _fits(where: str, own: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    wrong = [name for name in own if name not in saved or own[name].shape != saved[name].shape]
    if wrong:
        raise StateError(
            f"the checkpoint of {where} lacks or missizes {', '.join(sorted(wrong))}\n"
            "hint: it was made by another method"
        )


def _taken(round_: Round, own: dict[str, Tensor], saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """The saved tensors, in our own buffers where there are some."""
    kept = {name: tensor for name, tensor in _lasting(round_, own).items() if name in saved}
    for name, tensor in kept.items():
        tensor.copy_(saved[name])
    return kept | {name: tensor.to(round_.device, copy=True) for name, tensor in saved.items() if name not in kept}


def _save_flight(flight: Flight) -> dict[str, Any]:
    """An open event: the message itself, since encoding it again would take the residual twice."""
    me = flight.me
    return {
        "event": flight.event,
        "step": flight.step,
        "weight": me.weight,
        "rate": me.rate,
        "memory": {name: tensor.clone() for name, tensor in me.memory.items()},
        "signal": flight.signal.clone(),
        "snapshot": None if flight.snapshot is None else flight.snapshot.clone(),
        "message": {name: tensor.clone() for name, tensor in save_message(flight.leg.message).items()},
        "carry": {name: tensor.clone() for name, tensor in flight.leg.carry.items()},
        "cause": flight.leg.cause,
        "sick": flight.sick,
        "scale": flight.scale,
        "legs": flight.tag.leg,
    }


def _load_flight(round_: Round, saved: dict[str, Any]) -> Flight:
    """Copies throughout: buffers of a flight are written to later, and the checkpoint must stay as it is."""

    def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(round_.device, copy=True) for name, tensor in tensors.items()}

    me = Me(
        rank=round_.rank,
        size=round_.size,
        event=saved["event"],
        step=saved["step"],
        weight=saved["weight"],
        rate=saved["rate"],
        device=round_.device,
        memory=copied(saved["memory"]),
    )
    layout = round_.layout
    signal = round_.scratch.take()
    signal.copy_(saved["signal"])
    message = {name: tensor.clone() for name, tensor in saved["message"].items()}
    return Flight(
        event=saved["event"],
        step=saved["step"],
        me=me,
        signal=signal,
        snapshot=None if saved["snapshot"] is None else saved["snapshot"].to(round_.device, copy=True),
        leg=Leg(load_message(message), copied(saved["carry"]), saved["cause"]),
        tag=Tag(*(round_.name, saved["event"], saved["legs"], layout.identity, saved["cause"], layout.shares())),
        sick=saved["sick"],
        scale=saved["scale"],
    )
