"""Measures the transfer rules of the card that is here: ``refcache tune``.

Loads and writes of 16,384 tokens of an 8B model's size run beside matrix products and copies that
stand in for its layers, in every way there is: kernels under several caps, and the copy engine with
pages of several sizes. What counts is what the model feels:

* a load: the wall time of a prefill whose layers each wait for their rows;
* a write: how much longer the work beside it takes in all.

:func:`rules_from` makes the rules of these costs. Absolute figures are not kept. The first round of
each way is not timed: it goes into poisoned memory, and every byte of it is compared.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from refcache.allocator import PagedTokenToKVPoolAllocator
from refcache.controller.hicache_controller import HiCacheController
from refcache.errors import CopyFailed
from refcache.pool import MHATokenToKVPool, host_pool_for
from refcache.pool.transfer_rule import Rules, TransferPlan, TransferRule
from refcache.runtime import CudaRuntime
from refcache.types import ServerArgs

PAGES = (64, 32, 16, 8, 4)  # falling: where the engine has lost, shorter copies are not tried
LAYERS, TOKENS, HEADS, WIDTH = 32, 16384, 8, 128
SMALL = TOKENS // 4
ROW = HEADS * WIDTH * 2
CAPS = (1, 2, 3, 4, 6)
ROUNDS = 3
STEPS = 120  # of the model beside a write
LOST, SLOW = 1.5, 0.5  # the engine costs so much more, or has so much less speed: it has lost
EQUAL = 1.02  # of the best kernel's cost: the engine, which takes no multiprocessor, is preferred

Way = tuple[str, int]  # io_backend and cap
ENGINE: Way = ("direct", 0)


class Moved(NamedTuple):
    """What is measured: a direction, the bytes of a copy of the engine, and the bytes in all."""

    to_host: bool
    copy_bytes: int
    total: int


class Cost(NamedTuple):
    """What the model felt, in milliseconds, and how fast the rows moved, in GB/s."""

    ms: float
    gbps: float


Costs = Mapping[Moved, Mapping[Way, Cost]]


def rules_from(costs: Costs) -> Rules:
    """The rules for these costs: for each direction what goes by the engine, then a kernel's cap.

    The engine is taken from the shortest copies on from which it always wins: it costs no more than
    the best kernel and 2 %, and has at least half the speed of the fastest. Where it loses with
    less to move, it is taken from twice as much on. Else the kernel whose cap costs least.
    """
    rules = []
    for to_host in (False, True):
        some = {moved: ways for moved, ways in costs.items() if moved.to_host == to_host}
        whole = max(moved.total for moved in some)
        kernels: dict[int, dict[Way, Cost]] = {}  # by total: the kernels' costs hang on no length
        for moved, ways in sorted(some.items(), reverse=True):
            kernels.setdefault(moved.total, {}).update(
                (way, cost) for way, cost in ways.items() if way != ENGINE
            )
        start = None
        for moved, ways in sorted(some.items(), reverse=True):
            if moved.total == whole and ENGINE in ways:
                if not _wins(ways[ENGINE], kernels[whole]):
                    break
                start = moved.copy_bytes
        if start is not None:
            lost = [
                moved.total
                for moved, ways in some.items()
                if moved.copy_bytes >= start
                and ENGINE in ways
                and not _wins(ways[ENGINE], kernels[moved.total])
            ]
            least = 2 * max(lost, default=0)
            rules.append(TransferRule(to_host, "direct", copy_bytes=start, min_bytes=least))
        cap = min((cost.ms, way[1]) for way, cost in kernels[whole].items())[1]
        rules.append(TransferRule(to_host, "kernel", max_programs=cap))
    return tuple(rules)


def _wins(engine: Cost, kernels: Mapping[Way, Cost]) -> bool:
    fastest = max(cost.gbps for cost in kernels.values())
    return (
        engine.ms <= EQUAL * min(k.ms for k in kernels.values()) and engine.gbps >= SLOW * fastest
    )


def measure(say: Callable[[str], object] = lambda line: None) -> dict[Moved, dict[Way, Cost]]:
    """The costs on the current CUDA device.

    Args:
        say: told a line each for what was moved.

    Raises:
        CopyFailed: a way brought other bytes than were there.
    """
    costs: dict[Moved, dict[Way, Cost]] = {}
    cuda: Any = torch.cuda
    trying = {False, True}  # directions in which the engine has not lost yet
    with cuda.stream(cuda.Stream()):
        product = _Product()
        for page in PAGES:
            if page != PAGES[0] and not trying:
                break
            rig = _Rig(page, product)
            for moved in _amounts(page):
                kernels = [("kernel", cap) for cap in CAPS] if page == PAGES[0] else []
                engine = [ENGINE] if moved.to_host in trying else []
                if not kernels + engine:
                    continue
                found = {way: rig.cost(way, moved) for way in (*engine, *kernels)}
                costs[moved] = found
                shown = ", ".join(
                    f"{name} {cap or ''} {ms:.2f} at {gbps:.0f} GB/s"
                    for (name, cap), (ms, gbps) in found.items()
                )
                where = "to the host" if moved.to_host else "to the device"
                say(
                    f"{where}, {moved.total >> 20} MiB in copies of {moved.copy_bytes >> 10} KiB, "
                    f"ms: {shown}"
                )
                best = {
                    way: c for m, w in costs.items() if m[::2] == moved[::2] for way, c in w.items()
                }
                if engine and moved.total == _total(TOKENS) and _lost(best, found[ENGINE]):
                    trying.discard(moved.to_host)
            rig.host.release()
    return costs


def _total(tokens: int) -> int:
    return tokens * LAYERS * ROW * 2


def _amounts(page: int) -> Iterator[Moved]:
    for to_host in (False, True):
        yield Moved(to_host, page * ROW, _total(TOKENS))
    if page == PAGES[0]:
        yield Moved(False, page * ROW, _total(SMALL))


def _lost(ways: Mapping[Way, Cost], engine: Cost) -> bool:
    kernels = [cost for way, cost in ways.items() if way != ENGINE]
    return engine.ms > LOST * min(k.ms for k in kernels) or engine.gbps < SLOW * max(
        k.gbps for k in kernels
    )


class _Product:
    """A layer of the stand-in for a model, as one CUDA graph."""

    def __init__(self) -> None:
        a = torch.randn(2048, 4096, device="cuda").bfloat16()
        b = torch.randn(4096, 8192, device="cuda").bfloat16()
        out, copy = a @ b, torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(3):
                torch.mm(a, b, out=out)
            copy[: 1 << 29].copy_(copy[1 << 29 :])  # a decode is bound by memory


class _Rig:
    """Pools with scattered pages, and a controller that is told which way to go."""

    def __init__(self, page: int, product: _Product) -> None:
        machine = CudaRuntime()
        pool = MHATokenToKVPool(
            TOKENS, page, torch.bfloat16, HEADS, WIDTH, LAYERS, "cuda", runtime=machine
        )
        allocator = PagedTokenToKVPoolAllocator(
            TOKENS, page, torch.bfloat16, "cuda", pool, runtime=machine
        )
        self.pool, self.allocator, self.product = pool, allocator, product
        self.host = host_pool_for(pool, ServerArgs(page_size=page, hicache_ratio=1.1))
        self.controller = HiCacheController(allocator, self.host, page)
        mixed = torch.randperm(len(allocator.free_pages), device="cuda")
        allocator.free_pages = allocator.free_pages[mixed]
        pages = self.host.free_slots.view(-1, page)
        self.host.free_slots = pages[torch.randperm(len(pages))].flatten()
        self.slots: Any = None
        self.host_slots: Any = None

    def cost(self, way: Way, moved: Moved) -> Cost:
        """The median cost; the bytes are compared first.

        Raises:
            CopyFailed: they differ.
        """
        plan = TransferPlan(*way, way[0] == "kernel", "tuning")
        self.host.plan_transfer = lambda *_, **__: plan  # type: ignore[method-assign]
        tokens = moved.total // _total(1)
        self._check(way, moved, tokens)
        measure = self._write if moved.to_host else self._load
        costs = []
        for _ in range(ROUNDS):
            ms, took = measure(tokens)
            costs.append(Cost(ms, moved.total / took / 1e6))
            self._give_back()
        return Cost(*(statistics.median(column) for column in zip(*costs, strict=True)))

    def _start(self, tokens: int, *, to_host: bool) -> None:
        if to_host:
            self.slots = self.allocator.alloc(tokens)
            self.host_slots = self.controller.write(self.slots)
        else:
            self.host_slots = self.host.alloc(tokens)
            self.slots = self.controller.load(self.host_slots)
            self.controller.layer_done_counter.set_consumer(self.controller.start_loading())

    def _give_back(self) -> None:
        self.controller.reset()
        self.controller.evict_host(self.host_slots)
        self.controller.evict_device(self.slots)

    def _check(self, way: Way, moved: Moved, tokens: int) -> None:
        planes = [plane.buffer.view(torch.int16) for plane in self.pool.planes]
        hosts = [plane.view(torch.int16) for plane in self.host.planes]
        for plane, host in zip(planes, hosts, strict=True):
            plane.random_(-30000, 30000)
            if moved.to_host:
                host.fill_(0x5A5A)
            else:
                size = min(host.shape[1], plane.shape[1])
                host[:, :size].copy_(plane[:, :size])
                plane.fill_(0x5A5A)
        self._start(tokens, to_host=moved.to_host)
        self.controller.wait_for_copies()
        torch.cuda.synchronize()
        where = self.host_slots.cuda()
        for plane, host in zip(planes, hosts, strict=True):
            for layer in range(LAYERS):
                if not torch.equal(host[layer].cuda()[where], plane[layer][self.slots]):
                    raise CopyFailed(
                        f"{way[0]}, {way[1] or 'no'} programs, "
                        f"{'to the host' if moved.to_host else 'to the device'}: layer {layer} "
                        "has other bytes than were there"
                    )
        self._give_back()

    def _load(self, tokens: int) -> tuple[float, float]:
        """Milliseconds of a prefill that loads; the rows take as long."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        self._start(tokens, to_host=False)
        for layer in range(LAYERS):
            self.pool.get_key_buffer(layer)
            self.product.graph.replay()
        torch.cuda.synchronize()
        took = (time.perf_counter() - begin) * 1e3
        return took, took

    def _write(self, tokens: int) -> tuple[float, float]:
        """Milliseconds that steps lose beside a write, and that the write takes."""
        cuda: Any = torch.cuda
        marks = [cuda.Event(enable_timing=True) for _ in range(STEPS)]
        torch.cuda.synchronize()
        begin = 0.0
        for number, mark in enumerate(marks):
            mark.record()
            if number == 10:
                begin = time.perf_counter()
                self._start(tokens, to_host=True)
            self.product.graph.replay()
        self.controller.wait_for_copies()
        wrote = (time.perf_counter() - begin) * 1e3
        torch.cuda.synchronize()
        took: list[float] = [a.elapsed_time(b) for a, b in pairwise(marks)]
        alone = statistics.median(took[2:10] + took[-20:])
        return max(0.0, sum(t - alone for t in took[10:])), wrote
