"""The pages: every Python block runs as it stands, and every relative link leads somewhere.

The blocks of one page share their names, like the cells of a notebook. A block that cannot run here stands below a
comment `<!-- no-run: why -->`.
"""

from __future__ import annotations

import doctest
import re
import subprocess
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(
    r"(?:<!--\s*no-run:(?P<why>[^>]*)-->\s*)?^```python[^\n]*\n(?P<code>.*?)^```\s*$", re.MULTILINE | re.DOTALL
)
FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)")
HEADING = re.compile(r"^#+\s+(.*?)\s*#*$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A Python block of a page; `why` is the reason not to run it, or None."""

    line: int
    code: str
    why: str | None


def blocks(text: str) -> Iterator[Block]:
    for match in BLOCK.finditer(text):
        why = match["why"]
        yield Block(text.count("\n", 0, match.start("code")) + 1, match["code"], why if why is None else why.strip())


def run(page: str, found: list[Block], names: dict[str, object]) -> None:
    """Execute the blocks in order in one namespace; tracebacks show the page and its line."""
    for block in found:
        if block.why is not None:
            continue
        if block.code.lstrip().startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(block.code, names, page, page, block.line)
            doctest.DebugRunner(optionflags=doctest.ELLIPSIS).run(test, clear_globs=False)
            names.update(test.globs)
        else:
            exec(compile("\n" * (block.line - 1) + block.code, page, "exec"), names)  # noqa: S102 - our own pages


def anchors(text: str) -> set[str]:
    """The anchors that a page's headings get: lower case, punctuation gone, spaces to hyphens."""
    headings = HEADING.findall(FENCE.sub("", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    dead = []
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        if not place.exists() or (anchor and place.suffix == ".md" and anchor not in anchors(place.read_text())):
            dead.append(target)
    return dead


def pages() -> list[Path]:
    """Every Markdown page that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout.split("\n")  # fmt: skip
    # an unpacked archive has no index; there the usual places are searched
    found = [ROOT / name for name in listed if name] or [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    return sorted(page for page in found if page.exists())


def taught(page: Path) -> bool:
    return page == ROOT / "README.md" or ROOT / "docs" in page.parents


@pytest.mark.parametrize("page", [p for p in pages() if taught(p)], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = list(blocks(page.read_text()))
    assert [block.line for block in found if block.why == ""] == [], "a skipped block gives no reason"
    run(str(page), found, {"__name__": "__docs__"})


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_lead_somewhere(page):
    assert dead_links(page) == []


def test_blocks_share_names_and_skips_give_reasons():
    first, skipped, shell, last = "python\nx = 1", "python\nx = 2", "bash\nno", "python\n>>> x\n1"
    text = f"```{first}\n```\n\n<!-- no-run: needs a GPU -->\n```{skipped}\n```\n```{shell}\n```\n```{last}\n```\n"
    found = list(blocks(text))
    names: dict[str, object] = {}
    run("page", found, names)
    assert [(block.line, block.why) for block in found] == [(2, None), (7, "needs a GPU"), (13, None)]
    assert names["x"] == 1


def test_a_failing_block_fails_and_names_the_page():
    with pytest.raises(ZeroDivisionError) as caught:
        run("page.md", list(blocks("\n\n```python\n1 / 0\n```\n")), {})
    last = traceback.extract_tb(caught.tb)[-1]
    assert (last.filename, last.lineno) == ("page.md", 4)
    with pytest.raises(doctest.DocTestFailure):
        run("page.md", list(blocks("```python\n>>> 1 + 1\n3\n```\n")), {})


def test_a_dead_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# One & two\n[a](#one--two) [b](#three) [c](none.md) [d](https://example.org)\n```\n[e](no.md)\n```\n"
    )
    assert dead_links(page) == ["#three", "none.md"]
