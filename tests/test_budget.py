"""The budget: how long, branched and wide the source may be, and how well documented and tested.

Code lines carry a token that is neither comment nor docstring. A function's length leaves its own docstring out and
counts nested functions both in their parent and alone; complexity is McCabe's with operands of and/or counted.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import tokenize
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "lowtide"

# Over the limit on purpose: "path" or "path:qualified.name" -> the reason.
EXCEPTIONS: dict[str, str] = {
    "src/lowtide/train/attach.py:attach": "one call is all that a user's loop needs to know",
}

FILE_LINES, FILE_MEDIAN = 400, 200
FUNCTION_LINES, FUNCTION_MOST = 60, 40
COMPLEXITY, COMPLEXITY_MOST = 12, 6
CLASS_LINES, CLASS_METHODS = 200, 12
PARAMETERS = 8
COMMENTS_PER_100 = (5, 12)
EXPORTED = 60

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case)
QUIET = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
PRAGMA = re.compile(r"#\s*(!|noqa|type:|fmt:|pragma|mypy|pyright|ruff)")


@dataclass(frozen=True)
class Definition:
    """A function or class and where it stands; public where no name on its way is private or a function."""

    where: str
    node: FunctionNode | ast.ClassDef
    public: bool

    @property
    def lines(self) -> int:
        doc = docstring_lines(self.node) if isinstance(self.node, FunctionNode) else set()
        return (self.node.end_lineno or 0) - self.node.lineno + 1 - len(doc)


@dataclass(frozen=True)
class File:
    """One Python file, measured."""

    path: str
    lines: int
    code: int
    comments: int
    definitions: list[Definition]

    @property
    def functions(self) -> list[Definition]:
        return [found for found in self.definitions if isinstance(found.node, FunctionNode)]

    @property
    def classes(self) -> list[Definition]:
        return [found for found in self.definitions if isinstance(found.node, ast.ClassDef)]


def docstring_lines(node: ast.AST) -> set[int]:
    first = next(iter(getattr(node, "body", [])), None)
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return set(range(first.lineno, (first.end_lineno or 0) + 1))
    return set()


def definitions(node: ast.AST, where: str, *, public: bool = True) -> list[Definition]:
    found = []
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, FunctionNode | ast.ClassDef):
            found += definitions(child, where, public=public)
            continue
        shown = public and not child.name.startswith("_")
        here = f"{where}{'.' if isinstance(node, FunctionNode | ast.ClassDef) else ':'}{child.name}"
        found.append(Definition(here, child, shown))
        found += definitions(child, here, public=shown and isinstance(child, ast.ClassDef))
    return found


def measure(text: str, path: str = "x.py") -> File:
    tree = ast.parse(text, path)
    documents = (ast.Module, ast.ClassDef, *FunctionNode.__args__)
    docs = set().union(*(docstring_lines(node) for node in ast.walk(tree) if isinstance(node, documents)))
    code, comments = set(), 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments += not PRAGMA.match(token.string)
        elif token.type not in QUIET:
            code |= set(range(token.start[0], token.end[0] + 1))
    return File(path, len(text.splitlines()), len(code - docs), comments, definitions(tree, path))


def documented_by_protocol(node: ast.ClassDef) -> set[str]:
    """The methods that a protocol describes, so that its implementations need not."""
    if not any("Protocol" in ast.unparse(base) for base in node.bases):
        return set()
    return {part.name for part in node.body if isinstance(part, FunctionNode) and docstring_lines(part)}


def complexity(node: ast.AST) -> int:
    score = 1
    for child in ast.walk(node):
        score += isinstance(child, BRANCHES)
        score += len(child.values) - 1 if isinstance(child, ast.BoolOp) else 0
        score += len(child.ifs) if isinstance(child, ast.comprehension) else 0
    return score


def parameters(node: FunctionNode) -> list[ast.arg]:
    args = node.args
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg))]
    return [arg for place, arg in enumerate(named) if place or arg.arg not in {"self", "cls"}]


def is_typed(node: FunctionNode) -> bool:
    return node.returns is not None and all(arg.annotation for arg in parameters(node))


def measure_all(folder: Path) -> list[File]:
    return [measure(path.read_text(), str(path.relative_to(ROOT))) for path in sorted(folder.rglob("*.py"))]


def over(limit: int, sizes: dict[str, int]) -> str:
    """One line for each size over the limit; nothing if there is none."""
    found = sorted((size, where) for where, size in sizes.items() if size > limit and where not in EXCEPTIONS)
    return "".join(f"\n  {where}: {size} over {limit}" for size, where in reversed(found))


def fail_over(limit: int, sizes: dict[str, int]) -> None:
    found = over(limit, sizes)
    assert not found, found


def share_over(limit: int, sizes: dict[str, int]) -> float:
    return sum(size > limit for size in sizes.values()) / len(sizes)


@pytest.fixture(scope="module")
def files() -> list[File]:
    return measure_all(SOURCE)


@pytest.fixture(scope="module")
def functions(files) -> list[Definition]:
    return [found for file in files for found in file.functions]


def test_files_are_short(files):
    fail_over(FILE_LINES, {file.path: file.lines for file in files})
    assert statistics.median(file.lines for file in files) < FILE_MEDIAN


def test_functions_are_short(functions):
    sizes = {found.where: found.lines for found in functions}
    fail_over(FUNCTION_LINES, sizes)
    assert share_over(FUNCTION_MOST, sizes) <= 0.05, over(FUNCTION_MOST, sizes)


def test_functions_branch_little(functions):
    scores = {found.where: complexity(found.node) for found in functions}
    fail_over(COMPLEXITY, scores)
    assert share_over(COMPLEXITY_MOST, scores) <= 0.05, over(COMPLEXITY_MOST, scores)


def test_calls_are_narrow(functions):
    fail_over(PARAMETERS, {found.where: len(parameters(found.node)) for found in functions})


def test_classes_are_small(files):
    classes = [found for file in files for found in file.classes]
    fail_over(CLASS_LINES, {found.where: found.lines for found in classes})
    methods = {found.where: sum(isinstance(part, FunctionNode) for part in found.node.body) for found in classes}
    fail_over(CLASS_METHODS, methods)


def test_what_is_public_is_documented(files):
    public = [found for file in files for found in file.definitions if found.public]
    # a part's method does what its protocol says; what it does beside that stands at the class
    promised = {name for file in files for found in file.classes for name in documented_by_protocol(found.node)}
    bare = [found.where for found in public if not docstring_lines(found.node) and found.node.name not in promised]
    assert not bare, "no docstring:\n  " + "\n  ".join(bare)


def test_what_is_public_is_typed(functions):
    untyped = [found.where for found in functions if found.public and not is_typed(found.node)]
    assert not untyped, "not fully annotated:\n  " + "\n  ".join(untyped)


def test_comments_say_why_and_seldom(files):
    low, high = COMMENTS_PER_100
    rate = 100 * sum(file.comments for file in files) / sum(file.code for file in files)
    per_file = sorted((round(100 * file.comments / file.code), file.path) for file in files if file.code > 20)
    assert low <= rate <= high, f"{rate:.1f} comments per 100 code lines; by file: {per_file}"


def test_there_is_at_least_as_much_test_as_code(files):
    tests = measure_all(ROOT / "tests")
    lines, tested = (sum(file.code for file in some) for some in (files, tests))
    assert tested >= lines, f"{tested} lines of tests for {lines} of code"


def test_few_names_are_exported():
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            assert len(ast.literal_eval(node.value)) <= EXPORTED
            return
    pytest.fail("src/lowtide/__init__.py has no literal __all__")


def test_every_exception_is_needed_and_has_a_reason(files):
    known = {file.path for file in files} | {found.where for file in files for found in file.definitions}
    assert [name for name, reason in EXCEPTIONS.items() if name not in known or not reason] == []


def test_the_measure_itself():
    text = (
        '"""Module."""\n# why\nx = 1  # noqa: F841\n\n\nclass A:\n    """Doc."""\n\n'
        "    def f(self, a: int, *b: int) -> int:\n"
        '        """Doc.\n\n        More.\n        """\n'
        "        return [i for i in b if i and a] if a else 0\n\n"
        "    def _g(self, c): ...\n"
    )
    file = measure(text)
    where = {found.where: found for found in file.definitions}
    assert (file.lines, file.code, file.comments) == (16, 5, 1)
    assert list(where) == ["x.py:A", "x.py:A.f", "x.py:A._g"]
    assert where["x.py:A.f"].lines == 2
    assert complexity(where["x.py:A.f"].node) == 4
    assert [arg.arg for arg in parameters(where["x.py:A.f"].node)] == ["a", "b"]
    assert is_typed(where["x.py:A.f"].node)
    assert not is_typed(where["x.py:A._g"].node)
    assert not where["x.py:A._g"].public
