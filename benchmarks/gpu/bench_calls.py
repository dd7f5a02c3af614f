"""What a call costs: a step of a captured decode loop, the host's time, a pool of a new size.

    PYTHONPATH=src:aliases python benchmarks/gpu/bench_calls.py results.json

A step of the loop is compared with a graph of as many empty launches; slots are checked before
they are timed.
"""

import json
import sys
import time
from typing import Any

import torch
import triton
from bench_ops import RESULTS, graph_of, host_microseconds, milliseconds, report

import refcache_ops
from refcache.reference import Layout
from refcache_ops._launch import Variant, pointers

STEPS = 20


@triton.jit
def empty_kernel(out):  # type: ignore[no-untyped-def]
    """Nothing."""


EMPTY = Variant(empty_kernel, ("*i64",), (), 4)


def loops() -> None:
    """Microseconds a step more than empty launches, of allocations with a cursor in a graph."""
    for page in (1, 16):
        for batch in (1, 8, 64, 256, 1024):
            seq = torch.arange(batch, device="cuda") % page + 1  # a page in 16 opens at page 16
            last = torch.arange(batch, device="cuda") + page
            free = torch.randperm(STEPS * 60 * batch, device="cuda") + 1
            cursor = torch.zeros(1, dtype=torch.int64, device="cuda")
            for op, launches in (("alloc_decode", 1), ("alloc_extend", 2)):

                def step(op: str = op) -> torch.Tensor:
                    if op == "alloc_decode":
                        return refcache_ops.alloc_decode(seq, last, free, page, cursor)  # noqa: B023
                    return refcache_ops.alloc_extend(
                        seq - 1, seq, last, free, page, batch, cursor  # noqa: B023
                    )  # fmt: skip

                def launch(count: int = launches + (op == "alloc_extend")) -> None:
                    for _ in range(count):  # an extend's lengths are one launch too
                        EMPTY.launch(1, cursor, pointers(cursor, (cursor,)))  # noqa: B023

                cursor.zero_()
                opened = int(((seq - 1) % page == 0).sum())
                seen = [step() for _ in range(3)]
                fresh = torch.stack(seen)[:, (seq - 1) % page == 0].flatten()
                verified = len(fresh.unique()) == 3 * opened and int(cursor) == 3 * opened
                took = milliseconds(graph_of(step, STEPS).replay, 15) / STEPS * 1e3
                idle = milliseconds(graph_of(launch, STEPS).replay, 15) / STEPS * 1e3
                report(
                    f"loop {op} page {page} batch {batch}",
                    step_us=took, empty_us=idle, more_us=took - idle, verified=verified,
                )  # fmt: skip


def pools(slots: int, form: str = "stacked") -> dict[str, Any]:
    """Buffers of 32 layers, K and V, and 256 pairs."""
    layers, heads, dim = 32, 8, 128
    where = Layout.of("layer_first", slots, 1, layers, heads, dim)
    host = [torch.zeros(where.shape, dtype=torch.bfloat16).pin_memory() for _ in range(2)]
    device = [torch.zeros(where.shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    if form == "list":
        device = [layer for plane in device for layer in plane.unbind()]
    index = torch.arange(256, device="cuda")
    return {"host": host, "device": device, "host_indices": index, "device_indices": index}


def host_times() -> None:
    """Microseconds of the host a call, without a cap; beside two calls of torch."""
    seq, free = torch.full((64,), 33, device="cuda"), torch.arange(1, 100, device="cuda")
    cursor = torch.zeros(1, dtype=torch.int64, device="cuda")
    ops = refcache_ops
    calls: dict[str, Any] = {
        "alloc_decode": lambda: ops.alloc_decode(seq, seq, free, 16),
        "alloc_decode, cursor": lambda: ops.alloc_decode(seq, seq, free, 16, cursor),
        "alloc_extend": lambda: ops.alloc_extend(seq - 1, seq, seq, free, 16, 64),
    }
    flags = torch.zeros(32, dtype=torch.int64, device="cuda")
    where = (1, "layer_first", 2)
    for form in ("stacked", "list"):
        on = pools(512, form)
        host, device, pairs = on["host"], on["device"], (on["host_indices"], on["device_indices"])
        one = tuple(index[:1] for index in pairs)
        loads, saves = (device, host, *pairs), (host, device, *one)
        calls |= {
            f"load_per_layer, {form}": lambda a=loads: ops.load_per_layer(*a, 3, *where),
            f"load_layers, {form}": lambda a=loads: ops.load_layers(*a, flags, 0, 1, *where),
            f"backup_all_layer, {form}": lambda a=saves: ops.backup_all_layer(*a, *where),
        }
    rows, source = torch.zeros(64, 128, device="cuda"), torch.zeros(1, 128, device="cuda")
    pinned, there = torch.zeros(8192).pin_memory(), torch.zeros(8192, device="cuda")
    calls["torch: index_copy_"] = lambda: rows.index_copy_(0, seq[:1], source)
    calls["torch: a memcpy of 32 KB"] = lambda: there.copy_(pinned, non_blocking=True)
    for name, call in calls.items():
        report(f"host time of {name}", us=host_microseconds(call, 200))


def new_sizes() -> None:
    """Milliseconds of the first call for pools of other sizes, once one size is compiled."""
    for slots in (512, 600, 777, 1024, 1500):
        on = pools(slots)
        torch.cuda.synchronize()
        start = time.perf_counter()
        refcache_ops.backup_all_layer(**on, page_size=1, layout="layer_first")
        report(f"first call, {slots} slots", ms=(time.perf_counter() - start) * 1e3)


def main(path: str) -> None:
    torch.cuda.set_stream(torch.cuda.Stream())
    for part in (new_sizes, host_times, loops):
        part()
        header = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
        header |= {"triton": triton.__version__, "date": time.strftime("%Y-%m-%d")}
        with open(path, "w") as file:
            json.dump({**header, "rows": RESULTS}, file, indent=1)


if __name__ == "__main__":
    main(sys.argv[1])
