"""What each signal reads, and where it comes from."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowtide.errors import ModelError
from lowtide.sync import ModelReplica
from lowtide.sync.signal import delta, gradient, optimizer_state, parameters
from lowtide.tensors import Layout, entries, tile, trainable


def replica(optimizer=torch.optim.AdamW, *, dtype=torch.float32) -> tuple[ModelReplica, Layout, nn.Module]:
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(70, 96), nn.Linear(96, 3)).to(dtype)
    layout = Layout.build(entries(net, trainable(net)), tile())
    found = ModelReplica(trainable(net), [optimizer(net.parameters(), lr=0.01)])
    net(torch.ones(2, 70, dtype=dtype)).square().sum().backward()
    return found, layout, net


def back(layout: Layout, buffer: torch.Tensor) -> list[torch.Tensor]:
    tensors = [torch.zeros(entry.shape) for entry in layout.entries]
    layout.scatter(buffer, tensors)
    return tensors


def read(signal, found: ModelReplica, layout: Layout, anchor=None) -> list[torch.Tensor]:
    out = torch.full((layout.grid.size,), torch.nan)
    assert signal.read(found, layout, anchor, out) is out
    assert bool(out.isfinite().all()), "padding was left as it was"
    return back(layout, out)


def test_parameters_and_gradients_are_read_as_they_are():
    found, layout, net = replica()
    for one, parameter in zip(read(parameters(), found, layout), net.parameters(), strict=True):
        assert torch.equal(one, parameter)
    for one, parameter in zip(read(gradient(), found, layout), net.parameters(), strict=True):
        assert torch.equal(one, parameter.grad)


def test_a_parameter_without_a_gradient_counts_as_zero():
    found, layout, net = replica()
    net[0].bias.grad = None
    assert not read(gradient(), found, layout)[1].any()


def test_delta_points_the_way_that_training_descended():
    found, layout, net = replica()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    anchor = found.read("parameters", layout, layout.grid.zeros())
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.sub_(0.5)
    for one in read(delta(), found, layout, anchor):
        torch.testing.assert_close(one, torch.full_like(one, 0.5))
    for one, old in zip(read(delta(pull=2.0), found, layout, anchor), before, strict=True):
        torch.testing.assert_close(one, 0.5 - 2.0 * old)


def test_the_delta_of_bf16_parameters_leaves_out_what_they_cannot_hold_of_the_anchor():
    found, layout, net = replica(dtype=torch.bfloat16)
    anchor = found.read("parameters", layout, layout.grid.zeros()) + 1e-4
    layout.clear_padding(anchor)
    held = [torch.empty_like(parameter) for parameter in net.parameters()]
    layout.scatter(anchor, held)  # rounds
    found_delta = read(delta(), found, layout, anchor)
    for one, kept, parameter in zip(found_delta, held, net.parameters(), strict=True):
        torch.testing.assert_close(one, kept.float() - parameter.detach().float(), atol=2e-8, rtol=0)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_optimizer_state_is_read_by_its_name(name):
    found, layout, net = replica()
    found.optimizers[0].step()
    for one, parameter in zip(read(optimizer_state(name), found, layout), net.parameters(), strict=True):
        assert torch.equal(one, found.optimizers[0].state[parameter][name])


def test_an_optimizer_that_keeps_no_such_state_is_named():
    found, layout, _ = replica(torch.optim.SGD)
    found.optimizers[0].step()
    with pytest.raises(ModelError, match=r"SGD keeps no 'exp_avg' for 0\.weight\nhint: .*Adam-like"):
        read(optimizer_state("exp_avg"), found, layout)


def test_a_sparse_gradient_is_refused_with_the_way_out():
    table = nn.Embedding(100, 64, sparse=True)
    table(torch.tensor([3])).sum().backward()
    found = ModelReplica(trainable(table), [torch.optim.SGD(table.parameters(), lr=0.1)])
    layout = Layout.build(entries(table, trainable(table)), tile())
    with pytest.raises(ModelError, match=r"sparse_coo gradient\nhint: build its nn\.Embedding with sparse=False"):
        gradient().read(found, layout, None, layout.grid.zeros())


def test_only_a_delta_needs_an_anchor():
    assert [s.anchored for s in (delta(), gradient(), parameters(), optimizer_state("x"))] == [
        True,
        False,
        False,
        False,
    ]
    assert [s.target for s in (delta(), gradient(), optimizer_state("x"))] == ["parameters", "gradients", "x"]
