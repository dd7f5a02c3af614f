"""The immediate machine: every launch runs at once, so every event is already done.

The machine of plain CPU runs. Streams and events exist because callers name them; they order
nothing, since nothing is ever pending.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from refcache.runtime.api import Region


class ImmediateStream:
    """A stream with nothing in it."""

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else ImmediateEvent()

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


class ImmediateRuntime:
    """See the module docstring. Implements :class:`refcache.runtime.api.Runtime`."""

    name = "immediate"
    Stream = ImmediateStream
    Event = ImmediateEvent

    def __init__(self) -> None:
        self._default = ImmediateStream()
        self._current = self._default

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
        fn: Callable[[], None],
        reads: Iterable[Region] = (),
        writes: Iterable[Region] = (),
    ) -> None:
        fn()

    def host_sync(self) -> None: ...

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None: ...

    def synchronize(self) -> None: ...
