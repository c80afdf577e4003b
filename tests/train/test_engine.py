from __future__ import annotations

import pytest
import torch
from tests.train.loops import (
    CHECKED,
    METHODS,
    PRIVATE,
    Flaky,
    Run,
    batch,
    case,
    differences,
    kept,
    net,
    rank,
    sgd,
    step_once,
    until_it_fails,
)

from lowtide import ConfigError, Method, Plan, Settings, TransportError, attach, parts, simulate
from lowtide.train.agreement import digest
from lowtide.train.simulate import current_replica

# where several plans act at one step, those before the one that failed have been agreed on
ONE_PLAN = [name for name in METHODS if name not in ("resync", "sparta_diloco", "des_loc")]


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ONE_PLAN)
def test_an_exchange_that_fails_leaves_everything_as_it_was(name, fails_at):
    def worker():
        flaky = Flaky(current_replica().transport, fails_at)
        run = case(name, transport=flaky)
        step, _ = until_it_fails(run)
        assert run.sync.stats().dropped > 0
        return step

    one, other = simulate(worker, replicas=2).returns
    assert one == other


@pytest.mark.parametrize("name", [name for name in ONE_PLAN if name not in PRIVATE])
def test_after_a_dropped_round_replicas_go_on_as_one_model(name):
    def worker():
        flaky = Flaky(current_replica().transport, 2)
        run = case(name, transport=flaky)
        step, _ = until_it_fails(run)
        run.train(step + 1, step + 9)
        run.sync.close()
        return run.digest(), run.sync.fingerprint()

    one, other = simulate(worker, replicas=2).returns
    assert one == other


def test_plans_before_the_one_that_failed_have_been_agreed_on():
    def worker():
        # three messages of the first plan, at steps 2, 4 and 6, then the first one of the second
        run = case("sparta_diloco", transport=Flaky(current_replica().transport, 4)).train(1, 5)
        before = kept(run)
        with pytest.raises(TransportError, match="the line is down"):
            step_once(run.model, run.optimizer, 6)
        return [kept(run)[name]["event"] - before[name]["event"] for name in ("sparta.0", "sparta.1")]

    assert simulate(worker, replicas=2).returns == ([1, 0],) * 2


@pytest.mark.parametrize("name", ["fda", "fda_calibrated", "fda_late"])
def test_the_last_round_passes_every_gate(name):
    def worker():
        method, options, make = METHODS[name]
        run = Run(method, {**options, "theta": 1e9, "max_interval": 1000}, make, {"settings": CHECKED}).train(1, 8)
        apart = run.digest()
        run.sync.close()
        return apart, run.digest()

    one, other = simulate(worker, replicas=2).returns
    assert one[0] != other[0]
    assert one[1] == other[1]


def overlapped(merge: str) -> Method:
    rule = {"replace": parts.replace(), "mix": parts.mix(0.5), "rebase": parts.rebase()}[merge]
    plan = Plan(
        when=parts.every(4, delay=2), signal=parts.delta(), exchange=parts.summed(), outer=parts.sgd(1.0), merge=rule
    )
    return Method("overlapped", (plan,))


def constant_steps(merge: str, steps: int) -> float:
    """How far one unit a step has gone at the end."""

    def worker():
        model = torch.nn.Linear(3, 2)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = attach(model, optimizer, overlapped(merge))
        for _ in range(steps):
            for p in model.parameters():
                p.grad = -torch.ones_like(p)
            optimizer.step()
        sync.close()
        return model.weight.detach().clone()

    one, other = simulate(worker, replicas=2).returns
    assert torch.equal(one, other)
    return float(one.mean())


@pytest.mark.parametrize("steps", [3, 4, 5, 6, 7, 9])
def test_a_rebased_message_loses_no_step_at_the_end(steps):
    assert constant_steps("rebase", steps) == pytest.approx(steps)


@pytest.mark.parametrize(("steps", "gone"), [(3, 3), (4, 4), (5, 4), (7, 5)])
def test_a_replaced_message_drops_what_was_done_meanwhile(steps, gone):
    assert constant_steps("replace", steps) == pytest.approx(gone)


def test_every_leg_is_sent_and_the_outcome_applied_at_the_same_step():
    def worker():
        run = case("decoupled_sharded").train(1, 4)
        legs = [(entry.tag.event, entry.tag.leg, entry.kind) for entry in run.sync.meter.events if entry.tag.identity]
        run.sync.close()
        return legs

    assert simulate(worker, replicas=2).returns == ([(1, 0, "Scatter"), (1, 1, "Gather")],) * 2


def test_messages_of_overlapped_rounds_are_away_while_training_goes_on():
    def worker():
        run = Run("streaming_diloco", {"period": 6, "fragments": 2, "delay": 2})
        away = []
        for step in range(1, 13):
            step_once(run.model, run.optimizer, step)
            away.append(run.sync.engine.waiting)
        run.sync.close()
        return away

    expected = [step % 3 < 2 and step > 2 for step in range(1, 13)]
    assert simulate(worker, replicas=2).returns == (expected,) * 2


def test_a_link_that_is_slow_costs_nothing_when_messages_overlap():
    def seconds(delay):
        def worker():
            options = {"period": 10, "fragments": 1, "delay": delay, "bits": 32}
            Run("streaming_diloco", options).train(1, 35)

        return simulate(worker, replicas=2, link="100mbit/100ms", step_seconds=0.2)

    late, prompt = seconds(4), seconds(0)
    assert late.seconds < prompt.seconds
    compute = 35 * 0.2
    assert late.compute_seconds[0] == pytest.approx(compute, rel=1e-6)


def test_time_is_counted_where_it_goes():
    def worker():
        run = Run("decoupled", {"period": 2}).train(1, 6)
        return run.sync.stats().seconds

    result = simulate(worker, replicas=2, link="1mbit/250ms", step_seconds=0.1)
    for seconds in result.returns:
        assert seconds["encode"] > 0
        assert seconds["decode"] > 0
        # of the virtual clock, on which a round crosses the link twice; the start and the buffers come on top
        assert 3 * 2 * 0.25 <= seconds["wait"] < seconds["wire"]


def test_a_weight_that_cannot_weigh_drops_the_round_and_names_itself():
    def worker():
        values = iter([1.0, 2.0, -1.0])
        run = Run("decoupled", {"period": 2}, extra={"weight": lambda: next(values, 1.0)})
        run.train(1, 2)
        before = kept(run)
        with pytest.raises(ConfigError, match=r"weight must be positive, not -1\.0"):
            run.train(3, 4)
        assert not list(differences(before, kept(run)))
        run.train(5, 6)
        run.sync.close()
        return run.digest()

    one, other = simulate(worker, replicas=2).returns
    assert one == other


def test_a_replica_with_a_gradient_that_is_not_finite_is_left_out_and_healed(caplog):
    def worker():
        run = Run("decoupled", {"period": 2}, extra={"settings": CHECKED})
        run.train(1, 3)
        if rank() == 1:
            with torch.no_grad():
                run.model.second.weight[3, 5] = torch.nan
        reports = []
        run.sync.stepper.on_round = reports.append
        x, y = batch(4)
        run.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(run.model(x), y).backward()
        for p in run.model.parameters():
            p.grad.nan_to_num_(0.0)
        run.optimizer.step()
        run.train(5, 6)
        run.sync.close()
        return reports[0].sick, run.digest(), all(bool(p.isfinite().all()) for p in run.model.parameters())

    one, other = simulate(worker, replicas=3).returns[:2]
    assert (one[0], other[0]) == (None, "second.weight")
    assert one[1:] == other[1:]
    assert one[2]
    warned = [record.getMessage() for record in caplog.records]
    assert warned == ["decoupled.0, event 2: second.weight is not finite on rank 1, which was left out"]


@pytest.mark.parametrize("method", ["ddp", "local_sgd", "decoupled"])
def test_when_all_replicas_are_sick_the_model_stays_at_what_was_agreed(method):
    def worker():
        options = {} if method == "ddp" else {"period": 1}
        model = net()
        optimizer = sgd(model)
        sync = attach(model, optimizer, method, settings=Settings(check_every=1), **options)
        step_once(model, optimizer, 1)
        before = digest(model.parameters())
        for p in model.parameters():
            p.grad = torch.full_like(p, torch.nan)
        optimizer.step()
        healed = digest(model.parameters())
        sync.close()
        return before, healed, digest(model.parameters())

    one, other = simulate(worker, replicas=2).returns
    assert one == other
    assert one[0] == one[1]
