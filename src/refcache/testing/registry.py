"""The suites by name. A name is ``part.kind``; each is one row of the verdict."""

from dataclasses import dataclass

from refcache.testing.machines import (
    AllocatorMachine,
    DriverMachine,
    LoopMachine,
    TreeMachine,
)


@dataclass(frozen=True)
class Suite:
    """One row: the machine that runs, and the capabilities that it needs."""

    name: str
    machine: type[DriverMachine]
    needs: frozenset[str]


SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite("allocator.state", AllocatorMachine, frozenset({"allocator"})),
        Suite("tree.state", TreeMachine, frozenset({"allocator", "tree"})),
        Suite("loop.state", LoopMachine, frozenset({"allocator", "tree"})),
    )
}
