"""Suite ``ops.transfer``: calls of the ops, drawn and fixed ones."""

from collections.abc import Callable, Iterator
from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from refcache.oracle.drivers.ops import OpsDriver
from refcache.oracle.program.driver import Call
from refcache.reference import alloc_cases, cases
from refcache.reference.cases import TransferCase
from refcache.testing.machines.base import DriverMachine

randoms = st.randoms(use_true_random=False)


def fixed_cases() -> Iterator[Call]:
    """What is too large to be drawn often: several tiles, 2^31 elements, long batches.

    What takes long comes late, so that a planted bug is soon found; what has no guards around its
    buffers comes after what has, so that it is found alive.
    """
    *quick, longest = alloc_cases.long_alloc_cases()
    for alloc in quick:
        yield "slots", (alloc,)
    yield from _for_each_op(cases.awkward_cases)
    for op in cases.OPS:
        yield "far", (op,)
    yield "slots", (longest,)
    yield from _for_each_op(cases.row_bytes_cases)


def _for_each_op(kind: Callable[[str], Iterator[TransferCase]]) -> Iterator[Call]:
    for alike in zip(*map(kind, cases.OPS), strict=True):
        for case in alike:
            yield "transfer", (case,)


class OpsMachine(DriverMachine):
    """One call a step; the fixed cases come first, once."""

    d: OpsDriver
    make = OpsDriver
    opening = tuple(fixed_cases())

    @initialize()
    def start(self) -> None:
        self.begin()

    @precondition(lambda self: any(op in cases.OPS for op in self.d.names))
    @rule(rng=randoms)
    def transfer(self, rng: Random) -> None:
        op = rng.choice([op for op in cases.OPS if op in self.d.names])
        self.d.transfer(cases.random_case(rng, op=op))

    @precondition(lambda self: any(op not in cases.OPS for op in self.d.names))
    @rule(rng=randoms)
    def slots(self, rng: Random) -> None:
        self.d.slots(alloc_cases.random_alloc_case(rng))
