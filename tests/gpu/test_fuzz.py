"""Shapes, strides, dtypes and devices, drawn; and threads, on a card."""

import random
import threading
from typing import Any

import pytest
import torch

import refcache_ops
from ops_fuzz import Call
from refcache.errors import InvalidArgument
from refcache.reference import case_check, cases
from refcache_ops import engine

PINNED = case_check.Placement("cuda", torch.Tensor.pin_memory)


@pytest.mark.parametrize("seed", range(10))
def test_drawn_calls_do_as_the_reference(seed: int) -> None:
    """200 calls in all."""
    rng = random.Random(seed)
    for _ in range(20):
        Call(rng).check(refcache_ops, "cuda", torch.Tensor.pin_memory)


def test_threads_with_new_geometries_move_their_own_bytes() -> None:
    """They start together; what is new to each is planned, compiled and tabled at one time."""
    barrier, found = threading.Barrier(6), [["nothing came"]] * 6

    def run(number: int) -> None:
        barrier.wait()
        errors: list[str] = []
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(12):
                case = cases.TransferCase(
                    cases.OPS[turn % 3], heads=((1 + number % 3, 24 + turn), (2, 8)),
                    host_pages=4 + turn, form=("stacked", "list")[number % 2], seed=number,
                    layer_num=3, layers=(0, 3),
                )  # fmt: skip
                errors += case_check.transfer_errors(
                    case, refcache_ops, PINNED, torch.cuda.synchronize
                )
        found[number] = errors

    threads = [threading.Thread(target=run, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[]] * 6


@pytest.mark.parametrize("op", cases.OPS)
def test_a_negative_cap_is_refused_and_no_flag_rises(op: str) -> None:
    case = cases.TransferCase(op)
    on = case_check.build(case, PINNED)
    before = [t.cpu().clone() for t in (*on.raw, on.flags)]
    with pytest.raises(InvalidArgument, match="max_programs=-1"):
        getattr(refcache_ops, op)(*case_check.arguments(case, on), -1)
    torch.cuda.synchronize()
    now = [t.cpu() for t in (*on.raw, on.flags)]
    assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))


def test_no_space_from_an_allocation_is_copied_nowhere() -> None:
    """The slots of a list that is too short go to a copy as they are."""
    free = torch.tensor([2], device="cuda")
    seq, last = (torch.tensor(v, device="cuda") for v in ([5, 5], [7, 11]))
    slots = refcache_ops.alloc_decode(seq, last, free, 4)
    assert slots.tolist() == [8, -1]
    case = cases.TransferCase("load_layers", layer_num=3, layers=(0, 3), pairs=((0, 8), (1, -1)))
    on = case_check.build(case, PINNED)
    on.device_indices = slots
    want = case_check.build(case)
    case_check.call(case, want, cases_reference())
    case_check.call(case, on, refcache_ops)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b.cpu()) for a, b in zip(want.raw, on.raw, strict=True))


def cases_reference() -> Any:
    from refcache.reference import transfer

    return transfer


def test_the_copy_engine_follows_slots_that_numpy_owns() -> None:
    numpy = pytest.importorskip("numpy")
    case = cases.TransferCase()
    on = case_check.build(case, PINNED)
    slots = [numpy.arange(4), numpy.arange(4, 8)]
    indices = [torch.from_numpy(s) for s in slots]
    engine.backup_all_layer(on.host, on.device, *indices, 4, case.layout)
    torch.cuda.synchronize()
    slots[0][:] = [8, 9, 10, 11]
    slots[1][:] = [3, 2, 1, 0]
    engine.backup_all_layer(on.host, on.device, *indices, 4, case.layout)
    torch.cuda.synchronize()
    for host, device in zip(on.host, on.device, strict=True):
        got, want = host[:, 8:12].view(torch.int16), device[:, [3, 2, 1, 0]].cpu()
        assert torch.equal(got, want.view(torch.int16))
