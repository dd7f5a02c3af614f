"""``docs/document.toml`` and what is made of it: complete, current, and true."""

import ast
import contextlib
import io
import subprocess
import sys
from pathlib import Path

import pytest

from environment import environment

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

document = pytest.importorskip("document")

ITEMS = document.items()
PROGRAMS = [program for section in document.table() for program in section.get("program", [])]
LAST_LINE = 578  # of the document
STATED = 100  # items at least that are as stated


def test_the_table_is_complete():
    total = document.counts()
    print(dict(total))
    assert sum(total.values()) >= 146
    assert set(total) <= set(document.MARKS)
    assert total["as stated"] >= STATED


def test_every_item_has_what_its_mark_needs():
    for item in ITEMS:
        where = f"line {item['line']}: {item['says']}"
        assert item["says"].endswith((".", "?")), where
        assert item["tests"], where
        assert item["mark"] == "as stated" or item["why"], where
        assert document.places(item), where
        assert item["mark"] != "accepted, unused" or item["unused"], where
        assert set(item) <= {
            *("line", "last", "says", "mark", "why", "wrong", "names", "where", "tests"),
            *("unused", "reader", "callers", "missing"),
        }, where
        if item["mark"] == "next":
            assert "Today" in item["why"], where
        if item["mark"] == "refused":
            assert "Error" in item["why"] or "Invalid" in item["why"], where


def test_lines_are_in_the_order_of_the_document():
    before = 0
    for section in document.table():
        first, _, last = section["lines"].partition(" to ")
        span = range(int(first), int(last or first) + 1)
        assert before < span[0] <= span[-1] <= LAST_LINE
        lines = [item["line"] for item in section["item"]]
        assert lines == sorted(lines)
        for item in section["item"]:
            assert item["line"] in span, item["says"]
            assert item["line"] <= item.get("last", item["line"]) <= span[-1], item["says"]
        before = span[-1]


def test_names_are_said_once():
    names = [name for item in ITEMS for name, _ in item.get("names", [])]
    assert len(names) == len(set(names)) > 220


def test_every_test_is_collected():
    named = {test for item in ITEMS for test in item["tests"]}
    files = sorted({f"tests/{test.partition('::')[0]}" for test in named})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, *files], capture_output=True, text=True, cwd=ROOT, env=environment()
    )
    found = {line.partition("[")[0].removeprefix("tests/") for line in ran.stdout.splitlines()}
    assert {test for test in named - found if not skipped(test)} == set(), ran.stderr
    assert len(named & found) > 60


def skipped(test):
    """Whether the test is there, in a file that is left out where a package is missing."""
    path, _, name = test.partition("::")
    text = (ROOT / "tests" / path).read_text(encoding="utf-8")
    functions = {n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)}
    return name in functions and "importorskip" in text


@pytest.mark.parametrize("name", document.written())
def test_what_is_made_of_the_table_is_current(name):
    written = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert written == document.written()[name], "run scripts/document.py"


@pytest.mark.parametrize("program", PROGRAMS, ids=[program["title"] for program in PROGRAMS])
def test_programs_print_what_the_page_says(program):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(program["code"], {})
    assert out.getvalue().strip() == program["prints"].strip()


def test_the_page_is_linked():
    for page in ("README.md", "docs/index.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert "document.md" in text
        assert "source_map.md" in text


def test_a_diagram_loses_an_edge_that_the_code_loses(monkeypatch):
    import document_diagrams

    from refcache.controller import LayerDoneCounter

    before = document_diagrams.load_svg()
    monkeypatch.setattr(LayerDoneCounter, "wait_until", lambda self, threshold: None)
    after = document_diagrams.load_svg()
    assert before.count("marker-end") - after.count("marker-end") == 3  # one a layer
