"""Copies listed for the copy engine, on the CPU: ``memmove`` is the engine."""

import ctypes
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ops_fuzz import Call
from refcache.errors import InvalidArgument
from refcache.reference import LAYOUTS, case_check, cases
from refcache_ops import engine, staged


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The copies of each driver call: how many, and bytes."""
    calls: list[tuple[int, int]] = []

    def copy_many(targets: Any, sources: Any, sizes: Any, device: Any) -> None:
        calls.append((len(sizes), int(sizes.sum())))
        assert targets.is_contiguous()
        assert sources.is_contiguous()
        for to, source, size in zip(
            targets.tolist(), sources.tolist(), sizes.tolist(), strict=True
        ):
            ctypes.memmove(to, source, size)

    monkeypatch.setattr(engine, "copy_many", copy_many)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    return calls


def ops() -> SimpleNamespace:
    def backup_all_layer(*args: Any, max_programs: int) -> None:
        copies = engine.list_copies(*args)
        for layer in range(copies.layer_num):
            copies.issue(layer, to_host=True)

    def load_per_layer(*args: Any, max_programs: int) -> None:
        engine.load_per_layer(*args)

    return SimpleNamespace(backup_all_layer=backup_all_layer, load_per_layer=load_per_layer)


@pytest.mark.parametrize("op", ["backup_all_layer", "load_per_layer"])
def test_any_transfer_of_any_layout(moved: list[Any], op: str) -> None:
    rng = random.Random(0)
    for _ in range(150):
        drawn = cases.random_case(rng, op=op, form=rng.choice(cases.FORMS[:2]))
        assert case_check.transfer_errors(drawn, ops()) == []


@pytest.mark.parametrize("op", ["backup_all_layer", "load_per_layer"])
def test_strided_views_are_not_taken_for_dense(moved: list[Any], op: str) -> None:
    """Views of K and V in one buffer, wide slots, misalignment, dtypes: as for the kernels."""

    def as_op(max_programs: int, **given: Any) -> None:
        if op == "backup_all_layer":
            ops().backup_all_layer(*given.values(), max_programs=0)
        else:
            order = ("device", "host", "host_indices", "device_indices", "layer_id")
            rest = [given[name] for name in (*order, "page_size", "layout")]
            ops().load_per_layer(*rest, max_programs=0)

    rng, met = random.Random(2), 0
    while met < 25:
        call = Call(rng)
        if call.op != op or call.wrong:
            continue
        given, _ = call.make()
        if given["device"][0].dim() == 3 and len(given["device"]) == len(given["host"]):
            continue  # one layer alone; the engine asks for all
        call.check(SimpleNamespace(**{op: as_op}))
        met += 1


def test_layers_that_differ_in_strides_are_refused(moved: list[Any]) -> None:
    on = case_check.build(cases.TransferCase(form="list", heads=((2, 8),)))
    on.device[1] = torch.stack([on.device[1]] * 2, dim=1).select(1, 0)
    with pytest.raises(InvalidArgument, match="differ in strides"):
        engine.list_copies(on.host, on.device, on.host_indices, on.device_indices, 4, "layer_first")


@pytest.mark.parametrize("op", ["backup_all_layer", "load_per_layer"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pairs_without_a_slot_are_left_out(moved: list[Any], op: str, layout: str) -> None:
    pairs = ((0, 4), (-1, 5), (2, -1), (-1, -1), (3, 7))
    for some in (pairs, pairs[1:4]):
        case = cases.TransferCase(op, layout, pairs=some)
        assert case_check.transfer_errors(case, ops()) == []


def test_a_page_is_one_copy_and_neighbours_are_merged(moved: list[Any]) -> None:
    """Three pages of four: the second and third are neighbours on both sides."""
    pairs = [(h * 4 + i, d * 4 + i) for h, d in ((3, 0), (0, 1), (1, 2)) for i in range(4)]
    copies = {"layer_first": 2, "page_first": 12, "page_first_direct": 3, "page_head": 24}
    for layout, count in copies.items():
        case = cases.TransferCase(layout=layout, pairs=tuple(pairs), heads=((2, 8),))
        moved.clear()
        assert case_check.transfer_errors(case, ops()) == []
        assert {n for n, _ in moved} == {count}, layout
        assert len({size for _, size in moved}) == 1


def test_backups_into_pages_of_all_layers_are_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(staged, "backup_all_layer", lambda *args: called.append(args[-1]))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    monkeypatch.setattr(engine, "copy_many", lambda *args: None)
    for layout in LAYOUTS:
        on = case_check.build(cases.TransferCase(layout=layout))
        engine.backup_all_layer(on.host, on.device, on.host_indices, on.device_indices, 4, layout)
    assert called == list(staged.LAYOUTS)


def test_what_the_engine_cannot_reach_is_refused(moved: list[Any], monkeypatch: Any) -> None:
    on = case_check.build(cases.TransferCase())
    pairs = on.host_indices, on.device_indices
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: False)
    with pytest.raises(InvalidArgument, match="not pinned"):
        engine.list_copies(on.host, on.device, *pairs, 4, "layer_first")
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    with pytest.raises(InvalidArgument, match="as many"):
        engine.list_copies(on.host, on.device, pairs[0][:2], pairs[1], 4, "layer_first")
    with pytest.raises(InvalidArgument, match="layer"):
        engine.load_per_layer(on.device, on.host, *pairs, 99, 4, "layer_first")
    assert moved == []


def test_how_long_a_copy_is() -> None:
    row = 2048
    assert engine.copy_bytes("layer_first", 64, 32, row, to_host=False) == 64 * row
    assert engine.copy_bytes("page_first_direct", 64, 32, row, to_host=True) == 64 * row
    assert engine.copy_bytes("page_first", 64, 32, row, to_host=False) == row
    assert engine.copy_bytes("page_head", 64, 32, row, 8, to_host=False) == row // 8
    assert engine.copy_bytes("page_first", 64, 32, row, to_host=True) == 64 * 32 * row
