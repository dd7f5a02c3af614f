"""The runtime's vocabulary: streams, events and launches, as CUDA has them.

A :class:`Runtime` is a *machine*. Bytes of a pool are touched only through :meth:`Runtime.launch`
(or, by the host itself, :meth:`Runtime.host_access`), which name what they read and write, so the
same cache code runs on

* the immediate machine (:mod:`refcache.runtime.immediate`): every launch runs at once;
* the simulated machine (:mod:`refcache.runtime.simulated.machine`): launches wait in their streams
  and run in any legal order, and a tracker reports two conflicting accesses that nothing orders;
* real CUDA (:mod:`refcache.runtime.cuda`).

Rules (CUDA's measured behaviour):

* A stream is a FIFO. The default stream orders only itself.
* ``Event.record`` captures the tail of a stream at the call. A second record replaces the capture;
  waits issued before keep the old one. Never recorded: ``query()`` is True, waits do nothing.
* ``a.wait_stream(b)`` is: record on b, wait on a.
* Host code runs at once. A launched ``fn`` runs when the machine picks it, and reads its sources
  and indices then; it must not launch, record or wait.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

Slots = torch.Tensor | range | int


class Region(NamedTuple):
    """The cells a launch touches: some slots of some layers of one plane of one pool.

    ``slots`` is an index tensor, a range or an int, whose values are taken when the launch is
    issued. They are taken when it runs where only the device knows them before: if ``slots`` is one
    of the launch's ``indices``, or a function (called then; a page table that an earlier launch
    writes, say). ``layers`` is a range or an int. ``pool`` is compared by identity. Objects without
    planes (``req_to_token``, index tensors) use plane 0, layer 0, and, as one cell, slot 0.
    """

    pool: Any
    plane: int
    layers: range | int
    slots: Slots | Callable[[], Slots]


class Part(NamedTuple):
    """One part of a launch; ``fn`` gets the launch's index tensors. ``name`` is for reports."""

    name: str
    fn: Callable[..., object]
    reads: Iterable[Region]
    writes: Iterable[Region]


class Stream(Protocol):
    """A FIFO of launches, records and waits; see the module docstring."""

    def wait_event(self, event: Any) -> None: ...
    def wait_stream(self, other: Any) -> None: ...
    def record_event(self, event: Any = None) -> "Event": ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class Event(Protocol):
    """What a stream had to do at the last ``record``; see the module docstring."""

    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class Thread(Protocol):
    """A host thread that issues work while the thread that asked for it goes on."""

    name: str

    def submit(self, job: Callable[[], object]) -> None:
        """Have ``job()`` run on the thread, after all earlier jobs; returns at once."""
        ...

    def drain(self) -> None:
        """Wait until every job so far has run."""
        ...

    def stop(self, timeout: float | None = None) -> bool:
        """Run every job so far, then end the thread; the next ``submit`` starts another.

        Args:
            timeout: seconds to wait at most; None waits for ever. It is for real threads.

        Returns:
            False: the time was over; the thread goes on as if nothing had been asked.
        """
        ...


@dataclass
class Flags:
    """What a launch, or a thread that issues copies, signals part by part, again and again.

    Attributes:
        parts: one event a part, signalled when that part is done. Other parts may not be: a kernel
            finishes them in any order.
        finished: recorded behind the last part.
        values: int64 ``[parts]`` on the device; every launch raises each value by one epoch when
            the part is done (see :func:`refcache.reference.load_layers`), and nothing resets them,
            so that a wait for one launch is not satisfied by an earlier one.
        epoch: how many launches were issued, or expected.
    """

    parts: Sequence[Event]
    finished: Event
    values: torch.Tensor
    epoch: int = 0


_Stream: TypeAlias = Stream  # inside Runtime the plain names are its methods
_Event: TypeAlias = Event
_Thread: TypeAlias = Thread


class Runtime(Protocol):
    """A machine. ``Stream`` and ``Event`` make new ones, as in ``torch.cuda``."""

    name: str

    def Stream(self, name: str | None = None) -> _Stream:
        """A new stream; ``name`` is for reports."""
        ...

    def Event(self) -> _Event: ...

    def flags(self, parts: int) -> Flags:
        """What a launch of so many parts signals; never launched: all are done."""
        ...

    def expect(self, flags: Flags, stream: Any) -> None:
        """A new epoch of ``flags`` begins, whose parts a thread will raise on ``stream``.

        From now on no part, nor ``flags.finished``, is done until it was raised, or recorded. On a
        real machine, who lets a stream wait for a part waits on the host until it was issued.
        """
        ...

    def raise_flag(self, flags: Flags, part: int) -> None:
        """Behind all that was issued to the current stream, a part of the epoch is done."""
        ...

    def promise(self, stream: Any) -> _Event:
        """An event that a thread will record on ``stream``.

        Until then it is not done, unlike any other event: ``query`` is False, and who waits for it
        waits.
        """
        ...

    def Thread(self, name: str) -> _Thread:
        """A host thread that runs jobs."""
        ...

    def Lock(self) -> AbstractContextManager[Any]:
        """A re-entrant lock between host threads: taking it comes after its last release."""
        ...

    def Queue(self) -> Any:
        """A queue between host threads (``put``, ``get_nowait``, ``empty``, ``qsize``);
        ``get_nowait`` is ordered after the ``put`` of the item, and raises ``queue.Empty``."""
        ...

    def actor(self, name: str) -> AbstractContextManager[Any]:
        """The code inside the block belongs to the host thread ``name``."""
        ...

    def current_stream(self) -> _Stream: ...
    def default_stream(self) -> _Stream: ...
    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Make ``stream`` current inside the block."""
        ...

    def launch(
        self,
        name: str,
        fn: Callable[..., object],
        reads: Iterable[Region] = (),
        writes: Iterable[Region] = (),
        indices: tuple[torch.Tensor, ...] = (),
    ) -> None:
        """Issue ``fn(*indices)`` on the current stream. ``name`` appears in reports.

        ``indices``: tensors that the launch needs and does not keep alive. Who drops them before it
        has run must have told the allocator, by :meth:`record_stream`.
        """
        ...

    def launch_parts(
        self,
        name: str,
        parts: Iterable[Part],
        flags: Flags,
        at_once: Callable[..., object],
        indices: tuple[torch.Tensor, ...] = (),
    ) -> None:
        """Issue one launch on the current stream that signals ``flags`` part by part.

        It is given twice: as its parts, which run in any order on the simulated machine, and as
        ``at_once(flags.values, *indices)``, which other machines issue; it does the work of all
        parts and raises the values itself. ``indices`` as for :meth:`launch`. As many ``parts`` as
        ``flags`` has (the simulated machine refuses others; the rest never look at them).
        """
        ...

    def host_access(
        self,
        name: str,
        fn: Callable[[], object],
        reads: Iterable[Region] = (),
        writes: Iterable[Region] = (),
    ) -> None:
        """Run ``fn`` now, as an access by the host thread itself (no stream)."""
        ...

    def h2d(self, dst: torch.Tensor, src: torch.Tensor, pinned: bool = False) -> None:
        """Copy a host tensor to the device on the current stream; returns at once.

        A pageable source is read at the call, a pinned one when the copy runs.
        """
        ...

    def d2h(self, dst: torch.Tensor, src: torch.Tensor, pinned: bool = False) -> None:
        """Copy a device tensor to the host on the current stream.

        The host waits for the copy when ``dst`` is pageable, and not when it is pinned.
        """
        ...

    def host_sync(self) -> None:
        """What ``.item()``, ``.cpu()`` or ``nonzero`` do: the host waits for the current stream."""
        ...

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep ``tensor`` alive until the work now in ``stream`` is done."""
        ...

    def synchronize(self) -> None:
        """The host waits for everything."""
        ...
