"""The simulated machine: CUDA's streams and events on a CPU, deterministic, in any legal order.

Host code runs at once; launches wait in their streams until the machine picks them. It may pick at
every call of its methods, and what it picks is up to a *driver*
(:mod:`refcache.runtime.simulated.choices`): everything now, as little as possible, drawn integers,
or all orders one after another. With a :class:`~refcache.runtime.simulated.tracker.Tracker` it also
reports accesses that nothing orders, in whichever order they ran.

What orders what (happens-before): program order of a stream; a launch comes after all that its host
thread knew to be done when it issued it; a wait comes after the record it waits for; the host comes
after a ``synchronize``, and after a ``query`` that said True. Host threads are simulated too: code
inside ``with machine.actor(name)`` is that thread's; ``Lock`` and ``Queue`` order threads. A job
given to a ``Thread`` is pending like a launch, and comes after its ``submit``.

What a thread has promised (an event, a flag) may be waited for before the thread has issued what it
stands for. Then it is not known yet what the wait orders: the stream's clock holds the promise's
number in its place, and a launch behind it is looked at when it runs, which is after the promise
was kept.

Both tiers are CPU tensors: a region's pool, not ``tensor.device``, says which tier a slot is of.
Left out: stream priorities, legacy default-stream semantics (side streams do not synchronise with
it), and work that fails asynchronously.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from refcache.errors import InvalidArgument, NeverDone
from refcache.runtime.api import Flags, Part, Region
from refcache.runtime.simulated.log import MachineLog
from refcache.runtime.simulated.streams import (
    Capture,
    HostThread,
    Keep,
    Launch,
    Promise,
    SimulatedEvent,
    SimulatedLock,
    SimulatedQueue,
    SimulatedStream,
    SimulatedThread,
    Wait,
)
from refcache.runtime.simulated.tracker import (
    Access,
    Actor,
    Clock,
    Held,
    Touch,
    Tracker,
    join,
    late,
)

Driver = Callable[["SimulatedRuntime", str], int]


class SimulatedRuntime:
    """See the module docstring. Implements :class:`refcache.runtime.api.Runtime`.

    Args:
        driver: ``driver(machine, point)`` is called, while a launch is pending, at every *point*:
            ``"call"`` (after a launch, record or wait was issued), ``"query"`` (before it is
            answered) and ``"wait"`` (the host waits). 0: run everything now. 1: run nothing (at a
            wait: only what it waits for). ``c`` of 2 and more: run the next launch of the
            ``(c - 2) % r``-th of the ``r`` streams that could go on, and ask again.
        tracker: None to track nothing.

    Attributes:
        history: the last 64 accesses that ran, oldest first.
        log: writes down what happens, if somebody gives it one.
        host: the current host thread.
    """

    name = "simulated"

    def __init__(self, driver: Driver, tracker: Tracker | None = None) -> None:
        self.driver = driver
        self.tracker = tracker
        self.history: deque[Access] = deque(maxlen=64)
        self.log: MachineLog | None = None
        self._streams: list[SimulatedStream] = []
        self._jobs: list[SimulatedThread] = []  # the threads that can have some
        self._promises: dict[int, Clock | None] = {}  # by number: what a kept one stands for
        self._actors = 0
        self._issued = 0
        self._pending = 0
        self._running: Access | None = None
        self._default = self.Stream("default")
        self.host = HostThread(self._next_actor(), "main", self._default)
        self._threads = {"main": self.host}

    def Stream(self, name: str | None = None) -> SimulatedStream:
        index = self._next_actor()
        stream = SimulatedStream(self, index, name or f"stream {index}")
        self._streams.append(stream)
        return stream

    def Event(self) -> SimulatedEvent:
        return SimulatedEvent(self)

    def flags(self, parts: int) -> Flags:
        events = [SimulatedEvent(self) for _ in range(parts)]
        return Flags(events, SimulatedEvent(self), torch.zeros(parts, dtype=torch.int64))

    def expect(self, flags: Flags, stream: Any) -> None:
        for event in (*flags.parts, flags.finished):
            event.capture = self._promise(stream)  # type: ignore[attr-defined]
        flags.epoch += 1

    def raise_flag(self, flags: Flags, part: int) -> None:
        flags.parts[part].record(self.current_stream())

    def promise(self, stream: Any) -> SimulatedEvent:
        event = SimulatedEvent(self)
        event.capture = self._promise(stream)
        return event

    def Thread(self, name: str) -> SimulatedThread:
        thread = SimulatedThread(self, name)
        self._jobs.append(thread)
        return thread

    def Lock(self) -> SimulatedLock:
        return SimulatedLock(self)

    def Queue(self) -> SimulatedQueue:
        return SimulatedQueue(self)

    @contextmanager
    def actor(self, name: str) -> Iterator[None]:
        """Inside the block the host thread ``name`` runs; its first block starts the thread."""
        if name not in self._threads:
            thread = HostThread(self._next_actor(), name, self._default)
            join(thread.clock, self.host.clock)
            self._threads[name] = thread
        before, self.host = self.host, self._threads[name]
        try:
            yield
        finally:
            self.host = before

    def current_stream(self) -> SimulatedStream:
        return self.host.stream

    def default_stream(self) -> SimulatedStream:
        return self._default

    @contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        host = self.host
        before, host.stream = host.stream, stream
        try:
            yield
        finally:
            host.stream = before

    def launch(
        self,
        name: str,
        fn: Callable[..., object],
        reads: Iterable[Region] = (),
        writes: Iterable[Region] = (),
        indices: tuple[torch.Tensor, ...] = (),
    ) -> None:
        self._issue(self.host.stream, name, fn, reads, writes, indices)
        self._yield("call")

    def launch_parts(
        self,
        name: str,
        parts: Iterable[Part],
        flags: Flags,
        at_once: Callable[..., object],
        indices: tuple[torch.Tensor, ...] = (),
    ) -> None:
        parts, stream = list(parts), self.host.stream
        if len(parts) != len(flags.parts):
            raise InvalidArgument(
                f"'{name}' of {len(parts)} parts: expected {len(flags.parts)}, as its flags"
            )
        before = self._capture(stream)
        while len(stream.lanes) < len(flags.parts):
            stream.lanes.append(self.Stream(stream.name))
        captures = []
        for lane, part in zip(stream.lanes[: len(flags.parts)], parts, strict=True):
            self._queue_wait(lane, before)
            self._issue(lane, f"{name} {part.name}", part.fn, part.reads, part.writes, indices)
            captures.append(self._capture(lane))
        for event, capture in zip(flags.parts, captures, strict=True):
            event.capture = capture  # type: ignore[attr-defined]
            self._queue_wait(stream, capture)
        flags.finished.capture = self._capture(stream)  # type: ignore[attr-defined]
        flags.epoch += 1
        self._yield("call")

    def host_access(
        self,
        name: str,
        fn: Callable[[], object],
        reads: Iterable[Region] = (),
        writes: Iterable[Region] = (),
    ) -> None:
        self._yield("call")
        self._resolve(self.host.clock)
        access = self._access(self.host, name)
        if self.tracker is not None:
            self.tracker.run(access, self.tracker.issue(access, reads, writes))
        fn()
        self._ran(access)

    def h2d(self, dst: torch.Tensor, src: torch.Tensor, pinned: bool = False) -> None:
        source = Region(src, 0, 0, 0)
        staged = src
        if not pinned:
            staged = torch.empty_like(src)
            self.host_access("h2d, reading its source", lambda: staged.copy_(src), (source,))
        reads = (source,) if pinned else ()
        self.launch("h2d", lambda: dst.copy_(staged), reads, (Region(dst, 0, 0, 0),))

    def d2h(self, dst: torch.Tensor, src: torch.Tensor, pinned: bool = False) -> None:
        regions = (Region(src, 0, 0, 0),), (Region(dst, 0, 0, 0),)
        self.launch("d2h", lambda: dst.copy_(src), *regions)
        if not pinned:
            self.host_sync()

    def host_sync(self) -> None:
        self._block(self._capture(self.host.stream))

    def record_stream(self, tensor: torch.Tensor, stream: SimulatedStream) -> None:
        if stream.queue:
            stream.queue.append(Keep(tensor.untyped_storage()))

    def synchronize(self) -> None:
        for thread in self._jobs:
            thread.drain()
        for capture in [self._capture(stream) for stream in self._streams]:
            self._block(capture)

    def pending(self) -> list[tuple[str, ...]]:
        """What waits in each stream, launches by name, and in each thread."""
        for stream in self._streams:
            self._head(stream)
        queues = [
            tuple(item.access.name if type(item) is Launch else "" for item in stream.queue)
            for stream in self._streams
        ]
        return queues + [("job",) * len(thread.jobs) for thread in self._jobs]

    def runnable(self) -> list[SimulatedStream | SimulatedThread]:
        """The streams whose next launch, and the threads whose next job may run now."""
        threads = [thread for thread in self._jobs if thread.jobs and not thread.busy]
        return [stream for stream in self._streams if self._head(stream) is not None] + threads

    def run_next(self, who: SimulatedStream | SimulatedThread) -> None:
        """Run the next launch or job of ``who``, one of :meth:`runnable`."""
        if who not in self.runnable():
            raise InvalidArgument(f"{who}: expected one that has a launch which may run")
        if isinstance(who, SimulatedThread):
            self._run_job(who)
        else:
            self._run(who)

    def _next_actor(self) -> int:
        self._actors += 1
        return self._actors

    def _submit(self, thread: SimulatedThread, job: Callable[[], object]) -> None:
        self._not_inside_a_launch(f"a job of {thread.name}")
        with self.actor(thread.name):
            pass  # it has started
        thread.jobs.append((job, self.host.clock.copy()))
        self._pending += 1
        self._yield("call")

    def _drain(self, thread: SimulatedThread) -> None:
        while thread.jobs:
            self._run_job(thread)
        if thread.name in self._threads:
            join(self.host.clock, self._threads[thread.name].clock)

    def _run_job(self, thread: SimulatedThread) -> None:
        job, clock = thread.jobs.popleft()
        self._pending -= 1
        thread.busy = True
        try:
            with self.actor(thread.name):
                join(self.host.clock, clock)
                job()
        finally:
            thread.busy = False

    def _promise(self, stream: SimulatedStream) -> Promise:
        index = self._next_actor()
        self._promises[index] = None
        return Promise(stream, index)

    def _keep(self, promise: Promise, capture: Capture) -> None:
        """A thread has made the capture that was promised."""
        promise.made = capture
        self._promises[promise.index] = capture.clock
        if self.log is not None:
            self.log.kept(promise.index, capture.stream, capture.clock)

    def _resolve(self, clock: Clock) -> bool:
        """Replace kept promises in ``clock`` by what they stand for; whether some are not kept."""
        while open_ := self._promises.keys() & clock.keys():
            kept = [index for index in open_ if self._promises[index] is not None]
            if not kept:
                return True
            for index in kept:
                del clock[index]
                join(clock, self._promises[index] or {})
        return False

    def _access(self, actor: Actor, name: str) -> Access:
        self._issued += 1
        access = actor.access(name, self._issued)
        if self.log is not None:
            self.log.issued(access)
        return access

    def _ran(self, access: Access) -> None:
        self.history.append(access)
        if self.log is not None:
            self.log.ran(access)

    def _issue(
        self,
        stream: SimulatedStream,
        name: str,
        fn: Callable[..., object],
        reads: Iterable[Region],
        writes: Iterable[Region],
        indices: tuple[torch.Tensor, ...],
    ) -> None:
        self._not_inside_a_launch(f"launch of '{name}'")
        join(stream.clock, self.host.clock)
        unsure = self._resolve(stream.clock)
        access = self._access(stream, name)
        later: list[Touch] = []
        held: list[Held] | tuple[torch.Tensor, ...] = indices
        if self.tracker is not None:
            held = [Held(tensor) for tensor in indices]
            by_id = {id(tensor): one for tensor, one in zip(indices, held, strict=True)}
            if unsure:
                reads, writes = late(reads, by_id), late(writes, by_id)
            later = self.tracker.issue(access, reads, writes, by_id)
        stream.queue.append(Launch(access, fn, later, held))
        self._pending += 1

    def _capture(self, stream: SimulatedStream) -> Capture:
        self._not_inside_a_launch("record")
        self._resolve(stream.clock)
        capture = Capture(stream, stream.clock.copy())
        join(capture.clock, self.host.clock)
        self._head(stream)
        if stream.queue:
            stream.queue.append(capture)
        else:
            capture.done = True
        return capture

    def _wait(self, stream: SimulatedStream, capture: Capture | None) -> None:
        self._not_inside_a_launch("wait")
        if capture is None:
            return
        self._queue_wait(stream, capture)
        self._yield("call")

    def _queue_wait(self, stream: SimulatedStream, capture: Capture) -> None:
        if self.log is not None:
            self.log.waits(stream, capture.stream, capture.clock)
        join(stream.clock, capture.clock)
        if not self._settled(capture):
            stream.queue.append(Wait(capture))

    def _query(self, capture: Capture | None) -> bool:
        self._not_inside_a_launch("query")
        if capture is None:
            return True
        self._yield("query", capture)
        if not self._settled(capture):
            return False
        join(self.host.clock, capture.clock)
        return True

    def _block(self, capture: Capture | None) -> None:
        """The host waits for ``capture``."""
        self._not_inside_a_launch("synchronize")
        if capture is None:
            return
        self._yield("wait", capture)
        self._finish(capture)
        join(self.host.clock, capture.clock)

    def _yield(self, point: str, until: Capture | None = None) -> None:
        """Let the driver run launches; stop early when ``until`` is done."""
        while self._pending and not (until is not None and self._settled(until)):
            choice = self.driver(self, point)
            if choice == 0:
                if not self._run_all():
                    return
            elif choice == 1:
                return
            else:
                ready = self.runnable()
                if not ready:  # all that is pending waits for a job that is running
                    return
                self.run_next(ready[(choice - 2) % len(ready)])
                if point == "query":
                    point = "wait"

    def _run_all(self) -> bool:
        """Whether anything could run."""
        some = False
        ran = True
        while ran:
            ran = False
            for stream in self._streams:
                while self._head(stream) is not None:
                    self._run(stream)
                    ran = True
            for thread in self._jobs:
                while thread.jobs and not thread.busy:
                    self._run_job(thread)
                    ran = True
            some |= ran
        return some

    def _finish(self, capture: Capture) -> None:
        """Run as little as it takes.

        Raises:
            NeverDone: nothing that could run would bring it about.
        """
        while not self._settled(capture):
            if isinstance(capture, Promise):
                if capture.made is not None:
                    self._finish(capture.made)
                    continue
                ready = [t for t in self._jobs if t.jobs and not t.busy]
                if not ready:
                    raise NeverDone(
                        f"a wait for what a thread promised on {capture.stream}: no thread has a "
                        "job left; expected one that records or raises it"
                    )
                self._run_job(ready[0])
                continue
            stream = capture.stream
            first = stream.queue[0]
            if isinstance(first, Wait):
                self._finish(first.capture)
            else:
                self._run(stream)

    def _settled(self, capture: Capture) -> bool:
        if isinstance(capture, Promise):
            capture.done = capture.made is not None and self._settled(capture.made)
        elif not capture.done:
            self._head(capture.stream)
        return capture.done

    def _head(self, stream: SimulatedStream) -> Launch | None:
        """The launch ``stream`` could run now; does what it can of records and waits before it."""
        queue = stream.queue
        while queue:
            item = queue[0]
            if type(item) is Launch:
                return item
            if type(item) is Wait and not self._settled(item.capture):
                return None
            if type(item) is Capture:
                item.done = True
            if queue and queue[0] is item:  # else another stream's wait for this one got here first
                queue.popleft()
        return None

    def _run(self, stream: SimulatedStream) -> None:
        launch = stream.queue.popleft()
        assert isinstance(launch, Launch)
        self._pending -= 1
        access = launch.access
        indices: Iterable[Any] = launch.indices
        if self.tracker is not None:
            indices = self.tracker.indices(access, launch.indices)  # type: ignore[arg-type]
            self._resolve(access.clock)
            self.tracker.run(access, launch.late)
        self._running = access
        try:
            launch.fn(*indices)
        finally:
            self._running = None
        self._ran(access)

    def _not_inside_a_launch(self, what: str) -> None:
        if self._running is not None:
            raise InvalidArgument(f"{what} inside {self._running}: a launch only touches bytes")
