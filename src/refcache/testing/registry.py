"""The suites by name. A name is ``part.kind``; each is one row of the verdict.

Kinds: *state* makes legal calls and checks every rule; *misuse* mixes in calls that break the
contract, which must be refused and change nothing; *exact* holds every choice against SGLang
0.5.10's, so that a changed policy is seen; *ranks* runs one program on ranks that differ in time;
*backend*, *damage* and *crash* judge what keeps pages below the host, by its own methods;
*explore* draws nothing: it tries all small programs, as far as its share goes.

What the suites are called takes no tensor to know: a machine is imported when it is asked for.
"""

import importlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from refcache.errors import UnknownName
from refcache.types import EVICTION_POLICIES, WRITE_POLICIES

if TYPE_CHECKING:
    from refcache.testing.machines.base import DriverMachine

EXACT = frozenset({"exact"})


@dataclass(frozen=True)
class Suite:
    """One row. The rules of its machine make the steps of a driver, and the driver's bench checks.

    Attributes:
        home: where the machine is, ``module:class`` below :mod:`refcache.testing.machines`; or the
            class itself.
        extra: capabilities beyond those that the driver needs.
        share: of the cases asked for, how many it runs; a step of the loop is worth several calls.
    """

    name: str
    home: "str | type[DriverMachine]"
    extra: frozenset[str] = frozenset()
    share: float = 1.0

    @cached_property
    def machine(self) -> "type[DriverMachine]":
        """The Hypothesis machine."""
        if not isinstance(self.home, str):
            return self.home
        module, _, name = self.home.partition(":")
        found: type[DriverMachine] = getattr(
            importlib.import_module(f"refcache.testing.machines.{module}"), name
        )
        return found

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
        from refcache.oracle.explore import SCOPES

        return frozenset().union(*(SCOPES[name].needs for name in self.programs))


SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite("allocator.state", "allocator:AllocatorMachine"),
        Suite("allocator.misuse", "allocator:AllocatorMisuseMachine", share=0.5),
        Suite("allocator.exact", "allocator:AllocatorExactMachine", EXACT, 0.5),
        Suite("tree.state", "tree:TreeMachine"),
        Suite("tree.misuse", "tree:TreeMisuseMachine", share=0.5),
        Suite("tree.exact", "tree:TreeExactMachine", EXACT, 0.5),
        Suite("mamba.state", "mamba:MambaMachine", share=0.3),
        Suite("mamba.misuse", "mamba:MambaMisuseMachine", frozenset({"refuses_misuse"}), 0.12),
        Suite("mamba.exact", "mamba:MambaExactMachine", EXACT, 0.12),
        Suite("swa.state", "swa:SWAMachine", share=0.3),
        Suite("swa.misuse", "swa:SWAMisuseMachine", frozenset({"refuses_misuse"}), 0.1),
        Suite("swa.exact", "swa:SWAExactMachine", EXACT, 0.1),
        Suite("loop.state", "loop:LoopMachine", share=0.25),
        Suite("hicache.state", "hicache:HiCacheMachine", share=0.6),
        Suite("hicache.streams", "streams:StreamsMachine", share=0.4),
        Suite("hicache.ranks", "ranks:RanksMachine", share=0.3),
        Suite("hicache.faults", "faults:FaultsMachine", frozenset({"faults"}), 0.2),
        Suite("storage.state", "storage.tier:TierMachine", share=0.2),
        Suite("storage.faults", "storage.tier:TierFaultsMachine", share=0.2),
        Suite("offload.state", "offload:OffloadMachine", share=0.18),
        Suite("storage.backend", "storage.backend:BackendMachine", share=0.4),
        Suite("storage.damage", "storage.backend:DamageMachine", share=0.3),
        Suite("storage.crash", "storage.backend:CrashMachine", share=0.1),
        Suite("sequences.state", "sequences:SequencesMachine", share=0.6),
        Suite("ops.transfer", "ops:OpsMachine", share=0.1),
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


def list_suites(select: str | None = None) -> list[str]:
    """Names of all suites, or of those of a part (``tree``), a kind (``state``) or one by name.

    Raises:
        UnknownName: nothing is called so.
    """
    known = [*SUITES, *EXPLORED]
    if select is None:
        return known
    names = [name for name in known if name == select or select in name.split(".")]
    if not names:
        parts = {part for name in known for part in name.split(".")}
        raise UnknownName("suite", select, {*known, *parts})
    return names


def draws_write_policies(suite: str) -> bool:
    """Whether a suite draws the write policies of a host tier."""
    return suite in SUITES and suite.startswith("hicache.")
