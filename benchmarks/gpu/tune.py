"""Tries the kernels' launch parameters on a card; the choices in the kernel modules come from it.

PYTHONPATH=src:aliases python benchmarks/gpu/tune.py results.json [step ...]
"""

import cProfile
import json
import pstats
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import bench_ops as bench
import torch

import refcache_ops
from refcache_ops import _launch
from refcache_ops.alloc_decode import kernel as decode
from refcache_ops.alloc_extend import kernel as extend
from refcache_ops.copy import kernel as copy

EXTENDS = (
    (1, 64, 8192),
    (64, 64, 8192),
    (256, 64, 8192),
    (1024, 16, 128),
    (1024, 64, 8192),
    (1024, 1, 8192),
)


def setting(module: Any, **values: int) -> str:
    for name, value in values.items():
        setattr(module, name, value)
    _launch._compiled.clear()
    return " ".join(f"{k.lower()} {v}" for k, v in values.items())


def gpu_us(fn: Callable[[], Any]) -> float:
    return bench.milliseconds(bench.graph_of(fn, 20).replay, 9) / 20 * 1e3


def allocs() -> None:
    for tokens, warps, programs in (
        (256, 4, 1024), (512, 4, 1024), (512, 4, 2048), (1024, 4, 1024), (1024, 8, 1024),
        (2048, 4, 2048), (2048, 8, 1024),
    ):  # fmt: skip
        label = setting(extend, TOKEN_BLOCK=tokens, WARPS=warps, PROGRAMS=programs)
        row = {}
        for batch, page, grow in EXTENDS:
            prefix = torch.full((batch,), 5 * page, device="cuda")
            free = torch.randperm(batch * (grow // page + 1), device="cuda")
            args = (prefix, prefix + grow, prefix, free, page, batch * grow)
            row[f"{batch}x{grow}p{page}"] = gpu_us(partial(refcache_ops.alloc_extend, *args))
        bench.report(f"extend {label}", **row)
    for rows, warps, block in (
        (64, 2, 1024), (128, 4, 1024), (256, 4, 1024), (1024, 8, 1024), (1024, 16, 1024),
        (256, 8, 256),
    ):  # fmt: skip
        label = setting(decode, ROWS=rows, WARPS=warps, BATCH_BLOCK=block)
        row = {}
        for batch in (1, 64, 256, 1024):
            seq = torch.full((batch,), 33, device="cuda")
            free = torch.arange(1, 2000, device="cuda")
            row[str(batch)] = gpu_us(partial(refcache_ops.alloc_decode, seq, seq, free, 16))
        bench.report(f"decode {label}", **row)


def copies() -> None:
    for shape, tokens, layout in (
        ("8b", 2048, "layer_first"), ("mla", 2048, "layer_first"), ("mla", 16384, "page_first"),
    ):  # fmt: skip
        pools = bench.Pools(shape, tokens, 1, layout)
        for block, programs, warp in (
            (512, 256, 128), (1024, 64, 256), (1024, 128, 256), (1024, 264, 256), (2048, 64, 256),
        ):  # fmt: skip
            label = setting(copy, SMALL_BLOCK=block, MAX_PROGRAMS=programs, UNITS_A_WARP=warp)
            moves = {"d2h": pools.backup, "h2d": pools.load, "at once": pools.load_at_once}
            row = {
                name: pools.bytes / bench.milliseconds(fn, 3, 2_000_000) / 1e6
                for name, fn in moves.items()
            }
            bench.report(f"{shape} {tokens} {layout} {label}", **row)
    setting(copy, UNITS_A_WARP=256)
    for block, programs in ((512, 256), (1024, 32), (1024, 64), (1024, 128), (2048, 32)):
        label = setting(copy, FLAG_BLOCK=block, MAX_PROGRAMS=programs)
        row = {}
        for shape in ("mla", "8b"):
            pools = bench.Pools(shape, 256, 1, "layer_first")
            took = bench.milliseconds(pools.load_at_once, 15)
            row[shape] = pools.bytes / took / 1e6
        bench.report(f"small {label}", **row)
    setting(copy, SMALL_BLOCK=1024, FLAG_BLOCK=512, MAX_PROGRAMS=128)


def capped() -> None:
    matmul = bench.Matmul()
    bench.report("matmul alone", ms=matmul.alone)
    for layout, page in (("layer_first", 1), ("page_first_direct", 64)):
        pools = bench.Pools("8b", 16384, page, layout)
        for block, warp, cap in (
            (4096, 256, 2), (2048, 128, 2), (2048, 128, 3), (2048, 128, 4), (1024, 128, 4),
            (4096, 128, 1), (8192, 256, 1), (8192, 256, 2), (4096, 128, 3), (4096, 128, 4),
        ):  # fmt: skip
            label = setting(copy, LOAD_BLOCK=block, WRITE_BLOCK=block, UNITS_A_WARP=warp)
            row = {}
            for name, fn in (("d2h", pools.backup), ("h2d", pools.load)):
                took, slowed = matmul.beside(partial(fn, cap), pools.bytes / 45e6)
                row |= {name: pools.bytes / took / 1e6, f"{name} matmul": slowed}
            bench.report(f"{layout} page {page} {label} cap {cap}", **row)
    setting(copy, LOAD_BLOCK=8192, WRITE_BLOCK=2048, UNITS_A_WARP=256)
    for layout, page in (("layer_first", 16), ("layer_first", 64), ("page_first_direct", 64)):
        pools = bench.Pools("8b", 16384, page, layout)
        row = {}
        for name, run in (("d2h", pools.backup_direct), ("h2d", pools.load_direct)):
            took, slowed = matmul.beside(run, pools.bytes / 45e6)
            row |= {name: pools.bytes / took / 1e6, f"{name} matmul": slowed}
            row[f"{name} alone"] = pools.bytes / bench.milliseconds(run, 3, 2_000_000) / 1e6
        bench.report(f"direct {layout} page {page}", **row)


def host_time() -> None:
    bench.host_parts()
    pools = bench.Pools("mla", 256, 1, "layer_first")
    index = pools.pairs[0]
    for name, fn in (
        ("load_layers", pools.load_at_once),
        ("alloc_decode", partial(refcache_ops.alloc_decode, index, index, index, 16)),
    ):
        fn()
        torch.cuda.synchronize()
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(200):
            fn()
        profile.disable()
        torch.cuda.synchronize()
        print(name)
        pstats.Stats(profile).sort_stats("tottime").print_stats(14)


STEPS = {f.__name__: f for f in (host_time, allocs, capped, copies)}

if __name__ == "__main__":
    torch.cuda.set_stream(torch.cuda.Stream())
    bench.limits()
    for name in sys.argv[2:] or STEPS:
        STEPS[name]()
        with open(sys.argv[1], "w") as file:
            json.dump(bench.RESULTS, file, indent=1)
