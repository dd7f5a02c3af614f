"""Traces of other programs: the schema, the page's example, and two traces of one workload."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import refcache
from refcache.cli.main import main
from refcache.errors import InvalidTrace
from refcache.oracle import NaiveAllocator, TreeDriver, resolve
from refcache.trace import compare_traces, judge_trace, validate
from refcache.trace.exchange.schema import json_schema
from refcache.trace.format import AnyCall

DOCS = Path(__file__).parents[2] / "docs"
(EXAMPLE,) = re.findall(
    r"```jsonl\n(.*?)```", (DOCS / "traces.md").read_text(encoding="utf-8"), flags=re.DOTALL
)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "other.jsonl"
    path.write_text(EXAMPLE)
    return path


def test_the_example_of_the_page_keeps_the_schema_and_is_legal(written: Path) -> None:
    assert str(validate(written)) == "ok: 7 lines keep refcache-trace version 1"
    assert str(judge_trace(written)) == "ok: 5 records judged"


def test_the_schema_of_the_docs_is_up_to_date() -> None:
    shown = json.loads((DOCS / "trace.schema.json").read_text(encoding="utf-8"))
    assert shown == json_schema(), "write docs/trace.schema.json with `refcache judge --schema`"
    assert len([name for name in shown["$defs"] if name[0].isupper()]) >= len(AnyCall.__args__)


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ('"slots":[1,2]', '"slots":["1"]', 2, "Expected `int`"),
        ('"op":"free"', '"op":"release"', 5, "release"),
        ('"n":3', '"n":4', 4, "record 4 comes after record 2"),
        ('"num_tokens":2', '"tokens":2', 5, "tokens"),
        ('{"n":6,"call":{"op":"end","lines":5}}\n', "", 0, "without an end record"),
        ('"version":1', '"version":9', 0, "version 9"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(
    written: Path, old: str, new: str, line: int, said: str
) -> None:
    text = written.read_text()
    assert old in text
    written.write_text(text.replace(old, new))
    verdict = validate(written)
    assert verdict.error is not None
    assert said in verdict.error
    assert not line or f"line {line}" in verdict.error
    assert main(["judge", "--schema", str(written)]) == 1


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidTrace):
        validate(tmp_path / "none.jsonl")


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()


def workload(driver: Any, path: Path) -> Path:
    with refcache.record(driver.tree, path):
        driver.admit((1, 1, 2, 2))
        driver.cache(0)
        driver.admit((1, 1, 2, 3))
        driver.finish(0)
        driver.evict(2)
        driver.finish(0)
    return path


@pytest.fixture
def traces(tmp_path: Path) -> tuple[Path, Path]:
    """One workload on two allocators that choose other pages."""
    a = workload(TreeDriver(resolve("refcache"), page_size=2, size=16), tmp_path / "a.jsonl")
    b = workload(TreeDriver(Other(), page_size=2, size=16), tmp_path / "b.jsonl")
    return a, b


class Other(type(resolve("refcache"))):  # type: ignore[misc]
    """The reference's tree over the naive allocator, which takes the highest page first."""

    def allocator(self, config: Any) -> NaiveAllocator:
        return NaiveAllocator(config.size, config.page_size)


def test_other_pages_are_no_difference(
    traces: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = traces
    assert a.read_text() != b.read_text()
    found = compare_traces(a, b)
    assert found.verdict == "ok", str(found)
    assert main(["judge", str(a), str(b)]) == 0
    assert capsys.readouterr().out == f"same: {found.records} records tell the same\n"


def altered(path: Path, change: Any) -> Path:
    lines = path.read_text().splitlines()
    path.write_text("".join(change(json.loads(line)) + "\n" for line in lines))
    return path


def test_the_first_difference_is_named(
    traces: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = traces

    def shorter(line: Any) -> str:
        if line.get("call", {}).get("op") == "match_prefix" and line["call"].get("slots"):
            line["call"]["slots"] = line["call"]["slots"][:-2]
        return json.dumps(line)

    found = compare_traces(a, altered(b, shorter))
    assert (found.op, found.what) == ("match_prefix", "slots")
    assert main(["judge", str(a), str(b)]) == 1
    assert f"record {found.n}, match_prefix: slots" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ('"size":16', '"size":32', "size differs"),
        ('"op":"evict","num_tokens":2', '"op":"evict","num_tokens":4', "was asked something else"),
    ],
)
def test_what_was_asked_is_compared_first(
    traces: tuple[Path, Path], old: str, new: str, what: str
) -> None:
    a, b = traces
    b.write_text(b.read_text().replace(old, new))
    assert compare_traces(a, b).what == what


def test_a_trace_that_ends_early_or_is_damaged(traces: tuple[Path, Path]) -> None:
    a, b = traces
    lines = b.read_text().splitlines(keepends=True)
    b.write_text("".join(lines[:4]))
    assert compare_traces(a, b).verdict == "unknown"
    b.write_text("".join(lines[:4]) + '{"n":4,"call":{"op":"end","lines":3}}\n')
    found = compare_traces(a, b)
    assert (found.verdict, found.n, found.what) == ("violation", 4, "B has fewer")
    assert main(["judge", str(a), str(b), "--schema"]) == 2
