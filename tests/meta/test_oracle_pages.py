"""The pages about the oracle: generated ones are up to date, what docs/oracle.md shows is so."""

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from refcache.oracle import Violation, resolve
from refcache.oracle.target.base import CAPABILITIES
from refcache.testing import SUITES, run_suite

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "oracle.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, flags=re.DOTALL)
MINE, BY_HAND, SUITE = (text for language, text in BLOCKS if language == "python")


def pages() -> Any:
    path = ROOT / "scripts" / "oracle_pages.py"
    spec = importlib.util.spec_from_file_location("oracle_pages", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The allocator of the page, importable: it hands a page out twice."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return "mine:MyTarget"


@pytest.mark.parametrize("name", ["invariants.md", "planted.md"])
def test_generated_pages_are_up_to_date(name: str) -> None:
    written = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert written == pages().PAGES[name](), "run scripts/oracle_pages.py"


def test_a_double_hand_out_is_shown_as_the_page_says(mine: str) -> None:
    result = run_suite("allocator.state", resolve(mine))
    assert result.verdict == "violation"
    assert result.failure is not None
    assert [result.failure.text] == [
        text.rstrip("\n") for language, text in BLOCKS if language == "text"
    ]
    with pytest.raises(Violation) as again:
        exec("\n".join(result.failure.steps), {})
    assert (again.value.id, again.value.evidence) == (result.failure.rule, result.failure.evidence)


def test_the_program_by_hand_runs() -> None:
    exec(BY_HAND, {})


def test_the_suite_class_fails_with_the_program(mine: str) -> None:
    names: dict[str, Any] = {}
    exec(SUITE, names)
    with pytest.raises(pytest.fail.Exception, match="P1: token 3 got page 2"):
        names["TestMyAllocator"]().test_state()


def test_tables_name_every_suite_and_capability() -> None:
    for suite in SUITES.values():
        (row,) = re.findall(rf"^\| `{re.escape(suite.name)}` .*$", PAGE, flags=re.MULTILINE)
        assert set(re.findall(r"`(\w+)`", row.split("|")[3])) == suite.needs
    named = re.findall(r"^\| `(\w+)` \| [^|]*\|$", PAGE, flags=re.MULTILINE)
    assert set(named) >= CAPABILITIES
