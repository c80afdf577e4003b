"""Make the large text of the studies: the Linux source that Debian ships, split by file.

    python benchmarks/corpus.py [--folder data/linux-6.1]

A comparison of training methods needs text that no run sees twice, or it rewards whatever regularises. Files are
sorted by the SHA-256 of their path; those whose digest ends in a byte under 5 are validation, the others training
until 256 MiB are reached, each set joined with NUL bytes. The result holds `train.bin` and `validation.bin`, both
again with `.xz` (to carry elsewhere), and `corpus.json` with versions, sizes and digests. It needs Debian's `apt-get`
and `dpkg-deb`, 1 GB of free disk and 2 GB of memory while it works, and no root.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

PACKAGE = "linux-source-6.1"
FOLDERS = frozenset(
    ["kernel", "mm", "fs", "net", "lib", "block", "crypto", "security", "sound", "Documentation", "tools"]
)
ENDINGS = frozenset({".c", ".h", ".rst", ".py", ".txt", ".S"})
VALIDATION_BELOW = 5  # of the 256 values of a digest's last byte: about 2 % of the files
MOST_BYTES = 2**28  # packed, this much still fits where 64 MiB are the limit
XZ_PRESET = 4


class CorpusError(Exception):
    """The corpus cannot be made here."""


@dataclass(frozen=True)
class Part:
    """One file of the result: what `corpus.json` says of it."""

    name: str
    files: int
    bytes: int
    sha256: str
    packed_bytes: int
    packed_sha256: str


def is_text(path: str) -> bool:
    """Whether a path inside the source tree belongs to the corpus: a text in or below one of the folders.

    >>> is_text("kernel/fork.c"), is_text("drivers/net/tun.c"), is_text("drivers/char/mem.c"), is_text("mm/Makefile")
    (True, True, False, False)
    """
    return not FOLDERS.isdisjoint(path.split("/")[:-1]) and Path(path).suffix in ENDINGS


def is_validation(path: str) -> bool:
    """Whether a file is held out, decided by its path alone."""
    return hashlib.sha256(path.encode()).digest()[-1] < VALIDATION_BELOW


def download(folder: Path) -> tuple[Path, str]:
    """The source archive and the package's version, fetched and unpacked in `folder`."""
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            message = f"{tool} is not here; the corpus is made from Debian's package {PACKAGE}"
            raise CorpusError(f"{message}\nhint: make it on a Debian machine and copy the folder data/ over")
    try:
        subprocess.run(["apt-get", "download", PACKAGE], cwd=folder, check=True)
    except subprocess.CalledProcessError as error:
        message = f"apt-get download {PACKAGE} failed with code {error.returncode}"
        raise CorpusError(f"{message}\nhint: run 'apt-get update' once as root") from error
    package = next(folder.glob(f"{PACKAGE}_*.deb"))
    version = subprocess.run(["dpkg-deb", "-f", package, "Version"], check=True, capture_output=True, text=True).stdout
    subprocess.run(["dpkg-deb", "-x", package, folder / "tree"], check=True)
    package.unlink()
    return next((folder / "tree").rglob(f"{PACKAGE}.tar.*")), version.strip()


def read_texts(archive: Path) -> dict[str, bytes]:
    """Every text of the archive by its path inside the source tree."""
    texts = {}
    with tarfile.open(archive, "r|*") as tree:
        for member in tree:
            path = member.name.partition("/")[2]
            if member.isfile() and is_text(path) and (content := tree.extractfile(member)):
                texts[path] = content.read()
    return texts


def at_most(paths: list[str], texts: dict[str, bytes], limit: int) -> list[str]:
    """The first `paths` whose joined texts stay within `limit` bytes.

    >>> at_most(["a", "b", "c"], {"a": b"12", "b": b"34", "c": b"5"}, 5)
    ['a', 'b']
    """
    ends = itertools.accumulate(len(texts[path]) + 1 for path in paths)
    return [path for path, end in zip(paths, ends, strict=True) if end - 1 <= limit]


def write_part(folder: Path, name: str, texts: list[bytes]) -> Part:
    """Write `name`.bin and `name`.bin.xz aside and move them into place when whole."""
    joined = b"\0".join(texts)
    plain, packed = folder / f"{name}.bin", folder / f"{name}.bin.xz"
    packer = lzma.LZMACompressor(preset=XZ_PRESET)
    squeezed = b"".join([packer.compress(joined), packer.flush()])
    for path, content in ((plain, joined), (packed, squeezed)):
        aside = path.with_name(path.name + ".part")
        aside.write_bytes(content)
        aside.replace(path)
    digests = [hashlib.sha256(content).hexdigest() for content in (joined, squeezed)]
    return Part(name, len(texts), len(joined), digests[0], len(squeezed), digests[1])


def make(folder: Path) -> list[Part]:
    """Make the corpus in `folder`; whatever happens, nothing temporary stays behind."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lowtide-corpus-", dir=folder) as scratch:
        # apt drops its rights while it downloads and must be able to write here
        Path(scratch).chmod(0o755 if os.geteuid() else 0o777)
        archive, version = download(Path(scratch))
        texts = read_texts(archive)
    order = sorted(texts, key=lambda path: hashlib.sha256(path.encode()).digest())
    train = [path for path in order if not is_validation(path)]
    sets = {"train": at_most(train, texts, MOST_BYTES), "validation": [p for p in order if is_validation(p)]}
    parts = [write_part(folder, name, [texts[path] for path in paths]) for name, paths in sets.items()]
    record = {"package": PACKAGE, "version": version, "parts": [asdict(part) for part in parts]}
    (folder / "corpus.json").write_text(json.dumps(record, indent=2) + "\n")
    return parts


def main() -> int:
    """Make the corpus and print what it is."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("data/linux-6.1"), help="where the result goes")
    options = parser.parse_args()
    try:
        parts = make(options.folder)
    except CorpusError as error:
        print(f"corpus: {error}", file=sys.stderr)
        return 1
    for part in parts:
        print(f"{part.name}.bin      {part.files:6d} files  {part.bytes:>11,} bytes  sha256 {part.sha256}")
        print(f"{part.name}.bin.xz   {'':12}  {part.packed_bytes:>11,} bytes  sha256 {part.packed_sha256}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
