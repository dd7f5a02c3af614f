"""The ordering edges of a two-tier cache, each with a small program in which only it orders two
accesses.

In a serving loop most edges are implied by another one (the host waits for results, the other
getter has waited, an extend came before the decode), so that losing one of them changes nothing
there. Here nothing else stands in: with the edge every order of the program is free of races;
without it each order must be reported. Programs have one layer and at most six launches, so all
their orders are run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from refcache.allocator import TokenToKVPoolAllocator
from refcache.controller import HiCacheController
from refcache.errors import RefcacheError, UnknownName
from refcache.pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool, host_pool_for
from refcache.runtime import Region, SimulatedRuntime, Tracker, all_orders
from refcache.runtime.control import MachineWithout
from refcache.types import ServerArgs

SLOTS = 5  # of the device pools
Driver = Callable[[SimulatedRuntime, str], int]


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


@dataclass(frozen=True)
class Edge:
    """An ordering edge.

    Attributes:
        name: what the command line calls it.
        sentence: who waits for what, and why.
        waiter, source: the wait that is left out, as for
            :class:`~refcache.runtime.control.MachineWithout`.
        program: where nothing else orders the two accesses.
        mla, io_backend: of the bench.
    """

    name: str
    sentence: str
    waiter: str
    source: str
    program: Callable[[Bench], None]
    mla: bool = False
    io_backend: str = "kernel"

    def run(self, driver: Driver, removed: bool, stop: bool = False) -> SimulatedRuntime:
        """Run the program once, to its end; the machine's tracker has the reports.

        Raises:
            RaceFound: the first report, with ``stop``.
        """
        machine = self._machine(driver, removed, stop)
        self._issue(machine)
        machine.synchronize()
        return machine

    def orders(self, removed: bool) -> list[list[RefcacheError]]:
        """The reports of every order in which the program's launches can run."""
        machines: list[SimulatedRuntime] = []

        def machine(driver: Driver) -> SimulatedRuntime:
            machines.append(self._machine(driver, removed, stop=False))
            return machines[-1]

        for _ in all_orders(self._issue, machine):
            pass
        return [m.tracker.reports for m in machines if m.tracker is not None]

    def _machine(self, driver: Driver, removed: bool, stop: bool) -> SimulatedRuntime:
        if removed:
            return MachineWithout(self.waiter, self.source, driver, Tracker(stop))
        return SimulatedRuntime(driver, Tracker(stop))

    def _issue(self, machine: SimulatedRuntime) -> None:
        self.program(Bench(machine, self.mla, self.io_backend))


def _write_after_compute(bench: Bench) -> None:
    slots = taken(bench.allocator.alloc(1))
    bench.compute(slots)
    bench.controller.write(slots)


def _load(bench: Bench) -> None:
    bench.start_load()


def _key_getter(bench: Bench) -> None:
    slots = bench.start_load()
    bench.pool.get_key_buffer(0)
    bench.attend(0, slots)


def _value_getter(bench: Bench) -> None:
    slots = bench.start_load()
    bench.pool.get_value_buffer(0)
    bench.attend(1, slots)


def _load_over_running_forward(bench: Bench) -> None:
    bench.controller.register_forward_stream(bench.forward_stream)
    slots = taken(bench.allocator.alloc(SLOTS))
    with bench.machine.stream(bench.forward_stream):
        bench.compute(slots)
    bench.controller.evict_device(slots)
    bench.start_load()


def _forward_reads_row(bench: Bench) -> None:
    bench.rows.write((0, slice(0, 1)), torch.tensor([1]))
    bench.forward_stream.wait_stream(bench.machine.default_stream())
    with bench.machine.stream(bench.forward_stream):
        bench.machine.launch("page_table", lambda: None, [Region(bench.rows, 0, 0, 0)])


def _load_what_was_written(bench: Bench) -> None:
    host_slots = taken(bench.controller.write(taken(bench.allocator.alloc(1))))
    bench.controller.ack_write_queue[0].finish_event.synchronize()
    bench.start_load(host_slots)


def _compute_over_what_was_written(bench: Bench) -> None:
    slots = taken(bench.allocator.alloc(SLOTS))
    bench.controller.write(slots)
    bench.controller.ack_write_queue[0].finish_event.synchronize()
    bench.controller.evict_device(slots)
    bench.compute(taken(bench.allocator.alloc(SLOTS)))


def _write_over_what_was_loaded(bench: Bench) -> None:
    host_slots = taken(bench.host.alloc(1))
    bench.start_load(host_slots)
    bench.controller.ack_load_queue[0].finish_event.synchronize()
    bench.write_again(host_slots, taken(bench.allocator.alloc(1)))


def _four_loads(bench: Bench) -> None:
    host_slots = taken(bench.host.alloc(1))
    bench.start_load(host_slots)
    for _ in range(3):
        bench.start_load()
    # The fourth load could start, so the first one is done and its host slot may be reused.
    bench.write_again(host_slots, taken(bench.allocator.alloc(1)))


def _decode_after_load(bench: Bench) -> None:
    slots = bench.start_load()
    bench.controller.layer_done_counter.set_consumer(-1)
    bench.controller.layer_done_counter.wait_all()
    bench.pool.get_key_buffer(0)
    bench.attend(0, slots)


_ALL = (
    Edge(
        "write-start",
        "a write waits for what its caller's stream has computed",
        "write", "default", _write_after_compute,
    ),
    Edge(
        "load-start",
        "a load waits for its caller's stream, which moves its index tensors",
        "load", "default", _load,
    ),
    Edge(
        "key-getter",
        "reading K of a layer waits for the layer's load",
        "default", "load", _key_getter,
    ),
    Edge(
        "value-getter",
        "reading V of a layer waits for the layer's load",
        "default", "load", _value_getter,
    ),
    Edge(
        "mla-getter",
        "reading the latent rows of a layer waits for the layer's load",
        "default", "load", _key_getter, mla=True,
    ),
    Edge(
        "load-fence",
        "a load waits for the forward stream, which may still write slots that were given back",
        "load", "forward", _load_over_running_forward,
    ),
    Edge(
        "forward-schedule",
        "a forward waits for the schedule stream, which writes request rows",
        "forward", "default", _forward_reads_row,
    ),
    Edge(
        "host-reuse-d2h",
        "host slots that a write fills are used again only after its finish event",
        "main", "write", _load_what_was_written,
    ),
    Edge(
        "device-reuse-d2h",
        "device slots that a write reads are used again only after its finish event",
        "main", "write", _compute_over_what_was_written,
    ),
    Edge(
        "host-reuse-h2d",
        "host slots that a load reads are used again only after its finish event",
        "main", "load", _write_over_what_was_loaded,
    ),
    Edge(
        "producer-reuse",
        "a slot of the layer counter is taken again only after its load's finish event",
        "main", "load", _four_loads, io_backend="direct",
    ),
    Edge(
        "decode-load",
        "a decode after a load, with no waits by layer, waits for the whole load",
        "default", "load", _decode_after_load,
    ),
)  # fmt: skip

EDGES: dict[str, Edge] = {edge.name: edge for edge in _ALL}


def edge(name: str) -> Edge:
    """The edge of that name.

    Raises:
        UnknownName: there is none.
    """
    if name not in EDGES:
        raise UnknownName("edge", name, EDGES)
    return EDGES[name]
