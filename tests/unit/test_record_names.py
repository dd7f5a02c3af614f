"""``record`` of an object with names of its own: the table, and what is missing."""

from pathlib import Path
from typing import Any

import pytest
import torch

import refcache
from refcache.errors import InvalidArgument, UnknownName
from refcache.oracle import NaiveAllocator
from refcache.trace import Named, judge_trace


class Slots:
    """A live pool: other names, and lists instead of tensors."""

    def __init__(self, size: int) -> None:
        self.made = NaiveAllocator(size, 1)
        self.capacity, self.block = size, 1

    def room(self) -> int:
        return self.made.available_size()

    def acquire(self, count: int, reason: str = "") -> list[int]:
        found = self.made.alloc(count)
        return [] if found is None else found.tolist()

    def release(self, slots: list[int]) -> None:
        self.made.free(torch.tensor(slots))


NAMES: dict[str, Any] = {
    "capacity": "size",
    "block": "page_size",
    "room": "available_size",
    "acquire": Named("alloc", lambda count, reason="": (count,), lambda slots: slots or None),
    "release": "free",
}


def test_a_pool_with_other_names_is_recorded_and_judged(tmp_path: Path) -> None:
    pool = Slots(4)
    with refcache.record(pool, tmp_path / "t.jsonl", NAMES) as recorder:
        first = pool.acquire(3, reason="prefill")
        assert pool.acquire(2) == []
        pool.release(first)
    assert str(judge_trace(tmp_path / "t.jsonl")) == "ok: 3 records judged"
    assert "acquire" not in vars(pool)
    assert "allocator.alloc_extend" in recorder.missing
    assert "allocator.alloc" not in recorder.missing


def test_its_mistakes_are_found(tmp_path: Path) -> None:
    pool = Slots(4)
    with refcache.record(pool, tmp_path / "t.jsonl", NAMES):
        pool.acquire(1)
        pool.made._free.add(4)
        pool.acquire(1)
    assert "P1" in str(judge_trace(tmp_path / "t.jsonl"))


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidArgument, match="as allocator: alloc, free, available_size, size, pa"
    ):
        refcache.record(Slots(4), tmp_path / "t.jsonl")
    some = {"acquire": "alloc", "release": "free", "room": "available_size"}
    with pytest.raises(InvalidArgument, match=r"as allocator: size, page_size\. A method of"):
        refcache.record(Slots(4), tmp_path / "t.jsonl", some)


def test_a_table_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="operation 'allocate'"):
        refcache.record(Slots(4), tmp_path / "t.jsonl", {"acquire": "allocate"})
    with pytest.raises(InvalidArgument, match="both 'free'"):
        refcache.record(Slots(4), tmp_path / "t.jsonl", {"release": "free", "acquire": "free"})
