"""Staged backups on the CPU: the interpreter gathers, ``memmove`` is the copy engine."""

import ctypes
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from refcache import reference
from refcache.errors import InvalidArgument, UnknownName
from refcache.reference import case_check, cases
from refcache_ops import staged


@pytest.fixture
def engine(kernel_ops: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The strategy as ops; ``moved`` counts the copies of each call."""
    moved: list[int] = []

    def copy_many(targets: Any, sources: Any, sizes: Any, device: Any) -> None:
        moved.append(len(sizes))
        for to, source, size in zip(
            targets.tolist(), sources.tolist(), sizes.tolist(), strict=True
        ):
            ctypes.memmove(to, source, size)

    monkeypatch.setattr(staged, "copy_many", copy_many)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)

    def backup_all_layer(*args: Any, max_programs: int) -> None:
        staged.backup_all_layer(*args)

    return SimpleNamespace(backup_all_layer=backup_all_layer, moved=moved)


def page_pairs(rng: random.Random, page: int, host: int, device: int) -> tuple[Any, ...]:
    count = rng.randint(0, min(host, device))
    pages = zip(rng.sample(range(host), count), rng.sample(range(device), count), strict=True)
    pairs = [(h * page + i, d * page + i) for h, d in pages for i in range(page)]
    rng.shuffle(pairs)
    return tuple(pairs)


@pytest.mark.parametrize("stage", [1, 400, 1 << 20])
def test_whole_pages_in_any_order(engine: Any, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    op = "backup_all_layer"
    monkeypatch.setattr(staged, "STAGE_BYTES", stage)
    rng = random.Random(stage)
    for _ in range(25):
        drawn = cases.random_case(rng, op=op)
        pairs = page_pairs(rng, drawn.page_size, drawn.host_pages, drawn.device_pages)
        case = cases.random_case(
            random.Random(drawn.seed), op=op, pairs=pairs, page_size=drawn.page_size,
            host_pages=drawn.host_pages, device_pages=drawn.device_pages,
            layout=rng.choice(staged.LAYOUTS),
        )  # fmt: skip
        assert case_check.transfer_errors(case, engine) == []


def test_runs_are_coalesced(engine: Any) -> None:
    """Three pages of four, two of them neighbours on the host."""
    pairs = [(h * 4 + i, d * 4 + i) for h, d in ((2, 0), (0, 2), (1, 1)) for i in range(4)]
    pairs[:4] = [(3 * 4 + i, i) for i in range(4)]
    for layout in staged.LAYOUTS:
        case = cases.TransferCase(layout=layout, pairs=tuple(pairs), heads=((2, 8),))
        engine.moved.clear()
        assert case_check.transfer_errors(case, engine) == []
        assert engine.moved == [2], layout


def test_fragments_of_pages_are_refused(engine: Any) -> None:
    layout = "page_head"
    whole = [(i, i) for i in range(8)]
    for pairs in (whole[:7], [*whole[:3], (9, 3), *whole[4:]], [(i + 2, i) for i in range(4)]):
        on = case_check.build(cases.TransferCase(layout=layout, pairs=tuple(pairs)))
        before = [raw.clone() for raw in on.raw]
        with pytest.raises(InvalidArgument, match="no whole pages of 4"):
            staged.backup_all_layer(
                on.host, on.device, on.host_indices, on.device_indices, 4, layout
            )
        assert all(torch.equal(a, b) for a, b in zip(before, on.raw, strict=True))


def test_pairs_without_a_slot_are_skipped(engine: Any) -> None:
    op, layout = "backup_all_layer", "page_first"
    pairs = ((0, 4), (-1, 5), (2, -1), (-1, -1), (3, 7))
    for some in (pairs, pairs[1:4]):
        case = cases.TransferCase(op, layout, pairs=some)
        assert case_check.transfer_errors(case, engine) == []


def other_view(slots: torch.Tensor) -> Any:
    return slots.data


def as_numpy(slots: torch.Tensor) -> Any:
    return slots.numpy()


def raw_bytes(slots: torch.Tensor) -> Any:
    return (ctypes.c_int64 * len(slots)).from_address(slots.data_ptr())


@pytest.mark.parametrize("owner", [other_view, as_numpy, raw_bytes])
@pytest.mark.parametrize("side", ["host_indices", "device_indices"])
def test_slots_are_read_again_whoever_changed_them(engine: Any, side: str, owner: Any) -> None:
    """The same tensors, written through memory that others hold: torch counts no write."""
    case = cases.TransferCase(layout="page_first")
    want, got = case_check.build(case), case_check.build(case)
    args = ("host", "device", "host_indices", "device_indices")
    staged.backup_all_layer(*(getattr(got, name) for name in args), 4, case.layout)
    reference.backup_all_layer(*(getattr(want, name) for name in args), 4, case.layout)
    for on in (want, got):
        changed = owner(getattr(on, side))
        changed[0], changed[1] = int(changed[1]) + 4, int(changed[0]) + 4
    staged.backup_all_layer(*(getattr(got, name) for name in args), 4, case.layout)
    reference.backup_all_layer(*(getattr(want, name) for name in args), 4, case.layout)
    assert all(torch.equal(a, b) for a, b in zip(want.raw, got.raw, strict=True))


def test_what_is_not_staged_is_refused() -> None:
    assert staged.run_bytes("page_first", 64, 32, 2048) == 64 * 32 * 2048
    assert staged.run_bytes("page_head", 1, 32, 2048) == 32 * 2048
    with pytest.raises(UnknownName, match="layer_first"):
        staged.run_bytes("layer_first", 64, 32, 2048)
    on = case_check.build(cases.TransferCase())
    with pytest.raises(UnknownName, match="layer_first"):
        staged.backup_all_layer(
            on.host, on.device, on.host_indices, on.device_indices, 4, "layer_first"
        )
