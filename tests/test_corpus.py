"""The large text: which files belong to it, how it is split, and what happens where it cannot be made."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import lzma
import sys
import tarfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "corpus.py"


@pytest.fixture
def corpus(monkeypatch):
    spec = importlib.util.spec_from_file_location("corpus_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "corpus_script", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def made(corpus, tmp_path, monkeypatch):
    """A corpus made from a small archive; gives the folder and the texts that went in."""
    texts = {f"kernel/{index}.c": f"text {index}".encode() for index in range(400)}

    def archive(folder: Path) -> tuple[Path, str]:
        path = folder / "source.tar.xz"
        with tarfile.open(path, "w:xz") as tree:
            for name, content in {**texts, "drivers/char/mem.c": b"not this"}.items():
                member = tarfile.TarInfo(f"linux/{name}")
                member.size = len(content)
                tree.addfile(member, io.BytesIO(content))
        return path, "1.0"

    monkeypatch.setattr(corpus, "download", archive)
    corpus.make(tmp_path / "data")
    return tmp_path / "data", texts


def test_every_text_is_in_exactly_one_part(made):
    folder, texts = made
    parts = [(folder / f"{name}.bin").read_bytes().split(b"\0") for name in ("train", "validation")]
    assert sorted(parts[0] + parts[1]) == sorted(texts.values())
    assert len(parts[1]) > 0


def test_the_split_is_the_rule_that_the_page_states(made):
    folder, texts = made
    order = sorted(texts, key=lambda path: hashlib.sha256(path.encode()).hexdigest())
    held_out = [texts[path] for path in order if int(hashlib.sha256(path.encode()).hexdigest()[-2:], 16) < 5]
    assert (folder / "validation.bin").read_bytes() == b"\0".join(held_out)


def test_the_packed_files_and_the_record_agree_with_the_plain_ones(made):
    folder, _ = made
    for part in json.loads((folder / "corpus.json").read_text())["parts"]:
        plain = (folder / f"{part['name']}.bin").read_bytes()
        packed = (folder / f"{part['name']}.bin.xz").read_bytes()
        assert lzma.decompress(packed) == plain
        assert (part["bytes"], part["packed_bytes"]) == (len(plain), len(packed))
        assert part["sha256"] == hashlib.sha256(plain).hexdigest()


def test_nothing_temporary_stays_behind(made):
    names = {path.name for path in made[0].iterdir()}
    assert names == {"train.bin", "train.bin.xz", "validation.bin", "validation.bin.xz", "corpus.json"}


def test_the_training_text_stays_under_its_limit(corpus):
    texts = dict.fromkeys("abc", b"12345")
    assert [corpus.at_most(list("abc"), texts, limit) for limit in (4, 5, 11, 16, 17)] == [
        [], ["a"], ["a", "b"], ["a", "b"], ["a", "b", "c"],
    ]  # fmt: skip


def test_without_apt_it_refuses_and_says_what_to_do(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["corpus.py", "--folder", str(tmp_path / "data")])
    assert corpus.main() == 1
    assert "apt-get is not here" in capsys.readouterr().err
    assert list((tmp_path / "data").iterdir()) == []
