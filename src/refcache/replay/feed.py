"""When the requests of a trace come: as fast as the loop admits them, or when they arrived.

By arrival, the loop runs on a clock of the trace: a step takes what the configuration says, and
while nothing runs the clock goes on to the next arrival. It is also the clock of the tree, so that
strategies can ask how long ago something was used.
"""

from collections.abc import Sequence
from math import inf, nextafter
from typing import Any, Protocol

from refcache.readers import TraceRequest
from refcache.replay.config import ReplayConfig

QUEUE = 16  # requests kept waiting, so that a batch never lacks candidates


class Feed(Protocol):
    """Hands out a trace's requests by their index, each once, in order."""

    @property
    def clock(self) -> "TraceClock | None":
        """Seconds of the trace, where the feed goes by them."""
        ...

    def due(self, scheduler: Any) -> Sequence[int]:
        """The requests to submit before the next step."""
        ...

    def passed(self, computed: int) -> None:
        """A step was made that computed so many tokens in prefills."""
        ...

    def more(self) -> bool:
        """Nothing runs: whether a request will come; the clock goes on to its arrival."""
        ...


class TraceClock:
    """Seconds of the trace; read as a tree's clock, no two readings tie.

    Attributes:
        now: seconds since the trace began.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._read = 0.0

    def __call__(self) -> float:
        self._read = max(nextafter(self._read, inf), self.now)
        return self._read


class AsAdmitted:
    """The queue never lacks candidates; times of arrival are not looked at."""

    clock = None

    def __init__(self, trace: Sequence[TraceRequest], config: ReplayConfig) -> None:
        self._left = iter(range(len(trace)))
        self._serial = config.serial

    def due(self, scheduler: Any) -> Sequence[int]:
        waiting = len(scheduler.live_reqs if self._serial else scheduler.waiting_queue)
        keep = 1 if self._serial else QUEUE
        return [index for _, index in zip(range(keep - waiting), self._left, strict=False)]

    def passed(self, computed: int) -> None: ...

    def more(self) -> bool:
        return False


class ByArrival:
    """Each request comes when the clock of the trace has reached its time."""

    def __init__(self, trace: Sequence[TraceRequest], config: ReplayConfig) -> None:
        self.clock = TraceClock()
        first = trace[0].timestamp if trace else 0
        self._times = [(request.timestamp - first) / 1000 for request in trace]
        self._next = 0
        self._step, self._rate = config.step_ms / 1000, config.prefill_rate

    def due(self, scheduler: Any) -> Sequence[int]:
        begin = self._next
        while self._next < len(self._times) and self._times[self._next] <= self.clock.now:
            self._next += 1
        return range(begin, self._next)

    def passed(self, computed: int) -> None:
        self.clock.now += self._step + computed / self._rate

    def more(self) -> bool:
        if self._next == len(self._times):
            return False
        self.clock.now = max(self.clock.now, self._times[self._next])
        return True


def feed_of(trace: Sequence[TraceRequest], config: ReplayConfig) -> Feed:
    """The feed that ``config.arrivals`` asks for."""
    return ByArrival(trace, config) if config.arrivals else AsAdmitted(trace, config)
