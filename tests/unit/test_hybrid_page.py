"""``docs/hybrid.md``: its program prints what it says, its pictures are what code draws."""

import contextlib
import io
import re
import sys
from pathlib import Path

import pytest

from refcache.tree.components import StateComponent, WindowComponent

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

hybrid_pictures = pytest.importorskip("hybrid_pictures")

DOCS = ROOT / "docs"
PAGE = (DOCS / "hybrid.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_program_prints_what_the_page_says(block):
    program, said = block
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "docs/hybrid.md", "exec"), {})
    assert printed.getvalue() == said


def test_pictures_are_current_and_shown():
    written = hybrid_pictures.written()
    assert {name: (DOCS / name).read_text(encoding="utf-8") for name in written} == written
    assert re.findall(r"\]\((hybrid-[\w-]+\.svg)\)", PAGE) == list(written)
    assert sorted(written) == sorted(path.name for path in DOCS.glob("hybrid-*.svg"))


def test_files_of_the_page_are_there():
    for path in re.findall(r"^\| `(refcache/[\w/]+\.py)`", PAGE, flags=re.MULTILINE):
        assert (ROOT / "src" / path).is_file(), path


def test_a_picture_shows_what_the_tree_has(monkeypatch):
    """Not what it should have: a state too many, a window that is said to be gone."""
    before = hybrid_pictures.no_state_where_they_part()
    keep = lambda self, child, upper: setattr(  # noqa: E731
        self.of(upper), "value", self.of(child).value
    )
    monkeypatch.setattr(StateComponent, "halve", keep)
    assert hybrid_pictures.no_state_where_they_part().count("<circle") > before.count("<circle")
    assert "match 10" in hybrid_pictures.a_window_that_lives()
    monkeypatch.setattr(WindowComponent, "usable", lambda self, path: False)
    assert "match 0" in hybrid_pictures.a_window_that_lives()


def test_who_reads_the_plain_tree_reads_of_no_other():
    """Nothing there is about states and windows but what a plain tree answers when asked."""
    words = re.compile("component|tombstone|hybrid|window|recurrent")
    answers = ("No sliding window: 0.", "No layer with", "``mamba_value``")
    for name in ("radix_tree", "radix_cache", "insert_plan", "node", "strategies", "hiradix_cache"):
        lines = (ROOT / "src" / "refcache" / "tree" / f"{name}.py").read_text(encoding="utf-8")
        found = [line for line in lines.splitlines() if words.search(line)]
        assert [line for line in found if not any(a in line for a in answers)] == [], name
