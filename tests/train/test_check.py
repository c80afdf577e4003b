from __future__ import annotations

import re

import pytest
import torch
from tests.train.loops import METHODS, PRIVATE, Run, case, errors, rank

from lowtide import AgreementError, Settings, simulate
from lowtide.train.agreement import digest
from lowtide.train.check import Check
from lowtide.train.simulate import current_replica
from lowtide.transport.loopback import Loopback
from lowtide.transport.meter import Meter

EQUAL = "ab" * 32


def compared(every, rounds, replicas=2):
    """The rounds after which fingerprints were compared."""

    def worker():
        meter, check, seen = Meter(current_replica().transport), Check(every), []
        for number in range(1, rounds + 1):
            before = meter.ledger.total.events
            check.after_round(meter, lambda: EQUAL)
            seen += [number] * (meter.ledger.total.events - before)
        return seen

    returns = simulate(worker, replicas=replicas).returns
    assert all(seen == returns[0] for seen in returns)
    return returns[0]


def test_the_period_is_counted_in_rounds():
    assert compared(1, 4) == [1, 2, 3, 4]
    assert compared(3, 8) == [3, 6]
    assert compared(0, 8) == []


def test_without_a_period_the_first_comparison_measures_and_all_take_the_same():
    def worker():
        meter, check = Meter(current_replica().transport), Check(None)
        hashes = []

        def fingerprint():
            hashes.append(digest([torch.zeros(200_000 * rank())]))
            return EQUAL

        for _ in range(12):
            check.after_round(meter, fingerprint)
        return check.every, len(hashes)

    one, other = simulate(worker, replicas=2).returns
    assert one == other
    assert 1 <= one[0] <= 1000
    # rounds without anything between them are far too quick to be checked one by one
    assert one[0] > 1
    assert one[1] == 1 + 12 // one[0]


def test_alone_there_is_nothing_to_compare():
    check = Check(1)
    check.after_round(Loopback(), lambda: pytest.fail("nobody to compare with"))
    assert check.rounds == 1


def test_a_saved_check_goes_on_counting():
    check = Check(None)
    check.load_state_dict({"every": 5, "rounds": 4})
    assert check.state_dict() == {"every": 5, "rounds": 4}

    def worker():
        meter = Meter(current_replica().transport)
        again = Check(None)
        again.load_state_dict({"every": 5, "rounds": 4})
        again.after_round(meter, lambda: EQUAL)
        return meter.ledger.total.events

    assert simulate(worker, replicas=2).returns == (1, 1)


def tampered(name, what, replicas=3):
    """What replicas are told when one of them has changed something behind our back."""

    def worker():
        run = case(name).train(1, 4)
        if rank() == 1:
            with torch.no_grad():
                if what == "parameters":
                    run.model.second.bias[2] += 1e-6
                else:
                    for round_ in run.sync.engine.rounds:
                        round_.state.shared[what].view(-1)[0] += 1e-6
        run.train(5, 12)

    return errors(worker, replicas)


def expected(told):
    said = re.fullmatch(
        r"AgreementError: replicas are not one model after round \d+: "
        r"rank 0 (\w{12}), rank 1 (\w{12}), rank 2 (\w{12})\n"
        r"hint: something else writes to the parameters, or machines round otherwise; restart from a checkpoint",
        told[0],
    )
    assert said is not None, told[0]
    assert told == [told[0]] * len(told)
    first, odd, third = said.groups()
    assert first == third != odd


ANCHORED = [name for name in METHODS if name not in PRIVATE | {"ddp", "demo", "powersgd", "des_loc"}]


@pytest.mark.parametrize("name", ANCHORED)
def test_an_anchor_that_was_changed_is_found_on_every_replica(name):
    expected(tampered(name, "anchor"))


@pytest.mark.parametrize("name", ["diloco", "muloco", "streaming", "decoupled_nesterov"])
def test_a_momentum_that_was_changed_is_found_on_every_replica(name):
    expected(tampered(name, "outer.momentum"))


@pytest.mark.parametrize("name", ["ddp", "demo", "powersgd"])
def test_without_an_anchor_changed_parameters_are_found_on_every_replica(name):
    expected(tampered(name, "parameters"))


@pytest.mark.parametrize("name", ["local_sgd", "diloco", "decoupled"])
def test_with_an_anchor_changed_parameters_are_a_delta_like_any_other(name):
    assert tampered(name, "parameters") == ["", "", ""]


def test_a_check_that_is_switched_off_finds_nothing():
    def worker():
        run = Run("ddp", extra={"settings": Settings(check_every=0)}).train(1, 2)
        with torch.no_grad():
            run.model.second.bias[2] += rank()
        run.train(3, 5)
        return run.sync.stats().by_cause.get("check", 0)

    assert simulate(worker, replicas=2).returns == (0, 0)


def test_a_check_costs_what_it_says():
    def worker():
        return Run("local_sgd", {"period": 2}, extra={"settings": Settings(check_every=2)}).train(1, 12).sync.meter

    for meter in simulate(worker, replicas=2).returns:
        assert meter.ledger.by_cause["check"].events == 3
        assert meter.ledger.by_cause["check"].payload == 3 * (4 + 32)


def test_the_error_is_one_of_agreement():
    def worker():
        Check(1).after_round(current_replica().transport, lambda: digest([torch.tensor(rank())]))

    with pytest.raises(AgreementError, match="not one model after round 1"):
        simulate(worker, replicas=2)
