"""The immediate machine: every launch runs at once, so every event is already done.

The machine of plain CPU runs. Streams and events exist because callers name them; they order
nothing, since nothing is ever pending.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from threading import RLock
from typing import Any

import torch

from refcache.reference.transfer import FLAG_EPOCH
from refcache.runtime.api import Flags, Part, Region


class ImmediateStream:
    """A stream with nothing in it."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def record_event(self, event: Any = None) -> "ImmediateEvent":
        done: ImmediateEvent = event if event is not None else ImmediateEvent()
        return done

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class ImmediateEvent:
    """An event that is done."""

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class ImmediateThread:
    """A thread that has run each job when ``submit`` returns."""

    def __init__(self, name: str) -> None:
        self.name = name

    def submit(self, job: Callable[[], object]) -> None:
        job()

    def drain(self) -> None: ...

    def stop(self, timeout: float | None = None) -> bool:
        return True


class ImmediateRuntime:
    """See the module docstring. Implements :class:`refcache.runtime.api.Runtime`."""

    name = "immediate"
    Stream = ImmediateStream
    Event = ImmediateEvent
    Thread = ImmediateThread
    Lock = staticmethod(RLock)
    Queue = SimpleQueue

    def __init__(self) -> None:
        self._default = ImmediateStream("default")
        self._current = self._default

    def flags(self, parts: int) -> Flags:
        events = [ImmediateEvent() for _ in range(parts)]
        return Flags(events, ImmediateEvent(), torch.zeros(parts, dtype=torch.int64))

    def expect(self, flags: Flags, stream: Any) -> None:
        flags.epoch += 1

    def raise_flag(self, flags: Flags, part: int) -> None:
        flags.values[part] = flags.epoch * FLAG_EPOCH

    def promise(self, stream: Any) -> ImmediateEvent:
        return ImmediateEvent()

    @contextmanager
    def actor(self, name: str) -> Iterator[None]:
        yield

    def current_stream(self) -> ImmediateStream:
        return self._current

    def default_stream(self) -> ImmediateStream:
        return self._default

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def launch(
        self,
        name: str,
        fn: Callable[..., object],
        reads: Iterable[Region] = (),
        writes: Iterable[Region] = (),
        indices: tuple[torch.Tensor, ...] = (),
    ) -> None:
        fn(*indices)

    def launch_parts(
        self,
        name: str,
        parts: Iterable[Part],
        flags: Flags,
        at_once: Callable[..., object],
        indices: tuple[torch.Tensor, ...] = (),
    ) -> None:
        at_once(flags.values, *indices)
        flags.epoch += 1

    def host_access(
        self,
        name: str,
        fn: Callable[[], object],
        reads: Iterable[Region] = (),
        writes: Iterable[Region] = (),
    ) -> None:
        fn()

    def h2d(self, dst: torch.Tensor, src: torch.Tensor, pinned: bool = False) -> None:
        dst.copy_(src)

    def d2h(self, dst: torch.Tensor, src: torch.Tensor, pinned: bool = False) -> None:
        dst.copy_(src)

    def host_sync(self) -> None: ...

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None: ...

    def synchronize(self) -> None: ...
