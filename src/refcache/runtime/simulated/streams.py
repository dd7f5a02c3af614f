"""The simulated machine's streams, events, host threads, locks and queues.

They hold state; what happens to it is the machine's doing
(:class:`refcache.runtime.simulated.machine.SimulatedRuntime`).
"""

from collections import deque
from collections.abc import Callable
from queue import Empty
from typing import Any, Protocol

import torch

from refcache.runtime.simulated.tracker import Access, Actor, Clock, Held, Touch, join


class Machine(Protocol):
    """What streams, events and host threads ask of their machine: each is a call of CUDA's on it.

    ``host``: the host thread that is calling now.
    """

    host: "HostThread"

    def current_stream(self) -> "SimulatedStream": ...
    def Event(self) -> "SimulatedEvent": ...
    def _capture(self, stream: "SimulatedStream") -> "Capture": ...
    def _wait(self, stream: "SimulatedStream", capture: "Capture | None") -> None: ...
    def _query(self, capture: "Capture | None") -> bool: ...
    def _block(self, capture: "Capture | None") -> None: ...
    def _keep(self, promise: Any, capture: "Capture") -> None: ...
    def _yield(self, point: str, until: "Capture | None" = None) -> None: ...
    def _submit(self, thread: Any, job: Callable[[], object]) -> None: ...
    def _drain(self, thread: Any) -> None: ...


class Launch:
    """A launch that has not run."""

    __slots__ = ("access", "fn", "indices", "late")

    def __init__(
        self,
        access: Access,
        fn: Callable[..., object],
        late: list[Touch],
        indices: list[Held] | tuple[torch.Tensor, ...],
    ) -> None:
        self.access = access
        self.fn = fn
        self.late = late
        self.indices = indices


class Capture:
    """The tail of a stream at one ``record``. In the queue it is the record itself."""

    __slots__ = ("clock", "done", "stream")

    def __init__(self, stream: "SimulatedStream", clock: Clock) -> None:
        self.stream = stream
        self.clock = clock
        self.done = False


class Promise(Capture):
    """A capture that a host thread will make. ``made``: what it was, once it has been."""

    __slots__ = ("index", "made")

    def __init__(self, stream: "SimulatedStream", index: int) -> None:
        super().__init__(stream, {index: 1})
        self.index = index
        self.made: Capture | None = None


class Wait:
    """A stream's wait for a capture that is not done."""

    __slots__ = ("capture",)

    def __init__(self, capture: Capture) -> None:
        self.capture = capture


class Keep:
    """Keeps a storage alive until the stream gets here."""

    __slots__ = ("storage",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage


class SimulatedStream(Actor):
    """A FIFO of launches, records and waits.

    Attributes:
        lanes: streams of the parts of this stream's launches, which run in any order.
    """

    def __init__(self, machine: Machine, index: int, name: str) -> None:
        super().__init__(index, "stream", name)
        self.machine = machine
        self.lanes: list[SimulatedStream] = []
        self.queue: deque[Launch | Capture | Wait | Keep] = deque()

    def wait_event(self, event: "SimulatedEvent") -> None:
        """Everything issued here from now on comes after what ``event`` has captured."""
        self.machine._wait(self, event.capture)

    def wait_stream(self, other: "SimulatedStream") -> None:
        """Record on ``other``, wait here."""
        self.machine._wait(self, self.machine._capture(other))

    def record_event(self, event: "SimulatedEvent | None" = None) -> "SimulatedEvent":
        """Record ``event`` (a new one by default) here."""
        event = event or self.machine.Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Is everything issued here done?"""
        return self.machine._query(self.machine._capture(self))

    def synchronize(self) -> None:
        """The host waits for everything issued here."""
        self.machine._block(self.machine._capture(self))


class SimulatedEvent:
    """Holds the capture of its last record, if any."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.capture: Capture | None = None

    def record(self, stream: SimulatedStream | None = None) -> None:
        """Capture the tail of ``stream`` (the current one by default)."""
        capture = self.machine._capture(stream or self.machine.current_stream())
        if isinstance(self.capture, Promise) and self.capture.made is None:
            self.machine._keep(self.capture, capture)
        else:
            self.capture = capture
        self.machine._yield("call")

    def wait(self, stream: SimulatedStream | None = None) -> None:
        """Let ``stream`` (the current one by default) wait."""
        (stream or self.machine.current_stream()).wait_event(self)

    def query(self) -> bool:
        """Is the captured work done? True when nothing was ever captured."""
        return self.machine._query(self.capture)

    def synchronize(self) -> None:
        """The host waits for the captured work."""
        self.machine._block(self.capture)


class HostThread(Actor):
    """A host thread; each has its own current stream."""

    def __init__(self, index: int, name: str, stream: SimulatedStream) -> None:
        super().__init__(index, "host thread", name)
        self.stream = stream


class SimulatedThread:
    """A host thread whose jobs the machine runs when it picks them, each from start to end."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine = machine
        self.name = name
        self.jobs: deque[tuple[Callable[[], object], Clock]] = deque()
        self.busy = False

    def submit(self, job: Callable[[], object]) -> None:
        """Have ``job()`` run, after all earlier jobs and after what the caller knows."""
        self.machine._submit(self, job)

    def drain(self) -> None:
        """Wait until every job so far has run."""
        self.machine._drain(self)

    def stop(self, timeout: float | None = None) -> bool:
        """As :meth:`drain`: there is no thread to end."""
        self.drain()
        return True


class SimulatedLock:
    """Taking it comes after whatever its last holder did."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.clock: Clock = {}

    def __enter__(self) -> None:
        join(self.machine.host.clock, self.clock)

    def __exit__(self, *_: object) -> None:
        join(self.clock, self.machine.host.clock)


class SimulatedQueue:
    """A FIFO between host threads; getting an item comes after its ``put``."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.items: deque[tuple[Any, Clock]] = deque()

    def put(self, item: Any) -> None:
        self.items.append((item, self.machine.host.clock.copy()))

    def get_nowait(self) -> Any:
        """The oldest item.

        Raises:
            queue.Empty: there is none.
        """
        if not self.items:
            raise Empty
        item, clock = self.items.popleft()
        join(self.machine.host.clock, clock)
        return item

    def empty(self) -> bool:
        return not self.items

    def qsize(self) -> int:
        return len(self.items)
