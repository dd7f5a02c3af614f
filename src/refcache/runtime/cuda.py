"""The real machine: the runtime's vocabulary over ``torch.cuda``.

A launch is simply issued: ``fn`` enqueues kernels on the current stream, and CUDA decides when they
run. Regions and names are not looked at. What a launch signals from inside are values in device
memory, and a stream that waits for one waits until it has reached an epoch. Host threads, queues
and locks are Python's own.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from queue import SimpleQueue
from threading import RLock
from typing import Any

import torch

from refcache.errors import InvalidArgument
from refcache.runtime.api import Flags, Part, Region
from refcache.runtime.threads import IssuingThread, PromisedEvent


class FlagEvent:
    """One part of the last launch that signalled ``flags``.

    A stream waits for the part alone. The host cannot see it: it asks, and waits, for the launch.

    No stream waits for a part that a thread has yet to issue: the host waits for that first. Else a
    call that waits for the device with the driver's lock in hand (``cudaFree``,
    ``cudaHostUnregister``, the first launch of some kernels) would wait for the flag, and the
    thread, which must issue it, for the lock.
    """

    def __init__(self, flags: Flags, part: int, machine: "CudaRuntime") -> None:
        self._flags = flags
        self._part = part
        self._machine = machine
        self._issued = threading.Event()
        self._issued.set()  # a launch issues all parts

    def expect(self) -> None:
        """From now on the part is not issued until it is raised."""
        self._issued.clear()

    def raise_flag(self, stream: Any) -> None:
        """Raise the part behind the work of ``stream``; it counts as issued even if that fails."""
        try:
            _driver().raise_flag(self._flags.values, self._part, self._flags.epoch, stream)
        finally:
            self._issued.set()

    def record(self, stream: Any = None) -> None:
        """Refused: the launch signals."""
        raise InvalidArgument("record of a flag: expected the launch to raise it")

    def wait(self, stream: Any = None) -> None:
        """Let ``stream`` (the current one by default) wait; nothing was launched: no wait.

        The host waits until the part was issued, if a thread issues it.
        """
        self._issued.wait()
        if self._flags.epoch:
            stream = stream or self._machine.current_stream()
            _driver().wait_flag(self._flags.values, self._part, self._flags.epoch, stream)

    def query(self) -> bool:
        """Is the launch done?"""
        done: bool = self._flags.finished.query()
        return done

    def synchronize(self) -> None:
        """The host waits for the launch."""
        self._flags.finished.synchronize()


def _driver() -> Any:
    return import_module("refcache_ops.driver")


class CudaRuntime:
    """See the module docstring. Implements :class:`refcache.runtime.api.Runtime`.

    Args:
        device: the CUDA device of every stream; the current one by default.
        cuda: the module with CUDA's vocabulary, for tests without a device.
    """

    name = "cuda"
    Lock = staticmethod(RLock)
    Queue = SimpleQueue

    def __init__(self, device: Any = None, cuda: Any = torch.cuda) -> None:
        self.device = device
        self._cuda = cuda

    def Stream(self, name: str | None = None) -> Any:
        return self._cuda.Stream(self.device)

    def Event(self) -> Any:
        return self._cuda.Event()

    def flags(self, parts: int) -> Flags:
        values = torch.zeros(parts, dtype=torch.int64, device=self.device or "cuda")
        self.host_sync()  # no stream may see them before they are 0
        flags = Flags((), PromisedEvent(self.Event()), values)
        flags.parts = [FlagEvent(flags, part, self) for part in range(parts)]
        return flags

    def expect(self, flags: Flags, stream: Any) -> None:
        flags.epoch += 1
        for event in (*flags.parts, flags.finished):
            event.expect()  # type: ignore[attr-defined]

    def raise_flag(self, flags: Flags, part: int) -> None:
        flags.parts[part].raise_flag(self.current_stream())  # type: ignore[attr-defined]

    def promise(self, stream: Any) -> PromisedEvent:
        event = PromisedEvent(self.Event())
        event.expect()
        return event

    def Thread(self, name: str) -> IssuingThread:
        return IssuingThread(name, _driver().enter_context(self.device))

    @contextmanager
    def actor(self, name: str) -> Iterator[None]:
        yield

    def current_stream(self) -> Any:
        return self._cuda.current_stream(self.device)

    def default_stream(self) -> Any:
        return self._cuda.default_stream(self.device)

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._cuda.stream(stream)
        return context

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
        flags.finished.record(self.current_stream())

    def host_access(
        self,
        name: str,
        fn: Callable[[], object],
        reads: Iterable[Region] = (),
        writes: Iterable[Region] = (),
    ) -> None:
        fn()

    def h2d(self, dst: torch.Tensor, src: torch.Tensor, pinned: bool = False) -> None:
        dst.copy_(src, non_blocking=True)

    def d2h(self, dst: torch.Tensor, src: torch.Tensor, pinned: bool = False) -> None:
        dst.copy_(src, non_blocking=pinned)

    def host_sync(self) -> None:
        self.current_stream().synchronize()

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        if tensor.is_cuda:
            tensor.record_stream(stream)

    def synchronize(self) -> None:
        self._cuda.synchronize(self.device)
