"""The suites by name. A name is ``part.kind``; each is one row of the verdict.

Kinds: *state* makes legal calls and checks every rule; *misuse* mixes in calls that break the
contract, which must be refused and change nothing; *exact* holds every choice against SGLang
0.5.10's, so that a changed policy is seen; *ranks* runs one program on ranks that differ in time.
"""

from dataclasses import dataclass

from refcache.oracle import (
    AllocatorDriver,
    HiCacheDriver,
    LoopDriver,
    StreamsDriver,
    TreeDriver,
)
from refcache.oracle.drivers.misuse import AllocatorMisuseDriver, TreeMisuseDriver
from refcache.oracle.drivers.ops import OpsDriver
from refcache.oracle.drivers.ranks.driver import RanksDriver
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
    """One row: the machine that runs, and the capabilities that it needs.

    ``share``: of the cases asked for, how many it runs; a step of the loop is worth several calls.
    """

    name: str
    machine: type[DriverMachine]
    needs: frozenset[str]
    share: float = 1.0


EXACT = frozenset({"exact"})
SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite("allocator.state", AllocatorMachine, AllocatorDriver.needs),
        Suite("allocator.misuse", AllocatorMisuseMachine, AllocatorMisuseDriver.needs, 0.5),
        Suite("allocator.exact", AllocatorExactMachine, AllocatorDriver.needs | EXACT, 0.5),
        Suite("tree.state", TreeMachine, TreeDriver.needs),
        Suite("tree.misuse", TreeMisuseMachine, TreeMisuseDriver.needs, 0.5),
        Suite("tree.exact", TreeExactMachine, TreeDriver.needs | EXACT, 0.5),
        Suite("loop.state", LoopMachine, LoopDriver.needs, 0.25),
        Suite("hicache.state", HiCacheMachine, HiCacheDriver.needs, 0.3),
        Suite("hicache.streams", StreamsMachine, StreamsDriver.needs, 0.1),
        Suite("hicache.ranks", RanksMachine, RanksDriver.needs, 0.1),
        Suite("ops.transfer", OpsMachine, OpsDriver.needs, 0.1),
    )
}
