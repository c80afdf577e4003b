from __future__ import annotations

import logging

import pytest
import torch
from tests.train.loops import CHECKED, METHODS, PRIVATE, Run, case, net, rank, same, sgd, step_once

from lowtide import LowtideError, PeerLostError, Report, Settings, attach, simulate
from lowtide.messages import Gather, Tag
from lowtide.train.agreement import digest
from lowtide.transport.loopback import Loopback

OVERLAPPED = ["streaming", "eager", "sparta_late", "fda_late"]


def rounds_of(worker, replicas=2):
    return simulate(worker, replicas=replicas).returns


def test_close_runs_the_last_partial_round():
    def worker():
        run = Run("decoupled", {"period": 4}).train(1, 6)
        before = run.sync.stats().rounds, run.digest()
        run.sync.close()
        return before, (run.sync.stats().rounds, run.digest())

    one, other = rounds_of(worker)
    assert one[0][0] == 1 and one[1][0] == 2
    assert one[0][1] != other[0][1]
    assert one[1] == other[1]


def test_close_has_nothing_to_do_right_after_a_round():
    def worker():
        run = Run("decoupled", {"period": 4}).train(1, 8)
        before = run.sync.stats(), run.digest()
        run.sync.close()
        assert run.sync.stats().rounds == before[0].rounds
        assert run.sync.stats().sent == before[0].sent
        return before[1] == run.digest()

    assert rounds_of(worker) == (True, True)


def test_a_short_last_round_can_be_scaled():
    def moved(scale):
        def worker():
            extra = {"settings": Settings(scale_last=scale)}
            run = Run("diloco", {"period": 8, "outer_lr": 1.0, "momentum": 0.0}, extra=extra)
            start = [p.detach().clone() for p in run.model.parameters()]
            run.train(1, 2)
            torch.manual_seed(0)
            run.sync.close()
            return torch.cat([(p - q).flatten() for p, q in zip(run.model.parameters(), start, strict=True)]).detach()

        return simulate(worker, replicas=2).returns[0]

    torch.testing.assert_close(moved(True), moved(False) * 2 / 8, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_closing_twice_is_closing_once(name):
    def worker():
        run = case(name).train(1, 5)
        run.sync.close()
        once = run.digest(), run.sync.stats()
        run.sync.close()
        run.sync.detach()
        assert (run.digest(), run.sync.stats()) == once
        # the loop may go on alone
        run.train(6, 7)
        return run.sync.stats().steps

    assert rounds_of(worker) == (5, 5)


def test_a_session_that_never_stepped_closes_without_a_word():
    def worker():
        with Run("decoupled").sync as sync:
            pass
        return sync.stats().rounds, sync.stats().by_cause.keys() <= {"start"}

    assert rounds_of(worker) == ((0, True), (0, True))


def test_leaving_the_block_closes():
    def worker():
        run = Run("local_sgd", {"period": 4})
        with run.sync as sync:
            assert sync is run.sync
            run.train(1, 6)
        return run.digest()

    one, other = rounds_of(worker)
    assert one == other


def test_an_exception_leaves_without_a_last_round_and_peers_get_the_reason():
    told = {}

    def worker():
        run = Run("decoupled", {"period": 4})
        before = None
        try:
            with run.sync:
                run.train(1, 6)
                before = run.digest(), run.sync.stats()
                if rank() == 1:
                    _ = [][rank()]
        except (IndexError, LowtideError) as error:
            told[rank()] = error
            # nothing was exchanged on the way out
            assert (run.digest(), run.sync.stats().rounds) == (before[0], before[1].rounds)
            assert run.sync.stats().sent == before[1].sent
            run.train(7, 8)
        return run.sync.stats().steps

    assert rounds_of(worker) == (6, 6)
    assert isinstance(told[1], IndexError)
    assert isinstance(told[0], PeerLostError)
    assert told[0].ranks == (1,)
    assert "rank 1 stopped: IndexError" in str(told[0])


@pytest.mark.parametrize("name", OVERLAPPED)
def test_an_exception_with_messages_on_their_way_is_the_one_that_is_seen(name):
    run = case(name, settings=Settings(alone="method")).train(1, 4)
    assert run.sync.engine.waiting
    with pytest.raises(ZeroDivisionError), run.sync:
        _ = 1 / 0


def test_keyboard_interrupt_leaves_without_the_network():
    def worker():
        run = Run("decoupled", {"period": 2}).train(1, 3)
        with pytest.raises(KeyboardInterrupt), run.sync:
            raise KeyboardInterrupt
        return run.sync.stats().rounds

    assert rounds_of(worker) == (1, 1)


@pytest.mark.parametrize("name", METHODS)
def test_detach_gives_the_model_back_as_it_is(name):
    def worker():
        run = case(name).train(1, 4)
        before, sent = run.digest(), run.sync.stats().sent
        run.sync.detach()
        assert run.digest() == before
        assert run.sync.stats().sent == sent
        assert not run.sync.engine.waiting
        return True

    assert rounds_of(worker) == (True, True)


@pytest.mark.parametrize("name", OVERLAPPED)
def test_detach_with_messages_on_their_way_needs_no_network(name):
    model = net()
    method, options, make = METHODS[name]
    sync = attach(model, make(model), method, settings=Settings(alone="method"), **options)
    optimizer = sync.engine.replica.optimizers[0]
    step = 0
    while not sync.engine.waiting:
        step += 1
        step_once(model, optimizer, step)
    before = digest(model.parameters())
    sync.detach()
    assert digest(model.parameters()) == before
    # its own transport has been given back
    with pytest.raises(LowtideError):
        sync.meter.start(Gather(b""), Tag("x", 0))


@pytest.mark.parametrize("name", METHODS)
def test_the_anchor_is_the_model_last_agreed_on(name):
    def worker():
        run = case(name).train(1, 8)
        live = run.digest()
        run.model.eval()
        with run.sync.anchor() as model:
            assert model is run.model
            inside = run.digest()
        assert run.digest() == live
        return live, inside

    returns = simulate(worker, replicas=2).returns
    anchored = name not in PRIVATE | {"ddp", "demo", "powersgd", "des_loc"}
    if anchored:
        assert returns[0][1] == returns[1][1]
    if name in ("ddp", "demo", "powersgd"):
        assert returns[0] == returns[1]


def test_the_anchor_is_the_model_of_the_last_round_not_of_now():
    def worker():
        run = Run("decoupled", {"period": 3}).train(1, 3)
        agreed = run.digest()
        run.train(4, 5)
        with run.sync.anchor():
            inside = run.digest()
        return agreed == inside != run.digest()

    assert rounds_of(worker) == (True, True)


def test_the_live_model_comes_back_after_an_error_inside():
    def worker():
        run = Run("decoupled", {"period": 3}).train(1, 5)
        live = run.digest()
        with pytest.raises(ZeroDivisionError), run.sync.anchor():
            _ = 1 / 0
        return run.digest() == live

    assert rounds_of(worker) == (True, True)


def test_looking_at_the_anchor_changes_nothing_that_follows():
    def worker(look):
        run = Run("decoupled", {"period": 3})
        for step in range(1, 9):
            step_once(run.model, run.optimizer, step)
            if look:
                with run.sync.anchor():
                    pass
        run.sync.close()
        return run.digest()

    assert rounds_of(lambda: worker(True)) == rounds_of(lambda: worker(False))


def test_alone_the_anchor_is_the_model():
    run = Run("decoupled").train(1, 3)
    live = run.digest()
    with run.sync.anchor():
        assert run.digest() == live


def test_one_replica_stops_all_at_the_same_step():
    def worker():
        run = Run("decoupled", {"period": 4})
        for step in range(1, 100):
            step_once(run.model, run.optimizer, step)
            if run.sync.any(step >= 5 + rank()):
                break
        run.sync.close()
        return step, run.digest(), run.sync.stats().by_cause["stop"] > 0

    one, *others = rounds_of(worker, replicas=3)
    assert all(other == one for other in others)
    assert one[0] == 5


def test_any_takes_whatever_is_true():
    def worker():
        sync = Run("ddp").sync
        return [sync.any(flag) for flag in (torch.tensor(rank() == 1), rank(), [], False)]

    assert rounds_of(worker) == ([True, True, False, False],) * 2
    alone = Run("ddp").sync
    assert [alone.any(flag) for flag in (True, False, torch.tensor(True))] == [True, False, True]


@pytest.mark.parametrize("name", [name for name in METHODS if name not in PRIVATE])
def test_fingerprints_are_equal_after_every_round(name):
    def worker():
        run = case(name)
        prints = []
        for step in range(1, 9):
            done = run.sync.stats().rounds
            step_once(run.model, run.optimizer, step)
            if run.sync.stats().rounds > done and name != "des_loc":
                prints.append(run.sync.fingerprint())
        run.sync.close()
        return [*prints, run.sync.fingerprint()]

    one, other = simulate(worker, replicas=2).returns
    assert one == other
    assert len(set(one)) > 1 or name == "des_loc"


@pytest.mark.parametrize("method", ["ddp", "powersgd", "demo"])
def test_fingerprints_of_methods_without_an_anchor_tell_the_parameters_apart(method):
    def worker():
        run = Run(method).train(1, 2)
        same_before = run.sync.fingerprint()
        with torch.no_grad():
            run.model.first.bias[0] += rank()
        return same_before, run.sync.fingerprint()

    one, other = rounds_of(worker)
    assert one[0] == other[0]
    assert one[1] != other[1]


def test_rank_and_size_say_which_replica_this_is():
    assert rounds_of(lambda: (Run("ddp").sync.rank, Run("ddp").sync.size), replicas=3) == ((0, 3), (1, 3), (2, 3))
    alone = Run("ddp").sync
    assert (alone.rank, alone.size) == (0, 1)


def test_on_round_is_told_each_report():
    def worker():
        reports = []
        run = Run("decoupled", {"period": 3}, extra={"on_round": reports.append}).train(1, 7)
        run.sync.close()
        return reports

    one, other = rounds_of(worker)
    assert one == [Report("decoupled.0", event, step, (0, 1)) for event, step in ((1, 3), (2, 6), (3, 7))]
    assert one == other


def test_on_round_is_told_when_a_gate_stays_closed():
    def worker():
        reports = []
        Run("fda", {"theta": 1e9}, extra={"on_round": reports.append}).train(1, 3)
        return [(report.step, bool(report.closed), report.ranks) for report in reports]

    assert rounds_of(worker) == ([(step, True, ()) for step in (1, 2, 3)],) * 2


def test_reports_of_gradients_come_after_the_step():
    def worker():
        seen = []
        model = net()
        optimizer = sgd(model)
        sync = attach(
            model, optimizer, "ddp", on_round=lambda report: seen.append((report.step, digest(model.parameters())))
        )
        step_once(model, optimizer, 1)
        return seen == [(1, digest(model.parameters()))], sync.stats().rounds

    assert rounds_of(worker) == ((True, 1),) * 2


@pytest.mark.parametrize(
    ("steps", "period", "warns"), [(3, 10, True), (10, 10, False), (11, 10, False), (0, 10, False)]
)
def test_a_run_that_is_shorter_than_a_period_is_warned_of(steps, period, warns, caplog):
    def worker():
        run = Run("decoupled", {"period": period}).train(1, steps)
        run.sync.close()

    with caplog.at_level(logging.WARNING, logger="lowtide"):
        simulate(worker, replicas=2)
    said = [record.getMessage() for record in caplog.records]
    text = f"the run ended after {steps} steps, before its first round; a shorter period gives it some"
    assert [line.endswith(text) for line in said] == [True] * (2 * warns)


def test_a_gate_that_never_opened_is_no_short_run(caplog):
    def worker():
        run = Run("fda", {"theta": 1e9}).train(1, 5)
        run.sync.close()

    with caplog.at_level(logging.WARNING, logger="lowtide"):
        simulate(worker, replicas=2)
    assert not caplog.records


def test_the_session_outlives_its_end():
    run = Run("diloco", {"period": 2}, extra={"settings": Settings(alone="method"), "transport": Loopback()})
    run.train(1, 3)
    run.sync.close()
    assert run.sync.stats().rounds == 2
    assert len(run.sync.fingerprint()) == 64
    assert run.sync.state_dict()["steps"] == 3
    with run.sync.anchor():
        pass


def test_replicas_that_drift_end_with_their_mean():
    def worker():
        run = Run("noloco", {"period": 2}, extra={"settings": CHECKED}).train(1, 4)  # two pairs
        before = [p.detach().clone() for p in run.model.parameters()]
        run.sync.close()
        return before, [p.detach().clone() for p in run.model.parameters()]

    returns = simulate(worker, replicas=4).returns
    befores = [before for before, _ in returns]
    assert not all(same(befores[0], before) for before in befores)
    for _, after in returns:
        assert same(after, returns[0][1])
        for mean, *parts in zip(after, *befores, strict=True):
            torch.testing.assert_close(mean, torch.stack(parts).mean(0))
