"""What the ops keep between calls is right when threads meet: they start together on a barrier."""

import threading
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from refcache.reference import case_check, cases

THREADS = 4


def together(work: Callable[[int], Any]) -> list[Any]:
    """The results of ``work(0)``, ``work(1)``, ... on threads that start at one time."""
    barrier = threading.Barrier(THREADS)
    results: list[Any] = [None] * THREADS

    def run(number: int) -> None:
        barrier.wait()
        try:
            results[number] = work(number)
        except Exception as error:  # shown by whoever asked
            results[number] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def all_inside(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    """Let the threads wait for each other inside a function, where a cache is not yet filled."""
    barrier, inner = threading.Barrier(THREADS), getattr(module, name)

    def waits(*args: Any, **kwargs: Any) -> Any:
        barrier.wait(timeout=20)
        return inner(*args, **kwargs)

    monkeypatch.setattr(module, name, waits)


def test_threads_that_plan_new_geometries_get_plans_of_their_own(
    kernel_ops: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = import_module("refcache_ops.copy.plan")
    plan._plans.clear()
    all_inside(monkeypatch, plan, "_make_plan")
    made = [
        cases.TransferCase(heads=((1 + n, 8), (2, 8)), host_pages=4 + n) for n in range(THREADS)
    ]

    def work(number: int) -> Any:
        on = case_check.build(made[number])
        return plan.plan_transfer(
            on.host, on.device, on.host_indices, on.device_indices, 4, "layer_first"
        )

    transfers = together(work)
    variants = {import_module("refcache_ops.copy.kernel")._variant(
        t.plan, 1024, True, False, torch.int64, torch.int64
    ) for t in transfers}  # fmt: skip
    assert [t.plan.row[0] for t in transfers] == [1 + n for n in range(THREADS)]
    assert len({id(t.plan) for t in transfers}) == len(variants) == THREADS
    plan._plans.clear()


def test_threads_that_plan_one_geometry_share_a_plan(
    kernel_ops: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = import_module("refcache_ops.copy.plan")
    plan._plans.clear()
    all_inside(monkeypatch, plan, "_make_plan")
    on = case_check.build(cases.TransferCase(heads=((3, 24),)))
    args = (on.host, on.device, on.host_indices, on.device_indices, 4, "layer_first")
    assert len({id(t.plan) for t in together(lambda number: plan.plan_transfer(*args))}) == 1
    plan._plans.clear()


def test_threads_that_make_one_table_of_addresses_keep_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph that was captured with a table reads it for ever: another must not take its place."""
    plan = import_module("refcache_ops.copy.plan")
    all_inside(monkeypatch, plan.torch, "tensor")
    made = together(lambda number: plan._table((11, 12, 13), torch.device("cpu")))
    monkeypatch.undo()
    kept = plan._table((11, 12, 13), torch.device("cpu"))
    assert kept.tolist() == [11, 12, 13]
    assert all(table is kept for table in made)


def test_a_table_of_addresses_is_kept_however_many_follow() -> None:
    plan = import_module("refcache_ops.copy.plan")
    first = plan._table((1, 2), torch.device("cpu"))
    for other in range(200):
        plan._table((other, 3), torch.device("cpu"))
    assert plan._table((1, 2), torch.device("cpu")) is first


def test_threads_that_meet_a_new_kernel_compile_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = pytest.importorskip("refcache_ops._launch")
    monkeypatch.setattr(launch, "_compiled", {})
    compiled = []

    def compile(self: Any, target: Any = None) -> Any:
        compiled.append(self)
        return SimpleNamespace(run=len(compiled), function=object(), packed_metadata=())

    monkeypatch.setattr(launch.Variant, "compile", compile)
    kernel = object()
    variants = [launch.Variant(kernel, ("i32",), (n // 2,), 4) for n in range(THREADS)]
    codes = together(lambda number: variants[number]._load(0))
    assert len(compiled) == 2
    assert codes[0] is codes[1]
    assert codes[2] is codes[3]
    assert codes[0] is not codes[2]


@pytest.mark.parametrize("op", cases.OPS)
def test_bytes_of_threads_with_geometries_of_their_own(
    kernel_ops: SimpleNamespace, op: str
) -> None:
    import_module("refcache_ops.copy.plan")._plans.clear()

    def work(number: int) -> list[str]:
        errors = []
        for turn in range(3):
            case = cases.TransferCase(
                op, heads=((1 + number, 3 + turn), (2, 8)), host_pages=4 + turn, seed=number
            )
            errors += case_check.transfer_errors(case, kernel_ops)
        return errors

    assert together(work) == [[]] * THREADS
