"""The KV events of a recorded trace, replayed: what is resident on each medium.

Streams of events without calls are judged by :mod:`refcache.trace.events.stream`.
"""

from refcache.oracle.rules.events import EventReplay
from refcache.trace.events.kinds import AllBlocksCleared, KVEvent

DEVICE = "GPU"


class Residency:
    """What is resident on each medium, after the events so far. ``media``: a replay of each."""

    def __init__(self) -> None:
        self.media: dict[str, EventReplay] = {}

    def apply(self, event: KVEvent) -> None:
        """Replay one event.

        Raises:
            Violation: it cannot come after those before it.
        """
        if isinstance(event, AllBlocksCleared):
            self.medium(DEVICE)
            for replay in self.media.values():
                replay.apply([event])
        else:
            self.medium(event.medium or DEVICE).apply([event])

    def medium(self, name: str) -> EventReplay:
        """The replay of one medium; below the device, a parent may be on the device only."""
        if name not in self.media:
            above = (lambda: None) if name == DEVICE else (lambda: self.media.get(DEVICE))
            self.media[name] = EventReplay(above)
        return self.media[name]
