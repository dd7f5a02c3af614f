"""Each rule about a call fires for a fault: allocator, misuse, loop, streams, ranks, ops, events.

The counterpart of ``test_call_invariants.py`` for the drivers that need no fault of a tree's own
parts: a fault is a patch, as a planted bug is. Each program passes on the unchanged reference.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from refcache import oracle, reference
from refcache.errors import RefcacheError
from refcache.events import AllBlocksCleared, BlockRemoved, BlockStored
from refcache.oracle import (
    AllocatorDriver,
    AllocatorMisuseDriver,
    Driver,
    LoopDriver,
    OpsDriver,
    RanksDriver,
    StreamsDriver,
    TreeMisuseDriver,
    Violation,
    resolve,
)
from refcache.oracle.ledger.ledger import Ledger
from refcache.oracle.program.torch_settings import torch_settings
from refcache.oracle.rules.events import EventReplay
from refcache.oracle.rules.violation import without_rules
from refcache.oracle.target.ops import OpsTarget
from refcache.planted import PlantedBug, find
from refcache.reference.alloc_cases import AllocCase
from refcache.reference.cases import TransferCase

Function = Callable[..., Any]
TOKENS = "refcache.allocator.token:TokenToKVPoolAllocator"
PAGED = "refcache.allocator.paged:PagedTokenToKVPoolAllocator"
BASE = "refcache.allocator.base:BaseTokenToKVPoolAllocator"
RADIX = "refcache.tree.radix_cache:RadixCache"
TREE = "refcache.tree.radix_tree:RadixTree"
ROWS = "refcache.pool.req_to_token:ReqToTokenPool"
SCHEDULER = "refcache.engine.scheduling.scheduler:Scheduler"
CONTROLLER = "refcache.controller.hicache_controller:HiCacheController"


def patch(where: str, replacement: Callable[[Function], Function]) -> PlantedBug:
    return PlantedBug("fault", "slip", "", where, replacement, "")


def nothing(where: str, answer: Any = None) -> PlantedBug:
    return patch(where, lambda original: lambda *args, **more: answer)


def result(where: str, change: Function) -> PlantedBug:
    return patch(where, lambda original: lambda *args, **more: change(original(*args, **more)))


def lenient(where: str) -> PlantedBug:
    """What is refused is ignored without a word."""

    def replacement(original: Function) -> Function:
        def quiet(*args: Any, **more: Any) -> Any:
            try:
                return original(*args, **more)
            except RefcacheError:
                return SimpleNamespace(delta=0, prefix_len=0)

        return quiet

    return patch(where, replacement)


def raises(where: str) -> PlantedBug:
    """A refusal is another error than the target's."""

    def replacement(original: Function) -> Function:
        def wrong(*args: Any, **more: Any) -> Any:
            try:
                return original(*args, **more)
            except RefcacheError as error:
                raise ZeroDivisionError from error

        return wrong

    return patch(where, replacement)


def turned(original: Function) -> Function:
    """A match gives the right slots in the wrong order."""

    def match_prefix(self: Any, params: Any) -> Any:
        found = original(self, params)
        return found._replace(device_indices=found.device_indices.flip(0))

    return match_prefix


def for_ever(original: Function) -> Function:
    """Once something runs, each step launches a forward and none is processed."""

    def step(self: Any) -> Any:
        if self.live_reqs:
            self.forward_ct += 1
            return None
        return original(self)

    return step


def pinned(original: Function) -> Function:
    def evict(self: Any, params: Any) -> Any:
        for node in self.nodes():
            self.inc_lock_ref(node)
        return original(self, params)

    return evict


def unlisted(original: Function) -> Function:
    def insert(self: Any, params: Any) -> Any:
        out = original(self, params)
        self.evictable_leaves.clear()
        return out

    return insert


def half_refused(original: Function) -> Function:
    """A refused insert has grown the tree's size."""

    def insert(self: Any, params: Any) -> Any:
        try:
            return original(self, params)
        except RefcacheError:
            self.evictable_size_ += 1
            raise

    return insert


def kept_rows(original: Function) -> Function:
    return lambda self: None if hasattr(self, "root_node") else original(self)


def another_token(original: Function) -> Function:
    def tokens(self: Any) -> Any:
        return [(token + 1) % 3 for token in original(self)]

    return tokens


PAGE_2 = {"page_size": 2, "size": 8}
SERVE = ("serve", ((0, 1, 2, 0), (1, 1, 2)))
HOST_HIT = ("serve", ((0, 1, 2) * 3, (1, 1, 2) * 3, (2, 1, 0) * 3, (0, 1, 2) * 3), (), "write_back")
CASES: list[tuple[Any, str, str, PlantedBug, dict[str, Any], tuple[tuple[Any, ...], ...]]] = [
    # ---- allocator
    (AllocatorDriver, "AL2", "refused 1 pages although 4 are", nothing(f"{BASE}.alloc"), PAGE_2,
        (("alloc", 1),)),
    (AllocatorDriver, "AL1", "3 slots, but 4 were asked for", result(f"{BASE}.alloc",
        lambda out: out[:-1]), PAGE_2, (("alloc", 2),)),
    (AllocatorDriver, "AL1", "the slots are torch.int32 [4], expected torch.int64", result(
        f"{BASE}.alloc", lambda out: out.to(torch.int32)), PAGE_2, (("alloc", 2),)),
    (AllocatorDriver, "AL1", "the slots are a list, expected torch.int64 [2]", result(
        f"{BASE}.alloc", lambda out: out.tolist()), PAGE_2, (("alloc", 1),)),
    (AllocatorDriver, "AL1", "the slots are torch.int64 [1, 2], expected torch.int64 [2]", result(
        f"{PAGED}.alloc_extend", lambda out: out[None]), PAGE_2, (("extend", ((0, 2),)),)),
    (AllocatorDriver, "AL1", "token 1 got slot 4, expected 3", result(f"{BASE}.alloc",
        lambda out: out[::2].repeat(2)), PAGE_2, (("alloc", 2),)),
    (AllocatorDriver, "P0", "token 0 got slot 0 of page 0", result(f"{BASE}.alloc",
        lambda out: out - 2), PAGE_2, (("alloc", 1),)),
    (AllocatorDriver, "P0", "token 0 got slot 10 of page 5", result(f"{BASE}.alloc",
        lambda out: out + 8), PAGE_2, (("alloc", 1),)),
    (AllocatorDriver, "AL1", "token 0 opens a page at slot 3, offset 1", result(f"{BASE}.alloc",
        lambda out: out + 1), PAGE_2, (("alloc", 1),)),
    (AllocatorDriver, "P1", "token 0 got page 1, which sequence 0 owns", result(f"{BASE}.alloc",
        lambda out: out % 2 + 2), PAGE_2, (("alloc", 1), ("alloc", 1))),
    (AllocatorDriver, "P1", "available_size() = 6, but 4 pages of 2 are owned by nobody",
        result(f"{BASE}.available_size", lambda n: n - 2), PAGE_2, (("sort",),)),
    # ---- misuse
    *((AllocatorMisuseDriver, "REFUSE", f"{what}: was accepted", lenient(where), PAGE_2,
        (("alloc", 1), ("decode", (0,)), call))
        for what, where, call in (
            ("free of page 3, which is free", f"{BASE}.free", ("free_free_page", 0)),
            ("free of slot 2 and free page 3", f"{BASE}.free", ("free_with_free_page", 0)),
            ("free of slot 0", f"{BASE}.free", ("free_dummy_page",)),
            ("free past the pool", f"{BASE}.free", ("free_outside", 0)),
            ("free of float slots", f"{BASE}.free", ("free_floats",)),
            ("alloc of -1 pages", f"{BASE}.alloc", ("alloc_odd", 0)),
            ("alloc_extend to fewer tokens", f"{PAGED}.alloc_extend", ("shrink", 0)),
            ("alloc_extend with a wrong sum", f"{PAGED}.alloc_extend", ("wrong_sum", 0, 1)),
            ("alloc_extend after another slot", f"{PAGED}.alloc_extend", ("wrong_last_loc", 0)),
            ("alloc_decode after another slot", f"{PAGED}.alloc_decode", ("wrong_last_loc", 0)),
            ("alloc_extend after a slot in page 0", f"{PAGED}.alloc_extend",
                ("last_loc_outside", 0)),
            ("alloc_decode after a slot in page 0", f"{PAGED}.alloc_decode",
                ("last_loc_outside", 0)),
        )),
    (AllocatorMisuseDriver, "REFUSE", "free of a negative slot: was accepted", patch(
        f"{BASE}.free", lambda original: lambda self, index: None if index.min() < 0
        else original(self, index)), PAGE_2, (("free_outside", 0),)),
    (AllocatorMisuseDriver, "REFUSE", "alloc of 3 slots: was accepted", patch(
        f"{BASE}.alloc", lambda original: lambda self, n: None if n % 2 else original(self, n)),
        PAGE_2, (("alloc_odd", 1),)),
    (AllocatorMisuseDriver, "REFUSE", "free of slot 0: raised ZeroDivisionError(), expected",
        raises(f"{BASE}.free"), PAGE_2, (("free_dummy_page",),)),
    *((TreeMisuseDriver, "REFUSE", f"{what}: was accepted", lenient(where), PAGE_2,
        (("admit", (0, 1, 2)), ("insert", (0, 1, 2, 2)), call))
        for what, where, call in (
            ("dec_lock_ref of an unlocked node", f"{RADIX}.dec_lock_ref",
                ("unlock_unlocked", (0, 1))),
            ("inc_lock_ref of another tree's node", f"{RADIX}.inc_lock_ref",
                ("lock_stranger", (0, 1))),
            ("dec_lock_ref of another tree's node", f"{RADIX}.dec_lock_ref",
                ("lock_stranger", (0, 1))),
            ("inc_lock_ref of an evicted node", f"{RADIX}.inc_lock_ref",
                ("lock_evicted", (0, 1))),
            ("insert of a partial page", f"{TREE}.insert", ("insert_unfit", (0, 1, 2))),
            ("insert with a slot too few", f"{TREE}.insert", ("insert_unfit", (0, 1))),
            ("a write past the row", f"{ROWS}.write", ("write_outside_row", 0, 1)),
        )),
    (TreeMisuseDriver, "Z3", "the refused call (insert with a slot too few) turned", patch(
        f"{TREE}.insert", half_refused), PAGE_2, (("insert_unfit", (0, 1)),)),
    # ---- the loop over one tier
    (LoopDriver, "P1", "page 1 was handed out twice", patch(f"{BASE}.alloc", lambda original:
        lambda self, n: original(self, n) * 0 + torch.arange(1, n + 1)), {},
        (("submit", (0, 1), 3), ("run", 3))),
    (LoopDriver, "PROGRESS", "request 0 computed 1 tokens, and its next chunk starts at 0",
        find("chunk-computed-again"), {"chunk_pages": 1},
        (("submit", (0, 1, 2), 1, "a"), ("run", 3))),
    (LoopDriver, "PROGRESS", "4 steps changed nothing; live are []", nothing(f"{SCHEDULER}.step"),
        {}, (("submit", (0, 1)), ("run", 4))),
    (LoopDriver, "PROGRESS", "after 100 more steps there are still", patch(f"{SCHEDULER}.step",
        for_ever), {}, (("submit", (0, 1), 9), ("run",), ("wind_down",))),
    (LoopDriver, "BUDGET", "", nothing(f"{BASE}.alloc"), {}, (("submit", (0, 1)), ("run",))),
    (LoopDriver, "C-READ", "expected token 0 of request 1 (", patch(f"{TREE}.match_prefix",
        turned), {}, (("submit", (0, 1, 2)), ("run", 3), ("submit", (0, 1, 2, 0)), ("run",))),
    (LoopDriver, "Z1", "2 tokens are cached after flush_cache", patch(f"{TREE}.reset", kept_rows),
        {}, (("submit", (0, 1)), ("run", 3), ("flush",))),
    (LoopDriver, "P1", "14 of 16 tokens are free after everything", patch(f"{RADIX}.evict", pinned),
        {}, (("submit", (0, 1)), ("run", 3), ("wind_down",))),
    (LoopDriver, "R3", "3 of 4 rows are free and nothing runs", nothing(f"{ROWS}.free"), {},
        (("submit", (0, 1)), ("run", 3), ("wind_down",))),
    (LoopDriver, "P1", "available_size() = 15, but 16 pages of 1 were", result(
        f"{BASE}.available_size", lambda n: n - 1), {}, (("evict", 1),)),
    (LoopDriver, "P3", "+ 0 protected + 0 private = 17 tokens, but the pool has 16", result(
        f"{TREE}.evictable_size", lambda n: n + (n > 0)), {}, (("submit", (0, 1)), ("run", 3))),
    (LoopDriver, "A3", "is not listed as an evictable leaf", patch(
        f"{TREE}._insert_helper", unlisted), {}, (("submit", (0, 1)), ("run", 3))),
    # ---- streams
    (StreamsDriver, "X5", "edge key-getter (reading K", nothing(f"{CONTROLLER}.evict_host"),
        {"without_edge": "key-getter"}, (("edge", "key-getter"),)),
    (StreamsDriver, "X5", "edge key-getter (reading K", nothing(f"{CONTROLLER}.evict_host"),
        {"without_edge": "key-getter"}, (("every_order", "key-getter"),)),
    (StreamsDriver, "X5", "", nothing("refcache.pool.kv_cache:KVCache._wait"), {},
        (("edge", "key-getter"),)),
    (StreamsDriver, "X5", "", nothing(f"{CONTROLLER}._wait_for_forward"), {}, (SERVE,)),
    (StreamsDriver, "LIFE", "", nothing(f"{CONTROLLER}._keep"), {},
        ((*SERVE, (1,) * 200),)),
    (StreamsDriver, "C-READ", "r", patch(f"{TREE}.match_prefix", turned), {}, (HOST_HIT,)),
    (StreamsDriver, "C-READ", "r0 answered", patch(
        "refcache.engine.tp_worker:GenerationBatchResult.tokens", another_token), {}, (SERVE,)),
    (StreamsDriver, "PROGRESS", "requests are left after 400 steps", nothing(f"{SCHEDULER}.step"),
        {}, (SERVE,)),
    # ---- ranks
    (RanksDriver, "Z2", "copies in flight: [] on rank 0, [('write', 1)] on rank 1",
        find("own-acks-counted"), {"delays": (False, True)}, (("insert", (0, 1)), ("poll",))),
    (RanksDriver, "Z2", "rank 1 is done", find("reduce-only-with-news"),
        {"delays": (False, True)}, (("insert", (0, 1)), ("poll",))),
]  # fmt: skip


def perform(driver: Any, config: dict[str, Any], calls: tuple[tuple[Any, ...], ...]) -> None:
    d = driver(resolve("refcache"), **config)
    for name, *args in calls:
        getattr(d, name)(*args)


@pytest.mark.parametrize(
    ("driver", "rule", "evidence", "fault", "config", "calls"),
    CASES,
    ids=[f"{c[0].__name__} {c[1]} {c[2][:30]}" for c in CASES],
)
def test_fires(
    driver: Any, rule: str, evidence: str, fault: PlantedBug, config: Any, calls: Any
) -> None:
    if "without_edge" not in config:
        perform(driver, config, calls)  # the reference passes
    with fault.active(), pytest.raises(Violation) as caught:
        perform(driver, config, calls)
    assert caught.value.id == rule, str(caught.value)
    assert evidence in caught.value.evidence


def test_more_pages_than_are_free_are_found_without_the_rule_of_owners() -> None:
    """P1 looks at each page and comes first; AL2 counts them."""
    all_of_it = patch(f"{BASE}.alloc", lambda original: lambda self, n: torch.arange(2, n + 2))
    with all_of_it.active(), without_rules("P1", "P0"), pytest.raises(Violation) as caught:
        perform(AllocatorDriver, PAGE_2, (("alloc", 5),))
    assert (caught.value.id, caught.value.evidence) == ("AL2", "5 new pages out of 4 free")


# ---- torch's settings ----------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("change", "evidence"),
    [
        (lambda: torch.set_default_dtype(torch.float16),
            "default dtype from torch.float32 to torch.float16"),
        (lambda: torch.set_default_device("meta"), "default device from cpu to meta"),
        (lambda: torch.set_grad_enabled(False), "grad mode from True to False"),
        (lambda: torch.use_deterministic_algorithms(True, warn_only=True),
            "deterministic debug mode from 0 to 1"),
    ],
)  # fmt: skip
def test_a_setting_of_torch_that_a_call_changes_is_found_and_put_back(
    change: Callable[[], None], evidence: str, fails: bool
) -> None:
    def changing(self: Any) -> None:
        change()
        if fails:
            raise ValueError

    before = torch_settings()
    d = AllocatorDriver(resolve("refcache"))
    with (
        patch(f"{BASE}.merge_and_sort_free", lambda original: changing).active(),
        pytest.raises(Violation) as caught,
    ):
        d.sort()
    assert torch_settings() == before
    assert caught.value.id == "GLOBAL", str(caught.value)
    assert f"merge_and_sort_free changed torch's {evidence}" in caught.value.evidence


# ---- ops -----------------------------------------------------------------------------------------


def overflow(*args: Any, **more: Any) -> Any:
    raise RuntimeError("int32 overflow detected for operation mul")


@pytest.mark.parametrize(
    ("op", "function", "call", "rule", "evidence"),
    [
        ("backup_all_layer", lambda *args, **more: None, ("transfer", TransferCase()), "OP1",
            "wrong bytes in host plane 0, slot=0"),
        ("backup_all_layer", lambda *args, **more: None, ("far", "backup_all_layer"), "OP1",
            "behind 2^31 elements"),
        ("alloc_decode", lambda *args: reference.alloc_decode(*args) + 1,
            ("slots", AllocCase((1,), None, (-1,), (1,), 4)), "OP2", "slot 0 of 1 is 5, but"),
        ("alloc_decode", lambda *args: reference.alloc_decode(*args).int(),
            ("slots", AllocCase((1,), None, (-1,), (1,), 4)), "OP2",
            "slots torch.int32 [1], but should be int64 [1]"),
        ("alloc_extend", lambda *args: reference.alloc_extend(*args).int(),
            ("slots", AllocCase((1,), (0,), (-1,), (1,), 4)), "OP2",
            "slots torch.int32 [1], but should be int64 [1]"),
        ("backup_all_layer", overflow, ("transfer", TransferCase()), "OP3", "int32 overflow"),
    ],
)  # fmt: skip
def test_an_op_s_rule_fires(op: str, function: Any, call: Any, rule: str, evidence: str) -> None:
    with pytest.raises(Violation) as caught:
        getattr(OpsDriver(OpsTarget(SimpleNamespace(**{op: function}))), call[0])(call[1])
    assert caught.value.id == rule, str(caught.value)
    assert evidence in caught.value.evidence


# ---- events --------------------------------------------------------------------------------------


def stored(block: int, *tokens: int, parent: int | None = None) -> BlockStored:
    return BlockStored([block], parent, list(tokens), 1)


@pytest.mark.parametrize(
    ("events", "rule", "evidence"),
    [
        ([BlockRemoved([7])], "N2", "removed page 7, which is not stored"),
        ([stored(7, 0), BlockRemoved([7]), BlockRemoved([7])], "N2", "removed page 7"),
        ([stored(7, 0), AllBlocksCleared(), BlockRemoved([7])], "N2", "removed page 7"),
        ([stored(8, 1, parent=7)], "N2", "stored [1] after page 7, which is not stored"),
        ([stored(7, 0), stored(7, 0)], "N2", "stored page 7 of [0] twice"),
        ([stored(7, 0), BlockRemoved([7]), stored(7, 1)], "N1", "page 7 is [1], and was [0]"),
        ([], "N2", "page 1 is cached for [0], and not stored"),
        ([stored(7, 1)], "N2", "page 1 is cached for [0], and not stored"),
        (
            [stored(7, 0), stored(8, 1, parent=7)],
            "N2",
            "the events leave [0, 1] stored, and no page is cached for it",
        ),
        ([stored(7, 0), stored(8, 0)], "N2", "the events leave [0] stored"),
    ],
)
def test_a_rule_of_the_events_fires(events: Any, rule: str, evidence: str) -> None:
    ledger = Ledger(4, 1, lambda rule, evidence: None)
    ledger.adopt((None, (0,)), 1)

    def replay() -> None:
        one = EventReplay()
        one.apply(events)
        one.check(ledger)

    with pytest.raises(Violation) as caught:
        replay()
    assert (caught.value.id, evidence in caught.value.evidence) == (rule, True), str(caught.value)


def test_silence_on_legal_events() -> None:
    ledger = Ledger(4, 1, lambda rule, evidence: None)
    for prefix, page in (((0,), 1), ((0, 1), 2)):
        ledger.adopt((None, prefix), page)
    replay, above = EventReplay(), EventReplay()
    replay.apply([stored(5, 2), AllBlocksCleared(), stored(7, 0), stored(8, 1, parent=7)])
    replay.check(ledger)
    above.apply([stored(7, 0)])
    below = EventReplay(above=lambda: above)
    below.apply([stored(8, 1, parent=7)])  # a write-back stores a page before its parent
    assert below.resident == {8: (0, 1)}


def exported_drivers() -> list[type[Driver]]:
    names = [getattr(oracle, name) for name in oracle.__all__]
    return [n for n in names if isinstance(n, type) and issubclass(n, Driver) and n is not Driver]


@pytest.mark.parametrize("driver", exported_drivers())
def test_a_printed_program_imports_from_the_public_place_only(driver: type[Driver]) -> None:
    target = resolve("refcache")
    if target.lacks(driver.needs):
        pytest.skip("the reference lacks the ops here")
    program = driver(target).program()
    imports = program[: program.index(next(line for line in program if line.startswith("d = ")))]
    assert all(i == "import torch" or i.startswith("from refcache.oracle import") for i in imports)
    exec("\n".join(program), {})
