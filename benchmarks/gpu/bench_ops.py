"""Speed of the ops on a CUDA card, beside the limits of the same run.

    PYTHONPATH=src:aliases python benchmarks/gpu/bench_ops.py results.json

Rows of KV are scattered (random pages on both tiers). GB/s counts the payload once; times are
medians of CUDA events. A speed is printed only for a result that was compared with a gather after
its destination was poisoned.
"""

import json
import statistics
import sys
import time
from functools import partial
from typing import Any

import torch
import triton

import refcache_ops
from refcache.reference import Layout
from refcache_ops import direct

SHAPES = {"8b": (32, 2, 1024), "mla": (61, 1, 576)}  # layers, planes, bf16 elements a row
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
RESULTS: list[dict[str, Any]] = []


def milliseconds(fn: Any, repeat: int = 7) -> float:
    """Median time of ``fn`` on the current stream."""
    fn()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        fn()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def report(name: str, **values: Any) -> None:
    RESULTS.append({"name": name, **values})
    shown = ", ".join(
        f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items()
    )
    print(f"{name:46} {shown}", flush=True)


def scattered(pages: int, page: int, of: int, seed: int) -> torch.Tensor:
    order = torch.randperm(of, generator=torch.Generator().manual_seed(seed))[:pages] + 1
    return (order[:, None] * page + torch.arange(page)).flatten()


class Pools:
    """Device and pinned host planes with scattered pages, and what must arrive."""

    def __init__(self, shape: str, tokens: int, page: int, layout: str) -> None:
        self.layers, planes, row = SHAPES[shape]
        heads = 8 if planes == 2 else 1
        self.page, self.layout, self.tokens = page, layout, tokens
        size = (tokens + 2 * page) // page * page + 64 * page
        dims = Layout.of(layout, size, page, self.layers, heads, row // heads).shape
        self.host = [
            torch.empty(dims, dtype=torch.bfloat16, pin_memory=True) for _ in range(planes)
        ]
        self.device = [
            torch.empty(
                (self.layers, size, heads, row // heads), dtype=torch.bfloat16, device="cuda"
            )
            for _ in range(planes)
        ]
        pages = tokens // page
        self.host_cpu = scattered(pages, page, size // page - 2, 1)
        self.device_cpu = scattered(pages, page, size // page - 2, 2)
        self.host_indices, self.device_indices = self.host_cpu.cuda(), self.device_cpu.cuda()
        self.bytes = tokens * self.layers * planes * row * 2
        self.where = [Layout.of_buffer(layout, h, page) for h in self.host]

    def poison(self, tensors: list[torch.Tensor], value: int) -> None:
        for t in tensors:
            t.view(torch.uint8).fill_(value)

    def fill(self, tensors: list[torch.Tensor]) -> None:
        for t in tensors:
            t.view(torch.int16).random_(-30000, 30000)

    def same(self) -> bool:
        """Every row of both tiers agrees."""
        torch.cuda.synchronize()
        for host, device, where in zip(self.host, self.device, self.where, strict=True):
            for layer in range(0, self.layers, max(1, self.layers // 6)):
                rows = where.rows(host, layer).flatten(0, 1)[self.host_cpu].view(torch.int16)
                if not torch.equal(
                    rows, device[layer][self.device_indices].cpu().view(torch.int16)
                ):
                    return False
        return True

    def backup(self, programs: int = 0) -> None:
        refcache_ops.backup_all_layer(
            self.host, self.device, self.host_indices, self.device_indices,
            self.page, self.layout, programs,
        )  # fmt: skip

    def load(self, programs: int = 0) -> None:
        for layer in range(self.layers):
            refcache_ops.load_per_layer(
                self.device, self.host, self.host_indices, self.device_indices, layer,
                self.page, self.layout, programs,
            )  # fmt: skip

    def load_at_once(self, programs: int = 0) -> None:
        refcache_ops.load_layers(
            self.device, self.host, self.host_indices, self.device_indices, self.flags,
            0, self.layers, self.page, self.layout, programs,
        )  # fmt: skip

    def backup_direct(self) -> None:
        direct.backup_all_layer(
            self.host, self.device, self.host_cpu, self.device_cpu, self.page, self.layout
        )

    def load_direct(self) -> None:
        for layer in range(self.layers):
            direct.load_per_layer(
                self.device, self.host, self.host_cpu, self.device_cpu, layer,
                self.page, self.layout,
            )  # fmt: skip

    def verified(self, fn: Any, to_host: bool) -> bool:
        self.fill(self.device if to_host else self.host)
        self.poison(self.host if to_host else self.device, 0xA5)
        torch.cuda.synchronize()
        fn()
        return self.same()


def matmul_times(a: torch.Tensor) -> list[float]:
    """Times of 38 matrix products that follow each other without a gap."""
    pairs = []
    for _ in range(40):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.mm(a, a)
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs[2:]]


def limits() -> dict[str, float]:
    n = 1 << 30
    host, device = (
        torch.empty(n, dtype=torch.uint8, pin_memory=True),
        torch.empty(n, dtype=torch.uint8, device="cuda"),
    )
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    found = {
        "memcpy_d2h": n / milliseconds(lambda: host.copy_(device, non_blocking=True)) / 1e6,
        "memcpy_h2d": n / milliseconds(lambda: device.copy_(host, non_blocking=True)) / 1e6,
        "matmul_ms": statistics.median(matmul_times(a)),
    }
    report("limits", **found)
    return found


def transfers(peak: dict[str, float]) -> None:
    for shape, tokens in (("8b", 16384), ("mla", 16384), ("8b", 2048)):
        for layout in LAYOUTS if tokens == 16384 else LAYOUTS[:1]:
            for page in (1, 16, 64) if layout in LAYOUTS[:2] else (16, 64):
                pools = Pools(shape, tokens, page, layout)
                for name, fn, to_host in (
                    ("backup_all_layer", pools.backup, True),
                    ("load_per_layer", pools.load, False),
                ):
                    label = f"{name} {shape} {tokens} {layout} page {page}"
                    if not pools.verified(fn, to_host):
                        report(label, verified=False)
                        continue
                    speed = pools.bytes / milliseconds(fn, 3) / 1e6
                    share = speed / peak["memcpy_d2h" if to_host else "memcpy_h2d"]
                    report(label, gbps=speed, of_memcpy=share)
                del pools


def beside_matmul(peak: dict[str, float]) -> None:
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    cases = []
    for page, layout in ((64, "layer_first"), (64, "page_first_direct"), (16, "page_first_direct")):
        pools = Pools("8b", 16384, page, layout)
        for programs in (2, 4, 8):
            cases += [
                (
                    f"kernel cap {programs} D2H",
                    pools,
                    lambda p=pools, c=programs: p.backup(c),
                    True,
                ),
                (f"kernel cap {programs} H2D", pools, lambda p=pools, c=programs: p.load(c), False),
            ]
        cases += [
            ("copy engine D2H", pools, pools.backup_direct, True),
            ("copy engine H2D", pools, pools.load_direct, False),
        ]
        for name, p, fn, to_host in cases:
            label = f"beside matmul {name} {p.layout} page {p.page}"
            if not p.verified(fn, to_host):
                report(label, verified=False)
                continue
            side.wait_stream(torch.cuda.current_stream())
            begin, finish = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(side):
                begin.record()
                fn()
                finish.record()
            times = matmul_times(a)
            report(
                label,
                gbps=p.bytes / begin.elapsed_time(finish) / 1e6,
                matmul=statistics.median(times) / peak["matmul_ms"],
            )
        cases.clear()
        del pools


def small_loads() -> None:
    for shape in ("mla", "8b"):
        pools = Pools(shape, 256, 1, "layer_first")
        pools.flags = torch.zeros(pools.layers, dtype=torch.int64, device="cuda")
        for name, fn in (("load_per_layer", pools.load), ("load_layers", pools.load_at_once)):
            ok = pools.verified(fn, False)
            cpu = time.perf_counter()
            for _ in range(20):
                fn()
            cpu = (time.perf_counter() - cpu) / 20
            torch.cuda.synchronize()
            gbps = pools.bytes / milliseconds(fn, 15) / 1e6 if ok else float("nan")
            report(f"{name} {shape} 256 tokens page 1", gbps=gbps, cpu_ms=cpu * 1e3, verified=ok)


def allocation() -> None:
    for batch in (1, 64, 256, 1024):
        for page, grow in ((16, 1), (16, 128), (64, 8192), (1, 8192)):
            prefix = torch.full((batch,), 5 * page, dtype=torch.int64)
            seq = prefix + grow
            last = torch.arange(batch) * 8 * page + 5 * page - 1 + page
            need = int(((seq + page - 1) // page - (prefix + page - 1) // page).sum())
            free = torch.randperm(need + 10, generator=torch.Generator().manual_seed(0)) + batch * 9
            args = [t.cuda() for t in (prefix, seq, last, free)]
            total = batch * grow
            if grow == 1:
                want = refcache_ops.alloc_decode(seq, last, free, page)
                fn = partial(refcache_ops.alloc_decode, *args[1:], page)
            else:
                want = refcache_ops.alloc_extend(prefix, seq, last, free, page, total)
                fn = partial(refcache_ops.alloc_extend, *args, page, total)
            ok = torch.equal(fn().cpu(), want)
            fn()
            torch.cuda.synchronize()
            cpu = time.perf_counter()
            for _ in range(200):
                fn()
            cpu = (time.perf_counter() - cpu) / 200
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(20):
                    fn()
            gpu = milliseconds(graph.replay, 15) / 20
            out = torch.empty(total, dtype=torch.int64, device="cuda")
            fill = torch.cuda.CUDAGraph()
            with torch.cuda.graph(fill):
                for _ in range(20):
                    out.fill_(-1)
            op = "alloc_decode" if grow == 1 else "alloc_extend"
            report(
                f"{op} page {page} +{grow} batch {batch}",
                gpu_us=gpu * 1e3, fill_us=milliseconds(fill.replay, 15) / 20 * 1e3,
                cpu_us=cpu * 1e6, verified=ok,
            )  # fmt: skip


def main(path: str) -> None:
    peak = limits()
    allocation()
    small_loads()
    beside_matmul(peak)
    transfers(peak)
    card = torch.cuda.get_device_name()
    header = {"card": card, "torch": torch.__version__, "triton": triton.__version__}
    header["date"] = time.strftime("%Y-%m-%d")
    with open(path, "w") as file:
        json.dump({**header, "rows": RESULTS}, file, indent=1)


if __name__ == "__main__":
    main(sys.argv[1])
