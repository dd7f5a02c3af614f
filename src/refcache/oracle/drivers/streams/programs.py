"""The bench and the programs of the ordering edges: in each, one edge alone orders two accesses.

Programs have one layer and at most six launches. :mod:`refcache.oracle.drivers.streams.edges` says
which edge each one is for.
"""

from typing import Any

import torch

from refcache.allocator import TokenToKVPoolAllocator
from refcache.controller import HiCacheController
from refcache.pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool, host_pool_for
from refcache.runtime import Region, SimulatedRuntime
from refcache.types import ServerArgs

SLOTS = 5  # of the device pools


class Bench:
    """One-layer pools (page size 1) and a controller on one machine."""

    def __init__(self, machine: SimulatedRuntime, mla: bool, io_backend: str) -> None:
        self.machine = machine
        self.pool: Any
        if mla:
            self.pool = MLATokenToKVPool(SLOTS, 1, torch.int64, 1, 1, 1, "cpu", runtime=machine)
        else:
            self.pool = MHATokenToKVPool(SLOTS, 1, torch.int64, 1, 1, 1, "cpu", runtime=machine)
        self.rows = ReqToTokenPool(1, 2, runtime=machine)
        self.allocator = TokenToKVPoolAllocator(
            SLOTS, torch.int64, "cpu", self.pool, runtime=machine
        )
        self.host = host_pool_for(self.pool, ServerArgs(hicache_ratio=4))
        self.controller = HiCacheController(self.allocator, self.host, 1, io_backend=io_backend)
        self.forward_stream = machine.Stream("forward")

    def compute(self, slots: torch.Tensor) -> None:
        """A forward writes the rows of ``slots``, on the current stream."""
        row = torch.zeros(len(slots), 1, 1, dtype=torch.int64)
        self.pool.set_kv_buffer(0, slots, *[row] * len(self.pool.planes))

    def attend(self, plane: int, slots: torch.Tensor) -> None:
        """A forward reads rows whose getter was called."""
        self.machine.launch("attention", lambda: None, [self.pool.region(plane, 0, slots)])

    def start_load(self, host_slots: torch.Tensor | None = None) -> torch.Tensor:
        """Load one (by default new) host slot; its device slot."""
        if host_slots is None:
            host_slots = taken(self.host.alloc(1))
        slots = taken(self.controller.load(host_slots))
        self.controller.layer_done_counter.set_consumer(self.controller.start_loading())
        return slots

    def write_again(self, host_slots: torch.Tensor, slots: torch.Tensor) -> None:
        """Give host slots back and let a write take the same ones."""
        others = self.host.alloc(self.host.available_size())
        self.controller.evict_host(host_slots)
        assert taken(self.controller.write(slots)).tolist() == host_slots.tolist()
        self.controller.evict_host(taken(others))


def taken(slots: torch.Tensor | None) -> torch.Tensor:
    """Slots of an allocation that cannot fail here."""
    assert slots is not None
    return slots


def write_after_compute(bench: Bench) -> None:
    """A forward writes slots, and a write copies them."""
    slots = taken(bench.allocator.alloc(1))
    bench.compute(slots)
    bench.controller.write(slots)


def write_behind_running_forward(bench: Bench) -> None:
    """A write starts, from the schedule stream, while a forward computes the rows it copies."""
    bench.controller.register_forward_stream(bench.forward_stream)
    slots = taken(bench.allocator.alloc(1))
    with bench.machine.stream(bench.forward_stream):
        bench.compute(slots)
    bench.controller.write(slots)


def load(bench: Bench) -> None:
    """One load."""
    bench.start_load()


def key_getter(bench: Bench) -> None:
    """K is read after its getter was called."""
    slots = bench.start_load()
    bench.pool.get_key_buffer(0)
    bench.attend(0, slots)


def value_getter(bench: Bench) -> None:
    """V is read after its getter was called."""
    slots = bench.start_load()
    bench.pool.get_value_buffer(0)
    bench.attend(1, slots)


def write(bench: Bench) -> None:
    """One write."""
    bench.controller.write(taken(bench.allocator.alloc(1)))


def slots_computed_late(bench: Bench) -> None:
    """A write of slots whose numbers an allocation on the device has just computed."""
    slots = taken(bench.allocator.alloc(1))
    bench.machine.launch("alloc", lambda: None, writes=[Region(slots, 0, 0, 0)])
    bench.controller.write(slots)


def load_over_running_forward(bench: Bench) -> None:
    """A load gets slots that were given back while a forward writes them."""
    bench.controller.register_forward_stream(bench.forward_stream)
    slots = taken(bench.allocator.alloc(SLOTS))
    with bench.machine.stream(bench.forward_stream):
        bench.compute(slots)
    bench.controller.evict_device(slots)
    bench.start_load()


def forward_reads_row(bench: Bench) -> None:
    """A row is written, then read on the forward stream."""
    bench.rows.write((0, slice(0, 1)), torch.tensor([1]))
    bench.forward_stream.wait_stream(bench.machine.default_stream())
    with bench.machine.stream(bench.forward_stream):
        bench.machine.launch("page_table", lambda: None, [Region(bench.rows, 0, 0, 0)])


def row_is_given_on(bench: Bench) -> None:
    """A forward reads a row, which the next request is given."""
    with bench.machine.stream(bench.forward_stream):
        bench.machine.launch("page_table", lambda: None, [Region(bench.rows, 0, 0, 0)])
        rows_read = bench.forward_stream.record_event()
    bench.machine.current_stream().wait_event(rows_read)
    bench.rows.write((0, slice(0, 1)), torch.tensor([1]))


def load_what_was_written(bench: Bench) -> None:
    """Host slots are written, then loaded from."""
    host_slots = taken(bench.controller.write(taken(bench.allocator.alloc(1))))
    bench.controller.ack_write_queue[0].finish_event.synchronize()
    bench.start_load(host_slots)


def compute_over_what_was_written(bench: Bench) -> None:
    """A forward gets slots that a write has read."""
    slots = taken(bench.allocator.alloc(SLOTS))
    bench.controller.write(slots)
    bench.controller.ack_write_queue[0].finish_event.synchronize()
    bench.controller.evict_device(slots)
    bench.compute(taken(bench.allocator.alloc(SLOTS)))


def write_over_what_was_loaded(bench: Bench) -> None:
    """A write gets host slots that a load has read."""
    host_slots = taken(bench.host.alloc(1))
    bench.start_load(host_slots)
    bench.controller.ack_load_queue[0].finish_event.synchronize()
    bench.write_again(host_slots, taken(bench.allocator.alloc(1)))


def load_slot_used_again(bench: Bench) -> None:
    """Two loads through one load slot; then a write gets the host slots of the first."""
    bench.controller.layer_done_counter.num_counters = 1
    host_slots = taken(bench.host.alloc(1))
    bench.start_load(host_slots)
    bench.start_load()
    # The second load could start, so the first one is done and its host slot may be reused.
    bench.write_again(host_slots, taken(bench.allocator.alloc(1)))


def decode_after_load(bench: Bench) -> None:
    """A decode, without a load of its own, reads what was loaded."""
    slots = bench.start_load()
    bench.controller.layer_done_counter.set_consumer(-1)
    bench.controller.layer_done_counter.wait_all()
    bench.pool.get_key_buffer(0)
    bench.attend(0, slots)


def graph_during_load(bench: Bench) -> None:
    """A CUDA graph, captured when no load was queued, is replayed while one is on its way.

    A replay issues the captured launches and runs no host code: the getters' waits were those of
    the capture, which had none. So a replay must come after the whole load (or the step must run
    without the graph, layer by layer).
    """
    bench.pool.get_key_buffer(0)  # the capture: there is nothing to wait for
    slots = bench.start_load()
    bench.controller.layer_done_counter.wait_all()
    bench.attend(0, slots)  # the replay


def write_v_after_reading_it(bench: Bench) -> None:
    """V of some slots is read, then written on the alternative stream."""
    slots = torch.tensor([1])
    bench.attend(1, slots)
    bench.pool.capture_mode = True
    bench.compute(slots)


def read_v_after_writing_it(bench: Bench) -> None:
    """V is written on the alternative stream, then read."""
    slots = torch.tensor([1])
    bench.pool.capture_mode = True
    bench.compute(slots)
    bench.attend(1, slots)
