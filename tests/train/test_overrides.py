from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.train.loops import CHECKED, METHODS, PRIVATE, Run, case, errors, net, rank, sgd
from torch import nn

import lowtide
from lowtide import ConfigError, attach, parts, simulate
from lowtide.sync.exchange import Gathered
from lowtide.sync.exchange.summed import Summed
from lowtide.tensors import Entry
from lowtide.train.agreement import digest
from lowtide.train.overrides import fragments, overridden, pieces

CODEC = parts.chain(parts.top_k(1 / 8), parts.int8())
ENTRIES = [
    Entry("embed.weight", (90, 50)),
    Entry("h.0.w", (64, 64)),
    Entry("h.1.w", (64, 64)),
    Entry("head.bias", (90,)),
]
OPEN = [
    *("ddp", "local_sgd", "diloco", "diloco_int8", "decoupled", "decoupled_sharded", "decoupled_nesterov"),
    *("sparseloco", "streaming", "muloco", "demo", "powersgd"),
]


def named(found):
    return {piece.name: [entry.name for entry in piece.entries] for piece in found}


def test_every_parameter_is_in_every_plan_once():
    found = pieces(lowtide.sparta(diloco_period=4), ENTRIES, {})
    assert named(found) == {"sparta.0": [e.name for e in ENTRIES], "sparta.1": [e.name for e in ENTRIES]}


def test_the_first_pattern_that_fits_wins():
    overrides = {"*.bias": "dense", "h*": CODEC, "*": parts.chain(parts.fp32())}
    assert named(pieces(lowtide.decoupled(), ENTRIES, overrides)) == {
        "decoupled.0[*.bias]": ["head.bias"],
        "decoupled.0[h*]": ["h.0.w", "h.1.w"],
        "decoupled.0[*]": ["embed.weight"],
    }


def test_dense_is_a_plain_sum_without_a_residual():
    plan = lowtide.decoupled().plans[0]
    dense = overridden(plan, "dense")
    assert isinstance(dense.exchange, Summed)
    assert not dense.residual.keeps
    assert (dense.when, dense.outer, dense.signal, dense.merge) == (plan.when, plan.outer, plan.signal, plan.merge)


def test_a_codec_keeps_the_residual_and_the_combine_rule():
    for method in (lowtide.decoupled(), lowtide.decoupled(exchange="sharded")):
        plan = method.plans[0]
        other = overridden(plan, CODEC)
        assert isinstance(other.exchange, Gathered)
        assert other.exchange.codec == CODEC
        assert other.exchange.combine == plan.exchange.combine
        assert other.residual == plan.residual


def test_a_pattern_that_fits_nothing_is_refused():
    with pytest.raises(ConfigError) as refused:
        pieces(lowtide.decoupled(), ENTRIES, {"*norm*": "dense"})
    assert str(refused.value) == "the override '*norm*' fits no parameter\nhint: names look like 'embed.weight'"


def test_a_pattern_that_is_always_too_late_is_refused_too():
    with pytest.raises(ConfigError, match=re.escape("the override 'h.0*' fits no parameter")):
        pieces(lowtide.decoupled(), ENTRIES, {"h*": "dense", "h.0*": CODEC})


@pytest.mark.parametrize("wrong", ["sparse", 3, None, parts.top_k(1 / 8)], ids=str)
def test_what_is_no_codec_is_refused(wrong):
    with pytest.raises(ConfigError) as refused:
        pieces(lowtide.decoupled(), ENTRIES, {"h*": wrong})
    assert str(refused.value) == (f"an override is 'dense' or a codec, not {wrong!r}\nhint: chain(top_k(1/16), int8())")


@pytest.mark.parametrize("override", ["dense", CODEC], ids=["dense", "codec"])
@pytest.mark.parametrize(
    ("method", "exchange"),
    [(lowtide.fda(), "Gate"), (lowtide.noloco(), "Pairs"), (lowtide.sparta(), "Masked")],
    ids=str,
)
def test_methods_whose_exchange_is_the_method_take_no_overrides(method, exchange, override):
    with pytest.raises(ConfigError) as refused:
        pieces(method, ENTRIES, {"h*": override})
    assert str(refused.value) == (
        f"the exchange {exchange} takes no overrides\n"
        "hint: they fit methods in which all replicas exchange all of the parameters at once"
    )


@pytest.mark.parametrize("override", ["dense", CODEC], ids=["dense", "codec"])
@pytest.mark.parametrize("name", OPEN)
def test_replicas_stay_one_model_with_overrides(name, override):
    def worker():
        run = case(name, overrides={"second*": override}).train(1, 6)
        run.sync.close()
        return run.digest(), run.sync.fingerprint()

    one, other = simulate(worker, replicas=2).returns
    assert one == other
    assert name not in PRIVATE and name in METHODS


def payload(**overrides):
    def worker():
        run = Run("decoupled", {"period": 2}, extra={"overrides": overrides, "settings": CHECKED}).train(1, 4)
        return run.sync.stats().payload - run.sync.meter.ledger.by_cause["start"].payload, run.sync.stats().by_group

    return simulate(worker, replicas=2).returns[0]


def test_bytes_change_as_the_codecs_say():
    plain, groups = payload()
    dense, dense_groups = payload(**{"second.weight": "dense"})
    finer, finer_groups = payload(**{"second.weight": parts.chain(parts.dct(64), parts.top_k(1 / 8), parts.sym2())})
    weight = 110 * 40
    # two rounds of four bytes for each of its elements, and a weight, instead of 1 of 32
    assert dense - plain == pytest.approx(2 * 4 * weight, rel=0.1)
    assert plain < finer < dense
    assert groups["matrix"] < finer_groups["matrix"] < dense_groups["matrix"]


def test_a_dense_part_takes_the_plain_mean_of_its_deltas():
    def worker():
        model = net()
        sync = attach(
            model,
            sgd(model),
            lowtide.decoupled(period=1, outer_lr=1.0),
            overrides={"second.bias": "dense"},
            buffers="ignore",
        )
        start = model.second.bias.detach().clone()
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + rank())
        sync.engine.replica.optimizers[0].step()
        return model.second.bias.detach() - start

    for moved in simulate(worker, replicas=2).returns:
        torch.testing.assert_close(moved, torch.full((110,), -0.15))


def test_replicas_with_other_overrides_are_told():
    def worker():
        Run("decoupled", extra={"overrides": {"first*": "dense"} if rank() else {"first*": CODEC}})

    one, other = errors(worker)
    assert one == other
    assert one.startswith("AgreementError: replicas differ in overrides: rank 0 has {'first*': Chain(")
    assert one.endswith("; rank 1 has {'first*': 'dense'}\nhint: give every replica the same overrides")


@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=12),
    blocks=st.lists(st.one_of(st.none(), st.integers(0, 9)), min_size=12, max_size=12),
    number=st.integers(1, 6),
)
def test_fragments_hold_every_tensor_once_and_none_is_empty(sizes, blocks, number):
    entries = [
        Entry(f"part{at}.w" if block is None else f"h.{block}.w{at}", (size,))
        for at, (size, block) in enumerate(zip(sizes, blocks, strict=False))
    ]
    if len(entries) < number:
        with pytest.raises(ConfigError) as refused:
            fragments(entries, number)
        assert str(refused.value) == (
            f"{len(entries)} tensors do not divide into {number} fragments\n"
            f"hint: fragments={len(entries)} is the most that they give"
        )
        return
    found = fragments(entries, number)
    assert len(found) == number
    assert all(found)
    assert sorted(entry.name for part in found for entry in part) == sorted(entry.name for entry in entries)


@pytest.mark.parametrize("number", [2, 3, 4])
def test_layers_without_parameters_leave_no_fragment_empty(number):
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.ReLU())))
    found = fragments([Entry(name, tuple(p.shape)) for name, p in model.named_parameters()], number)
    assert [[entry.name for entry in part] for part in found] == [
        [f"{layer}.{kind}" for layer in (0, 2, 4, 6)[at::number] for kind in ("weight", "bias")] for at in range(number)
    ]


def test_fragments_of_a_few_tensors_are_of_about_equal_size():
    found = fragments([Entry(f"t{at}", (size,)) for at, size in enumerate([10, 10, 10, 10, 10, 10, 60, 60])], 3)
    assert [[entry.name for entry in part] for part in found] == [
        ["t0", "t1", "t2", "t3", "t4", "t5"],
        ["t6"],
        ["t7"],
    ]


def test_what_is_tied_belongs_to_one_fragment_and_what_is_in_no_block_to_the_first():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(70, 64)
            self.h = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])
            self.head = nn.Linear(64, 70, bias=False)
            self.head.weight = self.embed.weight

    def worker():
        model = Tied()
        sync = attach(model, sgd(model), "streaming_diloco", period=3, fragments=3, delay=0)
        return [[entry.name for entry in round_.layout.entries] for round_ in sync.engine.rounds]

    assert simulate(worker, replicas=2).returns[0] == [
        ["embed.weight", "h.0.weight", "h.0.bias"],
        ["h.1.weight", "h.1.bias"],
        ["h.2.weight", "h.2.bias"],
    ]


def test_overridden_groups_are_cut_into_fragments_of_their_own():
    def worker():
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        optimizer = sgd(model)
        options = {"period": 4, "fragments": 2, "delay": 1}
        sync = attach(model, optimizer, "streaming_diloco", overrides={"*bias": "dense"}, settings=CHECKED, **options)
        for step in range(10):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + rank()))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        sync.close()
        return sorted(round_.name for round_ in sync.engine.rounds), digest(model.parameters())

    one, other = simulate(worker, replicas=2).returns
    assert one == other
    assert one[0] == [f"streaming_diloco.0{label}#{at}" for label in ("", "[*bias]") for at in (0, 1)]
