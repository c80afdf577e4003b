"""The laws of codecs, for every one of them: bytes by formula, bounded errors, nothing lost, nothing believed blindly.

A new transform, selector, quantiser or chunker joins with a line in ALL_CODECS.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lowtide.codec import (
    Chain,
    Coefficients,
    Turn,
    all_,
    bf16,
    chain,
    cyclic,
    dct,
    e3m0,
    fp16,
    fp32,
    int8,
    linear,
    random,
    sign,
    stat,
    sym2,
    threshold,
    top_k,
    top_k_tensor,
)
from lowtide.codec.payload import HEADER_BYTES, MAJOR, SECTION_BYTES, digest, unseal
from lowtide.codec.tail import Full
from lowtide.errors import PayloadError
from lowtide.sync.residual import error_feedback
from lowtide.tensors import Entry, Grid, Layout, divisor, flat, tile, whole

ALL_CODECS = [
    ("fp32", chain()),
    ("bf16", chain(bf16())),
    ("fp16 in tiles", chain(fp16(), chunker=tile(64))),
    ("int8", chain(int8())),
    ("int8 twice as wide, flat", chain(int8(12), chunker=flat(1024))),
    ("e3m0", chain(e3m0())),
    ("linear 256", chain(linear(256), tail="fp32")),
    ("sign", chain(sign())),
    ("dct e3m0 in small blocks", chain(dct(16), e3m0(32))),
    ("dct int8", chain(dct(), int8())),
    ("dct top-k fp32", chain(dct(), top_k(1 / 32))),
    ("dct top-k sym2", chain(dct(), top_k(1 / 32), sym2())),
    ("dct top-k sym2, exact tail", chain(dct(), top_k(1 / 64), sym2(), tail="fp32")),
    ("dct top-k stat 4", chain(dct(), top_k(1 / 32), stat(4))),
    ("dct top-k stat 16", chain(dct(), top_k(1 / 8), stat(16))),
    ("dct top-k count in divisors", chain(dct(), top_k(count=32), chunker=divisor(64))),
    ("dct top-k sign", chain(dct(), top_k(1 / 32), sign())),
    ("top-k sym2", chain(top_k(1 / 64), sym2())),
    ("top-k bf16, flat", chain(top_k(1 / 16), bf16(), chunker=flat(512))),
    ("top-k int8 of every matrix", chain(top_k(1 / 50), int8(), chunker=whole())),
    ("top-k of all but nothing", chain(top_k(1e-9), e3m0())),
    ("top-k tensor fp16", chain(top_k_tensor(1 / 32), fp16())),
    ("dct top-k tensor linear 16", chain(dct(), top_k_tensor(1 / 16), linear(16))),
    ("threshold sym2", chain(threshold(1 / 32), sym2())),
    ("dct threshold stat 4", chain(dct(), threshold(1 / 32, every=4), stat(4))),
    ("random bf16", chain(random(1 / 16), bf16())),
    ("dct random sym2", chain(dct(), random(1 / 8, seed=5), sym2())),
    ("random unscaled sign", chain(random(1 / 4), sign(scaled=False))),
    ("cyclic fp32", chain(cyclic(1 / 8))),
    ("dct cyclic linear 2, in divisors", chain(dct(), cyclic(1 / 4), linear(2), chunker=divisor(20))),
]
NAMES = [name for name, _ in ALL_CODECS]
every_codec = pytest.mark.parametrize("codec", [codec for _, codec in ALL_CODECS], ids=NAMES)


def every_codec_that(fits):
    """Those of ALL_CODECS that a law speaks about."""
    chosen = {name: codec for name, codec in ALL_CODECS if fits(codec)}
    return pytest.mark.parametrize("codec", chosen.values(), ids=chosen)


# A quantiser that gives again what it decoded, and all others, by their numbers on the wire.
EXACT = {fp32().code, bf16().code, fp16().code, sym2().code, e3m0().code, sign().code}

MODEL = [("embedding", (130, 70)), ("bias", (70,)), ("first", (70, 96)), ("scale", ()), ("kernel", (40, 3, 7, 9)),
         ("empty", (0,)), ("skinny", (5, 900)), ("second", (64, 128))]  # fmt: skip


def layout_of(codec: Chain, shapes=MODEL) -> Layout:
    return Layout.build([Entry(name, shape) for name, shape in shapes], codec.chunker)


def coefficients(codec: Chain, layout: Layout, scale: float = 1.0) -> Tensor:
    """A signal as a codec sees it; magnitudes of a heavy tail, as deltas have them."""
    tensors = [scale * torch.randn(entry.shape) * torch.randn(entry.shape).exp() for entry in layout.entries]
    return codec.transform.forward_(layout.gather(tensors), layout.grid)


def coded(codec: Chain, shapes=MODEL, event: int = 0) -> tuple[Grid, Tensor, bytes, Coefficients]:
    layout = layout_of(codec, shapes)
    buffer = coefficients(codec, layout)
    payload = codec.encode(buffer, layout.grid, Turn(event))
    return layout.grid, buffer, payload, codec.decode(payload, layout.grid, Turn(event))


def positions(found: Coefficients) -> Tensor:
    return torch.arange(found.size) if found.index is None else found.index


def counts_by_tensor(grid: Grid, found: Coefficients) -> Tensor:
    """How many values each tensor of the body has sent."""
    counts = torch.zeros(grid.tensors, dtype=torch.int64)
    for group in grid.groups:
        inside = positions(found)[(positions(found) >= group.offset) & (positions(found) < group.stop)]
        counts += torch.bincount(group.owner[(inside - group.offset) // group.span], minlength=grid.tensors)
    return counts


# ---- there and back ----


@every_codec
def test_what_is_decoded_is_well_formed(codec):
    grid, _, _, found = coded(codec)
    index = positions(found)
    assert found.size == grid.size
    assert found.value.dtype == torch.float32 and index.dtype == torch.int64
    assert found.value.shape == index.shape
    assert bool((index.diff() > 0).all()) and 0 <= int(index[0]) <= int(index[-1]) < grid.size
    assert bool(found.value.isfinite().all())
    assert found.weight == 1.0


@every_codec
def test_the_error_is_bounded_by_what_came_in(codec):
    grid, buffer, _, found = coded(codec)
    body = positions(found) < grid.body
    before, after = buffer[positions(found)][body].double(), found.value[body].double()
    if codec.quantizer == sign(scaled=False):
        assert torch.equal(after, torch.where(before < 0, -1.0, 1.0).double())
    elif codec.quantizer.code == linear(2).code:
        # half a step of the tensor's range, which is at most the buffer's
        step = float(before.max() - before.min()) / (codec.quantizer.parameter - 1)
        assert float((before - after).abs().max()) <= 0.5001 * step
    else:
        assert float((before - after).norm()) < float(before.norm())
        assert float(after.abs().max()) <= float(before.abs().max()) * (1 + 2**-8)


@every_codec
def test_wide_quantisers_are_close(codec):
    grid, buffer, _, found = coded(codec)
    relative = {fp32().code: 0.0, bf16().code: 2**-8, fp16().code: 2**-11}.get(codec.quantizer.code)
    body = positions(found) < grid.body
    before, after = buffer[positions(found)][body], found.value[body]
    if relative is None:
        assert len(after.unique()) <= (2**codec.quantizer.bits) * max(grid.tensors, after.numel() // 32 + grid.tensors)
    else:
        assert torch.allclose(after, before, rtol=relative, atol=2**-24 if relative else 0.0)


@every_codec
def test_the_tail_is_sent_in_full_every_time(codec):
    grid, buffer, _, found = coded(codec)
    before, after = grid.tail_view(buffer), found.dense()[grid.body :]
    assert int((positions(found) >= grid.body).sum()) == sum(grid.tail)
    for one, other in zip(before.split(grid.tail), after.split(grid.tail), strict=True):
        step = 0.0 if isinstance(codec.tail, Full) or not one.numel() else float(one.abs().max()) / 127
        assert torch.allclose(one, other, rtol=0, atol=0.5001 * step)


@every_codec
def test_a_signal_of_zeros_comes_back_as_zeros(codec):
    layout = layout_of(codec)
    payload = codec.encode(layout.grid.zeros(), layout.grid, Turn())
    found = codec.decode(payload, layout.grid, Turn()).dense()
    if codec.quantizer == sign(scaled=False):
        assert set(found[: layout.grid.body].unique().tolist()) <= {0.0, 1.0}  # it has no zero
    else:
        assert not bool(found.any())


@every_codec
def test_coding_what_was_decoded_gives_it_again_where_the_quantiser_is_exact(codec):
    grid, _, payload, first = coded(codec)
    second = codec.decode(codec.encode(first.dense(), grid, Turn()), grid, Turn())
    once, twice = first.dense(), second.dense()
    assert torch.allclose(twice[grid.body :], once[grid.body :], rtol=1e-6)
    if codec.quantizer.code in EXACT:
        assert torch.equal(twice[: grid.body], once[: grid.body])
        if isinstance(codec.tail, Full) and bool((first.value != 0).all()):
            assert codec.encode(once, grid, Turn()) == payload
    else:
        assert float((twice - once).norm()) <= 0.5 * float(once.norm())


# ---- bytes ----


@every_codec
@pytest.mark.parametrize(
    "shapes",
    [MODEL, [("only tail", (7,)), ("scalar", ())], [("no tail", (64, 64))], []],
    ids=["model", "only tail", "no tail", "nothing"],
)
def test_the_length_is_the_formula(codec, shapes):
    layout = layout_of(codec, shapes)
    buffer = coefficients(codec, layout)
    payload = codec.encode(buffer, layout.grid, Turn(3))
    sections = unseal(payload)[1]
    index_bytes = sum(section.nbytes for section in sections)
    counts = counts_by_tensor(layout.grid, codec.decode(payload, layout.grid, Turn(3)))
    assert len(payload) == codec.nbytes(layout.grid, index_bytes, counts)
    if all(codec.select.counts(group) is not None for group in layout.grid.groups):
        assert len(payload) == codec.nbytes(layout.grid, index_bytes)
    body = (
        index_bytes + codec.quantizer.nbytes(counts) + (codec.tail.nbytes(layout.grid.tail) if layout.grid.tail else 0)
    )
    assert len(payload) == HEADER_BYTES + SECTION_BYTES * len(sections) + body


@every_codec
def test_the_same_signal_gives_the_same_bytes(codec):
    layout = layout_of(codec)
    buffer = coefficients(codec, layout)
    before = buffer.clone()
    first = codec.encode(buffer, layout.grid, Turn(2))
    torch.rand(7)  # the global generator plays no part
    assert codec.encode(before, layout_of(codec).grid, Turn(2)) == first
    assert torch.equal(buffer, before)


@every_codec
def test_the_number_of_threads_changes_no_byte(codec):
    layout = Layout.build([Entry(name, shape) for name, shape in MODEL], tile(8))  # hundreds of tiles
    buffer = coefficients(codec, layout)
    payload = codec.encode(buffer, layout.grid, Turn())
    torch.set_num_threads(2)
    try:
        assert codec.encode(buffer, layout.grid, Turn()) == payload
        together = codec.decode(payload, layout.grid, Turn())
    finally:
        torch.set_num_threads(1)
    assert torch.equal(codec.decode(payload, layout.grid, Turn()).value, together.value)


@every_codec
def test_the_event_changes_what_is_shared_and_nothing_else(codec):
    layout = layout_of(codec)
    buffer = coefficients(codec, layout)
    found = [codec.decode(codec.encode(buffer, layout.grid, Turn(e)), layout.grid, Turn(e)) for e in (0, 1)]
    same = torch.equal(positions(found[0]), positions(found[1]))
    assert same == (not codec.select.shared or codec.select.code == all_().code)


# ---- nothing is lost ----


@every_codec
@pytest.mark.parametrize("beta", [1.0, 0.9, 0.0])
def test_what_was_sent_and_what_is_kept_are_what_came_in(codec, beta):
    layout = layout_of(codec)
    grid, residual, memory = layout.grid, error_feedback(beta), {}
    kept = grid.zeros()
    came, went = torch.zeros(grid.size, dtype=torch.float64), torch.zeros(grid.size, dtype=torch.float64)
    # the tail forgets nothing, whatever beta is
    decay = torch.full((grid.size,), beta, dtype=torch.float64)
    decay[grid.body :] = 1.0
    for event in range(6):
        signal = coefficients(codec, layout)
        turn = Turn(event, memory=memory)
        came = decay * came + signal.double()
        proposed = residual.add(kept, signal, grid)
        found = codec.decode(codec.encode(proposed, grid, turn), grid, Turn(event))
        kept, memory = found.subtract_from(proposed), turn.memory
        went = decay * went + found.dense().double()
    scale = float(came.abs().max())
    assert float((kept.double() + went - came).abs().max()) <= 1e-5 * scale
    assert float(went.norm()) > 0


# steps of one do not adapt to the signal: who uses them scales it
@every_codec_that(lambda codec: codec.quantizer != sign(scaled=False))
def test_with_feedback_a_constant_signal_gets_across(codec):
    layout = layout_of(codec, [("first", (70, 96)), ("bias", (70,))])
    grid, residual, memory = layout.grid, error_feedback(1.0), {}
    signal, kept, went = coefficients(codec, layout), layout.grid.zeros(), layout.grid.zeros()
    early = 0.0
    for event in range(24):
        turn = Turn(event, memory=memory)
        proposed = residual.add(kept, signal.clone(), grid)
        found = codec.decode(codec.encode(proposed, grid, turn), grid, Turn(event))
        kept, memory, went = found.subtract_from(proposed), turn.memory, went + found.dense()
        early = early or float((went - signal).norm() / signal.norm())
    late = float((went / 24 - signal).norm() / signal.norm())
    assert late < max(0.999 * early, 1e-5)


# padding takes part in a transform, and everything is everything
@every_codec_that(lambda codec: not codec.transform.mixes and codec.select.code != all_().code)
def test_padding_is_never_sent_by_a_choice_without_a_transform(codec):
    layout = layout_of(codec)
    owned = layout.gather([torch.ones(entry.shape) for entry in layout.entries]).bool()
    for scale in (1.0, 0.0):
        payload = codec.encode(coefficients(codec, layout, scale), layout.grid, Turn())
        index = positions(codec.decode(payload, layout.grid, Turn()))
        assert bool(owned[index].all())


# ---- strangers ----


@every_codec
def test_a_payload_of_another_codec_is_refused_by_the_field_that_differs(codec):
    grid, _, payload, _ = coded(codec)
    for other in (codec for _, codec in ALL_CODECS):
        codes = {
            "transform": (codec.transform.code, other.transform.code),
            "select": (codec.select.code, other.select.code),
            "quantizer": (codec.quantizer.code, other.quantizer.code),
            "tail": (codec.tail.code, other.tail.code),
            "parameter": (codec.quantizer.parameter, other.quantizer.parameter),
            "selection": (codec.select.selection, other.select.selection),
        }
        differing = [field for field, (ours, theirs) in codes.items() if ours != theirs]
        if differing:
            with pytest.raises(PayloadError, match=rf"the payload's {differing[0]} is \d+, ours is \d+\nhint: "):
                other.decode(payload, grid, Turn())


def test_codecs_differ_on_the_wire_unless_they_read_each_other():
    told = {}
    for name, codec in ALL_CODECS:
        codes = (codec.transform.code, codec.select.code, codec.select.selection, codec.quantizer.code)
        told.setdefault((*codes, codec.quantizer.parameter, codec.tail.code, codec.chunker.name), []).append(name)
    assert [names for names in told.values() if len(names) > 1] == []


@every_codec
@pytest.mark.parametrize("field", ["event", "grid"])
def test_a_payload_of_another_event_or_layout_is_refused(codec, field):
    grid, _, payload, _ = coded(codec, event=4)
    if field == "grid":
        grid = layout_of(codec, [*MODEL[:-1], ("second", (128, 64))]).grid  # as many tiles
    turn = Turn(4 if field == "grid" else 5)
    with pytest.raises(PayloadError, match=f"the payload's {field} is .*, ours is "):
        codec.decode(payload, grid, turn)


@every_codec
def test_an_abstention_is_refused_where_a_payload_would_be(codec):
    layout = layout_of(codec)
    payload = codec.abstain(layout.grid, Turn(4))
    assert len(payload) == HEADER_BYTES
    assert codec.decode(payload, layout.grid, Turn(4)).weight == 0
    with pytest.raises(PayloadError, match="event"):
        codec.decode(payload, layout.grid, Turn(5))
    stranger = replace(codec, tail=Full(code=9))
    with pytest.raises(PayloadError, match="tail"):
        stranger.decode(payload, layout.grid, Turn(4))


@every_codec
@pytest.mark.parametrize("major", [MAJOR - 1, MAJOR + 1, 255])
def test_another_version_of_the_format_is_refused(codec, major):
    grid, _, payload, _ = coded(codec)
    changed = bytearray(payload)
    changed[4] = major
    changed[48:64] = digest(bytes(changed[:64]), bytes(changed[64:]))
    with pytest.raises(PayloadError, match=rf"payload format {major}\.0, this version reads {MAJOR}\.x\nhint: "):
        codec.decode(bytes(changed), grid, Turn())


@every_codec
def test_a_damaged_payload_is_refused(codec):
    grid, _, payload, _ = coded(codec)
    for place in torch.linspace(0, len(payload) - 1, 40).long().tolist():
        damaged = bytearray(payload)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(PayloadError):
            codec.decode(bytes(damaged), grid, Turn())
        with pytest.raises(PayloadError):
            codec.decode(payload[:place], grid, Turn())
