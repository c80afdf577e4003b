from __future__ import annotations

import copy
import io

import pytest
import torch
from tests.train.loops import (
    CHECKED,
    METHODS,
    PRIVATE,
    Run,
    adamw,
    case,
    differences,
    errors,
    net,
    rank,
    sgd,
    without_seconds,
)

from lowtide import AgreementError, Settings, StateError, attach, simulate
from lowtide.train.saved import VERSION

STEPS = 13
# before the first round, between rounds, right after one, with messages on their way (3 to 5 in most that overlap)
STOPS = (2, 3, 4, 5, 8)
IN_FLIGHT = {"streaming": 3, "streaming_dense": 2, "eager": 4, "sparta_late": 4, "fda_late": 4}


def train(name, first, last, saved=None, *, seed=0):
    """What a world of two has at `last`, and after `close`."""

    def worker():
        run = case(name)
        if saved is not None:
            run.load(saved[rank()])
        run.train(first, last)
        end = run.all()
        run.sync.close()
        return end, run.digest(), without_seconds(run.sync.state_dict())

    return simulate(worker, replicas=2, seed=seed)


def stopped(name, at, replicas=2):
    """What each replica has saved after some steps; the process then ends as it is."""
    return simulate(lambda: case(name).train(1, at).saved(), replicas=replicas).returns


@pytest.mark.parametrize("name", METHODS)
def test_resuming_is_never_having_stopped(name):
    whole = train(name, 1, STEPS)
    for at in STOPS:
        resumed = train(name, at + 1, STEPS, stopped(name, at), seed=99)
        assert not list(differences(resumed.returns, whole.returns)), at
        assert resumed.fingerprints == whole.fingerprints


@pytest.mark.parametrize("name", IN_FLIGHT)
def test_messages_on_their_way_are_saved_and_sent_again(name):
    saved = stopped(name, IN_FLIGHT[name])
    for replica in saved:
        rounds = torch.load(io.BytesIO(replica), weights_only=True)["sync"]["rounds"]
        assert sum(len(state["flights"]) for state in rounds.values()) == 1

    def worker():
        run = case(name).load(saved[rank()])
        away = run.sync.engine.waiting
        run.sync.close()
        return away, run.digest()

    one, other = simulate(worker, replicas=2).returns
    assert one == other
    assert one[0]


@pytest.mark.parametrize("name", METHODS)
def test_a_state_can_be_loaded_twice_and_stays_as_it_is(name):
    """A round writes into its buffers; none of them may be the checkpoint's."""
    state = simulate(lambda: case(name).train(1, 4).all(), replicas=2).returns
    before = copy.deepcopy(state)

    def worker():
        ends = []
        for _ in range(2):
            run = case(name)
            run.model.load_state_dict(state[rank()]["model"])
            run.optimizer.load_state_dict(copy.deepcopy(state[rank()]["optimizer"]))
            run.sync.load_state_dict(with_seconds(state[rank()]["sync"]))
            torch.manual_seed(5)
            run.train(5, 9)
            run.sync.close()
            ends.append(run.digest())
        return ends

    for ends in simulate(worker, replicas=2).returns:
        assert ends[0] == ends[1]
    assert not list(differences(state, before))


def with_seconds(state):
    """A state as it was saved, with the seconds that comparisons leave out."""
    state = dict(state)
    state["meter"] = {
        "total": {**state["meter"]["total"], "seconds": 0.0},
        **{
            key: {name: {**each, "seconds": 0.0} for name, each in state["meter"][key].items()}
            for key in ("by_cause", "by_group")
        },
    }
    return state


@pytest.mark.parametrize("name", [name for name in METHODS if name not in PRIVATE])
@pytest.mark.parametrize("replicas", [1, 3])
def test_another_world_keeps_what_replicas_share_and_says_what_it_dropped(name, replicas, caplog):
    saved = stopped(name, 5)
    shared = torch.load(io.BytesIO(saved[0]), weights_only=True)["sync"]["rounds"]

    def worker():
        run = case(name, settings=Settings(check_every=1, alone="method")).load(saved[0])
        rounds = run.sync.state_dict()["rounds"]
        found = {name: (state["shared"], state["event"], state["last_step"]) for name, state in rounds.items()}
        flights = sum(len(state["flights"]) for state in rounds.values())
        residuals = [
            state["private"]["residual"].abs().sum().item()
            for state in rounds.values()
            if "residual" in state["private"]
        ]
        run.train(6, 9)
        run.sync.close()
        return found, flights, residuals, run.digest(), run.sync.stats().steps

    results = simulate(worker, replicas=replicas).returns
    expected = {name: (state["shared"], state["event"], state["last_step"]) for name, state in shared.items()}
    for found, flights, residuals, digest, steps in results:
        assert not list(differences(found, expected))
        assert flights == sum(residuals) == 0
        assert digest == results[0][3]
        assert steps == 9
    said = " ".join(record.getMessage() for record in caplog.records)
    lost = {key for state in shared.values() for key in state["private"]}
    assert all(key in said for key in lost)
    assert ("messages in flight" in said) == any(state["flights"] for state in shared.values())


@pytest.mark.parametrize("name", sorted(PRIVATE))
def test_replicas_that_drift_go_on_in_another_world_from_their_own_anchors(name):
    saved = stopped(name, 5)

    def worker():
        run = case(name).load(saved[rank() % 2])
        run.train(6, 9)
        run.sync.close()
        return run.digest()

    assert len(set(simulate(worker, replicas=3).returns)) == 1


@pytest.mark.parametrize("name", ["decoupled", "streaming", "diloco", "powersgd", "ddp", "fda"])
def test_a_run_alone_can_be_joined_by_others_and_left_by_them(name, caplog):
    alone = case(name, settings=CHECKED).train(1, 5)
    saved = alone.saved()

    def together():
        run = case(name).load(saved)
        assert run.digest() == alone.digest()
        run.train(6, 9)
        run.sync.close()
        return run.digest(), run.saved()

    results = simulate(together, replicas=2).returns
    assert results[0][0] == results[1][0]
    again = case(name).load(results[1][1])
    again.train(10, 11)
    again.sync.close()
    assert again.sync.stats().steps == 11
    said = {record.getMessage() for record in caplog.records}
    if name != "never":
        assert "one of checkpoint and session is of a single replica: anchors are the present parameters" in said


def test_another_replicas_checkpoint_gives_what_is_shared(caplog):
    saved = stopped("decoupled", 6)

    def worker():
        run = case("decoupled").load(saved[0])
        residual = run.sync.state_dict()["rounds"]["decoupled.0"]["private"]["residual"].abs().sum().item()
        run.train(7, 9)
        run.sync.close()
        return residual, run.digest()

    (own, one), (others, other) = simulate(worker, replicas=2).returns
    assert own > 0
    assert others == 0
    assert one == other
    assert "decoupled.0: saved by another replica or world, so these start anew: residual" in caplog.text


def test_another_replicas_messages_are_refused():
    saved = stopped("streaming", 3)
    told = errors(lambda: case("streaming").load(saved[1 - rank()]))
    assert told == [
        f"StateError: rank {own} cannot send what rank {1 - own} had on its way: streaming_diloco.0#0\n"
        "hint: give every replica its own checkpoint"
        for own in (0, 1)
    ]


def loaded(run: Run, state) -> str:
    """How a session answers to a state, which must leave it as it was."""
    before = copy.deepcopy(run.sync.state_dict())
    try:
        run.sync.load_state_dict(state)
    except StateError as error:
        assert not list(differences(run.sync.state_dict(), before))
        return str(error)
    return ""


def test_a_state_that_does_not_fit_is_refused_and_nothing_is_loaded():
    alone = {"settings": Settings(alone="method")}
    run = Run("streaming_diloco", {"period": 6, "fragments": 2, "delay": 2}, adamw, alone).train(1, 4)
    good = run.sync.state_dict()
    assert loaded(run, good) == ""
    # the session it is loaded into has gone on meanwhile
    names = list(good["rounds"])

    def changed(**changes):
        return {**good, **changes}

    def second(**changes):
        """The first round fits, the second does not."""
        return changed(rounds={**good["rounds"], names[1]: {**good["rounds"][names[1]], **changes}})

    shared = good["rounds"][names[1]]["shared"]
    cases = {
        "version": (
            changed(version=VERSION + 1),
            (f"the checkpoint has version {VERSION + 1}, this lowtide reads up to {VERSION}\n"
            "hint: install a newer lowtide"),
        ),
        "method": (
            changed(method="diloco(period=6)"),
            (f"the checkpoint was made by diloco(period=6), this session runs {run.sync.method}\n"
            "hint: attach with the same method, options and overrides"),
        ),
        "overrides": (
            changed(rounds={"streaming_diloco.0[*bias]#0": good["rounds"][names[0]]}),
            (f"the checkpoint was made by {run.sync.method}, this session runs {run.sync.method}\n"
            "hint: attach with the same method, options and overrides"),
        ),
        "parameters": (
            second(identity="00" * 16),
            (f"the checkpoint of {names[1]} was made for other parameters\n"
            "hint: build the same model, with the same parts frozen"),
        ),
        "missing": (
            second(shared={"anchor": shared["anchor"]}),
            f"the checkpoint of {names[1]} lacks or missizes outer.momentum\nhint: it was made by another method",
        ),
        "size": (
            second(shared={**shared, "anchor": shared["anchor"][1:]}),
            f"the checkpoint of {names[1]} lacks or missizes anchor\nhint: it was made by another method",
        ),
        "cursor": (
            changed(cursors={"train": {"epoch": 0, "position": -3, "drawn": None}}),
            "a data cursor cannot stand at epoch 0, position -3\nhint: the checkpoint is damaged",
        ),
        "meter": (changed(meter={}), "no saved ledger: KeyError('by_cause')\nhint: pass what to_dict() returned"),
        "nothing": ({}, (f"the checkpoint was made by None, this session runs {run.sync.method}\n"
            "hint: attach with the same method, options and overrides")),
        "model": (
            changed(model="00" * 32),
            ("the model does not hold the parameters that were saved with this state\n"
            "hint: first attach, then load the model, the optimizer and the session"),
        ),
    }  # fmt: skip
    for name, (state, said) in cases.items():
        assert loaded(run, state) == said, name


def test_a_model_that_was_loaded_before_attaching_is_noticed():
    """Attaching copies rank 0's parameters over it, in the middle of a round."""
    saved = stopped("decoupled", 6)

    def worker():
        state = torch.load(io.BytesIO(saved[rank()]), weights_only=True)
        model = net()
        model.load_state_dict(state["model"])
        attach(model, sgd(model), "decoupled", period=4).load_state_dict(state["sync"])

    told = errors(worker)
    assert told[1].startswith("StateError: the model does not hold the parameters that were saved with this state")


def test_an_older_state_brings_a_session_back():
    def worker():
        run = case("decoupled_sharded").train(1, 2)
        early = run.saved()
        run.train(3, 9)
        first = run.all()
        run.load(early).train(3, 9)
        return not list(differences(run.all()["model"], first["model"])), run.digest()

    one, other = simulate(worker, replicas=2).returns
    assert one[0] and other[0]


def test_a_state_is_plain_tensors_and_values():
    def worker():
        run = case("streaming").train(1, 4)
        run.sync.shard(range(10))
        return run.sync.state_dict()

    def kinds(value):
        if isinstance(value, dict):
            return set().union(*(kinds(each) for each in value.values()), {type(key) for key in value})
        if isinstance(value, list):
            return set().union(*map(kinds, value))
        return {type(value)}

    found = kinds(simulate(worker, replicas=2).returns[0])
    assert found <= {torch.Tensor, str, int, float, bool, type(None)}


def test_what_was_counted_goes_on_from_the_checkpoint():
    whole = simulate(lambda: case("decoupled").train(1, 9), replicas=2).stats
    saved = stopped("decoupled", 6)

    def worker():
        return case("decoupled").load(saved[rank()]).train(7, 9).sync.stats()

    for resumed, straight in zip(simulate(worker, replicas=2).returns, whole, strict=True):
        for name in ("steps", "rounds", "dropped", "payload", "sent", "received", "dense_reference"):
            assert getattr(resumed, name) == getattr(straight, name), name
        assert resumed.by_cause == straight.by_cause
        assert resumed.by_group == straight.by_group


def test_replicas_that_resume_at_different_steps_are_told():
    saved = [stopped("decoupled", at)[index] for index, at in enumerate((4, 8))]
    told = errors(lambda: case("decoupled").load(saved[rank()]).train(9, 12))
    assert all(text.startswith(AgreementError.__name__) for text in told), told
