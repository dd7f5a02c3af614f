"""One short program for each real bug that refcache reproduces in published releases.

A program is legal use of the release. Its steps are those of a driver; the few that need more (a
protected host node, a bare pool) say so. :mod:`refcache.peers.track_record` runs them.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from refcache.oracle.drivers.allocator import AllocatorDriver
from refcache.oracle.drivers.hicache.driver import HiCacheDriver
from refcache.oracle.drivers.tree.driver import TreeDriver
from refcache.oracle.program.driver import Driver
from refcache.oracle.rules.violation import Violation

Program = Callable[[Any], None]


@dataclass(frozen=True)
class Case:
    """One bug.

    Attributes:
        bug: its number in this list; ``what``: in one sentence; ``reports``: public ones.
        variant: of the target; ``driver``, ``config``: what is built; ``program``: the steps.
        kind: "bug"; "policy" for behaviour that is legal and surprises; "guarded" where the cache
            does not refuse a call that the release's own scheduler makes only when it is safe.
    """

    bug: str
    what: str
    reports: tuple[str, ...]
    driver: type[Driver]
    config: dict[str, Any]
    program: Program
    variant: str = ""
    kind: str = "bug"


CASES: dict[str, Case] = {}


def case(
    bug: str, what: str, *reports: str, driver: type[Driver], **more: Any
) -> Callable[[Program], Program]:
    """Register a program under ``bug``; further keywords of :class:`Case`, the rest configures."""
    fields = {k: more.pop(k) for k in ("variant", "kind") if k in more}

    def register(program: Program) -> Program:
        CASES[bug] = Case(bug, what, reports, driver, more, program, **fields)
        return program

    return register


def _run(d: Any, *prompts: Sequence[int]) -> None:
    """Admit and finish each prompt, one after the other."""
    for prompt in prompts:
        d.admit(tuple(prompt))
        d.cache(0)
        d.finish(0)


@case(
    "B01",
    "a load-back frees and reuses the host slots it is about to read",
    "PR 27631", "PR 27562", "PR 26728", "PR 31427", "issue 30321",
    driver=HiCacheDriver, write_policy="write_back", size=8, host_size=9,
)  # fmt: skip
def _b01(d: HiCacheDriver) -> None:
    _run(d, (1, 1, 1))
    d.admit((0, 0, 2, 1, 1, 0))
    d.cache(0)
    d.decode(0, 0)
    d.finish(0)
    d.admit((1, 1, 1, 1))
    d.settle()


@case(
    "B02",
    "a node with a host-backed child is listed as an evictable host leaf",
    "PR 23537", "issue 19212",
    driver=HiCacheDriver, write_policy="write_back", size=6, host_size=7,
)  # fmt: skip
def _b02(d: HiCacheDriver) -> None:
    _run(d, (1, 1))
    d.evict(1)
    _run(d, (1, 1, 0))
    d.settle()
    d.evict(2)


@case(
    "B03",
    "host eviction removes an inner node; later work below it fails or leaks",
    "PR 23537", "issue 19212", "PR 22592",
    driver=HiCacheDriver, write_policy="write_back", size=8, host_size=9,
)  # fmt: skip
def _b03(d: HiCacheDriver) -> None:
    d.log.append("# the set of host leaves is wrong from here on (B02): no checks of it")
    d.check = lambda: None  # type: ignore[method-assign]
    _run(d, (0, 0, 2))
    d.evict(1)
    _run(d, (0, 0, 2, 1))
    d.settle()
    _run(d, (2, 1, 1, 1, 1, 1))
    _run(d, (0, 0, 2))
    d.settle()
    d.wind_down()


@case(
    "B06",
    "a split before the acknowledgement leaves half of what was written unaccounted for",
    "PR 16946", "PR 27072", "PR 38480", "PR 38835",
    driver=HiCacheDriver, size=8, host_size=20,
)  # fmt: skip
def _b06(d: HiCacheDriver) -> None:
    _run(d, (1, 2, 3, 4))
    submitted = _covered(d)
    d.match((1, 2, 9))
    if _covered(d) != submitted:
        raise Violation(
            "X1", f"a write of {submitted} tokens is in flight; its entry now covers {_covered(d)}"
        )


def _covered(d: HiCacheDriver) -> int:
    covered = {h for t in d.target.inspect_host(d.tree).transfers for h in t.handles}
    return sum(len(n.key) for n in d.target.inspect(d.tree).nodes if n.handle in covered)


@case(
    "B07",
    "a load-back is not ordered after the forward that still writes the freed slots",
    "PR 36738",
    driver=HiCacheDriver, variant="overlap", size=3, host_size=20, write_policy="write_through",
)  # fmt: skip
def _b07(d: HiCacheDriver) -> None:
    _run(d, (0, 1))
    d.settle()
    d.evict(2)
    d.admit((2, 2, 2))
    d.abort(0)
    d.readmit(0, 1)


@case(
    "B11",
    "the allocation kernel is launched before the free pages are counted, and reads past them",
    "issue 34399", "PR 30892", "PR 34400", "PR 32780",
    driver=AllocatorDriver, page_size=4, size=4,
    variant="kernels",
)  # fmt: skip
def _b11(d: AllocatorDriver) -> None:
    d.alloc(1)
    d.decode((0,))


@case(
    "B13",
    "the host pool takes slots back twice, and then hands them out twice",
    "issue 13483", "PR 13501", "PR 29310", "PR 27010",
    driver=HiCacheDriver, page_size=2, size=16, host_size=18,
)  # fmt: skip
def _b13(d: Any) -> None:
    pool = d.target.host_pool(d.tree)
    d.log += ["slots = pool.alloc(4)  # the host pool", "pool.free(slots)"]
    d.log.append("pool.free(slots[:2])  # may be refused")
    slots = pool.alloc(4)
    pool.free(slots)
    with suppress(AssertionError):
        pool.free(slots[:2])
    if pool.available_size() > pool.size:
        raise Violation("H1", f"{pool.available_size()} host slots are free, of {pool.size}")


@case(
    "B13d",
    "the device allocator takes slots back twice",
    "issue 13483", "PR 29310",
    driver=AllocatorDriver, size=8,
)  # fmt: skip
def _b13d(d: AllocatorDriver) -> None:
    d.log += ["slots = d.subject.alloc(4)", "d.subject.free(slots)", "d.subject.free(slots[:2])"]
    slots = d.subject.alloc(4)
    d.subject.free(slots)
    d.subject.free(slots[:2])
    free = d.subject.available_size()
    if free > d.config.size:
        raise Violation("P1", f"{free} tokens are free, of {d.config.size}")


@case(
    "B19",
    "a reset with a copy in flight forgets the copy, which then writes the next owner's slots",
    "PR 26009", "PR 21413", "issue 21359", "PR 37177",
    driver=HiCacheDriver, kind="guarded", size=8, host_size=20,
)  # fmt: skip
def _b19(d: HiCacheDriver) -> None:
    _run(d, (1, 2, 3))
    d.log += ["d.tree.reset()", "d.allocator.clear()"]
    d.trial.call(d.tree.reset)
    d.trial.call(d.allocator.clear)
    free, size = len(d.target.inspect_host(d.tree).free), d.config.host_size
    if d.machine.runnable() and free == size:
        raise Violation(
            "Z1", f"after a reset all {size} host slots are free; a copy into some is still to run"
        )


@case(
    "B23",
    "write-back with a full, pinned host pool: an assertion fails",
    "PR 27108", "PR 16909",
    driver=HiCacheDriver, write_policy="write_back", size=6, host_size=7,
)  # fmt: skip
def _b23(d: Any) -> None:
    _run(d, (1, 1, 1, 1))
    d.evict(4)
    for node in d.target.inspect(d.tree).nodes:
        d.target.pin_on_host(d.tree, node.handle)
    d.log.append("# every host node is pinned here, as a write to storage pins it; no checks")
    d.check = lambda: None
    _run(d, (2, 2, 2, 2))
    d.log.append("d.tree.evict(EvictParams(num_tokens=4))  # may free nothing, must not raise")
    with d.ledger.permits(d.ledger.only_unlocked):
        d.trial.call(d.tree.evict, d.target.EvictParams(num_tokens=4))


@case(
    "B26",
    "a prefix that only chunk inserts made is never written to the host, and is lost when evicted",
    "PR 36647", "issue 39444", "PR 39454", "PR 9776", "PR 8533",
    driver=HiCacheDriver, kind="policy", size=16, host_size=40,
)  # fmt: skip
def _b26(d: HiCacheDriver) -> None:
    d.admit((1, 2, 3, 4, 5, 6, 7, 8), None, 4)
    d.proceed(0, 2)
    d.abort(0)
    d.settle()
    d.evict(4)
    found = d.target.inspect(d.tree).nodes
    if not found:
        raise Violation("W1", "tokens 1 to 4 were cached under write_through; no tier has them")


@case(
    "B27",
    "one request alone counts as two hits under write_through_selective",
    "PR 30689",
    driver=HiCacheDriver, kind="policy", write_policy="write_through_selective",
    size=16, host_size=40,
)  # fmt: skip
def _b27(d: HiCacheDriver) -> None:
    d.admit((1, 2, 3, 4))
    d.cache(0)
    d.decode(0, 5)
    d.finish(0)
    nodes = d.target.inspect(d.tree).nodes
    copied = [list(node.key) for node in nodes if node.host is not None]
    if copied:
        raise Violation("W1", f"one request was served once, and {copied[0]} has a host copy")


@case(
    "B31",
    "a fourth load before the first has finished fails an assertion",
    driver=HiCacheDriver, variant="loads", size=8, host_size=20,
)  # fmt: skip
def _b31(d: HiCacheDriver) -> None:
    _run(d, (0, 1), (1, 1), (2, 1), (3, 1))
    d.settle()
    d.evict(8)
    for first in range(4):
        d.load_back((first, 1))


@case(
    "B39",
    "KV events name a page without its namespace: two tenants' pages have one name",
    "issue 26747", "PR 38577", "PR 36382",
    driver=TreeDriver, variant="events", size=2, enable_kv_cache_events=True,
)  # fmt: skip
def _b39(d: TreeDriver) -> None:
    d.admit((1,))
    d.finish(0)
    d.insert((1,), "a")
