from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.train.loops import errors, net, rank, same
from torch import nn

from lowtide import AgreementError, simulate
from lowtide.messages import Gather
from lowtide.train import agreement
from lowtide.train.agreement import agree, ask, copy_from_first, digest, introduce, same_everywhere
from lowtide.train.simulate import current_replica
from lowtide.transport.meter import Meter


def transport():
    return current_replica().transport


def test_a_question_is_answered_by_all_in_order():
    assert (
        simulate(lambda: ask(transport(), Gather(b"%d" % rank()), "stop").payloads, replicas=3).returns
        == ((b"0", b"1", b"2"),) * 3
    )


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ("lowtide", "install the same version everywhere"),
        ("torch", "install the same version everywhere: another one may round otherwise"),
        ("method", "give every replica the same method and options"),
        ("settings", "give every replica the same settings"),
        ("colour", "start all replicas alike"),
    ],
)
def test_replicas_that_differ_are_told_alike_who_has_what(field, hint):
    def worker():
        introduce(transport(), {"ground": "same", field: f"kind {rank() // 2}"}, [])

    expected = f"AgreementError: replicas differ in {field}: rank 0 has kind 0; rank 1 has kind 0; rank 2 has kind 1"
    assert errors(worker, replicas=3) == [f"{expected}\nhint: {hint}"] * 3


def models(change):
    """What replicas are told whose models differ on rank 1 of 2."""

    def worker():
        model = net()
        if rank() == 1:
            model = change(model) or model
        agree(transport(), model, [], {}, check=False)

    one, other = errors(worker)
    assert one == other
    return one


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda model: setattr(model, "second", nn.Linear(40, 111)),
            "tensor 4 is second.weight (110, 40) float32 on rank 0 and second.weight (111, 40) float32 on rank 1",
        ),
        (
            lambda model: setattr(model, "third", nn.Linear(2, 1, bias=False)),
            "tensor 6 is norm.running_mean (40,) float32 buffer on rank 0 and third.weight (1, 2) float32 on rank 1",
        ),
        (
            lambda model: setattr(model.first, "bias", None),
            "tensor 1 is first.bias (40,) float32 on rank 0 and norm.weight (40,) float32 on rank 1",
        ),
        (
            lambda model: setattr(model.second.bias, "requires_grad", False),
            "tensor 5 is second.bias (110,) float32 on rank 0 and second.bias (110,) float32 frozen on rank 1",
        ),
        (
            lambda model: model.second.to(torch.bfloat16) and None,
            "tensor 4 is second.weight (110, 40) float32 on rank 0 and second.weight (110, 40) bfloat16 on rank 1",
        ),
        (
            lambda model: model.register_buffer("extra", torch.zeros(3)),
            "tensor 6 is norm.running_mean (40,) float32 buffer on rank 0 and extra (3,) float32 buffer on rank 1",
        ),
        (
            lambda model: delattr(model.norm, "num_batches_tracked"),
            "tensor 8 is norm.num_batches_tracked () int64 buffer on rank 0 and nothing on rank 1",
        ),
    ],
    ids=["shape", "one more", "one less", "frozen", "dtype", "buffer more", "buffer less"],
)
def test_the_first_tensor_that_differs_is_named(change, said):
    assert models(change) == (
        f"AgreementError: replicas differ in parameters: {said}\n"
        "hint: build the same model everywhere, and freeze the same parts before you attach"
    )


def test_wrappers_are_no_difference():
    assert models(nn.DataParallel) == ""


def test_a_digest_is_of_the_bytes_alone():
    x = torch.arange(6.0).view(2, 3)
    assert digest([x]) == digest([x.flatten()]) == digest([x.T.contiguous().T]) == digest([x[:1], x[1:]])
    assert digest([x]) != digest([x.double()])
    assert digest([torch.tensor([0.0])]) != digest([torch.tensor([-0.0])])
    assert digest([torch.tensor(torch.nan)]) == digest([torch.tensor(torch.nan)])
    assert digest([]) == digest([torch.zeros(0)])


def test_digests_that_differ_are_shown():
    def worker():
        same_everywhere(transport(), "their anchors", digest([torch.tensor(float(rank()))]), "check")

    shown = [digest([torch.tensor(float(number))])[:12] for number in (0, 1)]
    assert (
        errors(worker)
        == [
            (
                f"AgreementError: replicas differ in their anchors: rank 0: {shown[0]}, rank 1: {shown[1]}\n"
                "hint: they are no longer one model; restart from a checkpoint"
            )
        ]
        * 2
    )


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=5),
    replicas=st.integers(2, 4),
    piece=st.integers(1, 64),
)
def test_all_get_what_rank_0_has_whatever_the_shapes_and_pieces(shapes, replicas, piece):
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)

    def worker():
        generator = torch.Generator().manual_seed(rank())
        tensors = {
            str(number): (torch.rand(shape, generator=generator) * 9).to(dtypes[number % len(dtypes)])
            for number, shape in enumerate(shapes)
        }
        copy_from_first(transport(), tensors)
        return tensors

    kept = agreement._PIECE
    agreement._PIECE = piece
    try:
        first, *others = simulate(worker, replicas=replicas).returns
    finally:
        agreement._PIECE = kept
    assert all(same(first, other) for other in others)


def test_equal_models_are_not_copied():
    def sent(seed):
        def worker():
            meter = Meter(transport())
            copy_from_first(meter, dict(net(seed * rank()).named_parameters()))
            return meter.ledger.total.payload

        return simulate(worker, replicas=2).returns

    nbytes = 4 * sum(p.numel() for p in net().parameters())
    assert sent(0) == (32, 32)
    assert all(nbytes / 2 < payload < 2 * nbytes for payload in sent(1))


def test_no_line_carries_more_than_about_twice_the_model():
    def worker():
        meter = Meter(transport())
        copy_from_first(meter, {"weight": torch.full((100_000,), float(rank()))})
        return max(meter.ledger.total.sent, meter.ledger.total.received)

    assert all(moved < 2.1 * 400_000 for moved in simulate(worker, replicas=8).returns)


def test_what_cannot_agree_is_an_error_of_its_own_kind():
    with pytest.raises(AgreementError):
        simulate(lambda: introduce(transport(), {"a": str(rank())}, []), replicas=2)
