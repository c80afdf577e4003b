"""What every method sends and keeps for GPT-2 small (124.4M parameters): by formula, and as really encoded.

The formulas stand here in plain arithmetic on the shapes and know nothing of the code that encodes. The bytes of coded
positions are the one thing that depends on the data; they are read off the payload's own table.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import record  # noqa: E402 (neighbours, not a package)
from plain import Plain  # noqa: E402

import lowtide  # noqa: E402
from lowtide import Method  # noqa: E402
from lowtide.codec.payload import unseal  # noqa: E402
from lowtide.messages import Gather, Group, Inbox, Message, Sum  # noqa: E402
from lowtide.sync import Round  # noqa: E402
from lowtide.tensors import Entry, Layout  # noqa: E402
from lowtide.train.models.gpt import gpt2_small_shapes  # noqa: E402
from lowtide.train.overrides import pieces  # noqa: E402

PAGE = HERE.parents[1] / "docs" / "reference" / "methods.md"
HEADER, SECTION, WEIGHT = 64, 24, 4
Shapes = list[tuple[str, tuple[int, ...]]]


TOY: Shapes = [("a", (128, 96)), ("b", (100,)), ("c", (70, 130)), ("d", (96, 64))]


@dataclass(frozen=True)
class Sizes:
    """What the formulas are made of."""

    parameters: int  # P
    small: int  # elements of the tensors that go into the tail
    small_tensors: int
    matrices: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, shapes: Shapes) -> Sizes:
        """Matrices of 4096 elements and more are the body, all else is the tail."""
        counted = [(shape, math.prod(shape)) for _, shape in shapes]
        small = [numel for shape, numel in counted if len(shape) < 2 or numel < 4096]
        big = tuple((shape[0], numel // shape[0]) for shape, numel in counted if len(shape) > 1 and numel >= 4096)
        return cls(sum(numel for _, numel in counted), sum(small), len(small), big)

    def kept(self, part: int) -> int:
        """1 of `part` of every 64 x 64 tile, rounded up; the last tiles of a matrix hold less."""
        total = 0
        for rows, cols in self.matrices:
            heights = [min(64, rows - start) for start in range(0, rows, 64)]
            widths = [min(64, cols - start) for start in range(0, cols, 64)]
            total += sum(math.ceil(high * wide / part) for high in heights for wide in widths)
        return total


def dense(sizes: Sizes, _index: int) -> int:
    """fp32 and the weight."""
    return 4 * sizes.parameters + WEIGHT


def sparse(part: int, bits: int, meta: int, tail: int) -> Callable[[Sizes, int], int]:
    """Positions, values with `meta` bytes a matrix, a tail with `tail` bytes an element (and 4 a tensor as int8)."""

    def formula(sizes: Sizes, index: int) -> int:
        values = math.ceil(sizes.kept(part) * bits / 8) + meta * len(sizes.matrices)
        scales = 4 * sizes.small_tensors if tail == 1 else 0
        return HEADER + SECTION + index + values + tail * sizes.small + scales

    return formula


def streamed(sizes: Sizes, _index: int) -> int:
    """One fragment: 4 bits a value and a scale per 256, the tail as int8."""
    body = sizes.parameters - sizes.small
    return HEADER + math.ceil(body / 2) + 4 * math.ceil(body / 256) + sizes.small + 4 * sizes.small_tensors


def masked(sizes: Sizes, _index: int) -> int:
    """0.5 % of the values."""
    return 4 * math.ceil(0.005 * sizes.parameters) + WEIGHT


def low_rank(sizes: Sizes, _index: int) -> int:
    """Two factors of rank 4 for each matrix, the tail in fp32, a weight with each sum."""
    return 4 * 4 * sum(rows + cols for rows, cols in sizes.matrices) + 4 * sizes.small + 2 * WEIGHT


def three(sizes: Sizes, index: int) -> int:
    """Parameters and two moments."""
    return 3 * dense(sizes, index)


def checked(sizes: Sizes, index: int) -> int:
    """A dense round and the check that opened it."""
    return dense(sizes, index) + 8


ROWS: dict[str, tuple[Method, Callable[[Sizes, int], int], str]] = {
    "ddp": (lowtide.ddp(), dense, "4 P"),
    "powersgd, rank 4": (lowtide.powersgd(rank=4), low_rank, "16 sum(m + n) + 4 S"),
    "demo, 1/128": (lowtide.demo(), sparse(128, 32, 0, 4), "I + 4 K + 4 S"),
    "local_sgd": (lowtide.local_sgd(), dense, "4 P"),
    "diloco": (lowtide.diloco(), dense, "4 P"),
    "muloco": (lowtide.muloco(), dense, "4 P"),
    "decoupled, 1/32": (lowtide.decoupled(), sparse(32, 2, 8, 1), "I + K/4 + 8 T + S + 4 U"),
    "decoupled, 1/64": (lowtide.decoupled(density=1 / 64), sparse(64, 2, 8, 1), "I + K/4 + 8 T + S + 4 U"),
    "decoupled, 1/32, no transform": (
        lowtide.decoupled(transform="none"),
        sparse(32, 2, 8, 1),
        "I + K/4 + 8 T + S + 4 U",
    ),
    "sparseloco, 1/64": (lowtide.sparseloco(), sparse(64, 2, 20, 1), "I + K/4 + 20 T + S + 4 U"),
    "streaming_diloco, 3 fragments": (lowtide.streaming_diloco(), streamed, "B/2 + B/64 + S + 4 U"),
    "eager": (lowtide.eager(), dense, "4 P"),
    "sparta, 0.5 %": (lowtide.sparta(), masked, "4 p P"),
    "noloco": (lowtide.noloco(), lambda sizes, _: HEADER + 4 * sizes.parameters, "4 P"),
    "des_loc, all three": (lowtide.des_loc(), three, "12 P"),
    "fda, an open check": (lowtide.fda(theta=0.0), checked, "4 P + 8"),
}


def payload_of(message: Message) -> int:
    """Bytes of one message."""
    return message.tensor.nbytes if isinstance(message, Sum) else len(message.payload)  # type: ignore[union-attr]


def coded(message: Message) -> int:
    """Bytes of coded positions in a message."""
    if not isinstance(message, Gather | Group) or not message.payload.startswith(b"LOWT"):
        return 0
    return sum(section.nbytes for section in unseal(message.payload)[1])


def answer(message: Message) -> Inbox:
    """What a world of one gets back."""
    if isinstance(message, Sum):
        return Inbox((0,), total=message.tensor)
    return Inbox((0,), (message.payload,))  # type: ignore[union-attr]


def messages(round_: Round, replica: Plain) -> list[Message]:
    """Every leg of one event."""
    found = [round_.outgoing(replica, 1)]
    while True:
        following = round_.incoming(answer(found[-1]))
        if following is None:
            return found
        found.append(following)


def work(config: record.Record) -> record.Record:
    """One method: all its plans and fragments, one event of each."""
    shapes = gpt2_small_shapes() if config["shapes"] == "gpt2-small" else TOY
    method, formula, _ = ROWS[config["method"]]
    torch.manual_seed(config["seed"])
    tensors = {name: torch.randn(shape) * 0.02 for name, shape in shapes}
    replica = Plain(tensors)
    measured = index = copies = 0
    expected = 0
    for piece in pieces(method, [Entry(name, shape) for name, shape in shapes], {}):
        layout = Layout.build(piece.entries, piece.plan.exchange.chunker)
        round_ = Round(piece.plan, layout, piece.name, fragment=piece.fragment)
        round_.start(replica, torch.device("cpu"))
        for entry in piece.entries:
            tensors[entry.name] += torch.randn_like(tensors[entry.name]) * 1e-3
        sent = messages(round_, replica)
        measured += sum(payload_of(message) for message in sent)
        index += sum(coded(message) for message in sent)
        kept = [*round_.state.shared.values(), *round_.state.private.values()]
        copies += sum(buffer.numel() for buffer in kept)
        part = Sizes.of([(entry.name, entry.shape) for entry in piece.entries])
        if formula is streamed:  # blocks round up in every fragment
            expected += formula(part, 0)
    sizes = Sizes.of(shapes)
    expected = expected or formula(sizes, index)
    return {
        "parameters": sizes.parameters,
        "formula": expected,
        "measured": measured,
        "index_bytes": index,
        "copies": copies / sizes.parameters,
        "shown": f"{measured:,} bytes, formula {expected:,}, {copies / sizes.parameters:.2f} copies kept",
    }


def tables(records: list[record.Record]) -> dict[str, str]:
    """The table of the methods' page."""
    by_name = {each["config"]["method"]: each for each in records}
    rows = []
    for name, (method, _, formula) in ROWS.items():
        each = by_name.get(name)
        if each is None:
            continue
        same = "equal" if each["formula"] == each["measured"] else f"{each['formula']:,}"
        rows.append([
            name, formula, f"{each['measured']:,}", same, f"{4 * each['parameters'] / each['measured']:.1f}",
            f"{each['copies']:.2f}", method.state,
        ])  # fmt: skip
    header = ["method", "bytes an event", "measured", "by formula", "times under fp32", "copies kept", "which"]
    return {"bytes": record.markdown(header, rows)}


def main() -> int:
    """Run what is missing, or make the table."""
    options = record.parser(__doc__, HERE / "results" / "bytes.jsonl").parse_args()
    if options.table:
        record.fill(PAGE, tables(record.read_all(HERE / "results")))
        return 0
    shapes = "toy" if options.quick else "gpt2-small"
    tasks = [(name, {"method": name, "shapes": shapes, "seed": 0}) for name in ROWS]
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            options.out = Path(folder) / "quick.jsonl"
            return record.carry_out(tasks, work, options)
    return record.carry_out(tasks, work, options)


if __name__ == "__main__":
    sys.exit(main())
