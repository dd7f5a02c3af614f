"""The runtime's vocabulary: streams, events and launches, as CUDA has them.

A :class:`Runtime` is a *machine*. Bytes of a pool are touched only through :meth:`Runtime.launch`,
which names what it reads and writes, so the same cache code runs on

* the immediate machine (:mod:`refcache.runtime.immediate`): every launch runs at once;
* the simulated machine: launches wait in their streams and run in any legal order, and a tracker
  reports two conflicting accesses that nothing orders;
* real CUDA.

Rules (CUDA's measured behaviour):

* A stream is a FIFO. The default stream orders only itself.
* ``Event.record`` captures the tail of a stream at the call. A second record replaces the capture;
  waits issued before keep the old one. Never recorded: ``query()`` is True, waits do nothing.
* ``a.wait_stream(b)`` is: record on b, wait on a.
* Host code runs at once. A launched ``fn`` runs when the machine picks it, and reads its sources
  and indices then; it must not launch, record or wait.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch


class Region(NamedTuple):
    """The cells a launch touches: some slots of some layers of one plane of one pool.

    ``slots`` is an index tensor, a range or an int; ``layers`` a range or an int. ``pool`` is
    compared by identity. Objects without planes (``req_to_token``, index tensors) use plane 0 and
    layer 0.
    """

    pool: Any
    plane: int
    layers: range | int
    slots: torch.Tensor | range | int


class Stream(Protocol):
    """A FIFO of launches."""

    def wait_event(self, event: "Event") -> None: ...
    def wait_stream(self, other: "Stream") -> None: ...
    def record_event(self, event: "Event | None" = None) -> "Event": ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class Event(Protocol):
    """A point in a stream that others can wait for."""

    def record(self, stream: Stream | None = None) -> None: ...
    def wait(self, stream: Stream | None = None) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


# Inside Runtime, the bare names are its factory methods.
_Stream = Stream
_Event = Event


class Runtime(Protocol):
    """A machine. ``Stream`` and ``Event`` make new ones, as in ``torch.cuda``."""

    name: str

    def Stream(self) -> _Stream: ...
    def Event(self) -> _Event: ...
    def current_stream(self) -> _Stream: ...
    def default_stream(self) -> _Stream: ...
    def stream(self, stream: _Stream) -> AbstractContextManager[Any]:
        """Make ``stream`` current inside the block."""
        ...

    def launch(
        self,
        name: str,
        fn: Callable[[], None],
        reads: Iterable[Region] = (),
        writes: Iterable[Region] = (),
    ) -> None:
        """Issue ``fn`` on the current stream. ``name`` appears in reports."""
        ...

    def host_sync(self) -> None:
        """What ``.item()``, ``.cpu()`` or ``nonzero`` do: the host waits for the current stream."""
        ...

    def record_stream(self, tensor: torch.Tensor, stream: _Stream) -> None:
        """Keep ``tensor`` alive until the work now in ``stream`` is done."""
        ...

    def synchronize(self) -> None:
        """The host waits for everything."""
        ...
