"""Host threads of the real machine: one that runs jobs, and an event that it will record.

CUDA says of an event that nobody has recorded yet that it is done. Between the call that asks a
thread for a copy and the moment when the thread has issued it, that answer would hand out slots
that the copy will still use: :class:`PromisedEvent` does not give it.
"""

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

Job = Callable[[], object]


class PromisedEvent:
    """An event for one thread to record and others to ask.

    Args:
        event: the machine's own.
    """

    def __init__(self, event: Any) -> None:
        self._event = event
        self._recorded = threading.Event()
        self._recorded.set()  # never expected: like any event that was never recorded

    def expect(self) -> None:
        """From now on the event is not done until it was recorded again."""
        self._recorded.clear()

    def record(self, stream: Any = None) -> None:
        """Capture the tail of ``stream`` (the current one by default)."""
        self._event.record(*() if stream is None else (stream,))
        self._recorded.set()

    def wait(self, stream: Any = None) -> None:
        """Let ``stream`` (the current one by default) wait; the host waits for the record first."""
        self._recorded.wait()
        self._event.wait(*() if stream is None else (stream,))

    def query(self) -> bool:
        """Was it recorded, and is the captured work done?"""
        done: bool = self._recorded.is_set() and self._event.query()
        return done

    def synchronize(self) -> None:
        """The host waits for the record and for the captured work."""
        self._recorded.wait()
        self._event.synchronize()


class IssuingThread:
    """Runs jobs one after another, on a thread that starts with the first and ends with this
    object.

    A job must not raise: nobody would hear of it.

    Args:
        prepare: called once on the thread, before its first job.
    """

    def __init__(self, name: str, prepare: Job) -> None:
        self.name = name
        self._prepare = prepare
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._at_end: weakref.finalize[Any, Any] | None = None

    def submit(self, job: Job) -> None:
        """Have ``job()`` run on the thread, after all earlier jobs; returns at once."""
        if self._thread is None:
            arguments = (self._jobs, self._prepare)
            self._thread = threading.Thread(
                target=_run, args=arguments, name=self.name, daemon=True
            )
            self._thread.start()
            self._at_end = weakref.finalize(self, self._jobs.put, None)
        self._jobs.put(job)

    def drain(self) -> None:
        """Wait until every job so far has run."""
        self._drained(None)

    def stop(self, timeout: float | None = None) -> bool:
        """Run every job so far, then end; False (and nothing changed) if that takes too long."""
        if not self._drained(timeout):
            return False
        if self._thread is not None and self._at_end is not None:
            self._at_end()  # puts what ends the loop
            self._thread.join()
            self._thread = self._at_end = None
        return True

    def _drained(self, timeout: float | None) -> bool:
        if self._thread is None:
            return True
        done = threading.Event()
        self._jobs.put(done.set)
        return done.wait(timeout)


def _run(jobs: "SimpleQueue[Job | None]", prepare: Job) -> None:
    with suppress(Exception):  # the jobs that need it will fail, and say so
        prepare()
    while (job := jobs.get()) is not None:
        job()
        del job  # what it holds may go
