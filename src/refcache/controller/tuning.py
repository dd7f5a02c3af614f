"""Measures the transfer rules of the card that is here: ``refcache tune``.

For pages of several sizes, loads and writes of a small pool run beside matrix products and copies
that stand in for a model, in every way there is: kernels under several caps, and the copy engine.
What counts is what the model feels:

* a load: the wall time of a prefill whose layers each wait for their rows;
* a write: how much longer the work beside it takes in all.

:func:`rules_from` makes the rules of these costs. Absolute figures are not kept. The first round of
each way is not timed: it goes into poisoned memory, and every byte of it is compared.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch

from refcache.allocator import PagedTokenToKVPoolAllocator
from refcache.controller.hicache_controller import HiCacheController
from refcache.errors import CopyFailed
from refcache.pool import MHATokenToKVPool, host_pool_for
from refcache.pool.transfer_rule import Rules, TransferPlan, TransferRule
from refcache.runtime import CudaRuntime
from refcache.types import ServerArgs

PAGES = (4, 8, 16, 32, 64)
LAYERS, TOKENS, HEADS, WIDTH = 8, 16384, 8, 128
ROW = HEADS * WIDTH * 2
CAPS = (1, 2, 3, 4, 6)
ROUNDS = 3

Way = tuple[str, int]  # io_backend and cap
Costs = Mapping[tuple[bool, int], Mapping[Way, float]]  # by direction (to host) and bytes a copy


def rules_from(costs: Costs) -> Rules:
    """The rules for these costs: for each direction the engine's shortest copies, then a cap.

    The engine is taken from the length on from which it costs no more than any kernel; below, the
    kernel with the cap that costs least for the shortest copies.
    """
    rules = []
    for to_host in (False, True):
        by_length = {n: ways for (way, n), ways in sorted(costs.items()) if way == to_host}
        start = None
        for length, ways in reversed(by_length.items()):
            kernels = min(cost for (name, _), cost in ways.items() if name == "kernel")
            if ways["direct", 0] > kernels:
                break
            start = length
        if start is not None:
            rules.append(TransferRule(to_host, "direct", copy_bytes=start))
        shortest = by_length[min(by_length)]
        caps = [(cost, cap) for (name, cap), cost in shortest.items() if name == "kernel"]
        rules.append(TransferRule(to_host, "kernel", max_programs=min(caps)[1]))
    return tuple(rules)


def measure(say: Callable[[str], object] = lambda line: None) -> dict[Any, dict[Way, float]]:
    """The costs, in milliseconds, on the current CUDA device.

    Args:
        say: told a line a page size.

    Raises:
        CopyFailed: a way brought other bytes than were there.
    """
    costs: dict[Any, dict[Way, float]] = {}
    cuda: Any = torch.cuda
    with cuda.stream(cuda.Stream()):
        product = _Product()
        for page in PAGES:
            rig = _Rig(page, product)
            for to_host, cost in ((False, rig.load), (True, rig.write)):
                ways = [("direct", 0), *(("kernel", cap) for cap in CAPS)]
                for way in ways:
                    rig.check(way, to_host=to_host)
                found = {way: [cost(way) for _ in range(ROUNDS)] for way in ways}
                row = {way: statistics.median(times) for way, times in found.items()}
                costs[to_host, page * ROW] = row
                what = "to the host" if to_host else "to the device"
                shown = ", ".join(f"{n} {c or ''} {ms:.2f}" for (n, c), ms in row.items())
                say(f"{what}, copies of {page * ROW >> 10} KiB, ms: {shown}")
            rig.host.release()
    return costs


class _Product:
    """A layer of the stand-in for a model, as one CUDA graph."""

    def __init__(self) -> None:
        a = torch.randn(2048, 4096, device="cuda").bfloat16()
        b = torch.randn(4096, 8192, device="cuda").bfloat16()
        out, copy = a @ b, torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(4):
                torch.mm(a, b, out=out)
            copy[: 1 << 29].copy_(copy[1 << 29 :])  # a decode is bound by memory


class _Rig:
    """Pools with scattered pages, and a controller that is told which way to go."""

    def __init__(self, page: int, product: _Product) -> None:
        machine = CudaRuntime()
        size = 2 * TOKENS
        pool = MHATokenToKVPool(
            size, page, torch.bfloat16, HEADS, WIDTH, LAYERS, "cuda", runtime=machine
        )
        allocator = PagedTokenToKVPoolAllocator(
            size, page, torch.bfloat16, "cuda", pool, runtime=machine
        )
        self.pool, self.allocator, self.product = pool, allocator, product
        self.host = host_pool_for(pool, ServerArgs(page_size=page, hicache_ratio=1.1))
        self.controller = HiCacheController(allocator, self.host, page)
        mixed = torch.randperm(len(allocator.free_pages), device="cuda")
        allocator.free_pages = allocator.free_pages[mixed]
        pages = self.host.free_slots.view(-1, page)
        self.host.free_slots = pages[torch.randperm(len(pages))].flatten()

    def _force(self, way: Way) -> None:
        plan = TransferPlan(*way, way[0] == "kernel", "tuning")
        self.host.plan_transfer = lambda *_, **__: plan  # type: ignore[method-assign]

    def check(self, way: Way, *, to_host: bool) -> None:
        """Move random rows this way once, into poisoned memory, and compare every byte.

        Raises:
            CopyFailed: they differ.
        """
        self._force(way)
        planes = [plane.buffer.view(torch.int16) for plane in self.pool.planes]
        hosts = [plane.view(torch.int16) for plane in self.host.planes]
        for source, target in zip(*((planes, hosts) if to_host else (hosts, planes)), strict=True):
            source.random_(-30000, 30000)
            target.fill_(0x5A5A)
        slots: Any
        host_slots: Any
        if to_host:
            slots = self.allocator.alloc(TOKENS)
            host_slots = self.controller.write(slots)
        else:
            host_slots = self.host.alloc(TOKENS)
            slots = self.controller.load(host_slots)
            self.controller.start_loading()
        self.controller.wait_for_copies()
        torch.cuda.synchronize()
        where = host_slots.cpu()
        for plane, host in zip(planes, hosts, strict=True):
            for layer in range(LAYERS):
                if not torch.equal(host[layer][where], plane[layer][slots].cpu()):
                    raise CopyFailed(
                        f"{way[0]}, {way[1] or 'no'} programs, "
                        f"{'to the host' if to_host else 'to the device'}: layer {layer} differs"
                    )
        self.controller.reset()
        self.controller.evict_host(host_slots)
        self.controller.evict_device(slots)

    def load(self, way: Way) -> float:
        """Milliseconds of a prefill that loads."""
        self._force(way)
        host_slots: Any = self.host.alloc(TOKENS)
        slots: Any = self.controller.load(host_slots)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        self.controller.layer_done_counter.set_consumer(self.controller.start_loading())
        for layer in range(LAYERS):
            self.pool.get_key_buffer(layer)
            self.product.graph.replay()
        torch.cuda.synchronize()
        took = time.perf_counter() - begin
        self.controller.reset()
        self.controller.evict_host(host_slots)
        self.controller.evict_device(slots)
        return took * 1e3

    def write(self, way: Way) -> float:
        """Milliseconds that products lose beside a write."""
        self._force(way)
        slots: Any = self.allocator.alloc(TOKENS)
        host_slots: Any = None
        cuda: Any = torch.cuda
        marks = [cuda.Event(enable_timing=True) for _ in range(120)]
        torch.cuda.synchronize()
        for number, mark in enumerate(marks):
            mark.record()
            if number == 10:
                host_slots = self.controller.write(slots)
            self.product.graph.replay()
        torch.cuda.synchronize()
        self.controller.reset()
        self.controller.evict_host(host_slots)
        self.controller.evict_device(slots)
        took: list[float] = [a.elapsed_time(b) for a, b in pairwise(marks)]
        alone = statistics.median(took[2:10] + took[-20:])
        return max(0.0, sum(t - alone for t in took[10:]))
