"""Forward passes on two tiers: launched on a stream of the simulated machine, after their loads.

Their bytes are compared when they run (:mod:`refcache.oracle.drivers.hicache.content`).
"""

from collections.abc import Sequence
from typing import Any

from refcache.controller.layer_events import NUM_COUNTERS
from refcache.oracle.drivers.hicache.content import HostContent
from refcache.oracle.drivers.tree.forwards import Row
from refcache.oracle.drivers.tree.request import Request
from refcache.oracle.program.trial import Trial
from refcache.oracle.target.config import HiCacheParts
from refcache.oracle.view.host import TransferView
from refcache.runtime import SimulatedRuntime


class LaunchedForwards:
    """Two tiers: forwards on a stream of their own, and the loads that they wait for.

    Attributes:
        stream: where forwards run.
        consumer: the load that the next forward waits for, layer by layer; -1 for none.
        loads: those that were started since the host last knew that all were finished.
    """

    def __init__(
        self,
        trial: Trial,
        machine: SimulatedRuntime,
        stream: Any,
        content: HostContent,
        parts: HiCacheParts,
    ) -> None:
        self.trial, self.machine, self.stream, self.content = trial, machine, stream, content
        self.tree, self.counter = parts.tree, parts.counter
        self.consumer, self.loads = -1, 0
        self._results = machine.Event()

    def run(
        self, row: list[int], start: int, tokens: tuple[int, ...], extra_key: str | None
    ) -> None:
        self.start_loads()  # the scheduler does so before every batch
        machine = self.machine

        def forward() -> None:
            with machine.stream(self.stream):
                self.stream.wait_stream(machine.default_stream())
                self.counter.set_consumer(self.consumer)
                self.content.forward(machine, row, start, tokens, extra_key, self.trial.note)
                self.counter.set_consumer(-1)

        self.trial.call(forward)
        self.consumer = -1
        self._results = machine.Event()
        self._results.record(self.stream)
        if not self.trial.has("fences"):
            self.wait()
            self.loads = 0  # it waited for the newest load, and loads finish in order

    def read(self, req: Request, row: Row) -> None:
        """Rows are compared when the forward runs; see ``HostContent.forward``."""

    def wait(self) -> None:
        self.trial.call(self._results.synchronize)

    def forget(self) -> None: ...

    def start_loads(self) -> None:
        """``ready_to_load_host_cache``; without ``load_slots`` never a fourth load at a time."""
        if self.loads == NUM_COUNTERS and not self.trial.has("load_slots"):
            self.trial.call(self.machine.synchronize)
            self.loads = 0
        index = self.trial.call(self.tree.ready_to_load_host_cache)
        if index >= 0:
            self.consumer = index
            self.loads += 1

    def finish(self) -> None:
        """Start what was asked for, and let everything run to its end."""
        self.start_loads()
        self.trial.call(self.machine.synchronize)
        self.loads = 0

    def acknowledged(self, transfers: Sequence[TransferView]) -> None:
        """After a poll: without a load in flight, all are finished."""
        if all(t.kind != "load" for t in transfers):
            self.loads = 0
