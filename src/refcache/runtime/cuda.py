"""The real machine: the runtime's vocabulary over ``torch.cuda``.

A launch is simply issued: ``fn`` enqueues kernels on the current stream, and CUDA decides when they
run. Regions and names are not looked at. ``launch_parts`` issues each part as its own work and
records its event behind it. Host threads and locks are Python's own.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from queue import SimpleQueue
from threading import RLock
from typing import Any

import torch

from refcache.runtime.api import Part, Region


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

    def launch_parts(self, name: str, parts: Iterable[Part]) -> None:
        for part in parts:
            part.fn()
            if part.event is not None:
                part.event.record(self.current_stream())

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
