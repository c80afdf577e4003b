from __future__ import annotations

import pytest
import torch
from tests.train.loops import METHODS, Run, adamw, case, net, rank, sgd, step_once
from torch import nn

from lowtide import Method, ModelError, Plan, Settings, attach, parts, simulate
from lowtide.train.agreement import digest

ALONE = Settings(alone="method")


def launches(name, steps=12):
    """The steps at which each round left, by name."""

    def worker():
        reports = []
        run = case(name, on_round=reports.append).train(1, steps)
        run.sync.detach()
        return {(report.plan, report.step) for report in reports}

    one, other = simulate(worker, replicas=2).returns
    assert one == other
    found = {}
    for plan, step in sorted(one):
        found.setdefault(plan, []).append(step)
    return found


def test_rounds_come_at_the_steps_that_the_method_says():
    assert launches("diloco") == {"diloco.0": [4, 8, 12]}
    assert launches("post_local") == {"local_sgd.0": [1, 2, 3, 7, 11]}
    assert launches("resync") == {"decoupled.0": [2, 4, 6, 8, 10, 12], "decoupled.1": [10]}
    assert launches("streaming") == {"streaming_diloco.0#0": [3, 9], "streaming_diloco.0#1": [6]}
    assert launches("eager") == {"eager.0": [4, 8]}
    assert launches("ddp") == {"ddp.0": list(range(1, 13))}
    assert launches("des_loc") == {
        "des_loc.0": [2, 4, 6, 8, 10, 12],
        "des_loc.1": [6, 12],
        "des_loc.2": [12],
    }


def test_several_plans_run_in_the_order_written():
    def plan(scale):
        # each adds its own change to the mean, so that the order shows in the result
        return Plan(
            when=parts.every(1),
            signal=parts.delta(),
            exchange=parts.summed(),
            outer=parts.sgd(scale),
            merge=parts.replace(),
        )

    def worker(scales):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = attach(model, optimizer, Method("two", tuple(plan(scale) for scale in scales)))
        model.weight.grad = torch.full_like(model.weight, 1.0)
        optimizer.step()
        sync.detach()
        return model.weight.item()

    # the inner step goes from 1 to 0; then each plan goes its share of the way from 1 to what it finds
    assert simulate(lambda: worker((0.5, 1.0)), replicas=2).returns == (0.5, 0.5)
    assert simulate(lambda: worker((1.0, 0.5)), replicas=2).returns == (0.5, 0.5)
    assert simulate(lambda: worker((0.5, 0.5)), replicas=2).returns == (0.75, 0.75)


@pytest.mark.parametrize("kind", ["requires_grad", "replaced", "more", "less", "order"])
@pytest.mark.parametrize("method", ["decoupled", "ddp"])
def test_a_model_that_was_changed_is_refused_by_name(kind, method):
    model = net()
    optimizer = sgd(model)
    attach(model, optimizer, method, settings=ALONE)
    step_once(model, optimizer, 1)
    match kind:
        case "requires_grad":
            model.first.weight.requires_grad_(False)
            said = "first.weight"
        case "replaced":
            model.second.weight = nn.Parameter(model.second.weight.detach().clone())
            said = "second.weight"
        case "more":
            model.third = nn.Linear(2, 2)
            said = "third.bias, third.weight"
        case "less":
            model.second.bias = None
            said = "second.bias"
        case "order":
            model.first._parameters["weight"] = model.first._parameters.pop("weight")
            said = "their order"
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    before = digest(model.parameters())
    with pytest.raises(ModelError) as refused:
        optimizer.step()
    assert str(refused.value) == (
        f"the trained parameters have changed since attach: {said}\n"
        "hint: close the session, change requires_grad or parameters, then attach again"
    )
    if method == "ddp":
        assert digest(model.parameters()) == before


def test_alone_the_model_may_not_be_changed_either():
    """A loop that would fail with others fails alone, where it is cheaper to find."""
    model = net()
    optimizer = sgd(model)
    attach(model, optimizer, "decoupled")
    model.first.weight.requires_grad_(False)
    with pytest.raises(ModelError, match=r"changed since attach: first\.weight"):
        step_once(model, optimizer, 1)


def test_after_closing_the_model_may_change_and_be_attached_again():
    def worker():
        run = Run("decoupled", {"period": 2}).train(1, 3)
        run.sync.close()
        run.model.first.requires_grad_(False)
        with attach(run.model, run.optimizer, "decoupled", period=2) as again:
            run.train(4, 7)
        return run.digest(), again.stats().steps

    one, other = simulate(worker, replicas=2).returns
    assert one == other
    assert one[1] == 4


def test_the_schedule_and_the_optimizers_moments_stay_local():
    def worker():
        run = Run("decoupled", {"period": 2}, adamw).train(1, 4)
        moments = [state["exp_avg"] for state in run.optimizer.state.values()]
        return digest(moments), run.digest()

    one, other = simulate(worker, replicas=2).returns
    assert one[0] != other[0]
    assert one[1] == other[1]


def test_des_loc_makes_the_moments_common():
    def worker():
        run = case("des_loc").train(1, 12)
        return [digest([state[name] for state in run.optimizer.state.values()]) for name in ("exp_avg", "exp_avg_sq")]

    one, other = simulate(worker, replicas=2).returns
    assert one == other


def test_an_error_in_on_round_reaches_the_loop():
    def broken(report):
        raise KeyError(report.plan)

    run = Run("decoupled", {"period": 2}, extra={"settings": ALONE, "on_round": broken})
    run.train(1, 1)
    with pytest.raises(KeyError, match=r"decoupled\.0"):
        run.train(2, 2)


SPARSE = [name for name, (method, options, _) in METHODS.items() if "period" in options or method == "fda"]


@pytest.mark.parametrize("name", SPARSE)
def test_between_rounds_a_step_moves_no_byte(name):
    method, options, _ = METHODS[name]

    def worker():
        # the first round at step 60, or the first check of the gate
        slow = {key: 60 for key in options if key == "period"} | ({"check_every": 60} if method == "fda" else {})
        rest = {key: value for key, value in options.items() if key not in ("period", "check_every", "switch_at")}
        run = Run(method, {**rest, **slow}, METHODS[name][2])
        before = run.sync.stats().sent
        run.train(1, 5)
        return run.sync.stats().sent - before, run.sync.stats().steps

    assert simulate(worker, replicas=2).returns == ((0, 5),) * 2


def test_bf16_parameters_keep_fp32_anchors():
    def worker():
        model = net().to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = attach(model, optimizer, "decoupled", period=2, settings=Settings(check_every=1))
        for step in range(1, 6):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank())).bfloat16()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        sync.close()
        anchor = sync.engine.rounds[0].anchor
        names = {p.dtype for p in model.parameters()}
        fine = bool((anchor != anchor.bfloat16().float()).any())
        return names == {torch.bfloat16}, anchor.dtype, fine, digest(model.parameters())

    one, other = simulate(worker, replicas=2).returns
    assert one == other
    assert one[:3] == (True, torch.float32, True)


@pytest.mark.parametrize("method", ["local_sgd", "diloco"])
def test_outer_updates_below_the_quantum_of_bf16_are_not_lost(method):
    """One of eight replicas moves by one quantum each round: after 24 rounds the mean has moved by three of them."""

    def worker():
        options = {"outer_lr": 1.0, "momentum": 0.0} if method == "diloco" else {}
        model = nn.Linear(64, 64, bias=False).to(torch.bfloat16)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = attach(model, optimizer, method, period=1, **options)
        for _ in range(24):
            model.weight.grad = torch.full_like(model.weight, -(2.0**-7) * (rank() == 3))
            optimizer.step()
        sync.detach()
        return sync.engine.rounds[0].anchor[0].item(), model.weight[0, 0].item()

    for anchor, live in simulate(worker, replicas=8).returns:
        assert anchor == pytest.approx(1 + 3 * 2.0**-7)
        assert live == 1 + 3 * 2.0**-7
