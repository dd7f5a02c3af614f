"""Streams of KV events: residency replayed, impossible sequences reported."""

import json
from pathlib import Path
from typing import Any

import pytest

from refcache.errors import InvalidTrace
from refcache.trace import judge_events, judge_file

STORED = {"type": "BlockStored", "block_hashes": [1], "token_ids": [5, 6], "block_size": 2}
CHILD = {**STORED, "block_hashes": [2], "parent_block_hash": 1, "token_ids": [7, 8]}
REMOVED = {"type": "BlockRemoved", "block_hashes": [2]}
CLEARED = {"type": "AllBlocksCleared"}


def stream(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    "lines",
    [
        [STORED, CHILD, REMOVED, CHILD],
        [{"ts": 1.5, "events": [STORED, CHILD]}, {"ts": 2.0, "events": [REMOVED]}],
        [[1.5, [["BlockStored", [1], None, [5, 6], 2, None]]], [2.0, [["AllBlocksCleared"]]]],
        [CLEARED, STORED, CLEARED, STORED],
        [STORED, {**STORED, "medium": "CPU_PINNED"}, {"type": "BlockRemoved", "block_hashes": [1]}],
    ],
    ids=["objects", "batches", "arrays", "cleared", "tiers"],
)
def test_a_possible_stream(lines: list[Any], tmp_path: Path) -> None:
    verdict = judge_file(stream(tmp_path / "events.jsonl", *lines))
    assert verdict.verdict == "ok"
    assert verdict.records >= 2


@pytest.mark.parametrize(
    ("lines", "n", "rule", "words"),
    [
        ([REMOVED], 1, "N2", "removed page 2, which is not stored"),
        ([STORED, STORED], 2, "N2", "stored page 1 of [5, 6] twice"),
        ([CHILD], 1, "N2", "after page 1, which is not stored"),
        ([STORED, CLEARED, CHILD], 3, "N2", "after page 1, which is not stored"),
        (
            [STORED, CLEARED, CLEARED, {**STORED, "token_ids": [9, 9]}],
            4,
            "N1",
            "page 1 is [9, 9], and was [5, 6]",
        ),
        ([STORED, {**REMOVED, "block_hashes": [1], "medium": "CPU_PINNED"}], 2, "N2", "removed"),
    ],
)
def test_an_impossible_stream(
    lines: list[Any], n: int, rule: str, words: str, tmp_path: Path
) -> None:
    verdict = judge_events(stream(tmp_path / "events.jsonl", *lines), engine="sglang")
    assert (verdict.verdict, verdict.n, verdict.rule) == ("violation", n, rule)
    assert words in verdict.evidence


def test_damage(tmp_path: Path) -> None:
    path = stream(tmp_path / "events.jsonl", STORED, {**CHILD, "block_size": "two"})
    verdict = judge_events(path)
    assert (verdict.verdict, verdict.records) == ("unknown", 1)
    assert "line 2" in str(verdict)
    with pytest.raises(InvalidTrace, match="expected the header of a recorded trace, an event"):
        judge_events(stream(tmp_path / "other.jsonl", {"hello": 1}))
    with pytest.raises(InvalidTrace, match="expected the header of a recorded trace, an event"):
        judge_file(stream(tmp_path / "other.jsonl", {"hello": 1}))
