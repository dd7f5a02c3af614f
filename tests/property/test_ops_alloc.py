"""The allocation kernels, interpreted, against the reference and against a page walk."""

import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refcache.errors import InvalidArgument
from refcache.reference import alloc_cases

REPEATABLE = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def walk(case: alloc_cases.AllocCase) -> list[int]:
    """The third oracle: token by token, with nothing but a list of pages and a position."""
    free = list(case.free)
    out: list[int] = []
    prefixes = case.prefix if case.prefix is not None else [s - 1 for s in case.seq]
    for prefix, seq, last in zip(prefixes, case.seq, case.last, strict=True):
        slot = last
        for position in range(prefix, seq):
            if position % case.page_size == 0:
                slot = free.pop(0) * case.page_size if free else -1
            elif slot != -1 or position == prefix:
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
    import refcache_ops

    case = alloc_cases.random_alloc_case(rng)
    tensors = [torch.tensor(v, dtype=case.dtype) for v in (case.seq, case.last, case.free)]
    if case.prefix is None:
        got = refcache_ops.alloc_decode(*tensors, case.page_size)
    else:
        prefix = torch.tensor(case.prefix, dtype=case.dtype)
        got = refcache_ops.alloc_extend(prefix, *tensors, case.page_size, case.growth)
    assert got.tolist() == walk(case)


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


def test_bad_index_tensors_are_refused(kernel_ops: SimpleNamespace) -> None:
    good = torch.tensor([1])
    for bad in (good.float(), good[None]):
        with pytest.raises(InvalidArgument):
            kernel_ops.alloc_decode(bad, good, good, 4)
        with pytest.raises(InvalidArgument):
            kernel_ops.alloc_extend(good, good, bad, good, 4, 0)
