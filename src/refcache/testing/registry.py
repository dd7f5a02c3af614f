"""The suites by name. A name is ``part.kind``; each is one row of the verdict.

Kinds: *state* makes legal calls and checks every rule; *misuse* mixes in calls that break the
contract, which must be refused and change nothing; *exact* holds every choice against SGLang
0.5.10's, so that a changed policy is seen; *ranks* runs one program on ranks that differ in time;
*explore* draws nothing: it tries all small programs, as far as its share goes.
"""

from dataclasses import dataclass

from refcache.oracle.explore import SCOPES
from refcache.testing.machines.allocator import (
    AllocatorExactMachine,
    AllocatorMachine,
    AllocatorMisuseMachine,
)
from refcache.testing.machines.base import DriverMachine
from refcache.testing.machines.faults import FaultsMachine
from refcache.testing.machines.hicache import HiCacheMachine
from refcache.testing.machines.loop import LoopMachine
from refcache.testing.machines.ops import OpsMachine
from refcache.testing.machines.ranks import RanksMachine
from refcache.testing.machines.streams import StreamsMachine
from refcache.testing.machines.tree import TreeExactMachine, TreeMachine, TreeMisuseMachine
from refcache.types import EVICTION_POLICIES, WRITE_POLICIES


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


@dataclass(frozen=True)
class Share:
    """One row that explores: how many programs of each scope, for 100 cases asked for.

    Scopes are explored whole that fit in; see :mod:`refcache.oracle.explore.scopes`.
    """

    name: str
    programs: dict[str, int]

    @property
    def needs(self) -> frozenset[str]:
        """The capabilities that it asks of a target."""
        return frozenset().union(*(SCOPES[name].driver.needs for name in self.programs))


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
        Suite("hicache.faults", FaultsMachine, frozenset({"faults"}), 0.2),
        Suite("ops.transfer", OpsMachine, share=0.1),
    )
}
EXPLORED: dict[str, Share] = {
    share.name: share
    for share in (
        Share(
            "allocator.explore",
            {"allocator.tokens": 3_000, "allocator.pages": 13_000, "allocator.sorted": 17_000},
        ),
        Share(
            "tree.explore",
            {"tree.requests": 12_000, "tree.requests_pages": 1_500}
            | {f"tree.{policy}": 1_000 for policy in EVICTION_POLICIES},
        ),
        Share(
            "hicache.explore",
            {f"hicache.{policy}": 1_500 for policy in WRITE_POLICIES},
        ),
    )
}


def needs_of(suite: str) -> frozenset[str]:
    """The capabilities that a suite needs, whether it draws or explores."""
    return (EXPLORED if suite in EXPLORED else SUITES)[suite].needs
