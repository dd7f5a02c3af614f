"""Speed of the ops on a CUDA card, beside the limits of the same run; verified before timed.

    PYTHONPATH=src:aliases python benchmarks/gpu/bench_ops.py results.json [peer.py]

Rows of KV are scattered (random pages on both tiers). GB/s counts the payload once; times are
medians of CUDA events on a stream that is not idle before. No figure is printed for a result that
was not compared with a gather, after its destination was poisoned. ``peer.py`` may be a file with
SGLang's ``alloc_extend_kernel`` and ``alloc_decode_kernel``, which then run beside ours.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import torch
import triton
from bench_loads import controller_loads

import refcache_ops
from refcache.reference import Layout
from refcache_ops import engine
from refcache_ops.driver import wait_flag

SHAPES = {"8b": (32, 2, 8, 128), "mla": (61, 1, 1, 576)}  # layers, planes, heads, head width (bf16)
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
BUSY = 200_000  # cycles of a kernel that keeps the stream busy while the host issues work

Row = dict[str, Any]
RESULTS: list[Row] = []


def report(name: str, **values: Any) -> None:
    RESULTS.append({"name": name, **values})
    shown = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items()]
    print(f"{name:54} {', '.join(shown)}", flush=True)


def events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def milliseconds(fn: Callable[[], Any], repeat: int = 7, busy: int = BUSY) -> float:
    """Median time of ``fn`` on the current stream, the host being ahead by ``busy`` cycles."""
    fn()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeat):
        start, end = events()
        torch.cuda._sleep(busy)
        start.record()
        fn()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def graph_of(fn: Callable[[], Any], times: int) -> torch.cuda.CUDAGraph:
    fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            fn()
    return graph


def host_microseconds(fn: Callable[[], Any], calls: int = 300) -> float:
    """Median over five rounds of the host's time a call."""
    rounds = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        rounds.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(rounds)


def scattered(pages: int, page: int, of: int, seed: int) -> torch.Tensor:
    order = torch.randperm(of, generator=torch.Generator().manual_seed(seed))[:pages] + 1
    return (order[:, None] * page + torch.arange(page)).flatten()


_arena: dict[str, torch.Tensor] = {}


def arena(kind: str, length: int) -> torch.Tensor:
    """The first ``length`` bytes of one big buffer, since pinning memory takes seconds."""
    if kind not in _arena:
        size = 6 << 30
        _arena[kind] = (
            torch.empty(size, dtype=torch.uint8, pin_memory=True)
            if kind == "host"
            else torch.empty(size, dtype=torch.uint8, device="cuda")
        )
    return _arena[kind][:length]


class Pools:
    """Device and pinned host planes with scattered pages."""

    def __init__(self, shape: str, tokens: int, page: int, layout: str) -> None:
        self.layers, planes, heads, dim = SHAPES[shape]
        self.page, self.layout = page, layout
        size = tokens + tokens // 4 // page * page + 4 * page
        where = Layout.of(layout, size, page, self.layers, heads, dim)
        count = size * self.layers * heads * dim * 2
        on_host, on_device = arena("host", planes * count), arena("device", planes * count)
        self.host = [h.view(torch.bfloat16).view(where.shape) for h in on_host.view(planes, -1)]
        dims = (self.layers, size, heads, dim)
        self.device = [d.view(torch.bfloat16).view(dims) for d in on_device.view(planes, -1)]
        self.where = where
        self.host_cpu = scattered(tokens // page, page, size // page - 2, 1)
        self.device_cpu = scattered(tokens // page, page, size // page - 2, 2)
        self.pairs = (self.host_cpu.cuda(), self.device_cpu.cuda())
        self.flags = torch.zeros(self.layers, dtype=torch.int64, device="cuda")
        self.bytes = tokens * self.layers * planes * heads * dim * 2

    def backup(self, programs: int = 0) -> None:
        refcache_ops.backup_all_layer(
            self.host, self.device, *self.pairs, self.page, self.layout, programs
        )

    def load(self, programs: int = 0) -> None:
        for layer in range(self.layers):
            refcache_ops.load_per_layer(
                self.device, self.host, *self.pairs, layer, self.page, self.layout, programs
            )

    def load_at_once(self, programs: int = 0) -> None:
        refcache_ops.load_layers(
            self.device, self.host, *self.pairs, self.flags, 0, self.layers,
            self.page, self.layout, programs,
        )  # fmt: skip

    def backup_direct(self) -> None:
        pairs = (self.host_cpu, self.device_cpu)
        engine.backup_all_layer(self.host, self.device, *pairs, self.page, self.layout)

    def load_direct(self) -> None:
        pairs = (self.host_cpu, self.device_cpu)
        copies = engine.list_copies(self.host, self.device, *pairs, self.page, self.layout)
        for layer in range(self.layers):
            copies.issue(layer, to_host=False)

    def verified(self, fn: Callable[[], None], *, to_host: bool) -> bool:
        """Poison the destination, fill the source, move, and compare every layer (on the card)."""
        planes = len(self.host)
        mirror = arena("mirror", sum(h.nbytes for h in self.host)).view(planes, -1)
        hosts = [h.view(-1).view(torch.uint8) for h in self.host]
        for plane in self.device:
            plane.view(torch.uint8).fill_(0xA5)
        mirror.fill_(0x5A)
        source = self.device if to_host else [m.view(torch.int16) for m in mirror]
        for plane in source:
            plane.view(torch.int16).random_(-30000, 30000)
        for host, m in zip(hosts, mirror, strict=True):
            host.copy_(m, non_blocking=True)
        torch.cuda.synchronize()
        fn()
        torch.cuda.synchronize()
        for host, m, device in zip(hosts, mirror, self.device, strict=True):
            m.copy_(host)
            copied = m.view(torch.bfloat16)
            for layer in range(self.layers):
                rows = self.where.rows(copied, layer).flatten(0, 1)[self.pairs[0]]
                if not torch.equal(
                    rows.view(torch.int16), device[layer][self.pairs[1]].view(torch.int16)
                ):
                    return False
        return True


class Matmul:
    """A 4096^3 bf16 matmul to run beside transfers."""

    def __init__(self, times: int = 10) -> None:
        a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(a)
        self.times = times
        self.graph = graph_of(lambda: torch.mm(a, a, out=out), times)
        self.alone = milliseconds(self.graph.replay, 9) / times
        self.side = torch.cuda.Stream()

    def beside(self, fn: Callable[[], None], expected_ms: float) -> tuple[float, float]:
        """Time of ``fn`` on a stream, ms, and by how much the matmul is slowed meanwhile."""
        replays = int(expected_ms * 1.5 / (self.alone * self.times)) + 4
        took, slowed = [], []
        for _ in range(3):
            torch.cuda.synchronize()
            begin, finish = events()
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
            with torch.cuda.stream(self.side):
                torch.cuda._sleep(4_000_000)
                begin.record()
            torch.cuda.current_stream().wait_event(begin)
            for mark in marks[:-1]:
                mark.record()
                self.graph.replay()
            marks[-1].record()
            with torch.cuda.stream(self.side):
                fn()
                finish.record()
            torch.cuda.synchronize()
            end = begin.elapsed_time(finish)
            inside = [m for m in marks if begin.elapsed_time(m) <= end]
            took.append(end)
            if len(inside) > 2:
                window = inside[1].elapsed_time(inside[-1]) / (len(inside) - 2) / self.times
                slowed.append(window / self.alone)
        return statistics.median(took), statistics.median(slowed) if slowed else float("nan")


def limits() -> dict[str, float]:
    n = 1 << 30
    host, device = arena("host", n), arena("device", n)
    device2 = arena("device", 2 * n)[n:]
    found = {
        "memcpy_d2h": n / milliseconds(lambda: host.copy_(device, non_blocking=True)) / 1e6,
        "memcpy_h2d": n / milliseconds(lambda: device.copy_(host, non_blocking=True)) / 1e6,
        "device_copy": 2 * n / milliseconds(lambda: device.copy_(device2)) / 1e6,
        "device_fill": n / milliseconds(lambda: device.fill_(1)) / 1e6,
    }
    report("limits, GB/s", **found)
    return found


def transfers(peak: dict[str, float], repeat: int = 3) -> None:
    cases = [
        (shape, tokens, layout, page)
        for shape, tokens in (("8b", 16384), ("mla", 16384), ("8b", 2048), ("mla", 2048))
        for layout in (LAYOUTS if tokens == 16384 else LAYOUTS[:2])
        for page in ((1, 16, 64) if layout in LAYOUTS[:2] else (16, 64))
    ]
    for shape, tokens, layout, page in cases:
        pools = Pools(shape, tokens, page, layout)
        for op, fn, to_host in (
            ("backup_all_layer", pools.backup, True),
            ("load_per_layer", pools.load, False),
            ("load_layers", pools.load_at_once, False),
        ):
            label = f"alone {op} {shape} {tokens} {layout} page {page}"
            if not pools.verified(fn, to_host=to_host):
                report(label, verified=False)
                continue
            speed = pools.bytes / milliseconds(fn, repeat, 2_000_000) / 1e6
            share = speed / peak["memcpy_d2h" if to_host else "memcpy_h2d"]
            report(label, gbps=speed, of_memcpy=share, verified=True)


def beside_matmul(settings: list[tuple[str, str, int, int]]) -> None:
    """(strategy, layout, page, cap) one by one."""
    matmul = Matmul()
    report("matmul alone", ms=matmul.alone)
    for strategy, layout, page, cap in settings:
        pools = Pools("8b", 16384, page, layout)
        for to_host in (True, False):
            if strategy == "kernel":
                fn = (lambda: pools.backup(cap)) if to_host else (lambda: pools.load(cap))  # noqa: B023
            else:
                fn = pools.backup_direct if to_host else pools.load_direct
            label = (
                f"beside {strategy} {'D2H' if to_host else 'H2D'} {layout} page {page} cap {cap}"
            )
            if not pools.verified(fn, to_host=to_host):
                report(label, verified=False)
                continue
            took, slowed = matmul.beside(fn, pools.bytes / 45e6)
            run = engine.copy_bytes(layout, page, pools.layers, 2048, 8, to_host=to_host)
            report(label, gbps=pools.bytes / took / 1e6, matmul=slowed, run=run, verified=True)


def small_loads(caps: tuple[int, ...] = (0,)) -> None:
    """256 tokens; ``load_layers`` is timed to the wait for the last layer's flag."""
    for shape in ("mla", "8b"):
        pools = Pools(shape, 256, 1, "layer_first")
        ok = pools.verified(pools.load, to_host=False)
        took = milliseconds(pools.load, 15, 3_000_000)
        cpu = host_microseconds(pools.load, 20)
        label = f"small load_per_layer {shape} 256 tokens page 1"
        report(label, gbps=pools.bytes / took / 1e6, cpu_us=cpu, verified=ok)
        consumer, loads = torch.cuda.Stream(), torch.cuda.Stream()
        for cap in caps:
            ok = pools.verified(lambda: pools.load_at_once(cap), to_host=False)  # noqa: B023
            pools.flags.zero_()
            torch.cuda.synchronize()
            times, epoch = [], 0
            for idle in (False, True):
                times.clear()
                for _ in range(25):
                    epoch += 1
                    start, end = events()
                    with torch.cuda.stream(loads):
                        if not idle:
                            torch.cuda._sleep(BUSY * 4)
                        start.record()
                        pools.load_at_once(cap)
                    for layer in range(pools.layers):
                        wait_flag(pools.flags, layer, epoch, consumer)
                    end.record(consumer)
                    torch.cuda.synchronize()
                    times.append(start.elapsed_time(end))
                report(
                    f"small load_layers {shape} 256 tokens page 1 cap {cap}"
                    + (", idle stream" if idle else ""),
                    gbps=pools.bytes / statistics.median(times) / 1e6,
                    verified=ok,
                )
            cpu = host_microseconds(lambda: pools.load_at_once(cap), 20)  # noqa: B023
            report(f"small load_layers {shape} host time", cpu_us=cpu)


def allocation(peer: Any = None) -> None:
    for batch in (1, 64, 256, 1024):
        for page, grow in ((16, 1), (16, 128), (64, 8192), (1, 8192)):
            prefix = torch.full((batch,), 5 * page, dtype=torch.int64)
            seq = prefix + grow
            last = torch.arange(batch) * 8 * page + 5 * page - 1 + page
            need = batch * (-(-(5 * page + grow) // page) - 5)
            order = torch.randperm(need + 10, generator=torch.Generator().manual_seed(0))
            free = order + batch * 9
            total = batch * grow
            on = [t.cuda() for t in (prefix, seq, last, free)]
            out = torch.empty(total, dtype=torch.int64, device="cuda")
            upper = triton.next_power_of_2(batch)
            if grow == 1:
                want = refcache_ops.alloc_decode(seq, last, free, page)
                name = "alloc_decode"

                def ours() -> torch.Tensor:
                    return refcache_ops.alloc_decode(on[1], on[2], on[3], page)  # noqa: B023

                def theirs() -> torch.Tensor:
                    made = torch.empty(batch, dtype=torch.int64, device="cuda")  # noqa: B023
                    args = (on[1], on[2], on[3], made, upper, page)  # noqa: B023
                    peer.alloc_decode_kernel[(batch,)](*args)  # noqa: B023
                    return made
            else:
                want = refcache_ops.alloc_extend(prefix, seq, last, free, page, total)
                name = "alloc_extend"

                def ours() -> torch.Tensor:
                    return refcache_ops.alloc_extend(*on, page, total)  # noqa: B023

                def theirs() -> torch.Tensor:
                    made = torch.empty(total, dtype=torch.int64, device="cuda")  # noqa: B023
                    args = (*on, made, upper, page)  # noqa: B023
                    peer.alloc_extend_kernel[(batch,)](*args)  # noqa: B023
                    return made

            label = f"{name} page {page} +{grow} batch {batch}"
            row: Row = {"verified": torch.equal(ours().cpu(), want)}
            fill = graph_of(lambda: out.fill_(-1), 20)  # noqa: B023
            row["fill_us"] = milliseconds(fill.replay, 15) / 20 * 1e3
            for who, fn in (("", ours), ("peer_", theirs)):
                if who and peer is None:
                    continue
                if who:
                    row["peer_verified"] = torch.equal(theirs().cpu(), want)
                row[f"{who}gpu_us"] = milliseconds(graph_of(fn, 20).replay, 15) / 20 * 1e3
                row[f"{who}cpu_us"] = host_microseconds(fn)
            if grow == 8192 and page == 1:  # what moving the same bytes costs
                kept = torch.empty_like(out)
                copy = graph_of(lambda: kept.copy_(out), 20)  # noqa: B023
                row["copy_us"] = milliseconds(copy.replay, 15) / 20 * 1e3
            report(label, **row)


def host_parts() -> None:
    """Where the host's time of an allocation goes."""
    from refcache_ops.alloc_decode import kernel, op

    seq = torch.full((64,), 33, device="cuda")
    free = torch.arange(1, 100, device="cuda")
    calls = {
        "through torch.ops": lambda: torch.ops.refcache.alloc_decode.default(seq, seq, free, 16),
        "without the dispatcher": lambda: op.run_kernel(seq, seq, free, 16),
        "without checks": lambda: kernel.run(seq, seq, free, 16),
        "the output alone": lambda: seq.new_empty(64, dtype=torch.int64),
    }
    report("host time of alloc_decode, us", **{k: host_microseconds(f) for k, f in calls.items()})


def load_peer(path: str) -> Any:
    spec = spec_from_file_location("peer_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BESIDE = [
    ("kernel", "layer_first", 1, 2),
    ("kernel", "layer_first", 1, 4),
    ("kernel", "page_first_direct", 64, 2),
    ("direct", "layer_first", 4, 0),
    ("direct", "layer_first", 8, 0),
    ("direct", "layer_first", 16, 0),
    ("direct", "layer_first", 64, 0),
    ("direct", "page_first_direct", 16, 0),
    ("direct", "page_first_direct", 64, 0),
]


def main(path: str, peer: str | None = None) -> None:
    torch.cuda.set_stream(torch.cuda.Stream())
    header = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "rows": RESULTS,
    }
    peak = limits()
    steps: list[Callable[[], None]] = [
        lambda: host_parts(),
        lambda: allocation(load_peer(peer) if peer else None),
        lambda: small_loads(),
        lambda: controller_loads(report),
        lambda: beside_matmul(BESIDE),
        lambda: transfers(peak),
    ]
    for step in steps:
        step()
        with open(path, "w") as file:
            json.dump(header, file, indent=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
