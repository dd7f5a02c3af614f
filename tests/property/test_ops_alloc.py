"""The allocation kernels, interpreted, against the reference and against a page walk."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import refcache_ops
from refcache import reference
from refcache.errors import InvalidArgument
from refcache.reference import alloc_cases
from refcache_ops.alloc_decode import op as decode_op
from refcache_ops.alloc_extend import op as extend_op

REPEATABLE = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def walk(case: alloc_cases.AllocCase) -> list[int]:
    """The third oracle: token by token, with nothing but a list of pages and a position."""
    free = list(case.free[case.cursor or 0 :])
    out: list[int] = []
    prefixes = case.prefix if case.prefix is not None else [s - 1 for s in case.seq]
    for prefix, seq, last in zip(prefixes, case.seq, case.last, strict=True):
        slot = last
        for position in range(prefix, seq):
            if position % case.page_size == 0:
                slot = free.pop(0) * case.page_size if free else -1
            elif slot != -1:
                slot += 1
            out.append(slot)
    return out


@REPEATABLE
@given(st.randoms(use_true_random=False))
def test_alloc_kernels_are_byte_equal(kernel_ops: SimpleNamespace, rng: random.Random) -> None:
    case = alloc_cases.random_alloc_case(rng)
    assert alloc_cases.alloc_errors(case, kernel_ops) == []


@REPEATABLE
@given(st.randoms(use_true_random=False))
def test_the_reference_is_the_page_walk(rng: random.Random) -> None:
    case = alloc_cases.random_alloc_case(rng)
    tensors = [torch.tensor(v, dtype=case.dtype) for v in (case.seq, case.last, case.free)]
    cursor = None if case.cursor is None else torch.tensor([case.cursor])
    before = case.prefix or [s - 1 for s in case.seq]
    if case.prefix is None:
        got = refcache_ops.alloc_decode(*tensors, case.page_size, cursor)
    else:
        prefix = torch.tensor(case.prefix, dtype=case.dtype)
        got = refcache_ops.alloc_extend(prefix, *tensors, case.page_size, case.growth, cursor)
    assert got.tolist() == walk(case)
    if cursor is not None:
        page = case.page_size
        opened = sum(-(-s // page) + -b // page for s, b in zip(case.seq, before, strict=True))
        assert int(cursor) - (case.cursor or 0) == opened


GOLDEN = [
    ([2], [11], [5], [3, 4], [6, 7, 12, 13, 14, 15, 16, 17, 18]),
    ([4], [11], [7], [2, 3], [8, 9, 10, 11, 12, 13, 14]),
    ([4], [4], [7], [2, 3], []),
    (
        [2, 0, 4],
        [11, 4, 6],
        [5, -1, 11],
        [3, 4, 5, 6],
        [6, 7, 12, 13, 14, 15, 16, 17, 18, 20, 21, 22, 23, 24, 25],
    ),
    ([0], [12], [-1], [3], [12, 13, 14, 15] + [-1] * 8),
    ([], [], [], [3], []),
]


@pytest.mark.parametrize(("prefix", "seq", "last", "free", "want"), GOLDEN)
def test_golden_extends(
    kernel_ops: SimpleNamespace,
    prefix: list[int],
    seq: list[int],
    last: list[int],
    free: list[int],
    want: list[int],
) -> None:
    tensors = [torch.tensor(v, dtype=torch.int64) for v in (prefix, seq, last, free)]
    assert kernel_ops.alloc_extend(*tensors, 4, len(want)).tolist() == want


def test_golden_decode(kernel_ops: SimpleNamespace) -> None:
    t = torch.tensor
    got = kernel_ops.alloc_decode(t([5, 6, 9, 1]), t([11, 17, 3, -1]), t([7, 8]), 4)
    assert got.tolist() == [28, 18, 32, -1]


@pytest.mark.parametrize("batch", [1, 127, 128, 129, 1025, 2100])
def test_batches_beyond_one_block(kernel_ops: SimpleNamespace, batch: int) -> None:
    rng = random.Random(batch)
    seq = tuple(rng.randint(1, 40) for _ in range(batch))
    last = tuple(rng.randint(0, 10**6) for _ in range(batch))
    free = tuple(rng.sample(range(1, 10**6), batch))
    decode = alloc_cases.AllocCase(seq, None, last, free, page_size=4)
    assert alloc_cases.alloc_errors(decode, kernel_ops) == []
    if batch < 200:
        prefix = tuple(max(0, s - rng.randint(0, 9)) for s in seq)
        extend = alloc_cases.AllocCase(seq, prefix, last, free * 4, page_size=4, dtype=torch.int32)
        assert alloc_cases.alloc_errors(extend, kernel_ops) == []


@pytest.mark.parametrize(
    "growth",
    [1023, 1024, 1025, 5000, pytest.param(2**20 + 1, marks=pytest.mark.nightly)],
)
def test_long_extends_use_several_chunks(kernel_ops: SimpleNamespace, growth: int) -> None:
    free = tuple(range(1, growth // 64 + 3))
    case = alloc_cases.AllocCase((growth + 70, 9), (70, 9), (1_000_005, 8), free, page_size=64)
    assert alloc_cases.alloc_errors(case, kernel_ops) == []


def test_slots_beyond_2_31(kernel_ops: SimpleNamespace) -> None:
    page = 2**31 // 16 + 3
    case = alloc_cases.AllocCase((40,), (0,), (-1,), (page, page + 1, page + 2), 16, torch.int32)
    assert alloc_cases.alloc_errors(case, kernel_ops) == []
    decode = alloc_cases.AllocCase((17, 33), None, (15, 31), (page, page + 1), 16, torch.int32)
    assert alloc_cases.alloc_errors(decode, kernel_ops) == []


I32, I64 = torch.int32, torch.int64


def lens(*values: int, dtype: torch.dtype = I64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


# What no device may take, for alloc_decode and alloc_extend: the arguments that are bad.
BAD: list[dict[str, Any]] = [
    {"page_size": 0},
    {"page_size": -4},
    {"page_size": 2**31},
    {"seq_lens": lens(5)},
    {"seq_lens": lens(5, 6, 7)},
    {"last_loc": lens(3)},
    {"last_loc": lens(3, 4, 5)},
    {"last_loc": lens()},
    {"seq_lens": lens(5, 6).float()},
    {"last_loc": lens(3, 4).to(torch.int16)},
    {"free_pages": lens(3, 4).to(torch.uint8)},
    {"free_pages": lens(3, 4) > 0},
    {"seq_lens": lens(5, 6)[None]},
    {"last_loc": lens(3)[0]},
    {"free_pages": lens(3, 4)[:, None]},
    {"free_pages": torch.empty(4, dtype=I64, device="meta")},
    {"last_loc": torch.empty(2, dtype=I64, device="meta")},
    {"cursor": lens()},
    {"cursor": lens(0, 0)},
    {"cursor": lens(0)[0]},
    {"cursor": lens(0, dtype=I32)},
    {"cursor": torch.zeros(1, dtype=I64, device="meta")},
]
EXTEND: list[dict[str, Any]] = [
    {"prefix_lens": lens(4)},
    {"prefix_lens": lens(4, 5).float()},
    {"extend_num_tokens": -1},
    {"extend_num_tokens": 2**31},
]
VALUES: list[dict[str, Any]] = [
    {"extend_num_tokens": 3},
    {"prefix_lens": lens(6, 4), "extend_num_tokens": 1},
    {"prefix_lens": lens(-1, 5), "extend_num_tokens": 7},
    {"cursor": lens(-1)},
]


def call(ops: Any, op: str, bad: dict[str, Any]) -> None:
    given: dict[str, Any] = {"prefix_lens": lens(4, 5)} if op == "alloc_extend" else {}
    given |= {"seq_lens": lens(5, 6), "last_loc": lens(7, 12), "free_pages": lens(3, 4, 5)}
    given["page_size"] = 4
    given |= {"extend_num_tokens": 2} if op == "alloc_extend" else {}
    given |= {"cursor": lens(1)}
    given |= bad
    before = {k: v.clone() for k, v in given.items() if isinstance(v, torch.Tensor)}
    try:
        getattr(ops, op)(**given)
    finally:
        for name, value in before.items():
            assert value.device.type == "meta" or torch.equal(value, given[name])


@pytest.mark.parametrize("bad", [*BAD, *EXTEND], ids=str)
@pytest.mark.parametrize("ops", ["kernel", "reference", "torch.ops", "fake"])
def test_what_cannot_be_an_allocation_is_refused_by_name(
    kernel_ops: SimpleNamespace, ops: str, bad: dict[str, Any]
) -> None:
    kinds: dict[str, Any] = {
        "kernel": kernel_ops, "reference": reference, "torch.ops": refcache_ops,
        "fake": SimpleNamespace(
            alloc_decode=decode_op._fake, alloc_extend=extend_op._fake
        ),
    }  # fmt: skip
    if ops == "fake" and "extend_num_tokens" in bad:
        return  # a symbol there
    if ops == "torch.ops" and any(
        isinstance(v, torch.Tensor) and v.device.type == "meta" for v in bad.values()
    ):
        return  # the fake of the op is asked, see there
    (name,) = bad
    both = name not in ("prefix_lens", "extend_num_tokens")
    for op in ("alloc_extend", "alloc_decode") if both else ("alloc_extend",):
        with pytest.raises(InvalidArgument, match=name):
            call(kinds[ops], op, bad)


@pytest.mark.parametrize("bad", VALUES, ids=str)
def test_the_reference_refuses_values_by_name(bad: dict[str, Any]) -> None:
    for ops in (reference, refcache_ops):
        with pytest.raises(InvalidArgument):
            call(ops, "alloc_extend", bad)
    with pytest.raises(InvalidArgument):
        call(reference, "alloc_decode", {"seq_lens": lens(0, 3)})
    for bad_page in ({"page_size": 0}, {"seq_lens": lens(5)}):
        given = {"prefix_lens": lens(4, 5), "seq_lens": lens(5, 6), "page_size": 4} | bad_page
        with pytest.raises(InvalidArgument):
            reference.new_pages_needed(**given)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("batch", [1, 5, 130, 1030])
def test_a_loop_with_a_cursor_never_hands_a_slot_out_twice(
    kernel_ops: SimpleNamespace, page: int, batch: int
) -> None:
    """Calls with equal arguments, as a graph replays them: its lengths are on the device."""
    for ops in (kernel_ops, refcache_ops):
        free = torch.arange(1, 1 + batch * 3)
        seq, last, cursor = torch.zeros(batch, dtype=I64), torch.full((batch,), -1), lens(0)
        taken: list[int] = []
        for step in range(40 if page == 16 else 3):
            seq += 1
            last.copy_(ops.alloc_decode(seq, last, free, page, cursor))
            assert int(cursor) == batch * (step // page + 1)
            taken += last.tolist()
        assert len(set(taken)) == len(taken)
        assert min(taken) >= page


@pytest.mark.parametrize("op", ["alloc_decode", "alloc_extend"])
def test_exhaustion_shows_on_the_device_and_no_slot_follows_it(
    kernel_ops: SimpleNamespace, op: str
) -> None:
    """The cursor counts what was missing; a request without a slot gets none until a page opens."""
    for ops in (kernel_ops, refcache_ops):
        free, cursor = lens(5, 6), lens(1)
        seq, last = lens(5, 5, 5), lens(7, 11, 15)
        for step in range(4):
            if op == "alloc_decode":
                last = ops.alloc_decode(seq, last, free, 4, cursor)
            else:
                last = ops.alloc_extend(seq - 1, seq, last, free, 4, 3, cursor)
            assert last.tolist() == [24 + step, -1, -1]
            assert int(cursor) - len(free) == 2  # pages short
            seq = seq + 1
