"""The copy kernel, interpreted, against the reference and against bytes written by hand."""

import itertools
import random
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refcache.errors import InvalidArgument, UnknownName
from refcache.reference import LAYOUTS, case_check, cases, transfer

REPEATABLE = settings(max_examples=70, deadline=None, derandomize=True, database=None)


@pytest.mark.parametrize("op", cases.OPS)
@REPEATABLE
@given(rng=st.randoms(use_true_random=False))
def test_transfers_are_byte_equal(kernel_ops: SimpleNamespace, op: str, rng: random.Random) -> None:
    case = cases.random_case(rng, op=op)
    assert case_check.transfer_errors(case, kernel_ops) == []


@pytest.mark.parametrize("op", cases.OPS)
def test_every_row_size_and_head_count(kernel_ops: SimpleNamespace, tile: int, op: str) -> None:
    for case in cases.row_bytes_cases(op):
        assert case_check.transfer_errors(case, kernel_ops) == []


GRID = list(itertools.product(LAYOUTS, cases.DTYPES, (torch.int32, torch.int64)))


@pytest.mark.parametrize("op", cases.OPS)
def test_every_layout_dtype_and_index(kernel_ops: SimpleNamespace, op: str) -> None:
    forms = cases.FORMS if op == "load_per_layer" else cases.FORMS[:2]
    for n, (layout, dtype, index) in enumerate(GRID):
        case = cases.TransferCase(
            op,
            layout,
            dtype=dtype,
            index_dtype=index,
            form=forms[(n + n // 2) % len(forms)],  # every index dtype meets every form
            heads=((2, 12), (2, 8)),
        )
        assert case_check.transfer_errors(case, kernel_ops) == []


@pytest.mark.parametrize("op", cases.OPS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pairs_are_a_set(kernel_ops: SimpleNamespace, tile: int, op: str, layout: str) -> None:
    pages = [(0, 2), (3, 0), (2, 1)]  # host page, device page
    whole = [(h * 4 + i, d * 4 + i) for h, d in pages for i in range(4)]
    for pairs in ([], whole[:1], whole, whole[::-1], random.Random(1).sample(whole, 7)):
        case = cases.TransferCase(op, layout, pairs=tuple(pairs), max_programs=2)
        assert case_check.transfer_errors(case, kernel_ops) == []


@pytest.mark.parametrize(
    ("op", "cap", "least", "block"),
    [
        ("load_layers", 0, 1 << 22, "FLAG_BLOCK"),
        ("load_layers", 0, 1, "SMALL_BLOCK"),
        ("load_layers", 2, 1 << 22, "LOAD_BLOCK"),
        ("load_per_layer", 0, 1 << 22, "SMALL_BLOCK"),
        ("load_per_layer", 2, 1 << 22, "LOAD_BLOCK"),
    ],
)
def test_tiles_are_small_for_small_loads_with_flags_and_large_under_a_cap(
    kernel_ops: SimpleNamespace, monkeypatch: pytest.MonkeyPatch,
    op: str, cap: int, least: int, block: str,
) -> None:  # fmt: skip
    kernel, seen = import_module("refcache_ops.copy.kernel"), []
    monkeypatch.setattr(kernel, "FLAG_UNITS", least)
    monkeypatch.setattr(
        kernel.Variant, "launch", lambda self, *rest: seen.append(self.constants[10])
    )
    case = cases.TransferCase(op, max_programs=cap)
    case_check.call(case, case_check.build(case), kernel_ops)
    assert seen == [getattr(kernel, block)]


@pytest.mark.parametrize("op", cases.OPS)
def test_misaligned_buffers(kernel_ops: SimpleNamespace, op: str) -> None:
    for shift in range(1, 9):
        case = cases.TransferCase(op, shift=shift, dtype=torch.uint8, heads=((1, 32), (2, 16)))
        assert case_check.transfer_errors(case, kernel_ops) == []


@pytest.mark.parametrize("run", ["kernel", "reference"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", cases.OPS)
def test_pairs_without_a_slot_are_skipped(
    kernel_ops: SimpleNamespace, op: str, layout: str, run: str
) -> None:
    """-1 is what the allocation ops write for "no space": nothing of it is read or written."""
    ops: Any = kernel_ops if run == "kernel" else transfer
    pairs = ((0, 4), (-1, 5), (2, -1), (-1, -1), (3, 7))
    case = cases.TransferCase(op, layout, layer_num=3, layers=(1, 2), pairs=pairs)
    some = cases.TransferCase(op, layout, layer_num=3, layers=(1, 2), pairs=((0, 4), (3, 7)))
    want, got = case_check.build(some), case_check.build(case)
    case_check.call(some, want, transfer)
    case_check.call(case, got, ops)
    assert all(torch.equal(a, b) for a, b in zip(want.raw, got.raw, strict=True))
    assert torch.equal(want.flags, got.flags)


@pytest.mark.parametrize("op", cases.OPS)
def test_a_negative_cap_on_programs_is_refused(kernel_ops: SimpleNamespace, op: str) -> None:
    for call in (getattr(kernel_ops, op), getattr(torch.ops.refcache, op)):
        on = case_check.build(cases.TransferCase(op))
        before = [raw.clone() for raw in (*on.raw, on.flags)]
        args = case_check.arguments(cases.TransferCase(op), on)
        with pytest.raises(InvalidArgument, match="max_programs=-1: expected 0"):
            call(*args, -1)
        assert all(torch.equal(a, b) for a, b in zip(before, (*on.raw, on.flags), strict=True))


ALL_DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning", "ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_is_moved_or_refused_by_name(
    kernel_ops: SimpleNamespace, dtype: torch.dtype
) -> None:
    """The reference and the kernels move bytes of the same dtypes and refuse the same."""
    number = dtype.is_floating_point or dtype in cases.DTYPES or dtype == torch.bool
    whole = str(dtype) in {f"torch.{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)}
    for op in cases.OPS:
        case = cases.TransferCase(op, dtype=dtype, shift=1)
        for ops in (kernel_ops, transfer):
            if number or whole:
                assert case_check.transfer_errors(case, ops) == []
                continue
            on = case_check.build(case)
            with pytest.raises(InvalidArgument, match=f"{dtype}: expected a floating point type"):
                case_check.call(case, on, ops)


@pytest.mark.parametrize("form", cases.FORMS[:2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pools_of_every_size_share_one_kernel(
    kernel_ops: SimpleNamespace, layout: str, form: str
) -> None:
    """What is compiled for a pool fits pools of other sizes: no first call waits for a compiler."""
    kernel, plan = (import_module(f"refcache_ops.copy.{name}") for name in ("kernel", "plan"))
    compiled = set()
    for pages in (3, 5, 70, 4000):
        case = cases.TransferCase(layout=layout, form=form, host_pages=pages, device_pages=pages)
        on = case_check.build(case)
        made = plan.plan_transfer(on.host, on.device, on.host_indices, on.device_indices, 4, layout)
        variant = kernel._variant(made.plan, 1024, True, False, torch.int64, torch.int64)
        compiled.add((variant.types, variant.constants, variant.warps, variant.aligned))
    assert len(compiled) == 1


# The third oracle. Two layers, pages of two slots, one plane of one head of two bytes; device row
# (layer l, slot s) holds [l*100 + s, its complement to 255]. Host slots 2, 3, 0 take device slots
# 5, 4, 3. Written out by hand from the layouts' axes.
OLD = 77
A5, A4, A3 = [5, 250], [4, 251], [3, 252]
B5, B4, B3 = [105, 150], [104, 151], [103, 152]
NO = [OLD, OLD]
HAND = {
    "layer_first": [A3, NO, A5, A4, B3, NO, B5, B4],
    "page_first": [A3, B3, NO, NO, A5, B5, A4, B4],
    "page_first_direct": [A3, NO, B3, NO, A5, A4, B5, B4],
    "page_head": [A3, B3, NO, NO, A5, B5, A4, B4],
}


@pytest.mark.parametrize("ops", ["kernel", "reference"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_golden_bytes(kernel_ops: SimpleNamespace, layout: str, ops: str) -> None:
    run: Any = kernel_ops if ops == "kernel" else transfer
    device = torch.tensor(
        [[[100 * layer + s, 255 - 100 * layer - s] for s in range(6)] for layer in (0, 1)]
    )
    device = device.to(torch.uint8).view(2, 6, 1, 2)
    case = cases.TransferCase(layout=layout, page_size=2, heads=((1, 2),), host_pages=2, pairs=())
    host = torch.full(case.layout_of(0).shape, OLD, dtype=torch.uint8)
    host_indices, device_indices = torch.tensor([2, 3, 0]), torch.tensor([5, 4, 3])
    run.backup_all_layer([host], [device], host_indices, device_indices, 2, layout)
    assert host.view(-1, 2).tolist() == HAND[layout]

    back = torch.full((2, 6, 1, 2), OLD, dtype=torch.uint8)
    run.load_per_layer([back], [host], host_indices, torch.tensor([1, 0, 4]), 1, 2, layout)
    assert back.view(-1, 2).tolist() == [NO] * 6 + [B4, B5, NO, NO, B3, NO]


def test_golden_heads(kernel_ops: SimpleNamespace) -> None:
    """page_head keeps each head of a page together: two heads of one byte, pages of two."""
    device = torch.tensor([[[1, 2], [3, 4], [5, 6]], [[11, 12], [13, 14], [15, 16]]])
    host = torch.zeros((1, 2, 2, 2, 1), dtype=torch.uint8)
    pairs = (torch.tensor([0, 1]), torch.tensor([2, 1]))
    kernel_ops.backup_all_layer(
        [host], [device.to(torch.uint8).view(2, 3, 2, 1)], *pairs, 2, "page_head"
    )
    assert host.flatten().tolist() == [5, 15, 3, 13, 6, 16, 4, 14]


@pytest.mark.parametrize("to_host", [True, False])
def test_addresses_beyond_2_31(kernel_ops: SimpleNamespace, to_host: bool) -> None:
    """Huge strides over small storage: a layer's negative offset undoes a slot's huge one."""
    from refcache_ops.copy import kernel
    from refcache_ops.copy.plan import Plan, Transfer

    far = 2**33
    layer = 4 - far * 7  # slot 7 of layer 1 is unit 4
    strides, near = (far, 0, 0), (1, 0, 0)
    plan = Plan((1,), (1,), (1,), (strides,), (near,), (layer,), (0,), (1,), 2, False, False)
    small, row = torch.arange(8, dtype=torch.uint8), torch.full((1,), 99, dtype=torch.uint8)
    kernel.run(
        Transfer(plan, (small,), (row,)),
        torch.tensor([7], dtype=torch.int32),
        torch.tensor([0], dtype=torch.int32),
        1, 1, 0, to_host=to_host,
    )  # fmt: skip
    assert (small.tolist(), row.tolist()) == (
        ([0, 1, 2, 3, 99, 5, 6, 7], [99]) if to_host else (list(range(8)), [4])
    )


def test_products_beyond_2_31_in_pages(kernel_ops: SimpleNamespace) -> None:
    """The page term alone passes 2^31 units: page 2,066 with stride 1,039,680."""
    from refcache_ops.copy import kernel
    from refcache_ops.copy.plan import Plan, Transfer

    slot, page = 2066 * 4 + 3, 1_039_680
    strides, layer = (page, 5, 0), 1 - 2066 * page
    plan = Plan((1,), (1,), (1,), (strides,), ((1, 0, 0),), (layer,), (0,), (4,), 2, False, False)
    host, row = torch.arange(32, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    index = torch.tensor([slot], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    kernel.run(Transfer(plan, (host,), (row,)), *index, 1, 1, 0, to_host=False)
    assert row.tolist() == [3 * 5 + 1]


def test_flags_are_raised_once_a_load_and_never_reset(kernel_ops: SimpleNamespace) -> None:
    case = cases.TransferCase("load_layers", layer_num=3, layers=(0, 3))
    on = case_check.build(case)
    start = on.flags.clone()
    for epoch, pairs in enumerate((4, 1, 0, 3), start=1):
        on.host_indices, on.device_indices = (
            i[:pairs] for i in (on.host_indices, on.device_indices)
        )
        case_check.call(case, on, kernel_ops)
        assert (on.flags - start).tolist() == [epoch * transfer.FLAG_EPOCH] * 3


def refused(**change: Any) -> case_check.Buffers:
    on = case_check.build(cases.TransferCase("load_layers"))
    for name, value in change.items():
        setattr(on, name, value(getattr(on, name)))
    return on


@pytest.mark.parametrize("run", ["kernel", "reference"])
@pytest.mark.parametrize(
    "change",
    [
        {"host_indices": lambda t: t.float()},
        {"host_indices": lambda t: t[:-1]},
        {"device_indices": lambda t: t[None]},
        {"device": lambda d: [t.float() for t in d]},
        {"device": lambda d: d[:1]},
        {"device": lambda d: [t[:1] for t in d]},
        {"device": lambda d: [t[..., :1] for t in d]},
        {"device": lambda d: [t.transpose(-1, -2) for t in d]},
        {"device": lambda d: [t.clone().requires_grad_() for t in d]},
        {"host": lambda h: [h[0], h[1].float()]},
        {"host": lambda h: [h[0], h[1][:, :-1]]},
        {"host": lambda h: [t.transpose(0, 1) for t in h]},
        {"host": lambda h: []},
        {"flags": lambda f: f[:1]},
        {"flags": lambda f: f.int()},
    ],
)
def test_what_cannot_be_a_transfer_is_refused(
    kernel_ops: SimpleNamespace, change: dict[str, Any], run: str
) -> None:
    on = refused(**change)
    before = [raw.clone() for raw in on.raw]
    ops: Any = kernel_ops if run == "kernel" else transfer
    with pytest.raises(InvalidArgument):
        case_check.call(cases.TransferCase("load_layers"), on, ops)
    assert all(torch.equal(a, b) for a, b in zip(before, on.raw, strict=True))


def test_unknown_layout_and_layer(kernel_ops: SimpleNamespace) -> None:
    on = case_check.build(cases.TransferCase())
    pairs = (on.host_indices, on.device_indices)
    with pytest.raises(UnknownName, match="layout 'diagonal'"):
        kernel_ops.backup_all_layer(on.host, on.device, *pairs, 4, "diagonal")
    for layer in (-1, 2):
        with pytest.raises(InvalidArgument, match="layer_id"):
            kernel_ops.load_per_layer(on.device, on.host, *pairs, layer, 4, "layer_first")
