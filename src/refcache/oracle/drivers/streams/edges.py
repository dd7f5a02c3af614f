"""The ordering edges of a two-tier cache, each with a small program in which only it orders two
accesses.

In a serving loop most edges are implied by another one (the host waits for results, the other
getter has waited, an extend came before the decode), so that losing one of them changes nothing
there. Here nothing else stands in: with the edge every order of the program is free of races;
without it each order must be reported. Programs have one layer and at most six launches, so all
their orders are run.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from refcache.errors import RefcacheError, UnknownName

if TYPE_CHECKING:
    from refcache.runtime import SimulatedRuntime

Driver = Callable[["SimulatedRuntime", str], int]


@dataclass(frozen=True)
class Edge:
    """An ordering edge.

    Attributes:
        name: what the command line calls it.
        sentence: who waits for what, and why.
        waiter, source: the wait that is left out, as for
            :class:`~refcache.runtime.simulated.without.MachineWithout`.
        program: where nothing else orders the two accesses; a function of
            :mod:`refcache.oracle.drivers.streams.programs`.
        mla, io_backend: of the bench.
    """

    name: str
    sentence: str
    waiter: str
    source: str
    program: str
    mla: bool = False
    io_backend: str = "kernel"

    def run(self, driver: Driver, removed: bool, stop: bool = False) -> "SimulatedRuntime":
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
        from refcache.runtime import all_orders

        machines: list[SimulatedRuntime] = []

        def machine(driver: Driver) -> "SimulatedRuntime":
            machines.append(self._machine(driver, removed, stop=False))
            return machines[-1]

        for _ in all_orders(self._issue, machine):
            pass
        return [m.tracker.reports for m in machines if m.tracker is not None]

    def _machine(self, driver: Driver, removed: bool, stop: bool) -> "SimulatedRuntime":
        """A machine with the edge, or without it."""
        from refcache.runtime import SimulatedRuntime, Tracker
        from refcache.runtime.simulated.without import MachineWithout

        if removed:
            return MachineWithout(self.waiter, self.source, driver, Tracker(stop))
        return SimulatedRuntime(driver, Tracker(stop))

    def _issue(self, machine: "SimulatedRuntime") -> None:
        programs = importlib.import_module("refcache.oracle.drivers.streams.programs")
        getattr(programs, self.program)(programs.Bench(machine, self.mla, self.io_backend))


_ALL = (
    Edge(
        "write-start",
        "a write waits for what its caller's stream has computed",
        "write", "default", "write_after_compute",
    ),
    Edge(
        "write-fence",
        "a write waits for the forward stream, which computes rows that a finished request keeps",
        "write", "forward", "write_behind_running_forward",
    ),
    Edge(
        "load-start",
        "a load waits for its caller's stream, which moves its index tensors",
        "load", "default", "load",
    ),
    Edge(
        "key-getter",
        "reading K of a layer waits for the layer's load",
        "default", "load", "key_getter",
    ),
    Edge(
        "value-getter",
        "reading V of a layer waits for the layer's load",
        "default", "load", "value_getter",
    ),
    Edge(
        "mla-getter",
        "reading the latent rows of a layer waits for the layer's load",
        "default", "load", "key_getter", mla=True,
    ),
    Edge(
        "load-fence",
        "a load waits for the forward stream, which may still write slots that were given back",
        "load", "forward", "load_over_running_forward",
    ),
    Edge(
        "forward-schedule",
        "a forward waits for the schedule stream, which writes request rows",
        "forward", "default", "forward_reads_row",
    ),
    Edge(
        "row-reuse",
        "request rows are written again only after the forward has read its page table",
        "default", "forward", "row_is_given_on",
    ),
    Edge(
        "host-reuse-d2h",
        "host slots that a write fills are used again only after its finish event",
        "main", "write", "load_what_was_written",
    ),
    Edge(
        "device-reuse-d2h",
        "device slots that a write reads are used again only after its finish event",
        "main", "write", "compute_over_what_was_written",
    ),
    Edge(
        "host-reuse-h2d",
        "host slots that a load reads are used again only after its finish event",
        "main", "load", "write_over_what_was_loaded",
    ),
    Edge(
        "producer-reuse",
        "a slot of the layer counter is taken again only after its load's finish event",
        "main", "load", "load_slot_used_again",
    ),
    Edge(
        "decode-load",
        "a decode after a load, with no waits by layer, waits for the whole load",
        "default", "load", "decode_after_load",
    ),
    Edge(
        "graph-load",
        "a CUDA graph, whose getters ran when it was captured, is replayed behind the whole load",
        "default", "load", "graph_during_load",
    ),
    Edge(
        "alt-start",
        "the alternative stream writes V behind what the forward's stream did before",
        "alt", "default", "write_v_after_reading_it",
    ),
    Edge(
        "alt-join",
        "what follows on the forward's stream waits for V, which the alternative stream writes",
        "default", "alt", "read_v_after_writing_it",
    ),
)  # fmt: skip

_ENGINE = (
    Edge(
        "engine-write-start",
        "the thread of a write waits for what its caller's stream has computed",
        "write indices", "default", "write_after_compute", io_backend="direct",
    ),
    Edge(
        "engine-load-fence",
        "the copy engine's load waits for the forward stream as of the call",
        "load", "forward", "load_over_running_forward", io_backend="direct",
    ),
    Edge(
        "engine-slots-computed",
        "the copy of the device slots to the host waits for the stream that computes them",
        "write indices", "default", "slots_computed_late", io_backend="direct",
    ),
    Edge(
        "engine-slots-read",
        "the thread lists the copies when the device slots are on the host",
        "write thread", "write indices", "write", io_backend="direct",
    ),
    Edge(
        "engine-flag",
        "reading a layer waits for the flag that the copy engine's stream writes",
        "default", "load", "key_getter", io_backend="direct",
    ),
    Edge(
        "engine-decode-load",
        "a decode after a load waits for what the thread records behind the last layer",
        "default", "load", "decode_after_load", io_backend="direct",
    ),
    Edge(
        "engine-host-reuse-d2h",
        "host slots of a write are used again only after the event that its thread records",
        "main", "write", "load_what_was_written", io_backend="direct",
    ),
    Edge(
        "engine-device-reuse-d2h",
        "device slots of a write are used again only after the event that its thread records",
        "main", "write", "compute_over_what_was_written", io_backend="direct",
    ),
    Edge(
        "engine-host-reuse-h2d",
        "host slots of a load are used again only after the event that its thread records",
        "main", "load", "write_over_what_was_loaded", io_backend="direct",
    ),
    Edge(
        "engine-producer-reuse",
        "a load slot is taken again only when its thread has recorded the end, and it is reached",
        "main", "load", "load_slot_used_again", io_backend="direct",
    ),
)  # fmt: skip

EDGES: dict[str, Edge] = {edge.name: edge for edge in _ALL + _ENGINE}


def edge(name: str) -> Edge:
    """The edge of that name.

    Raises:
        UnknownName: there is none.
    """
    if name not in EDGES:
        raise UnknownName("edge", name, EDGES)
    return EDGES[name]
