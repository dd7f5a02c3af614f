"""Each rule about a call on a tree fires for the fault it is for: a check that cannot fail is none.

A fault is one change to the reference's tree, allocator or rows, made before the driver sees them.
Its program is legal: on the unchanged reference it passes. The counterparts for rules about a state
are ``test_invariants.py`` and ``test_host_invariants.py``; the other drivers are in
``test_driver_invariants.py``.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from programs import play
from refcache.oracle import HiCacheDriver, TreeDriver, Violation, resolve
from refcache.oracle.ledger.ledger import Ledger
from refcache.oracle.rules.violation import without_rules
from refcache.types import EvictParams, EvictResult

Fault = Callable[[Any], None]
Change = Callable[..., Any]


class Faulty(type(resolve("refcache"))):  # type: ignore[misc]
    """The reference, with a fault in its parts: ``tree``, ``allocator`` (recording) and ``rows``;
    on two tiers all of ``HiCacheParts``."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def tree(self, config: Any, allocator: Any, rows: Any) -> Any:
        tree = super().tree(config, allocator, rows)
        self.fault(SimpleNamespace(tree=tree, allocator=allocator, rows=rows))
        return tree

    def hicache(self, *args: Any) -> Any:
        parts = super().hicache(*args)
        self.fault(parts)
        return parts


def on(path: str, change: Change) -> Fault:
    """Replace the method at ``path`` of the parts by ``change(parts, the method, *its args)``."""

    def fault(parts: Any) -> None:
        *owners, name = path.split(".")
        owner = parts
        for part in owners:
            owner = getattr(owner, part)
        inner = getattr(owner, name)
        setattr(owner, name, lambda *args, **more: change(parts, inner, *args, **more))

    return fault


def result(path: str, change: Callable[[Any], Any]) -> Fault:
    """The method's result is another one."""
    return on(path, lambda parts, inner, *args, **more: change(inner(*args, **more)))


def nothing(path: str, answer: Any = None) -> Fault:
    """The method does nothing."""
    return on(path, lambda *args, **more: answer)


def then(path: str, more: Callable[[Any], Any]) -> Fault:
    """The method does ``more(parts)`` afterwards."""

    def change(parts: Any, inner: Any, *args: Any, **given: Any) -> Any:
        out = inner(*args, **given)
        more(parts)
        return out

    return on(path, change)


def second(path: str, change: Callable[[Any, Any], Any]) -> Fault:
    """From the second call on the result is ``change(parts, result)``."""

    def fault(parts: Any) -> None:
        calls = []

        def changed(parts: Any, inner: Any, *args: Any, **more: Any) -> Any:
            calls.append(1)
            out = inner(*args, **more)
            return change(parts, out) if len(calls) > 1 else out

        on(path, changed)(parts)

    return fault


def frees(slot: int) -> Fault:
    """An eviction of one token frees this slot and nothing else."""

    def change(parts: Any, inner: Any, params: Any) -> EvictResult:
        parts.allocator.free(torch.tensor([slot]))
        return EvictResult(1)

    return on("tree.evict", change)


def bypass(parts: Any) -> None:
    parts.tree.token_to_kv_pool_allocator = parts.allocator.inner


def grown(parts: Any, out: Any) -> Any:
    parts.tree.evictable_size_ += 1
    return out


def swapped(parts: Any, inner: Any, req: Any, **more: Any) -> None:
    """The row is cached, and its first two slots change places."""
    inner(req, **more)
    row = parts.rows.req_to_token[req.req_pool_idx]
    row[:2] = row[:2].flip(0)
    req.prefix_indices = row[: len(req.prefix_indices)].to(torch.int64)


def forgetful(parts: Any, inner: Any, req: Any, **more: Any) -> None:
    inner(req, **more)
    req.cache_protected_len = 0


def turned(parts: Any, inner: Any, req: Any, **more: Any) -> None:
    inner(req, **more)
    req.prefix_indices = req.prefix_indices.flip(0)


def removed_twice(parts: Any) -> None:
    for _ in range(2):
        parts.tree.events.removed(parts.tree.nodes()[0])


def all_protected(parts: Any) -> None:
    tree = parts.tree
    tree.evictable_size, tree.protected_size = (lambda: 0), tree.total_size


def pinned(parts: Any, inner: Any, params: Any) -> EvictResult:
    """An eviction that locks everything first."""
    for node in parts.tree.nodes():
        parts.tree.inc_lock_ref(node)
    return inner(params)  # type: ignore[no-any-return]


TREE: list[tuple[str, str, Fault, str]] = [
    ("M0", "match found 1 tokens, but 2", result("tree.match_prefix", lambda m: m._replace(
        device_indices=m.device_indices[:1])), "insert (0,1); match (0,1)"),
    ("C1", "match gave slots [2, 1]", result("tree.match_prefix", lambda m: m._replace(
        device_indices=m.device_indices.flip(0))), "insert (0,1); match (0,1)"),
    ("M1", "a second match gave [1, 2]", second("tree.match_prefix", lambda parts, m: m._replace(
        last_device_node=parts.tree.root_node)), "insert (0,1); match (0,1)"),
    ("M1", "a second match turned", second("tree.match_prefix", grown),
        "insert (0,1); match (0,1)"),
    ("K1", "lock then unlock turned", then("tree.dec_lock_ref", lambda parts:
        parts.tree.evictable_leaves.clear()), "insert (0,1); lock_and_unlock (0,1)"),
    ("K1", "inc_lock_ref returned -1, ", result("tree.inc_lock_ref", lambda r: replace(r,
        delta=r.delta + 1)), "insert (0,1); hold (0,1)"),
    ("K1", "dec_lock_ref returned 3, ", result("tree.dec_lock_ref", lambda r: replace(r,
        delta=r.delta + 1)), "insert (0,1); hold (0,1); unhold 0"),
    ("M3", "insert returned 0, but 1", second("tree.insert", lambda parts, r: replace(r,
        prefix_len=r.prefix_len - 1)), "insert (0,); insert (0,1)"),
    ("AL2", "1 pages were refused", nothing("allocator.inner.alloc"), "insert (0,)"),
    ("AL2", "1 pages were granted, 0 are", second("allocator.inner.alloc", lambda parts, out:
        torch.tensor([1])), "insert (0,1,2,3); hold (0,1,2,3); insert (1,)"),
    ("P1", "page 1 was handed out to the caller; page 1 is cached for [0]",
        second("allocator.inner.alloc", lambda parts, out: out * 0 + 1),
        "insert (0,); insert (1,)"),
    ("P1", "page 1 was handed out to request 1; page 1 is request 0's",
        second("allocator.inner.alloc", lambda parts, out: out * 0 + 1),
        "admit (0,); admit (1,)"),
    ("P0", "slot 0 was handed out", result("allocator.inner.alloc", lambda out: out * 0),
        "insert (0,)"),
    ("E1", "evict returned 2, the free space grew by 1", result("tree.evict", lambda r: replace(r,
        num_tokens_evicted=2)), "insert (0,); evict 1"),
    ("E1", "evict returned 1, it freed 0 tokens", bypass, "insert (0,); evict 1"),
    ("E2", "evict(1) freed 2, the last 1 for nothing", on("tree.evict", lambda parts, inner, p:
        inner(EvictParams(9))), "insert (0,); insert (1,); evict 1"),
    ("E3", "evict(1) freed 0 although [0] is not locked", nothing("tree.evict", EvictResult(0)),
        "insert (0,); evict 1"),
    ("T1", "the page of [0] was evicted, but [0, 1] is still cached", frees(1),
        "insert (0,); insert (0,1); evict 1"),
    ("L2", "page 1 is cached for [0], is locked, and was evicted", frees(1),
        "insert (0,); hold (0,); evict 1"),
    ("P1", "page 1 is request 0's, and was freed by an eviction", frees(1), "admit (0,1); evict 1"),
    ("P1", "page 4 was freed although it is free already", frees(4), "insert (0,); evict 1"),
    ("P0", "page 5 was freed; pages are 1 to 4", frees(5), "insert (0,); evict 1"),
    ("P1", "page 1 is cached for [0]; this call frees nothing",
        then("tree.match_prefix", lambda parts: parts.allocator.free(torch.tensor([1]))),
        "insert (0,); match (0,)"),
    ("P1", "pages [3, 4] belong to nobody: the request gave", nothing("tree._free"),
        "admit (0,1); admit (0,1); cache 0; cache 1"),
    ("P1", "pages [1, 2] belong to nobody: the request gave", nothing("tree._free"),
        "admit (0,1); abort 0"),
    ("C-READ", "request 0 reads token 0 from slot 2, which holds the KV of (None, (0, 1))",
        on("tree.cache_unfinished_req", swapped), "admit (0,1,2); cache 0"),
    ("R2", "request 0: cache_protected_len = 0, but 3 tokens fill",
        on("tree.cache_unfinished_req", forgetful), "admit (0,1,2); cache 0"),
    ("R2", "prefix_indices = [3, 2, 1], its row has [1, 2, 3]",
        on("tree.cache_unfinished_req", turned), "admit (0,1,2); cache 0"),
    ("P1", "available_size() = 3, but nobody owns 4", result("allocator.inner.available_size",
        lambda n: n - 1), ""),
    ("A1", "1 evictable + 0 protected, 2 in all, but 2", result("tree.evictable_size",
        lambda n: n // 2), "insert (0,1)"),
    ("A1", "2 evictable + 0 protected, 3 in all, but 2", result("tree.total_size",
        lambda n: n + n // 2), "insert (0,1)"),
    ("A2", "protected_size() = 0, but holders lock 2", nothing("tree.inc_lock_ref",
        SimpleNamespace(delta=0)), "insert (0,1); hold (0,1)"),
    ("A2", "protected_size() = 2, but holders lock 0", all_protected, "insert (0,1)"),
    ("R3", "3 rows are free and 0 in use, of 4", nothing("rows.free"), "admit (0,); finish 0"),
    ("Z1", "after reset the tree has sizes (1, 0, 1)", nothing("tree.reset"), "insert (0,); reset"),
    ("P1", "3 of 4 tokens are free after everything was evicted", on("tree.evict", pinned),
        "insert (0,); wind_down"),
    ("N2", "page 1 is cached for [0], and not stored by the events",
        nothing("tree.take_events", ()), "insert (0,)"),
    ("N2", "removed page", then("tree.insert", removed_twice), "insert (0,)"),
    ("A3", "is not listed as an evictable leaf", then("tree.insert", lambda parts:
        parts.tree.evictable_leaves.clear()), "insert (0,)"),
]  # fmt: skip


def no_fence(parts: Any) -> None:
    parts.tree.cache_controller._wait_for_forward = lambda stream: None


def no_getter(parts: Any) -> None:
    parts.pool._wait = lambda layer_id: None


def not_kept(parts: Any) -> None:
    parts.tree.cache_controller._keep = lambda *given: None


def not_loaded(parts: Any) -> None:
    nothing("host_pool.load_to_device_per_layer")(parts)
    nothing("host_pool.load_to_device_all_layer")(parts)


def half(loaded: Any) -> Any:
    return loaded[0][:1], loaded[1]


def elsewhere(parts: Any, inner: Any, params: Any) -> Any:
    slots, node = inner(params)
    return slots * 0 + 3, node


def refused(parts: Any, inner: Any, params: Any) -> Any:
    tree = parts.tree
    return tree._no_slots(), tree._device_ancestor(params.last_host_node)


def not_stored(parts: Any, inner: Any, node: Any, medium: str = "GPU") -> None:
    if medium == "GPU":
        inner(node, medium)


def moved(parts: Any) -> None:
    """A node's host slots are freed, and it takes others."""
    node, pool = parts.tree.nodes()[0], parts.host_pool
    pool.free(node.host_value)
    node.host_value = pool.alloc(2)


def only_once(parts: Any, inner: Any, params: Any) -> EvictResult:
    """The first eviction is made, later ones do nothing."""
    if any(node.evicted for node in parts.tree.nodes()):
        return EvictResult(0)
    return inner(params)  # type: ignore[no-any-return]


def not_of_2(parts: Any, inner: Any, node: Any, *more: Any) -> int:
    return 0 if node.key.token_ids[0] == 2 else int(inner(node, *more))


def in_use(parts: Any, inner: Any, num_tokens: int) -> int:
    """A host eviction that protects everything first."""
    for node in parts.tree.nodes():
        node.protect_host()
    return int(inner(num_tokens))


BURIED = "insert (0,1); settle; evict 2"
BURIED_BELOW = "insert (0,); insert (0,1); settle; evict 1"
FULL = "insert (0,0); settle; evict 2; insert (1,0,0); settle; evict 3"  # the host, with 5 tokens
HOST: list[tuple[str, str, Fault, str]] = [
    ("E1", "evict_host returned 3, it freed 2 slots", result("tree.evict_host", lambda n: n + 1),
        f"{BURIED}; evict_host 2"),
    ("E2", "evict_host(1) freed [1, 1], the last for nothing", on("tree.evict_host",
        lambda parts, inner, n: inner(9)), "insert (0,); insert (1,); settle; evict 2; "
        "evict_host 1"),
    ("E3", "evict_host(2) freed 0, ", nothing("tree.evict_host", 0), f"{BURIED}; evict_host 2"),
    ("L6", "every copy is done and polled, but ['write 1'] are not released",
        nothing("tree.writing_check"), "insert (0,1); settle"),
    ("L6", "every copy is done and polled, but ['load 1'] are not released",
        nothing("tree.loading_check"), f"{BURIED}; reload 0; settle"),
    ("C2", "host slot 0, layer 0, plane 0: it holds", nothing(
        "host_pool.backup_from_device_all_layer"), "insert (0,1); settle"),
    ("C1", "device slot 3, layer 0, plane 0: it holds", not_loaded, f"{BURIED}; reload 0; settle"),
    ("C-READ", "token 0 is read from device slot 1, layer 0, plane 0: it holds",
        nothing("pool.set_kv_buffer"), "insert (0,1)"),
    ("P1", "3 of 4 tokens are free after everything was evicted", on("tree.evict", pinned),
        "insert (0,); wind_down"),
    ("H1", "4 of 5 host slots are free after everything was evicted", on("tree.evict_host",
        in_use), "insert (0,); wind_down"),
    ("M0", "match found 0 tokens on the device and 1 on the host, but 2", result(
        "tree.match_prefix", lambda m: m._replace(host_hit_length=m.host_hit_length // 2)),
        f"{BURIED}; match (0,1)"),
    ("M0", "match found 1 tokens on the device and 0 on the host, but 2", result(
        "tree.match_prefix", lambda m: m._replace(host_hit_length=0)),
        "insert (0,); insert (0,1); settle; evict 1; match (0,1)"),
    ("C1", "match gave slots [2, 1]", result("tree.match_prefix", lambda m: m._replace(
        device_indices=m.device_indices.flip(0))), "insert (0,1); match (0,1)"),
    ("Q1", "a load of 2 tokens (threshold 1, quota None", result("tree.init_load_back",
        half), f"{BURIED}; reload 0"),
    ("Q1", "a load of 1 tokens (threshold 3, quota None", lambda parts: setattr(
        parts.tree, "load_back_threshold", 0),
        "threshold; insert (0,); settle; evict 1; reload 0"),
    ("Q1", "a load of 2 tokens (threshold 1, quota 1", on("tree.load_back",
        lambda parts, inner, node, quota: inner(node)), f"{BURIED}; reload 0, 1"),
    ("B1", "nothing was loaded; the last node is", result("tree.init_load_back", lambda r: r
        if len(r[0]) else (r[0], None)), f"{BURIED}; reload 0, 1"),
    ("Q2", "a load of 2 was refused, 4 tokens are free", on("tree.init_load_back", refused),
        f"{BURIED}; reload 0"),
    ("P1", "page 3 was handed out to the load; page 3 is cached for [1]", on(
        "tree.init_load_back", elsewhere), f"{BURIED}; insert (1,); reload 0"),
    ("N2", "the host's events leave [] stored", on("tree.events.stored", not_stored),
        "insert (0,); settle"),
    ("N2", "page 1 is cached for [0], and not stored by the events", nothing(
        "tree.take_events", ()), "insert (0,)"),
    ("Q2", "a load of 2 was refused, 2 tokens are free", on("tree.init_load_back", refused),
        f"{BURIED}; insert (1,1); hold (1,1); reload 0"),
    ("E3", "evict(1) freed 0 although [0] is not locked", on("tree.evict", only_once),
        f"write_back; {BURIED_BELOW}; evict 1"),
    ("W1", "has no host copy after 1 hits of 1", nothing("tree.write_backup", 0), "insert (0,)"),
    ("W1", "node [2] has no host copy after 1 hits of 1", on("tree.write_backup", not_of_2),
        f"{FULL}; insert (0,1); insert (2,)"),
    ("X5", "", no_getter, f"delay; {BURIED}; readmit 0, 1; settle"),
    ("X5", "", no_fence, "delay; insert (0,1,2); settle; evict 3; admit (1,2,1); abort 0; "
        "reload 0"),
    ("LIFE", "", not_kept, "delay; insert (0,1); settle"),
    ("A4", "is not listed as an evictable host leaf", then("tree.evict", lambda parts:
        parts.tree.evictable_host_leaves.clear()), BURIED),
    ("A3", "is not listed as an evictable leaf", then("tree.check_hicache_events",
        lambda parts: parts.tree.evictable_leaves.clear()), "insert (0,); settle"),
    ("X1", "a write in flight uses host page 0 for prefix [0], which the tree now has in page 2",
        then("tree.match_prefix", moved), "delay; insert (0,1); hold (0,1)"),
]  # fmt: skip


CONFIGS: dict[str, dict[str, Any]] = {
    "delay": {"delay": True},
    "quiet": {"enable_kv_cache_events": False},
    "reentrant": {"reentrant": True},
    "threshold": {"load_back_threshold": 3},
    "write_back": {"write_policy": "write_back"},
}


def perform(driver_class: Any, target: Any, program: str) -> None:
    """Words of ``CONFIGS``, then calls: ``name arguments``."""
    config: dict[str, Any] = {"size": 4, "enable_kv_cache_events": True}
    if driver_class is HiCacheDriver:
        config["delay"] = False
    calls = program.split("; ") if program else []
    while calls and calls[0] in CONFIGS:
        config |= CONFIGS[calls.pop(0)]
    d = driver_class(target, **config)
    for call in calls:
        if call.startswith("evict_host"):
            d.trial.call(d.tree.evict_host, int(call.split()[1]))
        else:
            play(d, call)


CASES = [
    *((TreeDriver, *case) for case in TREE),
    *((HiCacheDriver, *case) for case in HOST),
]
NAMES = [f"{case[0].__name__} {case[1]} {case[2][:30]}" for case in CASES]


@pytest.mark.parametrize(("driver", "rule", "evidence", "fault", "program"), CASES, ids=NAMES)
def test_fires(driver: Any, rule: str, evidence: str, fault: Fault, program: str) -> None:
    with pytest.raises(Violation) as caught:
        perform(driver, Faulty(fault), program)
    assert caught.value.id == rule, str(caught.value)
    assert evidence in caught.value.evidence


@pytest.mark.parametrize("program", sorted({case[4] for case in CASES}))
@pytest.mark.parametrize("driver", [TreeDriver, HiCacheDriver])
def test_the_reference_passes(driver: Any, program: str) -> None:
    if (driver, program) in {(case[0], case[4]) for case in CASES}:
        perform(driver, resolve("refcache"), program)


@pytest.mark.parametrize(
    "program",
    [
        "threshold; insert (0,1,2); settle; evict 3; reload 0; settle",
        f"{BURIED}; reload 0, 2; settle",
        f"{BURIED}; reload 0, 3; settle",
        # hit and quota are 2, but the load newly pins the token that it hangs from
        f"{BURIED_BELOW}; insert (0,1,1); settle; evict 2; reload 1, 2; settle",
        f"{BURIED_BELOW}; reload 0; settle; wind_down",
        f"write_back; {BURIED_BELOW}; settle; wind_down",
        f"reentrant; {BURIED_BELOW}; reload 0; settle; wind_down",
        f"quiet; {BURIED}; settle",
        "delay; insert (0,); settle; insert (1,); evict 1; settle",
        "admit (0,1,2), None, 2; cache 0; abort 0; settle",
        f"{FULL}; insert (2,); settle",
        "write_back; insert (0,); insert (0,1); evict 1; insert (1,1,1); evict 3; insert (2,2,2); "
        "evict 1; evict 4",
    ],
)
def test_silence_where_a_rule_makes_an_exception(program: str) -> None:
    perform(HiCacheDriver, resolve("refcache"), program)


def test_a_finished_request_that_does_not_match_is_found_without_the_rules_of_a_match() -> None:
    """M0 and C1 look at every match and come first; M2 does not depend on them."""
    cut = result("tree.match_prefix", lambda m: m._replace(device_indices=m.device_indices[:1]))
    with without_rules("M0", "C1"), pytest.raises(Violation) as caught:
        perform(TreeDriver, Faulty(cut), "admit (0,1); finish 0")
    assert caught.value.id == "M2"
    assert caught.value.evidence == "2 tokens were cached, 1 match"


def test_a_page_that_waits_in_a_free_group_is_nobody_s_to_hand_out() -> None:
    noted: list[str] = []
    ledger = Ledger(4, 1, lambda rule, evidence: noted.append(f"{rule}: {evidence}"))
    ledger.queued = {2}
    ledger.take([2], "request 0")
    assert noted == ["P1: page 2 was handed out while it waits in a free group"]
