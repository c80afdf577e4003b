from __future__ import annotations

import pytest
import torch
from tests.train.loops import Run, adamw, batch, net, rank, same, sgd, step_once
from torch import nn

from lowtide import ConfigError, ModelError, Settings, attach, simulate
from lowtide.train.agreement import digest
from lowtide.train.hooks import held_by, innermost

ALONE = Settings(alone="method")
GRADIENTS = ["ddp", "demo", "powersgd"]


def steps_of(optimizer, model, **options):
    """A session that runs its method alone, and how many steps it has counted."""
    sync = attach(model, optimizer, "diloco", period=1000, settings=ALONE, **options)
    return sync, lambda: sync.stats().steps


def backward(model, step=1, factor=1.0):
    x, y = batch(step)
    (nn.functional.cross_entropy(model(x), y) * factor).backward()


def test_accumulated_gradients_are_one_step():
    model = net()
    optimizer = sgd(model)
    _, steps = steps_of(optimizer, model)
    for step in range(12):
        backward(model, step, 1 / 4)
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    assert steps() == 3


def test_with_several_optimizers_a_step_counts_when_each_has_made_one():
    model = net()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    muon, other = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-3)
    _, steps = steps_of([muon, other], model)
    counted = []
    for optimizer in (muon, other, other, other, muon, muon, other):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        counted.append(steps())
    assert counted == [0, 1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("method", ["muloco", "ddp", "decoupled"])
def test_muon_and_adamw_together_keep_replicas_equal(method):
    def worker():
        model = net()
        matrices = [p for p in model.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if p.dim() != 2]
        optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-3)]
        options = {} if method == "ddp" else {"period": 2}
        sync = attach(model, optimizers, method, settings=Settings(check_every=1), **options)
        for step in range(1, 6):
            backward(model, step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        sync.close()
        return digest(model.parameters()), sync.stats().steps

    one, other = simulate(worker, replicas=2).returns
    assert one == other
    assert one[1] == 5


def test_gradients_are_common_before_the_first_of_several_optimizers_steps():
    def worker():
        model = net()
        model.drop.p = 0.0
        first = torch.optim.SGD(model.first.parameters(), lr=0.1)
        others = [p for name, p in model.named_parameters() if not name.startswith("first")]
        second = torch.optim.SGD(others, lr=0.1)
        sync = attach(model, [first, second], "ddp")
        backward(model)
        own = model.second.weight.grad.clone()
        first.step()
        common = model.second.weight.grad.clone()
        second.step()
        sync.close()
        return own, common, digest(model.parameters())

    one, other = simulate(worker, replicas=2).returns
    assert not same(one[0], other[0])
    assert same(one[1], other[1])
    torch.testing.assert_close(one[1], (one[0] + other[0]) / 2)
    assert one[2] == other[2]


def scaled_steps(optimizer, model, factors):
    """Steps under a scaler, some of whose losses overflow."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number, factor in enumerate(factors):
        x, y = batch(number)
        loss = nn.functional.cross_entropy(model(x), y) * factor
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scaler


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_is_no_step(fused):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    sync, steps = steps_of(optimizer, model)
    scaler = scaled_steps(optimizer, model, [1.0, float("inf"), 1.0, float("nan"), float("inf"), 1.0])
    assert steps() == 3
    assert scaler.get_scale() == 4.0 / 8
    assert next(iter(optimizer.state.values()))["step"] == 3
    sync.close()


@pytest.mark.parametrize("fused", [False, True])
def test_replicas_that_skip_other_steps_agree_all_the_same(fused):
    def worker():
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        sync = attach(model, optimizer, "decoupled", period=3, settings=Settings(check_every=1))
        # the one that skips takes one more batch
        scaled_steps(optimizer, model, [1.0, float("inf"), *[1.0] * 5] if rank() == 1 else [1.0] * 6)
        stats = sync.stats()
        sync.close()
        return stats.steps, stats.rounds, digest(model.parameters())

    one, other = simulate(worker, replicas=2).returns
    assert one == other
    assert one[:2] == (6, 2)


@pytest.mark.parametrize("batches", [9, 11])
def test_a_replica_that_is_one_step_short_at_the_end_agrees_with_its_last_partial_round(batches):
    """Where the others have nothing left to agree on it would be alone: then it has to take one more batch."""

    def worker():
        model = net()
        optimizer = adamw(model)
        with attach(model, optimizer, "decoupled", period=3, settings=Settings(check_every=1)) as sync:
            scaled_steps(optimizer, model, [float("inf") if rank() else 1.0, *[1.0] * (batches - 1)])
        return sync.stats().steps, sync.stats().rounds, digest(model.parameters())

    one, other = simulate(worker, replicas=2).returns
    assert (one[0], other[0]) == (batches, batches - 1)
    assert one[1:] == other[1:]


@pytest.mark.parametrize("method", GRADIENTS)
@pytest.mark.parametrize("fused", [False, True])
def test_methods_on_gradients_are_refused_under_a_scaler(method, fused):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    sync = attach(model, optimizer, method, settings=ALONE)
    with pytest.raises(ModelError) as refused:
        scaled_steps(optimizer, model, [1.0])
    assert str(refused.value) == (
        "methods on gradients cannot run under a GradScaler: each replica would skip other steps\n"
        "hint: train in bfloat16, or use a method on deltas such as decoupled or diloco"
    )
    assert sync.stats().steps == 0


@pytest.mark.parametrize("style", ["positional", "keyword"])
def test_methods_on_gradients_are_refused_with_a_closure(style):
    model = net()
    optimizer = sgd(model)
    attach(model, optimizer, "ddp", settings=ALONE)

    def closure():
        return torch.zeros(())

    with pytest.raises(ModelError, match="cannot run with a closure\nhint: call backward"):
        optimizer.step(closure) if style == "positional" else optimizer.step(closure=closure)


def test_a_closure_that_is_called_many_times_is_one_step():
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    _, steps = steps_of(optimizer, model)

    def closure():
        optimizer.zero_grad()
        x, y = batch(1)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.step(closure)
    assert steps() == 2


def test_a_scheduler_around_the_step_does_not_count():
    model = net()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    _, steps = steps_of(optimizer, model)
    for step in range(1, 4):
        step_once(model, optimizer, step)
        schedule.step()
    assert steps() == 3


def test_detaching_gives_the_optimizer_back():
    model = net()
    optimizer = sgd(model)
    sync, steps = steps_of(optimizer, model)
    step_once(model, optimizer, 1)
    sync.detach()
    step_once(model, optimizer, 2)
    assert steps() == 1
    assert not optimizer._optimizer_step_post_hooks
    assert not optimizer._optimizer_step_pre_hooks


def test_the_innermost_optimizer_is_found_under_any_number_of_wrappers():
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

    class Strange:
        def __init__(self, optimizer):
            self.optimizer = optimizer

    optimizer = sgd(net())
    assert innermost(optimizer) is optimizer
    assert innermost(Wrapper(Strange(Wrapper(optimizer)))) is optimizer


@pytest.mark.parametrize("wrong", ["adam", None, [1], nn.Linear(2, 2)], ids=str)
def test_what_is_no_optimizer_is_refused(wrong):
    with pytest.raises(ConfigError, match="no optimizer: ") as refused:
        attach(net(), wrong)
    assert str(refused.value).endswith("\nhint: pass what steps the model, or a list of them")


def test_an_optimizer_that_leaves_parameters_out_is_refused_by_their_names():
    model = net()
    with pytest.raises(ModelError) as refused:
        attach(model, torch.optim.SGD(model.first.parameters(), lr=0.1))
    assert str(refused.value) == (
        "no optimizer given steps norm.weight, norm.bias, second.weight and 1 more\n"
        "hint: pass all optimizers of this model, or freeze what is not trained"
    )


def test_an_optimizer_of_another_model_is_refused():
    model = net()
    both = torch.optim.SGD([*model.parameters(), *nn.Linear(3, 2).parameters()], lr=0.1)
    with pytest.raises(ModelError) as refused:
        attach(model, both)
    assert str(refused.value) == (
        "the optimizer steps 2 tensors that the model does not have, one of shape (2, 3)\n"
        "hint: build it from model.parameters() of the model you attach"
    )


def test_frozen_parameters_may_be_left_out_or_held():
    for held in ("all", "trained"):
        model = net()
        model.first.requires_grad_(False)
        chosen = model.parameters() if held == "all" else [p for p in model.parameters() if p.requires_grad]
        attach(model, torch.optim.SGD(chosen, lr=0.1)).close()


def test_a_group_with_strange_tensors_is_refused_at_the_next_step():
    model = net()
    optimizer = sgd(model)
    attach(model, optimizer, "diloco", settings=ALONE)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(5, 7))]})
    with pytest.raises(ModelError, match=r"1 tensors that the model does not have, one of shape \(5, 7\)"):
        step_once(model, optimizer, 1)


def test_a_group_of_the_models_own_parameters_that_was_frozen_is_refused_by_name():
    model = net()
    model.first.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    attach(model, optimizer, "diloco", settings=ALONE)
    model.first.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.first.parameters())})
    with pytest.raises(ModelError, match=r"have changed since attach: first\.bias, first\.weight"):
        step_once(model, optimizer, 1)


def test_a_parameter_that_is_taken_out_of_the_optimizer_is_refused_by_name():
    model = net()
    optimizer = sgd(model)
    attach(model, optimizer, "diloco", settings=ALONE)
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]
    with pytest.raises(ModelError, match=r"no optimizer given steps first\.weight"):
        step_once(model, optimizer, 1)


def test_groups_may_be_cut_anew_and_states_loaded():
    model = net()
    optimizer = adamw(model)
    _, steps = steps_of(optimizer, model)
    step_once(model, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    step_once(model, optimizer, 2)
    params = optimizer.param_groups[0]["params"]
    moved = params[3:]
    del params[3:]
    optimizer.add_param_group({"params": moved, "lr": 1e-4})
    step_once(model, optimizer, 3)
    assert steps() == 3
    assert len(held_by(optimizer)) == 6


def test_an_optimizer_state_loaded_in_another_order_of_groups_keeps_replicas_equal():
    def worker():
        model = net()
        weights = [p for p in model.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if p.dim() != 2]
        first = torch.optim.AdamW([{"params": weights}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)
        sync = attach(model, first, "diloco", period=2, settings=Settings(check_every=1))
        for step in range(1, 4):
            step_once(model, first, step)
        state = first.state_dict()
        first.load_state_dict(state)
        for step in range(4, 6):
            step_once(model, first, step)
        sync.close()
        return digest(model.parameters())

    one, other = simulate(worker, replicas=2).returns
    assert one == other


def test_attaching_adds_no_state_to_the_optimizer():
    runs = [Run("diloco", make=adamw, extra={"settings": ALONE}), None]
    assert runs[0].optimizer.state_dict() == adamw(net()).state_dict()
