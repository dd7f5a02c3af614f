"""The suites by name. A name is ``part.kind``; each is one row of the verdict.

Kinds: *state* makes legal calls and checks every rule; *misuse* mixes in calls that break the
contract, which must be refused and change nothing; *exact* holds every choice against SGLang
0.5.10's, so that a changed policy is seen; *ranks* runs one program on ranks that differ in time.
"""

from dataclasses import dataclass

from refcache.testing.machines.allocator import (
    AllocatorExactMachine,
    AllocatorMachine,
    AllocatorMisuseMachine,
)
from refcache.testing.machines.base import DriverMachine
from refcache.testing.machines.hicache import HiCacheMachine
from refcache.testing.machines.loop import LoopMachine
from refcache.testing.machines.ops import OpsMachine
from refcache.testing.machines.ranks import RanksMachine
from refcache.testing.machines.streams import StreamsMachine
from refcache.testing.machines.tree import TreeExactMachine, TreeMachine, TreeMisuseMachine


@dataclass(frozen=True)
class Suite:
    """One row. The rules of its machine make the steps of a driver, and the driver's bench checks.

    Attributes:
        extra: capabilities beyond those that the driver needs.
        share: of the cases asked for, how many it runs; a step of the loop is worth several calls.
    """

    name: str
    machine: type[DriverMachine]
    extra: frozenset[str] = frozenset()
    share: float = 1.0

    @property
    def needs(self) -> frozenset[str]:
        """The capabilities that it asks of a target."""
        needs: frozenset[str] = self.machine.make.needs | self.extra
        return needs


EXACT = frozenset({"exact"})
SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite("allocator.state", AllocatorMachine),
        Suite("allocator.misuse", AllocatorMisuseMachine, share=0.5),
        Suite("allocator.exact", AllocatorExactMachine, EXACT, 0.5),
        Suite("tree.state", TreeMachine),
        Suite("tree.misuse", TreeMisuseMachine, share=0.5),
        Suite("tree.exact", TreeExactMachine, EXACT, 0.5),
        Suite("loop.state", LoopMachine, share=0.25),
        Suite("hicache.state", HiCacheMachine, share=0.3),
        Suite("hicache.streams", StreamsMachine, share=0.1),
        Suite("hicache.ranks", RanksMachine, share=0.1),
        Suite("ops.transfer", OpsMachine, share=0.1),
    )
}
