"""The kernels on a card give the reference's bytes, on every kind of host memory."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import refcache_ops
from refcache.errors import InvalidArgument
from refcache.reference import LAYOUTS, alloc_cases, case_check, cases, transfer

MEMORY = ("pinned", "registered", "pageable")


@pytest.fixture(params=MEMORY)
def place(request: pytest.FixtureRequest, registered: Any) -> case_check.Placement:
    host: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "pinned": torch.Tensor.pin_memory,
        "registered": registered,
        "pageable": torch.clone,
    }
    return case_check.Placement("cuda", host[request.param])


def errors(case: cases.TransferCase, place: case_check.Placement) -> list[str]:
    return case_check.transfer_errors(case, refcache_ops, place, torch.cuda.synchronize)


@pytest.mark.parametrize("op", cases.OPS)
def test_drawn_transfers(op: str, place: case_check.Placement) -> None:
    rng = random.Random(7)
    for _ in range(60):
        assert errors(cases.random_case(rng, op=op), place) == []


@pytest.mark.parametrize("op", cases.OPS)
def test_every_row_size_and_head_count(op: str, place: case_check.Placement) -> None:
    for case in cases.row_bytes_cases(op):
        assert errors(case, place) == []


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", cases.OPS)
def test_every_layout_dtype_form(op: str, layout: str, index: torch.dtype) -> None:
    forms = cases.FORMS if op == "load_per_layer" else cases.FORMS[:2]
    place = case_check.Placement("cuda", torch.Tensor.pin_memory)
    for dtype, form in itertools.product(cases.DTYPES, forms):
        case = cases.TransferCase(
            op, layout, dtype=dtype, index_dtype=index, form=form, heads=((3, 24), (2, 8))
        )
        assert errors(case, place) == []


@pytest.mark.parametrize("cap", [0, 1, 2, 7, 16])
@pytest.mark.parametrize("op", cases.OPS)
def test_many_tiles(op: str, cap: int) -> None:
    """Hundreds of rows in shuffled pages, K and V of different widths, tiles that end anywhere."""
    rng, page = random.Random(cap), 16
    pages = list(zip(rng.sample(range(40), 30), rng.sample(range(31), 30), strict=True))
    pairs = tuple((h * page + i, d * page + i) for h, d in pages for i in range(page))
    for layout, count in itertools.product(LAYOUTS, (480, 479, 33)):
        case = cases.TransferCase(
            op, layout, page, 5, ((4, 96), (2, 72)), host_pages=40, device_pages=31,
            pairs=pairs[:count], layers=(1, 3), max_programs=cap,
        )  # fmt: skip
        assert errors(case, case_check.Placement("cuda", torch.Tensor.pin_memory)) == []


def test_drawn_allocs() -> None:
    rng = random.Random(3)
    for _ in range(300):
        case = alloc_cases.random_alloc_case(rng, batch=40, tokens=3000)
        assert alloc_cases.alloc_errors(case, refcache_ops, "cuda") == []


def test_long_alloc_cases() -> None:
    fixed = list(alloc_cases.long_alloc_cases())
    fixed.append(
        alloc_cases.AllocCase((2**20 + 71, 9), (70, 9), (1_000_005, 8), tuple(range(1, 16400)), 64)
    )
    fixed.append(
        alloc_cases.AllocCase((2**20 + 1, 9), (0, 0), (-1, -1), tuple(range(5, 2**20 + 99)), 1)
    )
    for case in fixed:
        assert alloc_cases.alloc_errors(case, refcache_ops, "cuda") == []


@pytest.mark.parametrize("to_host", [True, False])
def test_addresses_beyond_2_31_elements(to_host: bool) -> None:
    """The last rows of a device buffer of 3 GiB and a host buffer of 2.2 GiB, in uint8."""
    row, layers = 1024, 2
    slots, size = 3 * 2**30 // row // layers, 2_200_000_000 // row // layers
    device = torch.empty((layers, slots, 1, row), dtype=torch.uint8, device="cuda")
    host = torch.empty((layers, size, 1, row), dtype=torch.uint8).pin_memory()
    assert min(device.numel(), host.numel()) > 2**31
    to, source = torch.arange(size - 8, size), torch.arange(slots - 8, slots).flip(0)
    sample = torch.randint(0, 256, (layers, 8, 1, row), dtype=torch.uint8)
    if to_host:
        device[:, source.cuda()] = sample.cuda()
        refcache_ops.backup_all_layer(
            [host], [device], to.int().cuda(), source.int().cuda(), 1, "layer_first"
        )
        torch.cuda.synchronize()
        assert torch.equal(host[:, to], sample)
    else:
        host[:, to] = sample
        for layer in range(layers):
            refcache_ops.load_per_layer(
                [device], [host], to.int().cuda(), source.int().cuda(), layer, 1, "layer_first"
            )
        assert torch.equal(device[:, source.cuda()].cpu(), sample)


def test_indices_on_the_cpu_are_refused() -> None:
    on = case_check.build(
        cases.TransferCase(), case_check.Placement("cuda", torch.Tensor.pin_memory)
    )
    with pytest.raises(InvalidArgument, match="indices on cpu"):
        refcache_ops.backup_all_layer(
            on.host, on.device, on.host_indices.cpu(), on.device_indices, 4, "layer_first"
        )
    lens = torch.tensor([4])
    with pytest.raises(InvalidArgument, match="last_loc on cuda:0: expected cpu"):
        refcache_ops.alloc_decode(lens, lens.cuda(), lens, 4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("on_side_stream", [True, False])
def test_copy_engine(layout: str, on_side_stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy engine, batched (on a stream of its own) and one copy at a time."""
    from refcache_ops import engine, staged

    monkeypatch.setattr(staged, "STAGE_BYTES", 200_000)
    rng, page = random.Random(5), 16
    pages = list(zip(rng.sample(range(40), 30), rng.sample(range(31), 30), strict=True))
    pairs = tuple((h * page + i, d * page + i) for h, d in pages for i in range(page))
    stream = torch.cuda.Stream() if on_side_stream else torch.cuda.default_stream()
    for op in ("backup_all_layer", "load_per_layer"):
        case = cases.TransferCase(
            op, layout, page, 3, ((4, 96), (2, 72)), host_pages=40, device_pages=31, pairs=pairs,
            layers=(1, 1),
        )  # fmt: skip
        want = case_check.build(case)
        got = case_check.build(case, case_check.Placement("cuda", torch.Tensor.pin_memory))
        case_check.call(case, want, transfer)
        torch.cuda.synchronize()
        indices = (got.host_indices.cpu(), got.device_indices.cpu())
        with torch.cuda.stream(stream):
            if op == "backup_all_layer":
                engine.backup_all_layer(got.host, got.device, *indices, page, layout)
            else:
                engine.load_per_layer(got.device, got.host, *indices, 1, page, layout)
        torch.cuda.synchronize()
        for expected, seen in zip(want.raw, got.raw, strict=True):
            assert torch.equal(expected, seen.cpu())
