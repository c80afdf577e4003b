"""The house: which room may import which, read from the imports of every file, run or not."""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
PACKAGE = "lowtide"

GROUND = {"errors", "tensors", "messages"}
ALGORITHMS = GROUND | {"codec", "sync"}
TRAINING = ALGORITHMS | {"transport", "train"}
# A room and the rooms it may import, beside itself.
SEES = {
    "errors": set(),
    "tensors": {"errors"},
    "messages": {"errors"},
    "codec": GROUND,
    "sync": GROUND | {"codec"},
    "transport": {"errors", "messages"},
    "version": set(),
    "train": ALGORITHMS | {"transport", "version"},
    "report": TRAINING,
    "integrations": TRAINING,
    "systems": TRAINING,
    "cli": TRAINING | {"report", "integrations", "systems"},
    "parts": ALGORITHMS,  # names only, for lowtide.parts
    "": TRAINING | {"parts", "systems", "version"},  # names only, for lowtide itself
    "__main__": {"cli"},
}
CORE = {"lowtide", "numpy", "rich", "safetensors", "torch"}
# Where an extra may be imported, by the start of the module's name.
EXTRAS = {
    "lowtide.integrations": {"accelerate", "lightning", "transformers"},
    "lowtide.report": {"tensorboard"},
    "lowtide.systems.fusion": {"ot", "scipy"},
}
DISTRIBUTED = "lowtide.transport.process_group"
UNSAFE = {"cloudpickle", "cPickle", "dill", "jsonpickle", "joblib", "marshal", "pickle", "shelve"}
JUNK = re.compile(r"_*(utils?|common|helpers?|misc|shared)|.*_(utils?|helpers?)")


@dataclass(frozen=True)
class Import:
    """One imported name: by which module, at which line, and whether importing the module runs it."""

    module: str
    line: int
    target: str
    at_once: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


@dataclass(frozen=True)
class Module:
    """A source file: its dotted name, whether it is a package, and its syntax tree."""

    name: str
    is_package: bool
    tree: ast.Module

    @property
    def room(self) -> str:
        return room_of(self.name)


def room_of(name: str) -> str:
    return name.removeprefix(PACKAGE).lstrip(".").partition(".")[0]


def load(source: Path) -> dict[str, Module]:
    modules = {}
    for path in sorted((source / PACKAGE).rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules[name] = Module(name, is_package, ast.parse(path.read_text(), str(path)))
    return modules


def statements(node: ast.AST, *, at_once: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """Every node below, and whether it runs when its module is imported."""
    for child in ast.iter_child_nodes(node):
        runs = at_once and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            runs = False
        yield child, runs
        yield from statements(child, at_once=runs)


def imports(module: Module, known: set[str]) -> Iterator[Import]:
    for node, at_once in statements(module.tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = absolute(module, node)
            # `from package import name` reaches for the submodule of that name, where there is one
            names = [f"{base}.{alias.name}" for alias in node.names]
            targets = sorted({name if name in known or base == "torch" else base for name in names})
        else:
            continue
        for target in targets:
            yield Import(module.name, node.lineno, target, at_once)


def absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    above = node.level - 1 if module.is_package else node.level
    return ".".join([*parts[: len(parts) - above], *([node.module] if node.module else [])])


def wrong_arrows(modules: dict[str, Module]) -> list[str]:
    wrong = []
    for module in modules.values():
        for found in imports(module, set(modules)):
            if found.target.partition(".")[0] != PACKAGE:
                continue
            room, target = module.room, room_of(found.target)
            if room not in SEES:
                wrong.append(f"{module.name}: no room of this name; rooms are {', '.join(filter(None, SEES))}")
            elif target != room and target not in SEES[room]:
                wrong.append(f"{found}; {room or PACKAGE} sees {', '.join(sorted(SEES[room])) or 'nothing'}")
            elif room == target == "systems" and system(found.target) not in {"", system(module.name)}:
                wrong.append(f"{found}; no system imports another")
    return wrong


def system(name: str) -> str:
    return ".".join(name.split(".")[2:3])


def rings(modules: dict[str, Module]) -> list[str]:
    known = set(modules)
    graph = {
        name: {i.target for i in imports(module, known) if i.at_once and i.target in known and i.target != name}
        for name, module in modules.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" -> ".join(reversed(error.args[1]))]
    return []


def strangers(modules: dict[str, Module]) -> list[str]:
    wrong = []
    for module in modules.values():
        allowed = CORE | set(sys.stdlib_module_names)
        allowed |= {name for room, names in EXTRAS.items() if module.name.startswith(room) for name in names}
        wrong += [str(i) for i in imports(module, set(modules)) if i.target.partition(".")[0] not in allowed]
    return wrong


def distributed_uses(modules: dict[str, Module]) -> list[str]:
    wrong = []
    for name, module in modules.items():
        if name == DISTRIBUTED:
            continue
        wrong += [str(i) for i in imports(module, set(modules)) if i.target.startswith("torch.distributed")]
        for node in ast.walk(module.tree):
            named = isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.distributed")
            if named or (isinstance(node, ast.Constant) and node.value == "torch.distributed"):
                wrong.append(f"{name}:{node.lineno} uses torch.distributed")
    return wrong


def unsafe_loads(modules: dict[str, Module]) -> list[str]:
    wrong = []
    for name, module in modules.items():
        wrong += [str(i) for i in imports(module, set(modules)) if i.target.partition(".")[0] in UNSAFE]
        for call in (node for node in ast.walk(module.tree) if isinstance(node, ast.Call)):
            said = {k.arg: k.value.value for k in call.keywords if isinstance(k.value, ast.Constant)}
            loads = ast.unparse(call.func) == "torch.load" and said.get("weights_only") is not True
            if loads or said.get("allow_pickle"):
                wrong.append(f"{name}:{call.lineno} may unpickle: {ast.unparse(call)}")
    return wrong


def module_state(modules: dict[str, Module]) -> list[str]:
    """Names a function rebinds in its module, and lower-case containers that anybody could fill."""
    wrong = []
    for name, module in modules.items():
        wrong += [f"{name}:{n.lineno} global" for n in ast.walk(module.tree) if isinstance(n, ast.Global)]
        for node in module.tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.List | ast.Dict | ast.Set):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                shown = ast.unparse(target)
                if shown != "__all__" and not shown.isupper():
                    wrong.append(f"{name}:{node.lineno} {shown} is mutable")
    return wrong


def fail_if_any(wrong: list[str]) -> None:
    assert not wrong, "\n  ".join(["", *wrong])


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    return load(SOURCE)


def test_imports_run_one_way(modules):
    fail_if_any(wrong_arrows(modules))


def test_no_imports_form_a_ring(modules):
    fail_if_any(rings(modules))


def test_the_core_needs_torch_numpy_safetensors_and_rich_only(modules):
    fail_if_any(strangers(modules))


def test_one_file_talks_to_torch_distributed(modules):
    fail_if_any(distributed_uses(modules))


def test_nothing_is_unpickled(modules):
    fail_if_any(unsafe_loads(modules))


def test_modules_keep_no_state(modules):
    fail_if_any(module_state(modules))


def test_no_file_is_a_junk_drawer(modules):
    assert [name for name in modules if any(JUNK.fullmatch(part) for part in name.split("."))] == []


@pytest.fixture
def house(tmp_path):
    """Load a house of toy files: name of the module to its text."""

    def build(**files: str) -> dict[str, Module]:
        for name, text in files.items():
            path = tmp_path / PACKAGE / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return load(tmp_path)

    return build


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("codec__dct", "from lowtide.sync import plan"),
        ("codec__dct", "from ..sync import plan"),
        ("codec__dct", "def late():\n    import lowtide.train.attach"),
        ("transport__store", "from lowtide.tensors import Layout"),
        ("tensors", "import lowtide.messages"),
        ("sync__round", "import lowtide"),
        ("systems__graph__run", "from lowtide.systems.fusion import merge"),
        ("attic", "import lowtide.errors"),
    ],
)
def test_a_wrong_arrow_is_found(house, name, text):
    assert len(wrong_arrows(house(**{name: text}))) == 1


def test_an_allowed_arrow_is_no_finding(house):
    files = {
        "errors": "",
        "codec__dct": "from lowtide import errors\nfrom .base import Codec",
        "train__attach": "import lowtide.transport.base",
        "systems__graph__run": "from .parts import cut\nfrom lowtide.systems.graph import parts",
    }
    assert wrong_arrows(house(**files)) == []


def test_a_ring_is_found_and_a_late_import_breaks_it(house):
    ring = {"codec__a": "import lowtide.codec.b", "codec__b": "import lowtide.codec.a"}
    assert rings(house(**ring)) != []
    ring["codec__b"] = "def late():\n    import lowtide.codec.a"
    assert rings(house(**ring)) == []


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (distributed_uses, "from torch.distributed.tensor import DTensor"),
        (distributed_uses, "from torch import distributed"),
        (distributed_uses, "import torch\ndef late():\n    torch.distributed.barrier()"),
        (unsafe_loads, "import pickle"),
        (unsafe_loads, "import torch\ntorch.load('x')"),
        (unsafe_loads, "import torch\ntorch.load('x', weights_only=False)"),
        (unsafe_loads, "import numpy\nnumpy.load('x', allow_pickle=True)"),
        (strangers, "import scipy.fft"),
        (module_state, "seen = {}"),
        (module_state, "def count():\n    global total\n    total = 1"),
    ],
)
def test_a_breach_is_found(house, check, text):
    assert check(house(codec__dct=text)) != []


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (unsafe_loads, "import torch\ntorch.load('x', weights_only=True)"),
        (strangers, "import math, torch, numpy.typing"),
        (module_state, "__all__ = ['a']\nSIZES = [1, 2]"),
    ],
)
def test_good_manners_are_no_breach(house, check, text):
    assert check(house(codec__dct=text)) == []
