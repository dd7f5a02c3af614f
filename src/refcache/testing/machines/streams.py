"""The Hypothesis state machine of suite ``hicache.streams``: orders of launches.

The program of each ordering edge is run in every order it has, once, before anything is drawn. What
is drawn are workloads of the overlap loop: each is a step of its own, so a case has few of them.
"""

from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from refcache.oracle.drivers.streams.driver import StreamsDriver
from refcache.oracle.drivers.streams.edges import EDGES
from refcache.testing.machines.base import DriverMachine
from refcache.testing.machines.strategies import PAGE_SIZES, prompts, token
from refcache.types import WRITE_POLICIES

orders = st.lists(st.integers(0, 5), max_size=200).map(tuple)


@st.composite
def sessions(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """4 to 7 prompts; most come back, as they were or longer: what was evicted is loaded."""
    known = draw(st.lists(prompts.map(lambda p: p[:9]), min_size=2, max_size=3))
    turns = st.tuples(st.sampled_from(known), st.lists(token, max_size=2).map(tuple))
    return tuple(prompt + tail for prompt, tail in draw(st.lists(turns, min_size=4, max_size=7)))


RETRACTED = (
    ((0, 2, 0), (0, 2, 0, 1, 1), (0, 2, 0), (1, 0, 2, 0, 0, 0, 1)),
    (),
    "write_through",
    1,
    40,
    4,
    6,
    16,
)
"""A workload where a request is retracted, its prefix goes to the host, and is loaded for it."""


class StreamsMachine(DriverMachine):
    """The edges, then the overlap loop in drawn orders."""

    d: StreamsDriver
    make = StreamsDriver
    opening = (*(("every_order", (name,)) for name in EDGES), ("serve", RETRACTED))
    steps = 4
    write_policy: ClassVar[str | None] = None
    """The only one that is drawn, if any."""

    @initialize()
    def start(self) -> None:
        self.begin()

    @rule(
        prompts=sessions(),
        choices=orders,
        write_policy=st.sampled_from(WRITE_POLICIES),
        page_size=st.sampled_from(PAGE_SIZES),
        host_pages=st.sampled_from([1, 1, 40]),
        retract_at=st.integers(-1, 20),
        size=st.sampled_from([16, 24]),
        io_backend=st.sampled_from(["auto", "direct", "direct"]),
        failing_load=st.sampled_from([-1, -1, 0, 1]),
        apart=st.integers(0, 4),
    )
    def serve(self, **drawn: Any) -> None:
        self.d.serve(**drawn | ({"write_policy": self.write_policy} if self.write_policy else {}))
