"""Streams of KV events from drawn pools of hashed blocks: legal ones are ok, changed ones are not.

The pool behind a stream is vLLM's: blocks are named by their prefix, several copies of one may be
held, any block that nobody uses may go, whether it has children or not, and a full report may come
at any time. Ranks and cache groups have pools of their own.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from refcache.oracle.rules.violation import Violation
from refcache.readers.events import read_events
from refcache.trace.events.stream import LIBERTIES, Announced, judge_batches

SIZE = 2

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=4)
moves = st.lists(
    st.tuples(st.sampled_from(["store", "remove", "report", "lower"]), prompts, st.integers(0, 99)),
    min_size=2,
    max_size=14,
)


def name(rank: int, group: int, prefix: tuple[int, ...]) -> int:
    """A hash of a prefix: its digits, so that equal prefixes are equal names."""
    return int("9" + "".join(str(d) for d in prefix))


class Pool:
    """The blocks of one rank and group, and the events about them."""

    def __init__(self, rank: int, group: int) -> None:
        self.rank, self.group = rank, group
        self.held: list[tuple[int, ...]] = []  # one entry a copy

    def event(self, kind: str, prefixes: list[tuple[int, ...]], **more: Any) -> dict[str, Any]:
        hashes = [name(self.rank, self.group, p) for p in prefixes]
        return {"type": kind, "block_hashes": hashes, "group_idx": self.group, **more}

    def stored(self, run: list[tuple[int, ...]]) -> dict[str, Any]:
        above = run[0][:-1]
        return self.event(
            "BlockStored",
            run,
            parent_block_hash=name(self.rank, self.group, above) if above else None,
            token_ids=[t for p in run for t in (p[-1], 7)],
            block_size=SIZE,
            medium="GPU",
        )

    def play(self, move: str, digits: list[int], pick: int) -> list[dict[str, Any]]:
        """The events of one move."""
        prefixes = [tuple(digits[: i + 1]) for i in range(len(digits))]
        if move == "store":  # all of a prompt again, or what is not there yet
            new = prefixes if pick % 3 == 0 else [p for p in prefixes if p not in self.held]
            if not new:
                return []
            new = prefixes[prefixes.index(new[0]) :]
            self.held += new
            return [self.stored(new)]
        if move == "remove" and self.held:
            gone = self.held.pop(pick % len(self.held))
            return [self.event("BlockRemoved", [gone], medium="GPU")]
        if move == "report":
            listed = sorted(set(self.held), key=lambda p: (len(p), p))
            whole = [p for p in listed if all(p[:i] in listed for i in range(1, len(p)))]
            return [self.stored([p]) for p in whole]
        if move == "lower" and self.held:
            moved = self.event("BlockStored", [self.held[pick % len(self.held)]])
            told = {"parent_block_hash": None, "token_ids": [], "block_size": 0, "medium": "CPU"}
            return [{**moved, **told}]
        return []


@st.composite
def streams(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Batches of a legal stream; each rank numbers its own."""
    pools = {(rank, group): Pool(rank, group) for rank in (0, 1) for group in (0, 1)}
    made: list[dict[str, Any]] = []
    numbers = {0: 0, 1: 0}
    for move, digits, pick in draw(moves):
        rank, group = draw(st.sampled_from(sorted(pools)))
        events = pools[rank, group].play(move, digits, pick)
        if events:
            batch = {"ts": 1.0, "events": events, "data_parallel_rank": rank}
            made.append({"recv_ts": 1.0, "topic": f"r{rank}", "seq": numbers[rank], "batch": batch})
            numbers[rank] += 1
    assume(made)
    return made


def judge(folder: Path, stream: list[dict[str, Any]]) -> Any:
    path = folder / "stream.jsonl"
    path.write_text("".join(json.dumps(batch) + "\n" for batch in stream))
    return judge_batches(read_events(path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("streams")


@given(stream=streams())
@settings(max_examples=200)
def test_a_legal_stream_is_ok(folder: Path, stream: list[dict[str, Any]]) -> None:
    verdict = judge(folder, stream)
    assert verdict.verdict == "ok", verdict


def stores(batch: dict[str, Any]) -> list[dict[str, Any]]:
    return [e for e in batch["batch"]["events"] if e["type"] == "BlockStored" and e["token_ids"]]


def changed(kind: str, stream: list[dict[str, Any]], pick: int) -> list[dict[str, Any]] | None:
    """The stream with one illegal change, or None where it has no place for it."""
    copy = json.loads(json.dumps(stream))
    told = [event for batch in copy for event in stores(batch)]
    if kind == "lost batch":
        rank = copy[pick % len(copy)]["topic"]
        of_rank = [i for i, batch in enumerate(copy) if batch["topic"] == rank]
        if len(of_rank) < 3:
            return None
        del copy[of_rank[1 + pick % (len(of_rank) - 2)]]
        return copy
    if kind == "unknown block removed":
        event = {"type": "BlockRemoved", "block_hashes": [123], "group_idx": 0, "medium": "GPU"}
        copy[pick % len(copy)]["batch"]["events"].append(event)
        return copy
    if not told:
        return None
    event = told[pick % len(told)]
    if kind == "unknown parent":
        event["parent_block_hash"] = 123
    elif kind == "too few tokens":
        event["token_ids"].pop()
    elif kind == "other tokens":
        first = {**event, "block_hashes": [event["block_hashes"][0]]}
        first["token_ids"] = [9, 9]
        copy[-1]["batch"]["events"].append(first)
        copy[-1]["batch"]["data_parallel_rank"] = next(
            b["batch"]["data_parallel_rank"] for b in copy if event in b["batch"]["events"]
        )
        copy[-1]["topic"] = f"r{copy[-1]['batch']['data_parallel_rank']}"
        return None if copy[-1]["topic"] != stream[-1]["topic"] else copy
    elif kind == "another adapter":
        last = stream[-1]["batch"]["data_parallel_rank"]
        here = next(b["batch"]["data_parallel_rank"] for b in copy if event in b["batch"]["events"])
        if here != last:
            return None
        copy[-1]["batch"]["events"].append({**event, "lora_name": "other"})
    return copy


RULES = {
    "lost batch": "N4",
    "unknown block removed": "N2",
    "unknown parent": "N2",
    "too few tokens": "N3",
    "other tokens": "N1",
    "another adapter": "N1",
}


@pytest.mark.parametrize("kind", RULES)
@given(stream=streams(), pick=st.integers(0, 99))
@settings(max_examples=40)
def test_an_illegal_change_is_found(
    folder: Path, kind: str, stream: list[dict[str, Any]], pick: int
) -> None:
    broken = changed(kind, stream, pick)
    assume(broken is not None)
    assert broken is not None
    verdict = judge(folder, broken)
    assert (verdict.verdict, verdict.rule) == ("violation", RULES[kind]), verdict


@given(stream=streams())
@settings(max_examples=40)
def test_copies_are_counted(folder: Path, stream: list[dict[str, Any]]) -> None:
    """A block can be removed as often as it was stored and not once more."""
    path = folder / "counted.jsonl"
    path.write_text("".join(json.dumps(batch) + "\n" for batch in stream))
    announced = Announced(LIBERTIES["vllm"])
    for batch in read_events(path):
        for event in batch.events:
            announced.apply(event)
    for (rank, group, medium), copies in announced.resident().items():
        for block, count in copies.items():
            gone = next(
                event
                for batch in read_events(path)
                for event in batch.events
                if (event.rank, event.group, event.medium) == (rank, group, medium)
                and block in event.hashes
            )
            removal = type(gone)(
                "removed", "BlockRemoved", (block,), medium=medium, group=group, rank=rank
            )
            for _ in range(count):
                announced.apply(removal)
            with pytest.raises(Violation, match=f"removed page {block}"):
                announced.apply(removal)
