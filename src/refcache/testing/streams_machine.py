"""The Hypothesis state machine of suite ``hicache.streams``: orders of launches."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from refcache.oracle.edges import EDGES
from refcache.oracle.streams_driver import StreamsDriver
from refcache.testing.machines import DriverMachine
from refcache.testing.strategies import PAGE_SIZES, prompts
from refcache.types import WRITE_POLICIES

orders = st.lists(st.integers(0, 5), max_size=12).map(tuple)
long_orders = st.lists(st.integers(0, 5), max_size=200).map(tuple)


class StreamsMachine(DriverMachine):
    """Programs of the ordering edges, and the overlap loop, each in a drawn order."""

    d: StreamsDriver

    @initialize()
    def start(self) -> None:
        self.d = StreamsDriver(self.target)
        self.start_driver(self.d)

    @rule(name=st.sampled_from(sorted(EDGES)), choices=orders)
    def edge(self, name: str, choices: Any) -> None:
        self.d.edge(name, choices)

    @rule(
        prompts=st.lists(prompts.map(lambda p: p[:11]), min_size=2, max_size=7).map(tuple),
        choices=long_orders,
        write_policy=st.sampled_from(WRITE_POLICIES),
        page_size=st.sampled_from(PAGE_SIZES),
        host_pages=st.sampled_from([1, 1, 40]),
        retract_at=st.integers(-1, 20),
    )
    def serve(self, **drawn: Any) -> None:
        self.d.serve(**drawn)
