"""What the benchmarks share: one JSON line for each run, written whole, and runs that are there already are skipped.

A run is told by its configuration: everything that decides its outcome, as plain values. A results file holds one
line for each, with where and by which code it was made; a README's tables are made from the lines and nothing else.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from datetime import UTC, datetime
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import lowtide

Config = Mapping[str, Any]
Record = dict[str, Any]
Work = Callable[[Record], Record]

ROOT = Path(__file__).parents[1]
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def key_of(config: Config) -> str:
    """The name of a run: a digest of its configuration, whatever the order of its fields.

    >>> key_of({"seed": 1, "lr": 0.5}) == key_of({"lr": 0.5, "seed": 1}) != key_of({"lr": 0.5, "seed": 2})
    True
    """
    return hashlib.sha256(json.dumps(plain(config), sort_keys=True).encode()).hexdigest()[:12]


def plain(value: Any) -> Any:  # noqa: ANN401 (JSON is whatever it is)
    """A value as JSON can say it; a number that is not finite is null.

    >>> plain({"losses": (1.5, float("nan"))})
    {'losses': [1.5, None]}
    """
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not float("-inf") < value < float("inf"):
        return None
    return value


def read(path: Path) -> list[Record]:
    """All lines of a results file; one that was cut short is said and left out."""
    records = []
    for number, line in enumerate(path.read_text().splitlines() if path.is_file() else [], start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if line.strip():
                print(f"{path}:{number} is no JSON and left out", file=sys.stderr)
    return records


def read_all(folder: Path) -> list[Record]:
    """The results in a folder, the first of each run."""
    found: dict[str, Record] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for record in read(path):
            found.setdefault(record["key"], record)
    return list(found.values())


def append(path: Path, record: Config) -> None:
    """Add one line in one write, behind whatever another process has added meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(plain(record), allow_nan=False) + "\n"
    cut_short = path.is_file() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(target, (("\n" if cut_short else "") + line).encode())
        os.fsync(target)
    finally:
        os.close(target)


def surroundings() -> Record:
    """Where and by which code a run was made."""
    return {
        "commit": _commit(),
        "source": _source_digest(),
        "versions": {"python": platform.python_version(), "torch": version("torch"), "numpy": version("numpy"),
                     "lowtide": lowtide.__version__},
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def machine() -> Record:
    """What a benchmark of speed depends on; part of a run's configuration there."""
    return {"cpu": _cpu_name(), "threads": torch.get_num_threads()}


def _commit() -> str | None:
    try:
        head, changed = (
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "src"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}+changes" if changed else head


def _source_digest() -> str:
    """A digest of the package's source as it is, which a commit with changes on top is not."""
    digest = hashlib.sha256()
    folder = Path(lowtide.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.*)", info.read_text()) if info.is_file() else None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def parser(document: str | None, results: Path) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    about, _, more = (document or "").partition("\n")
    made = argparse.ArgumentParser(description=about, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="a toy run of a few seconds, whose results are not kept")
    made.add_argument("--jobs", type=int, default=1, metavar="J", help="processes that work at the same time")
    made.add_argument("--threads", type=int, default=default_threads(), metavar="T", help="threads of each process")
    made.add_argument("--only", default="*", metavar="PATTERN", help="runs whose name fits, such as 'diloco*'")
    made.add_argument("--limit-seconds", type=float, default=float("inf"), metavar="S",
                      help="start no further run after so long")  # fmt: skip
    made.add_argument("--out", type=Path, default=results, metavar="FILE", help="where results are added")
    made.set_defaults(results=results.parent)
    made.add_argument("--list", action="store_true", help="name the runs that are still to do, and stop")
    made.add_argument("--table", action="store_true", help="make the README's tables from the results, and stop")
    return made


def default_threads() -> int:
    """Threads for a process that has the machine to itself."""
    return min(2, os.cpu_count() or 1)


def carry_out(tasks: Sequence[tuple[str, Record]], work: Work, options: argparse.Namespace) -> int:
    """Do the runs that are not in the results yet, some at a time, adding each as it ends; how many failed.

    `tasks` are names with configurations, `work` a function of a module, which makes a record from a configuration.
    What stands in any file of the results folder, or in the file that is added to, is not done again.
    """
    done = {each["key"] for each in read_all(options.results) + read(options.out)}
    chosen = {key_of(config): (name, config) for name, config in tasks if fnmatch.fnmatchcase(name, options.only)}
    todo = [(name, config) for key, (name, config) in chosen.items() if key not in done]
    print(f"{len(chosen)} runs, {len(todo)} of them still to do", flush=True)
    if options.list:
        print(*(name for name, _ in todo), sep="\n")
        return 0
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(options.threads)))  # for the processes
    torch.set_num_threads(options.threads)
    begun, failed = time.perf_counter(), 0
    pairs = _one_by_one(todo, work, options) if options.jobs == 1 else _side_by_side(todo, work, options)
    for number, (name, config, result) in enumerate(pairs, start=1):
        if isinstance(result, BaseException):
            failed += 1
            print(f"{name} failed: {type(result).__name__}: {result}", file=sys.stderr, flush=True)
            continue
        append(options.out, {"name": name, "key": key_of(config), "config": config} | result)
        passed = time.perf_counter() - begun
        print(f"[{number}/{len(todo)}, {passed:.0f} s] {name}: {result.get('shown', 'done')}", flush=True)
    return failed


Outcomes = Iterable[tuple[str, Record, Record | BaseException]]


def _one_by_one(todo: Sequence[tuple[str, Record]], work: Work, options: argparse.Namespace) -> Outcomes:
    begun = time.perf_counter()
    for name, config in todo:
        if time.perf_counter() - begun > options.limit_seconds:
            return
        yield name, config, _attempt(work, config)


def _side_by_side(todo: Sequence[tuple[str, Record]], work: Work, options: argparse.Namespace) -> Outcomes:
    """As many as `jobs` in flight; a fresh interpreter for each process, since torch does not survive a fork."""
    begun, rest = time.perf_counter(), list(reversed(todo))
    running: dict[Future[Record | BaseException], tuple[str, Record]] = {}
    with ProcessPoolExecutor(
        options.jobs, get_context("spawn"), initializer=torch.set_num_threads, initargs=(options.threads,)
    ) as pool:
        while rest or running:
            while rest and len(running) < options.jobs and time.perf_counter() - begun <= options.limit_seconds:
                name, config = rest.pop()
                running[pool.submit(_attempt, work, config)] = (name, config)
            if not running:
                return
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                yield (*running.pop(future), future.result())


def _attempt(work: Work, config: Record) -> Record | BaseException:
    """A run's record, or why there is none: one run that fails does not end the others."""
    begun = time.perf_counter()
    try:
        result = work(dict(config))
    except Exception as error:  # noqa: BLE001 - it is told and counted
        return error
    finally:
        gc.collect()  # models hang in cycles of few objects and much memory, which Python is slow to notice
    seconds = {"real": round(time.perf_counter() - begun, 3)} | result.pop("seconds", {})
    return surroundings() | {"seconds": seconds} | result


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; every column but the first is set to the right.

    >>> print(markdown(["method", "loss"], [["ddp", "1.49"]]))
    | method | loss |
    | --- | --: |
    | ddp | 1.49 |
    """
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def fill(readme: Path, blocks: Mapping[str, str]) -> None:
    """Put each block between `<!-- NAME -->` and `<!-- end NAME -->`; the text around stays."""
    text = readme.read_text()
    for name, block in blocks.items():
        text, count = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- end {name} -->)",
            lambda found, block=block: f"{found[1]}{block.rstrip()}\n{found[2]}",  # type: ignore[misc]
            text,
            flags=re.DOTALL,
        )
        if count != 1:
            raise SystemExit(f"{readme} has {count} places for the block {name!r}, it needs one")
    readme.write_text(text)


def mean_and_spread(values: Sequence[float]) -> str:
    """The mean, and how far the farthest is from it where there are several.

    >>> mean_and_spread([1.0, 1.2]), mean_and_spread([1.0])
    ('1.100 ± 0.100', '1.000')
    """
    if not values:
        return ""
    mean = sum(values) / len(values)
    far = max(abs(value - mean) for value in values)
    return f"{mean:.3f}" + (f" ± {far:.3f}" if len(values) > 1 else "")
