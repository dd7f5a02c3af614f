"""Valid calls of the allocation ops, and the check that an implementation gives the reference's
slots. The free list lies inside a larger buffer, so that a read past its end shows.

The counterpart of :mod:`refcache.reference.cases`, which has the copies.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from refcache.errors import InvalidArgument
from refcache.reference import alloc
from refcache.reference.cases import as_code


@dataclass(frozen=True, repr=False)
class AllocCase:
    """One call of ``alloc_extend`` (or, with ``prefix`` None, of ``alloc_decode``).

    With a ``cursor`` two calls, as a loop makes them: the second takes up where the first ended.
    """

    seq: tuple[int, ...]
    prefix: tuple[int, ...] | None
    last: tuple[int, ...]
    free: tuple[int, ...]
    page_size: int
    dtype: torch.dtype = torch.int64
    cursor: int | None = None

    __repr__ = as_code

    def __post_init__(self) -> None:
        """Raise InvalidArgument unless this is one valid call."""
        decode = self.prefix is None
        before = tuple(s - 1 for s in self.seq) if self.prefix is None else self.prefix
        if not (
            self.page_size > 0
            and len(self.seq) == len(before) == len(self.last)
            and all(0 <= b <= s and s - decode >= 0 for b, s in zip(before, self.seq, strict=True))
            and min(self.last, default=0) >= -1
            and min(self.free, default=1) > 0
            and (self.cursor is None or self.cursor >= 0)
        ):
            raise InvalidArgument(f"{self!r}: expected a valid call")

    def simpler(self) -> Iterator["AllocCase"]:
        """Half of the requests, then one request less; then a shorter free list.

        Never an empty one: its address is null, and a kernel that reads past it ends the process.
        """
        count, half = len(self.seq), len(self.seq) // 2
        parts = (slice(half), slice(half, None), slice(count - 1), slice(1, None))
        for part in parts if count > 1 else ():
            prefix = self.prefix if self.prefix is None else self.prefix[part]
            yield replace(self, seq=self.seq[part], prefix=prefix, last=self.last[part])
        if len(self.free) > 1:
            yield replace(self, free=self.free[: len(self.free) // 2])

    @property
    def growth(self) -> int:
        """Slots that ``alloc_extend`` returns."""
        return sum(self.seq) - sum(self.prefix or ())


def random_alloc_case(rng: random.Random, batch: int = 6, tokens: int = 40) -> AllocCase:
    """A consistent case; sometimes with too short a free list, sometimes nothing to extend.

    Sometimes with a cursor, and then with requests that got no slot before.
    """
    page = rng.choice((1, 2, 3, 4, 16, 64))
    count = rng.randint(0, batch)
    near = [0, 1, page - 1, page, page + 1, 2 * page - 1, 2 * page, 3 * page + 1]
    prefix = [rng.choice((*near, rng.randint(0, tokens))) for _ in range(count)]
    decode = rng.random() < 0.4
    seq = [p + (1 if decode else rng.choice((0, *near, rng.randint(0, tokens)))) for p in prefix]
    needed = sum(-(-s // page) + -p // page for s, p in zip(seq, prefix, strict=True))
    pages = rng.sample(range(1, 1000 + count + needed), count + needed + 3)
    last = [q * page + (p - 1) % page if p else -1 for q, p in zip(pages, prefix, strict=False)]
    free = pages[count:][: rng.choice((needed, needed + 3, rng.randint(0, needed)))]
    dtype = rng.choice((torch.int32, torch.int64))
    cursor = rng.choice((None, None, 0, rng.randint(0, len(free) + 2)))
    if cursor is not None:
        last = [s if rng.random() < 0.9 else -1 for s in last]
    return AllocCase(
        tuple(seq), None if decode else tuple(prefix), tuple(last), tuple(free), page, dtype, cursor
    )


def alloc_errors(case: AllocCase, ops: Any, device: str = "cpu") -> list[str]:
    """What is wrong with the slots that ``ops`` returns, with the cursor, or with its inputs after
    the call; empty when slots and cursor are the reference's and nothing else was written."""
    seq, last = torch.tensor(case.seq, dtype=case.dtype), torch.tensor(case.last, dtype=case.dtype)
    beyond = torch.tensor([900_000, *case.free, *[990_000] * (8 + case.growth)], dtype=case.dtype)
    lengths = [("seq_lens", seq), ("last_loc", last)]
    counts: list[Any] = [case.page_size]
    if case.prefix is not None:
        lengths.insert(0, ("prefix_lens", torch.tensor(case.prefix, dtype=case.dtype)))
        counts.append(case.growth)
    name = "alloc_decode" if case.prefix is None else "alloc_extend"
    given = [*lengths, ("free_pages, or what lies around it,", beyond)]
    moved = [t.to(device, copy=True) for _, t in given]
    mine = slice(1, 1 + len(case.free))
    steps = 1 if case.cursor is None else 2
    cursors = [torch.tensor([7, case.cursor or 0, 7], device=d) for d in ("cpu", device)]
    for _ in range(steps):
        calls = []
        for op, tensors, cursor in zip(
            (getattr(alloc, name), getattr(ops, name)), ([t for _, t in given], moved), cursors,
            strict=True,
        ):  # fmt: skip
            rest = () if case.cursor is None else (cursor[1:2],)
            calls.append(op(*tensors[:-1], tensors[-1][mine], *counts, *rest))
        want, got = calls
        if not isinstance(got, torch.Tensor):
            return [f"a {type(got).__name__} was returned, but should be a tensor"]
        if got.dtype != torch.int64 or got.shape != want.shape:
            return [f"slots {got.dtype} {list(got.shape)}, but should be int64 {list(want.shape)}"]
        wrong = (got.cpu() != want).nonzero().flatten().tolist()
        if wrong:
            i = wrong[0]
            return [f"slot {i} of {len(want)} is {int(got[i])}, but should be {int(want[i])}"]
        after = [c.tolist() for c in cursors]
        if after[0] != after[1]:
            return [f"the cursor and its neighbours are {after[1]}, but should be {after[0]}"]
    return [
        f"{what} was written to"
        for (what, old), new in zip(given, moved, strict=True)
        if not torch.equal(old, new.cpu())
    ]


def long_alloc_cases() -> Iterator[AllocCase]:
    """Free lists that are too short, and batches and page numbers beyond one block or 32 bits."""
    yield AllocCase((9, 7), (2, 3), (5, 10), (5, 6, 7), 4)
    yield AllocCase((9,), (0,), (-1,), (5,), 4)
    yield AllocCase((5, 5, 5), None, (7, 11, 15), (6,), 4)
    yield AllocCase((5, 5, 6), None, (7, 11, -1), (6, 8, 9), 4, cursor=1)
    yield AllocCase((9, 7), (2, 3), (5, -1), (5, 6, 7, 8), 4, cursor=1)
    page = 2**31 // 16 + 3
    pages = (page, page + 1, page + 2)
    yield AllocCase((40,), (0,), (-1,), pages, 16, torch.int32)
    yield AllocCase((17, 33), None, (15, 31), pages, 16, torch.int32)
    for batch, decode in ((300, True), (1100, False)):
        seq = tuple(5 + i % 7 for i in range(batch))
        # most do not grow: a program each is slow to interpret
        grown = [1 if decode else 3 * (i < 4 or i > batch - 4) for i in range(batch)]
        before = tuple(s - g for s, g in zip(seq, grown, strict=True))
        last = tuple(40_000 + i * 4 + (b - 1) % 4 for i, b in enumerate(before))
        prefix = None if decode else before
        cursor = 3 if decode else None
        yield AllocCase(seq, prefix, last, tuple(range(2, 2 + batch)), 4, cursor=cursor)
        if decode:
            yield AllocCase(seq, prefix, last, tuple(range(2, 2 + batch)), 4)
