"""Copies by the copy engine, issued by a thread of their own.

A page of a layer is one copy for the engine, so 16,384 tokens are tens of thousands, and listing
and issuing them takes the host longer than a batch may wait. The controller therefore only submits
a job: the thread brings the device slots to the host (on a stream of its own: other copies do not
delay it), makes the lists, and issues layer by layer.

What the job stands for can be waited for at once. Streams wait for a layer's flag, which is a value
in memory. The host asks a promised event, which is not done before the thread has recorded it.

A job that fails has raised every flag and recorded every event that it promised: nobody waits for
ever, and nobody learns from a flag whether the rows are right. The error is in :attr:`failure`, for
the owner to ask before it trusts what was computed since.
"""

from collections.abc import Callable
from typing import Any

import torch

from refcache.errors import CopyFailed
from refcache.runtime import DeadIndex, Flags, RaceFound, Runtime

Copy = Callable[[torch.Tensor, torch.Tensor], object]


class CopyThread:
    """Issues copies to one stream.

    Args:
        name: of the thread, "write" or "load"; for reports.
        stream: where the copies run.

    Attributes:
        failure: the first copy that failed; None: none has.
    """

    def __init__(self, name: str, stream: Any, runtime: Runtime) -> None:
        self.name = name
        self.stream = stream
        self.runtime = runtime
        self.failure: CopyFailed | None = None
        self._thread = runtime.Thread(f"{name} thread")
        self._indices = runtime.Stream(f"{name} indices")

    def start(
        self,
        copy: Copy,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        start_event: Any,
        fence: Any = None,
        flags: Flags | None = None,
    ) -> Any:
        """Have ``copy(host slots, device slots)``, both on the host, called on the stream.

        Args:
            start_event: recorded on the caller's stream, where the device slots are computed; the
                thread waits for it, so the copies come after it.
            fence: another event that they come after.
            flags: what ``copy`` raises, part by part.

        Returns:
            The event behind the copies.
        """
        finished = self._promised()
        if flags is not None:
            self.runtime.expect(flags, self.stream)

        def job() -> None:
            try:
                with self.runtime.stream(self.stream):
                    slots = self._to_host(device_indices, start_event)
                    if fence is not None:
                        self.stream.wait_event(fence)
                    copy(host_indices, slots)
                    self._keep(host_indices, slots)
            except (RaceFound, DeadIndex):  # the simulated machine's reports
                raise
            except Exception as error:
                self._fail(error, flags)
            with self.runtime.stream(self.stream):
                if flags is not None:
                    flags.finished.record()
                finished.record()

        self._thread.submit(job)
        return finished

    def _promised(self) -> Any:
        return self.runtime.promise(self.stream)

    def _keep(self, *indices: torch.Tensor) -> None:
        """The copies do not keep the lists that they were made of alive."""
        for index in indices:
            self.runtime.record_stream(index, self.stream)

    def drain(self) -> None:
        """Wait until everything so far has been issued."""
        self._thread.drain()

    def _to_host(self, slots: torch.Tensor, computed: Any) -> torch.Tensor:
        """The slots, for this thread to read."""
        on_host = torch.zeros_like(slots, device="cpu")
        with self.runtime.stream(self._indices):
            self._indices.wait_event(computed)
            self.runtime.d2h(on_host, slots)
        return on_host

    def _fail(self, error: Exception, flags: Flags | None) -> None:
        failure = CopyFailed(f"{self.name} between the tiers, by the copy engine: {error!r}")
        failure.__cause__ = error
        self.failure = self.failure or failure
        if flags is not None:
            with self.runtime.stream(self.stream):
                for part in range(len(flags.parts)):
                    self.runtime.raise_flag(flags, part)
