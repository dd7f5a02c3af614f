"""Controls: the simulated machine without one ordering edge, to see that its loss is reported.

A check that has never failed proves nothing. :class:`MachineWithout` ignores one kind of wait, told
by who waits and for whom, so that code under test is run unchanged and exactly one edge is missing.
"""

from refcache.runtime.simulated.machine import Driver, SimulatedRuntime
from refcache.runtime.simulated.streams import Capture, SimulatedStream
from refcache.runtime.simulated.tracker import Tracker


class MachineWithout(SimulatedRuntime):
    """The simulated machine, except that ``waiter`` never waits for ``source``.

    A host thread that does not wait goes on as if the work were done (``query`` says True) and
    knows nothing of it. Its own work waiting for other streams is not touched.

    Args:
        waiter: name of a stream, or of a host thread ("main").
        source: name of the stream whose work is not waited for.
        driver, tracker: as for :class:`SimulatedRuntime`.

    Attributes:
        ignored: how many waits were left out. 0 means that the control controlled nothing.
    """

    def __init__(
        self, waiter: str, source: str, driver: Driver, tracker: Tracker | None = None
    ) -> None:
        super().__init__(driver, tracker)
        self.waiter = waiter
        self.source = source
        self.ignored = 0

    def _ignores(self, waiter: str, capture: Capture | None) -> bool:
        ignored = capture is not None and (waiter, capture.stream.name) == (
            self.waiter,
            self.source,
        )
        self.ignored += ignored
        return ignored

    def _wait(self, stream: SimulatedStream, capture: Capture | None) -> None:
        if not self._ignores(stream.name, capture):
            super()._wait(stream, capture)

    def _query(self, capture: Capture | None) -> bool:
        return self._ignores(self.host.name, capture) or super()._query(capture)

    def _block(self, capture: Capture | None) -> None:
        if not self._ignores(self.host.name, capture):
            super()._block(capture)

    def synchronize(self) -> None:
        """The host waits for everything, whatever is left out: what a test does at its end."""
        for thread in self._jobs:
            thread.drain()
        for capture in [self._capture(stream) for stream in self._streams]:
            super()._block(capture)
