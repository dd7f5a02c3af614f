"""Forward passes, as a bench makes them: they write the KV of new tokens and read the whole row.

On one tier a forward is played at once, with a table of what each slot holds. On two tiers it is
launched on a stream of the simulated machine, and its bytes are compared when it runs.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from refcache.controller.layer_events import NUM_COUNTERS
from refcache.oracle.drivers.hicache.content import HostContent
from refcache.oracle.drivers.tree.request import Request
from refcache.oracle.program.trial import Trial
from refcache.oracle.target.config import HiCacheParts
from refcache.oracle.view.host import TransferView
from refcache.runtime import SimulatedRuntime

Row = Callable[[Request], list[int]]


class Forwards(Protocol):
    """What a bench and its requests ask of forwards."""

    def run(
        self, row: list[int], start: int, tokens: tuple[int, ...], extra_key: str | None
    ) -> None:
        """Write the KV of tokens ``start ...`` into the slots of ``row``; C-READ when it reads."""

    def read(self, req: Request, row: Row) -> None:
        """C-READ: each slot with KV holds the request's own prefix, where that is known now."""

    def wait(self) -> None:
        """The host waits for the results of the last forward."""

    def forget(self) -> None:
        """After a reset no slot holds anything."""


class PlayedForwards:
    """One tier. ``kv``: what each slot holds, a namespace and the tokens up to the slot's own."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.kv: dict[int, tuple[str | None, tuple[int, ...]]] = {}

    def run(
        self, row: list[int], start: int, tokens: tuple[int, ...], extra_key: str | None
    ) -> None:
        for position in range(start, len(row)):
            self.kv[row[position]] = (extra_key, tokens[: position + 1])

    def read(self, req: Request, row: Row) -> None:
        tokens = req.tokens
        for position, slot in enumerate(row(req)[: req.computed]):
            expected = (req.extra_key, tokens[: position + 1])
            self.trial.require(
                self.kv.get(slot) == expected,
                "C-READ",
                f"{req.rid} reads token {position} from slot {slot}, which holds the KV of "
                f"{self.kv.get(slot)}; expected {expected}",
            )

    def wait(self) -> None: ...

    def forget(self) -> None:
        self.kv.clear()


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
