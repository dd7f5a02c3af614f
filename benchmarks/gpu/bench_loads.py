"""Loads through the controller: one launch a layer against one launch that announces each layer.

A step of ``bench_ops.py``. Timed from where the load may begin until a consumer stream has waited
for every layer; the rows of a load are compared before it is timed.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch

from refcache.allocator import TokenToKVPoolAllocator
from refcache.controller import HiCacheController
from refcache.pool import MHATokenToKVPool, MLATokenToKVPool, host_pool_for
from refcache.runtime import CudaRuntime
from refcache.types import ServerArgs

TOKENS = (16, 64, 256, 512, 1024, 2048, 4096)
SLEEP = 30_000_000  # cycles: the host has issued everything before the load begins
ROUNDS = 11


class Rig:
    """Pools of one shape, filled with random rows, and a controller on the real machine."""

    def __init__(self, shape: str) -> None:
        machine, size = CudaRuntime(), max(TOKENS)
        common = {"device": "cuda", "runtime": machine}
        if shape == "mla":
            self.pool: Any = MLATokenToKVPool(size, 1, torch.bfloat16, 512, 64, 61, **common)
        else:
            self.pool = MHATokenToKVPool(size, 1, torch.bfloat16, 8, 128, 32, **common)
        self.allocator = TokenToKVPoolAllocator(
            size, torch.bfloat16, "cuda", self.pool, runtime=machine
        )
        self.host = host_pool_for(self.pool, ServerArgs(page_size=1, hicache_ratio=1.1))
        self.controller = HiCacheController(self.allocator, self.host, 1, io_backend="kernel")
        self.consumer = torch.cuda.Stream()
        for plane in self.pool.planes:
            plane.buffer.view(torch.int16).random_()

    def back_up(self, tokens: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Host slots that hold rows, and the rows."""
        slots = self.allocator.alloc(tokens)
        rows = [plane.buffer[:, slots].clone() for plane in self.pool.planes]
        host_slots = self.controller.write(slots)
        self.controller.ack_write_queue.pop().finish_event.synchronize()
        self.controller.evict_device(slots)
        return host_slots, rows

    def load(self, host_slots: torch.Tensor, busy: bool) -> tuple[float, torch.Tensor]:
        """Milliseconds of one load, and its device slots (which are given back)."""
        new = self.controller.load(host_slots)
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if busy:
            torch.cuda._sleep(SLEEP)
        start.record()
        self.controller.layer_done_counter.set_consumer(self.controller.start_loading())
        with torch.cuda.stream(self.consumer):
            for layer in range(self.pool.layer_num):
                self.pool.get_key_buffer(layer)
            end.record()
        torch.cuda.synchronize()
        self.controller.ack_load_queue.clear()
        self.controller.evict_device(new)
        return start.elapsed_time(end), new

    def verified(self, host_slots: torch.Tensor, rows: list[torch.Tensor]) -> bool:
        for plane in self.pool.planes:
            plane.buffer.view(torch.int16).fill_(0x5555)
        _, new = self.load(host_slots, busy=True)
        return all(
            torch.equal(plane.buffer[:, new].view(torch.int16), want.view(torch.int16))
            for plane, want in zip(self.pool.planes, rows, strict=True)
        )


def controller_loads(report: Callable[..., None]) -> None:
    for shape in ("mla", "8b"):
        rig = Rig(shape)
        for tokens in TOKENS:
            host_slots, rows = rig.back_up(tokens)
            bytes_ = sum(want.nbytes for want in rows)
            for name, limit in (("layers", 0), ("at once", 1 << 40)):
                rig.host.small_load_bytes = limit
                ok = rig.verified(host_slots, rows)
                row = {}
                for state, busy in (("busy", True), ("idle", False)):
                    took = statistics.median(rig.load(host_slots, busy)[0] for _ in range(ROUNDS))
                    row[f"gbps_{state}"] = bytes_ / took / 1e6
                    row[f"us_{state}"] = took * 1e3
                layer_bytes = bytes_ // rig.pool.layer_num
                report(
                    f"controller load {shape} {tokens} tokens {name}",
                    layer_bytes=layer_bytes, **row, verified=ok,
                )  # fmt: skip
            rig.controller.evict_host(host_slots)
        rig.host.release()
