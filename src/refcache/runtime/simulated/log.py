"""What a simulated machine did, for people to look at: launches, host accesses, waits.

A machine whose ``log`` is one of these writes everything down; nothing else changes.
"""

from dataclasses import dataclass, replace

from refcache.runtime.simulated.tracker import Access, Actor, Clock


@dataclass
class Span:
    """A launch, or an access by the host.

    Attributes:
        name: of the launch; ``actor``: the stream or thread, in words; ``track``: its number.
        number: of its actor's accesses, from 1.
        step: what :attr:`MachineLog.step` was when it was issued.
        issued, ran: on the log's clock; ``ran`` is None while it is pending.
    """

    name: str
    actor: str
    track: int
    number: int
    step: int
    issued: int
    ran: int | None = None


@dataclass(frozen=True)
class Edge:
    """A stream waits: what it runs after its access ``after`` comes after another's ``number``.

    Attributes:
        track, after: the waiting stream, and how many accesses had been issued to it.
        on, number: the actor that is waited for, and the number of its access.
        at: on the log's clock; ``step`` as in :class:`Span`.
    """

    track: int
    after: int
    on: int
    number: int
    at: int
    step: int


class MachineLog:
    """See the module docstring. Its clock counts what is written down.

    Attributes:
        step: set by the owner of the log; written into everything.
        spans: in the order of their issue; ``edges``: in the order of the waits.
    """

    def __init__(self) -> None:
        self.step = 0
        self.spans: list[Span] = []
        self.edges: list[Edge] = []
        self._now = 0
        self._span: dict[Access, Span] = {}
        self._promised: dict[int, list[Edge]] = {}

    def issued(self, access: Access) -> None:
        """A launch was put into its stream, or the host is about to touch something."""
        actor = access.actor
        span = Span(access.name, str(actor), actor.index, access.number, self.step, self._tick())
        self.spans.append(span)
        self._span[access] = span

    def ran(self, access: Access) -> None:
        """It has run."""
        self._span[access].ran = self._tick()

    def waits(self, waiter: Actor, on: Actor, clock: Clock) -> None:
        """``waiter`` waits for what ``clock`` has captured of ``on``, or will have."""
        after = waiter.clock.get(waiter.index, 0)
        edge = Edge(waiter.index, after, on.index, clock.get(on.index, 0), self._tick(), self.step)
        if on.index not in clock:  # a promise: its number stands in the clock
            self._promised.setdefault(next(iter(clock)), []).append(edge)
        elif edge.number and on is not waiter:
            self.edges.append(edge)

    def kept(self, promise: int, on: Actor, clock: Clock) -> None:
        """What was promised has been captured of ``on``."""
        for edge in self._promised.pop(promise, ()):
            self.edges.append(replace(edge, on=on.index, number=clock.get(on.index, 0)))

    def _tick(self) -> int:
        self._now += 1
        return self._now
