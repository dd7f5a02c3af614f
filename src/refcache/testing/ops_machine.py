"""Suite ``ops.transfer``: calls of the ops, drawn and fixed ones."""

from collections.abc import Iterator
from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from refcache.oracle.driver import Call
from refcache.oracle.ops_driver import OpsDriver
from refcache.reference import alloc_cases, cases
from refcache.testing.machines import DriverMachine

randoms = st.randoms(use_true_random=False)


def fixed_cases() -> Iterator[Call]:
    """What is too large to be drawn often: several tiles, 2^31 elements, long batches."""
    for alloc in alloc_cases.long_alloc_cases():
        yield "slots", (alloc,)
    kinds = [[*cases.awkward_cases(op), *cases.row_bytes_cases(op)] for op in cases.OPS]
    for alike in zip(*kinds, strict=True):
        for case in alike:
            yield "transfer", (case,)
    for op in cases.OPS:
        yield "far", (op,)


class OpsMachine(DriverMachine):
    """One call a step; the fixed cases come first, once."""

    d: OpsDriver
    make = OpsDriver
    opening = tuple(fixed_cases())

    @initialize()
    def start(self) -> None:
        self.d = OpsDriver(self.target)
        self.start_driver(self.d)

    @precondition(lambda self: any(op in cases.OPS for op in self.d.names))
    @rule(rng=randoms)
    def transfer(self, rng: Random) -> None:
        op = rng.choice([op for op in cases.OPS if op in self.d.names])
        self.d.transfer(cases.random_case(rng, op=op))

    @precondition(lambda self: any(op not in cases.OPS for op in self.d.names))
    @rule(rng=randoms)
    def slots(self, rng: Random) -> None:
        self.d.slots(alloc_cases.random_alloc_case(rng))
