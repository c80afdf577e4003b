"""Data: nothing seen twice where that is promised, nothing shared between training and validation, all of it seeded."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lowtide.errors import ConfigError
from lowtide.train.data import generated_images, single_pass, stdlib_text, text_corpus, windows


@pytest.fixture
def folder(tmp_path):
    for index in range(60):
        path = tmp_path / f"part{index % 3}" / f"{index}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes([index]) * 10)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "secret.txt").write_bytes(b"\xff" * 10)
    return tmp_path


def letters(tokens: torch.Tensor) -> set[int]:
    return set(tokens.tolist()) - {0}


def test_windows_predict_every_token_once():
    tokens = torch.arange(33, dtype=torch.uint8)
    targets = [token for window in windows(tokens, 8) for token in window[1:].tolist()]
    assert targets == list(range(1, 33))


def test_windows_hold_one_token_more_than_the_context_as_int64():
    data = windows(torch.zeros(100, dtype=torch.uint8), 9)
    assert [(window.shape, window.dtype) for window in data] == [((10,), torch.int64)] * len(data)


def test_windows_come_in_batches_from_a_loader():
    loader = DataLoader(windows(torch.arange(65, dtype=torch.uint8), 8), batch_size=4)
    assert [batch.shape for batch in loader] == [(4, 9), (4, 9)]


def test_random_windows_are_decided_by_their_seed_and_stay_inside():
    tokens = torch.arange(200, dtype=torch.uint8)
    first, again, other = (torch.stack(list(windows(tokens, 7, seed=seed))) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(first - first[:, :1], torch.arange(8).expand_as(first))


def test_drawing_data_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    tokens = torch.arange(200, dtype=torch.uint8)
    windows(tokens, 7, seed=3)
    single_pass(tokens, 2, 0, 2, 4)
    generated_images(count=4)
    assert torch.equal(before, torch.random.get_rng_state())


@given(
    length=st.integers(60, 250),
    replicas=st.integers(1, 4),
    batch=st.integers(1, 3),
    context=st.integers(1, 4),
    seed=st.integers(0, 5),
)
def test_a_single_pass_sees_no_token_twice(length, replicas, batch, context, seed):
    tokens = torch.arange(length, dtype=torch.uint8)
    streams = [single_pass(tokens, replicas, rank, batch, context, seed=seed) for rank in range(replicas)]
    seen = torch.cat([part.flatten() for stream in streams for part in stream])
    assert len(seen.unique()) == len(seen)
    assert {len(stream) for stream in streams} == {length // (context + 1) // (replicas * batch)}
    assert {part.shape for stream in streams for part in stream} == {(batch, context + 1)}


def test_n_replicas_see_at_each_step_what_one_sees_with_n_times_the_batch():
    tokens = torch.arange(240, dtype=torch.uint8)
    alone = single_pass(tokens, 1, 0, 6, 3, seed=7)
    together = [single_pass(tokens, 3, rank, 2, 3, seed=7) for rank in range(3)]
    for step, batch in enumerate(alone):
        assert torch.equal(batch, torch.cat([stream[step] for stream in together]))


def test_a_single_pass_is_another_one_for_another_seed():
    tokens = torch.arange(240, dtype=torch.uint8)
    first, other = (single_pass(tokens, 1, 0, 4, 3, seed=seed)[0] for seed in (0, 1))
    assert not torch.equal(first, other)


def test_a_single_pass_resumes_by_the_number_of_its_step():
    stream = single_pass(torch.arange(240, dtype=torch.uint8), 2, 1, 2, 3)
    assert torch.equal(stream[3], list(stream)[3])
    with pytest.raises(IndexError):
        stream[len(stream)]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda t: windows(t, 20), "20 tokens hold no window of 20 \\+ 1"),
        (lambda t: single_pass(t, 4, 0, 2, 4), "20 tokens hold 4 windows, a step of all replicas takes 8"),
        (lambda t: single_pass(t, 2, 2, 1, 1), "rank 2 of 2 replicas\nhint: ranks are 0 to 1"),
    ],
)
def test_too_little_data_or_a_wrong_rank_is_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build(torch.zeros(20, dtype=torch.uint8))


def test_a_folder_is_split_by_file(folder):
    corpus = text_corpus(folder)
    assert letters(corpus.train).isdisjoint(letters(corpus.validation))
    assert letters(corpus.train) | letters(corpus.validation) == set(range(1, 60))


def test_the_split_of_a_folder_depends_on_paths_alone(folder):
    first = text_corpus(folder)
    for path in folder.glob("part*/*"):
        path.write_bytes(path.read_bytes() + b"!")
    second = text_corpus(folder)
    assert letters(first.validation) == letters(second.validation) - {ord("!")}
    assert first.digest != second.digest


def test_a_limit_takes_the_first_files_that_fit(folder):
    corpus = text_corpus(folder, max_bytes=100)
    order = sorted(path.relative_to(folder).as_posix() for path in folder.glob("part*/*"))
    expected = {int(name.partition("/")[2].removesuffix(".txt")) for name in order[:9]}
    assert letters(corpus.train) | letters(corpus.validation) == expected - {0}
    assert len(corpus.train) + len(corpus.validation) <= 100


def test_something_is_held_out_even_of_two_files(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    corpus = text_corpus(tmp_path)
    assert (len(corpus.train), len(corpus.validation)) == (1, 1)


def test_a_file_is_cut_and_nothing_is_lost(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(200)))
    corpus = text_corpus(path)
    assert (len(corpus.train), len(corpus.validation)) == (196, 4)
    assert torch.cat([corpus.train, corpus.validation]).tolist() == list(range(200))


def test_a_made_corpus_is_taken_as_it_is(tmp_path):
    (tmp_path / "train.bin").write_bytes(b"abcdef")
    (tmp_path / "validation.bin").write_bytes(b"xyz")
    corpus = text_corpus(tmp_path, max_bytes=4)
    assert bytes(corpus.train.tolist()) == b"abcd"
    assert bytes(corpus.validation.tolist()) == b"xyz"


def test_a_mapped_corpus_never_writes_to_its_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"a" * 100)
    text_corpus(path).train.zero_()
    assert path.read_bytes() == b"a" * 100


def test_the_digest_is_that_of_both_parts(tmp_path):
    (tmp_path / "train.bin").write_bytes(b"ab")
    (tmp_path / "validation.bin").write_bytes(b"c")
    parts = b"".join(hashlib.sha256(part).digest() for part in (b"ab", b"c"))
    assert text_corpus(tmp_path).digest == hashlib.sha256(parts).hexdigest()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path / "none", "no file or folder '.*none'\nhint: give a text"),
        (lambda path: path, "0 files of .* fit into None bytes\nhint: two are needed"),
        (lambda path: path.joinpath("short").write_text("short") and path / "short", "has 5 bytes, too few"),
        (lambda path: path.joinpath("empty").touch() or path / "empty", "has 0 bytes, too few"),
    ],
)
def test_a_corpus_that_cannot_be_is_refused(tmp_path, make, message):
    with pytest.raises(ConfigError, match=message):
        text_corpus(make(tmp_path))


def test_the_standard_library_is_a_corpus_of_python():
    corpus = stdlib_text(max_bytes=2_000_000)
    text = bytes(corpus.train.tolist())
    assert (corpus.train.dtype, corpus.validation.dtype) == (torch.uint8, torch.uint8)
    assert text.count(b"def ") > 1000
    assert 0 < len(corpus.validation) < len(corpus.train)
    assert corpus.digest == stdlib_text(max_bytes=2_000_000).digest


def test_generated_images_are_decided_by_their_seed():
    first, again, other = (generated_images(count=8, size=16, seed=seed).tensors for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_generated_images_have_every_class_and_a_moderate_range():
    images, labels = generated_images(classes=10, count=400, size=16).tensors
    assert images.shape == (400, 3, 16, 16)
    assert labels.unique().tolist() == list(range(10))
    assert abs(images.mean().item()) < 0.1
    assert 0.1 < images.std().item() < 0.6


def test_colour_tells_nothing_of_the_class():
    images, labels = generated_images(classes=4, count=2000, size=12).tensors
    means = torch.stack([images[labels == label].mean((0, 2, 3)) for label in range(4)])
    assert (means - means.mean(0)).abs().max() < 0.05


@pytest.mark.parametrize("options", [{"classes": 0}, {"count": 0}, {"size": 0}])
def test_impossible_images_are_refused(options):
    with pytest.raises(ConfigError, match="hint: all of them positive"):
        generated_images(**options)
