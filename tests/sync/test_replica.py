"""The only door between a round and a model."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lowtide.sync import ModelReplica
from lowtide.sync.replica import GRADIENTS, PARAMETERS, nonfinite
from lowtide.tensors import Layout, entries, tile, trainable, whole


def build(net: nn.Module, *optimizers: torch.optim.Optimizer, chunker=None) -> tuple[ModelReplica, Layout]:
    found = trainable(net)
    return ModelReplica(found, optimizers), Layout.build(entries(net, found), chunker or tile())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_read_and_written_back_changes_nothing(dtype):
    net = nn.Sequential(nn.Linear(80, 70), nn.Conv2d(3, 4, 2), nn.LayerNorm(5)).to(dtype)
    replica, layout = build(net)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    buffer = replica.read(PARAMETERS, layout, layout.grid.zeros())
    assert buffer.dtype == torch.float32
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    replica.write(PARAMETERS, layout, buffer)
    for parameter, old in zip(net.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), old, atol=1e-7, rtol=0)


def test_writing_gradients_makes_those_that_are_not_there():
    net = nn.Linear(80, 70)
    replica, layout = build(net)
    replica.write(GRADIENTS, layout, torch.ones(layout.grid.size))
    assert all(parameter.grad is not None and bool((parameter.grad == 1).all()) for parameter in net.parameters())


def test_parameters_that_are_not_contiguous_are_written_too():
    net = nn.Linear(80, 70)
    net.weight = nn.Parameter(torch.randn(80, 70).T)
    replica, layout = build(net, chunker=whole())
    replica.write(PARAMETERS, layout, torch.full((layout.grid.size,), 2.0))
    assert bool((net.weight == 2.0).all())


def test_state_is_found_in_whichever_optimizer_keeps_it():
    net = nn.Linear(80, 70)
    first = torch.optim.SGD([net.weight], lr=0.1, momentum=0.9)
    second = torch.optim.AdamW([net.bias], lr=0.2)
    net(torch.ones(1, 80)).sum().backward()
    first.step()
    second.step()
    replica = ModelReplica(trainable(net), [first, second])
    bias = Layout.build([entry for entry in entries(net, trainable(net)) if entry.name == "bias"], tile())
    found = replica.read("exp_avg", bias, bias.grid.zeros())
    assert torch.equal(found, second.state[net.bias]["exp_avg"])


def test_the_present_rate_is_that_of_the_first_group_and_the_base_rate_survives_a_schedule():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.4)
    replica, _ = build(net, optimizer)
    assert (replica.learning_rate(), replica.base_rate()) == (0.4, 0.4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 * (step + 1))
    assert (replica.learning_rate(), replica.base_rate()) == (pytest.approx(0.04), 0.4)
    optimizer.step()
    schedule.step()
    assert (replica.learning_rate(), replica.base_rate()) == (pytest.approx(0.08), 0.4)


@pytest.mark.parametrize("place", [0, 511, 1023])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_value_anywhere_is_found(place, bad):
    buffer = torch.full((1024,), 3.4e38)
    assert not nonfinite(buffer), "a sum of large finite values is no infinity"
    buffer[place] = bad
    assert nonfinite(buffer)


def test_two_infinities_do_not_hide_each_other():
    assert nonfinite(torch.tensor([math.inf, -math.inf, 1.0]))
