"""Transfers beside a model, end to end: what a user of the cache feels.

    PYTHONPATH=src:aliases python benchmarks/gpu/bench_model.py OUT.json PEERS [--steps ...]

*Load*: a prefill of N new tokens with H on the host, through ``HiCacheController`` with a wait a
layer; wall time from before ``start_loading`` to the end of the last layer. Its ratio is to the
larger of the compute alone and the payload at the peak of one memcpy. *Write*: 16,384 tokens to the
host beside decode or prefill steps; what the steps lose, and GB/s. Peers run in the same rounds.

Every path is checked before it is timed: the destination is poisoned, then every layer that the
model saw (or the host holds) is compared. Medians of interleaved rounds. ``PEERS`` is the folder of
``collect_peer.py``, or "none". ``--tries`` adds caps and both strategies, from which the rules in
``refcache.pool.transfer_rule`` were made.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import triton
from peers import Memcpy, SGLang
from serving import Prefill, Steps

from refcache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from refcache.controller import HiCacheController
from refcache.pool import MHATokenToKVPool, MLATokenToKVPool, host_pool_for
from refcache.pool.transfer_rule import TransferPlan
from refcache.runtime import CudaRuntime
from refcache.types import ServerArgs

SIZE = 20480  # tokens of the device pool
ROUNDS = 5
ROWS: list[dict[str, Any]] = []
Path_ = tuple[str, Any]


def report(**row: Any) -> None:
    ROWS.append(row)
    print(*(f"{v:.3g}" if isinstance(v, float) else v for v in row.values()), flush=True)


def timed() -> Any:
    return torch.cuda.Event(enable_timing=True)


class Rig:
    """Pools of one kind with scattered pages and random rows, a controller, and the peers."""

    def __init__(self, kind: str, page: int, peers: Path | None, layout: str) -> None:
        machine = CudaRuntime()
        self.kind, self.page = kind, page
        if kind == "mla":
            self.pool: Any = MLATokenToKVPool(
                SIZE, page, torch.bfloat16, 512, 64, 61, "cuda", runtime=machine
            )
        else:
            self.pool = MHATokenToKVPool(
                SIZE, page, torch.bfloat16, 8, 128, 32, "cuda", runtime=machine
            )
        self.layers = self.pool.layer_num
        self.device = [plane.buffer for plane in self.pool.planes]
        common = (torch.bfloat16, "cuda", self.pool)
        if page == 1:
            self.allocator: Any = TokenToKVPoolAllocator(SIZE, *common, runtime=machine)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(SIZE, page, *common, runtime=machine)
        args = ServerArgs(page_size=page, hicache_ratio=1.1, hicache_mem_layout=layout)
        self.host = host_pool_for(self.pool, args)
        self.plan = self.host.plan_transfer
        self.controller = HiCacheController(self.allocator, self.host, page)
        shuffle = torch.Generator().manual_seed(1)
        free = self.allocator.free_pages
        self.allocator.free_pages = free[torch.randperm(len(free), generator=shuffle).cuda()]
        pages = self.host.free_slots.view(-1, page)
        self.host.free_slots = pages[torch.randperm(len(pages), generator=shuffle)].flatten()
        self.state = self.allocator.backup_state()
        self.mirror = [torch.empty_like(p, device="cuda") for p in self.host.planes]
        for mirror, plane in zip(self.mirror, self.host.planes, strict=True):
            mirror.view(torch.int16).random_(-30000, 30000)
            plane.copy_(mirror)
        self.token_bytes = self.host.size_per_token
        self.peers = peers if layout == "layer_first" else None
        if self.peers is not None:
            self.sglang = SGLang(self.peers, self.host.planes, self.device, page)
        self.memcpy = Memcpy(self.host.planes, self.device, page)
        self.current = torch.cuda.current_stream()

    def force(self, choice: Any) -> None:
        """Let the controller take this (backend, cap, at once); None: what its rules say."""
        if choice is None:
            self.host.plan_transfer = self.plan
        else:
            self.host.plan_transfer = lambda *_, **__: TransferPlan(*choice, "forced")

    def device_slots(self, tokens: int) -> torch.Tensor:
        self.allocator.restore_state(self.state)
        return self.allocator.alloc(tokens)

    def behind(self, stream: Any, event: Any) -> None:
        """Record ``event`` on the controller's stream, behind the copy that was just started."""
        c = self.controller
        worker = c._loader if stream is c.load_stream else c._writer
        if c.last_plan.io_backend == "direct":
            worker._thread.submit(lambda: event.record(stream))
        else:
            event.record(stream)

    def start_load(self, path: Path_, host_slots: torch.Tensor, end: Any = None) -> Any:
        """Start a load; what lets the current stream wait for a layer. The slots are the same."""
        name, choice = path
        c, stream = self.controller, self.controller.load_stream
        if name in ("refcache", "forced"):
            self.force(choice)
            c.layer_done_counter.set_consumer(c.start_loading())
            if end is not None:
                self.behind(stream, end)
            return self.pool.get_key_buffer
        stream.wait_event(self.current.record_event())
        slots = c.load_queue[0].device_indices
        c.load_queue.clear()
        events = []
        with torch.cuda.stream(stream):
            if name == "memcpy":
                listed = self.memcpy.listed(host_slots, self.on_host)
                for layer in range(self.layers):
                    listed.issue(layer, to_host=False)
                    events.append(stream.record_event())
            else:
                on_device = host_slots.cuda(non_blocking=True)
                for layer in range(self.layers):
                    self.sglang.load_layer(layer, on_device, slots)
                    events.append(stream.record_event())
                on_device.record_stream(stream)
            if end is not None:
                end.record(stream)
        return lambda layer: self.current.wait_event(events[layer])

    def prefill(self, path: Path_, host_slots: torch.Tensor, model: Prefill) -> tuple[float, float]:
        """Wall milliseconds of a prefill with a load, and of the host's call."""
        self.allocator.restore_state(self.state)
        self.on_host = self.controller.load(host_slots).cpu()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        wait = self.start_load(path, host_slots)
        called = time.perf_counter()
        model.run(wait)
        torch.cuda.synchronize()
        took = time.perf_counter() - begin
        self.controller.ack_load_queue.clear()
        return took * 1e3, (called - begin) * 1e3

    def seen_right(self, host_slots: torch.Tensor, model: Prefill) -> bool:
        where = host_slots.cuda()
        for mirror, seen in zip(self.mirror, model.seen, strict=True):
            for layer in range(self.layers):
                want = mirror[layer][where].view(torch.int16)
                if not torch.equal(want, seen[layer].view(torch.int16)):
                    return False
        return True

    def slowed(self, path: Path_, host_slots: torch.Tensor, model: Prefill) -> tuple[float, float]:
        """By how much layers of the model are slowed beside a load, and the load's GB/s then."""
        self.allocator.restore_state(self.state)
        self.on_host = self.controller.load(host_slots).cpu()
        marks = [timed() for _ in range(4 * self.layers + 1)]
        torch.cuda.synchronize()
        begin, end = timed(), timed()
        begin.record(self.controller.load_stream)
        self.start_load(path, host_slots, end)
        time.sleep(0.004)
        for number in range(4 * self.layers):
            marks[number].record()
            model.graphs[number % self.layers].replay()
        marks[-1].record()
        torch.cuda.synchronize()
        self.controller._loader.drain()
        torch.cuda.synchronize()
        self.controller.ack_load_queue.clear()
        total = begin.elapsed_time(end)
        alone = [a.elapsed_time(b) for a, b in pairwise(marks[-9:])]
        inside = [
            a.elapsed_time(b) for a, b in pairwise(marks[1:]) if begin.elapsed_time(b) <= total
        ]
        speed = len(host_slots) * self.token_bytes / total / 1e6
        return statistics.fmean(inside or [0.0]) / statistics.fmean(alone), speed


def load_paths(rig: Rig, tries: bool) -> list[Path_]:
    paths: list[Path_] = [("refcache", None)]
    if rig.peers is not None:
        paths.append(("sglang", None))
    if rig.page > 1 and rig.host.layout == "layer_first":
        paths.append(("memcpy", None))
    if tries:
        paths += [("forced", ("kernel", cap, True)) for cap in (2, 3, 4, 6)]
        paths += [("forced", ("kernel", cap, False)) for cap in (3, 4)]
        paths += [("forced", ("direct", 0, False))] if rig.page > 1 else []
    return paths


def label(path: Path_) -> str:
    name, choice = path
    if name != "forced":
        return name
    return f"{choice[0]} {choice[1] or ''}{' at once' if choice[2] else ''}".strip()


def loads(rig: Rig, cells: list[tuple[int, int]], peak: float, tries: bool) -> None:
    state = rig.host.free_slots.clone()
    for tokens, new in cells:
        rig.host.free_slots = state.clone()
        host_slots = rig.host.alloc(tokens)
        model = Prefill(rig.device, rig.device_slots(tokens), new)
        paths = [*load_paths(rig, tries), ("load, then compute", ("kernel", 0, True))]
        alone: list[float] = []
        found: dict[str, list[tuple[float, float]]] = {label(p): [] for p in paths}
        right: dict[str, bool] = {}
        plans = {}
        for round_ in range(ROUNDS + 1):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            model.run()
            torch.cuda.synchronize()
            alone.append((time.perf_counter() - begin) * 1e3)
            for path in paths:
                name = label(path)
                real = ("forced", path[1]) if path[0] == "load, then compute" else path
                if round_ == 0:
                    for plane in (*rig.device, *model.seen):
                        plane.view(torch.int16).fill_(0x5A5A)
                took = (
                    then(rig, real, host_slots, model)
                    if path is not real
                    else rig.prefill(path, host_slots, model)
                )
                if round_ == 0:
                    right[name] = rig.seen_right(host_slots, model)
                    plans[name] = rig.controller.last_plan
                else:
                    found[name].append(took)
        compute, payload = statistics.median(alone[1:]), tokens * rig.token_bytes
        ideal = max(compute, payload / peak / 1e6)
        for path in paths:
            name = label(path)
            ms, host_ms = (statistics.median(x) for x in zip(*found[name], strict=True))
            row = {
                "what": "load", "kind": rig.kind, "page": rig.page, "H": tokens, "N": new,
                "path": name, "ms": ms, "ratio": ms / ideal, "host_ms": host_ms,
                "compute": compute, "ideal": ideal, "verified": right[name],
            }  # fmt: skip
            if name == "refcache":
                row["plan"] = plans[name].why
            if tokens >= 16384 and new == 512 and path[0] != "load, then compute":
                pairs = [rig.slowed(path, host_slots, model) for _ in range(3)]
                slow, row["gbps"] = (statistics.median(x) for x in zip(*pairs, strict=True))
                if slow:  # else the call returned when the load was over
                    row["slow"] = slow
            report(**row)
        del model
        rig.host.free_slots = state.clone()


def then(rig: Rig, path: Path_, host_slots: torch.Tensor, model: Prefill) -> tuple[float, float]:
    """Load everything with every multiprocessor, then compute."""
    rig.allocator.restore_state(rig.state)
    rig.controller.load(host_slots)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    wait = rig.start_load(path, host_slots)
    for layer in range(rig.layers):
        wait(layer)
    model.run()
    torch.cuda.synchronize()
    rig.controller.ack_load_queue.clear()
    return (time.perf_counter() - begin) * 1e3, 0.0


def write_paths(rig: Rig, tries: bool) -> list[Path_]:
    paths: list[Path_] = [("refcache", None)]
    if rig.peers is not None:
        paths.append(("sglang", None))
    if rig.page > 1 and rig.host.layout == "layer_first":
        paths.append(("memcpy", None))
    if tries:
        paths += [("forced", ("kernel", cap, False)) for cap in (1, 2, 3, 4, 0)]
        paths += [("forced", ("direct", 0, False))] if rig.page > 1 else []
    return paths


def start_write(rig: Rig, path: Path_, slots: torch.Tensor, on_host: Any, end: Any) -> Any:
    """Start a write; the host slots that it fills."""
    name, choice = path
    c, stream = rig.controller, rig.controller.write_stream
    if name in ("refcache", "forced"):
        rig.force(choice)
        host_slots = c.write(slots)
        rig.behind(stream, end)
        return host_slots
    host_slots = rig.host.alloc(len(slots))
    stream.wait_event(rig.current.record_event())
    with torch.cuda.stream(stream):
        if name == "memcpy":
            listed = rig.memcpy.listed(host_slots, on_host)
            for layer in range(rig.layers):
                listed.issue(layer, to_host=True)
        else:
            on_device = host_slots.cuda(non_blocking=True)
            rig.sglang.write(on_device, slots)
            on_device.record_stream(stream)
        end.record(stream)
    return host_slots


def written_right(rig: Rig, host_slots: torch.Tensor, slots: torch.Tensor) -> bool:
    where = host_slots.cuda()
    for plane, mirror, source in zip(rig.host.planes, rig.mirror, rig.device, strict=True):
        mirror.copy_(plane)
        for layer in range(rig.layers):
            got = mirror[layer][where].view(torch.int16)
            if not torch.equal(got, source[layer][slots].view(torch.int16)):
                return False
    return True


def writes(rig: Rig, tokens: int, tries: bool) -> None:
    for plane in rig.device:
        plane.view(torch.int16).random_(-30000, 30000)
    slots = rig.device_slots(tokens)
    on_host = slots.cpu()
    state = rig.host.free_slots.clone()
    paths = write_paths(rig, tries)
    right: dict[str, bool] = {}
    for path in paths:
        for plane in rig.host.planes:
            plane.view(torch.int16).fill_(0x5A5A)
        rig.host.free_slots = state.clone()
        filled = start_write(rig, path, slots, on_host, timed())
        rig.controller._writer.drain()
        torch.cuda.synchronize()
        right[label(path)] = written_right(rig, filled, slots)
    for kind, count in (("decode", 36), ("prefill", 60)):
        steps = Steps(kind)
        found: dict[str, list[tuple[float, ...]]] = {label(p): [] for p in paths}
        beside: dict[str, list[float]] = {label(p): [] for p in paths}
        for round_ in range(ROUNDS + 1):
            for path in paths:
                rig.host.free_slots = state.clone()
                marks = [timed() for _ in range(count + 1)]
                begin, end = timed(), timed()
                torch.cuda.synchronize()
                called = 0.0
                for number in range(count):
                    marks[number].record()
                    if number == 6:
                        begin.record(rig.controller.write_stream)
                        start = time.perf_counter()
                        start_write(rig, path, slots, on_host, end)
                        called = (time.perf_counter() - start) * 1e3
                    steps.graph.replay()
                marks[-1].record()
                torch.cuda.synchronize()
                rig.controller._writer.drain()
                torch.cuda.synchronize()
                rig.controller.ack_write_queue.clear()
                took = [a.elapsed_time(b) for a, b in pairwise(marks)]
                total = marks[6].elapsed_time(end)
                speed = tokens * rig.token_bytes / total / 1e6
                ends = [marks[6].elapsed_time(mark) for mark in marks[1:]]
                starts = [marks[6].elapsed_time(mark) for mark in marks[:-1]]
                after = [t for t, at in zip(took, starts, strict=True) if at > total + 5]
                alone = statistics.median(took[1:6] + after)
                inside = [t for t, at in zip(took[6:], ends[6:], strict=True) if at <= total]
                lost = sum(t - alone for t in took[6:])
                if round_:
                    found[label(path)].append((lost, speed, called, alone))
                    beside[label(path)] += [t / alone for t in inside]
        for path in paths:
            name = label(path)
            columns = zip(*found[name], strict=True)
            lost, speed, called, alone = (statistics.median(x) for x in columns)
            some = sorted(beside[name]) or [float("nan")]
            row = {
                "what": "write", "kind": rig.kind, "page": rig.page, "beside": kind,
                "path": name, "lost": lost, "gbps": speed, "host_ms": called,
                "p50": statistics.median(some), "p99": some[int(0.99 * (len(some) - 1))],
                "alone": alone, "verified": right[name],
            }  # fmt: skip
            if name == "refcache":
                rig.force(None)
                row["plan"] = rig.host.plan_transfer("auto", tokens, to_host=True).why
            report(**row)


def recipe(rig: Rig, tokens: int = 16384) -> None:
    """Other engines' copies, and the ops in their place, at their call sites' shapes; alone."""
    host, device, how = rig.host.planes, rig.device, (rig.page, "layer_first")
    layers = [plane[layer] for plane in device for layer in range(rig.layers)]  # as engines hold it
    slots = rig.device_slots(tokens)
    host_slots = rig.host.free_slots[:tokens]
    on_host, on_device = slots.cpu(), host_slots.cuda()
    flags = torch.zeros(rig.layers, dtype=torch.int64, device="cuda")
    ops = torch.ops.refcache

    def batched(to_host: bool) -> None:
        listed = rig.memcpy.listed(host_slots, on_host)
        for layer in range(rig.layers):
            listed.issue(layer, to_host=to_host)

    def by_layer() -> None:
        for layer in range(rig.layers):
            ops.load_per_layer(layers, host, on_device, slots, layer, *how)

    pairs: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
        (
            "sglang transfer_kv_all_layer", lambda: rig.sglang.write(on_device, slots),
            lambda: ops.backup_all_layer(host, layers, on_device, slots, *how),
        ),
        (
            "sglang transfer_kv_per_layer, all layers",
            lambda: [rig.sglang.load_layer(i, on_device, slots) for i in range(rig.layers)],
            by_layer,
        ),
        (
            "vllm batched memcpy, to the host", lambda: batched(to_host=True),
            lambda: ops.backup_all_layer(host, device, on_device, slots, *how),
        ),
        (
            "vllm batched memcpy, to the device", lambda: batched(to_host=False),
            lambda: ops.load_layers(
                device, host, on_device, slots, flags, 0, rig.layers, *how
            ),
        ),
    ]  # fmt: skip
    for call, theirs, ours in pairs:
        row: dict[str, Any] = {"what": "recipe", "kind": rig.kind, "page": rig.page, "call": call}
        for name, copy in (("theirs", theirs), ("ours", ours)):
            copy()
            found = []
            for _ in range(3):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                copy()
                called = time.perf_counter()
                torch.cuda.synchronize()
                found.append(((time.perf_counter() - begin) * 1e3, (called - begin) * 1e3))
            row[name], row[f"{name} host"] = (
                statistics.median(x) for x in zip(*found, strict=True)
            )
        report(**row)


def memcpy_peaks() -> dict[str, float]:
    n = 1 << 30
    host = torch.empty(n, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(n, dtype=torch.uint8, device="cuda")
    peaks = {}
    for name, to, of in (("d2h", host, device), ("h2d", device, host)):
        times = []
        for _ in range(5):
            begin, end = timed(), timed()
            begin.record()
            to.copy_(of, non_blocking=True)
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        peaks[name] = n / statistics.median(times) / 1e6
    report(what="peak", **peaks)
    return peaks


LOADS = [(256, 512), (4096, 512), (4096, 2048), (16384, 512), (16384, 2048), (16384, 4096)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("peers", type=Path)
    parser.add_argument("--steps", nargs="*", default=["load", "write"])
    parser.add_argument("--kinds", nargs="*", default=["mha", "mla"])
    parser.add_argument("--pages", nargs="*", type=int, default=[1, 16, 64])
    parser.add_argument("--cells", nargs="*", default=[f"{h}:{n}" for h, n in LOADS])
    parser.add_argument("--layout", default="layer_first")
    parser.add_argument("--tries", action="store_true")
    args = parser.parse_args()
    torch.cuda.set_stream(torch.cuda.Stream())
    peers = None if args.peers.name == "none" else args.peers
    peaks = memcpy_peaks()
    cells = [(int(h), int(n)) for h, n in (cell.split(":") for cell in args.cells)]
    steps: dict[str, Callable[[Rig], None]] = {
        "load": lambda rig: loads(rig, cells, peaks["h2d"], args.tries),
        "write": lambda rig: writes(rig, 16384, args.tries),
        "recipe": recipe,
    }
    for kind in args.kinds:
        for page in args.pages:
            rig = Rig(kind, page, peers, args.layout)
            for step in args.steps:
                steps[step](rig)
                about = {
                    "device": torch.cuda.get_device_name(),
                    "torch": torch.__version__,
                    "triton": triton.__version__,
                    "layout": args.layout,
                }
                args.out.write_text(json.dumps({**about, "rows": ROWS}, indent=1))
            rig.host.release()
            del rig


if __name__ == "__main__":
    main()
