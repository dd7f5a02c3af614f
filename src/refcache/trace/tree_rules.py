"""Rules about the tree on the device: matches, inserts, evictions, locks, and requests' rows."""

from typing import Any

from refcache.oracle.ledger.ledger import Prefix
from refcache.oracle.rules.violation import Violation
from refcache.trace import format as f
from refcache.trace.model import show
from refcache.trace.rules import Model, Undecidable, judges, op_of


def _longest_on_host(model: Model, prefix: Prefix, start: int) -> int:
    """How far ``prefix`` goes on in the host tier, from ``start`` elements on."""
    end = start
    for part in model.host.prefixes(prefix):
        if len(part[1]) > start:
            if part not in model.host.cached:
                break
            end = len(part[1])
    return end


@judges(f.MatchPrefix)
def _match_prefix(model: Model, call: f.MatchPrefix) -> None:
    prefix = model.whole(call.tokens, call.extra_key)
    here = model.device.longest(prefix)
    length = len(here[1])
    expected = model.device.slots(here)
    if call.slots != expected:
        common = next(
            (i for i, (a, b) in enumerate(zip(call.slots, expected, strict=False)) if a != b),
            min(len(call.slots), len(expected)),
        )
        pages = model.pages_of((call.slots if len(call.slots) > common else expected)[common:])
        raise Violation(
            "M0" if common == min(len(call.slots), length) else "C1",
            f"match of {show(prefix)} gave {len(call.slots)} slots, {length} tokens are on the "
            f"device: {show(here)}; they differ from token {common} on, in pages {pages[:4]}",
        )
    there = _longest_on_host(model, prefix, length)
    model.require(
        call.host_hit_length == there - length,
        "M0",
        f"match of {show(prefix)} found {length} tokens on the device and "
        f"{call.host_hit_length} on the host, but {there - length} more are on the host",
    )
    model.nodes[call.node] = here
    if call.host_hit_length:
        model.nodes[call.host_node] = (prefix[0], prefix[1][:there])


@judges(f.Insert)
def _insert(model: Model, call: f.Insert) -> None:
    prefix = model.whole(call.tokens, call.extra_key)
    known = len(model.device.longest(prefix)[1])
    if len(call.slots) < len(prefix[1]):
        raise Undecidable(f"{len(call.slots)} slots for {len(prefix[1])} elements")
    model.require(
        call.prefix_len == known,
        "M3",
        f"insert of {show(prefix)} returned {call.prefix_len}, but {known} tokens were on the "
        "device before",
    )
    _adopt(model, prefix, call.slots, known)


def _adopt(model: Model, prefix: Prefix, slots: f.Slots, known: int) -> None:
    """The tree takes over whole pages of a caller."""
    size = model.page_size
    for part in model.device.prefixes(prefix):
        end = len(part[1])
        if end <= known:
            continue
        page, mine = slots[end - size] // size, slots[end - size : end]
        model.require(
            mine == list(range(page * size, (page + 1) * size)),
            "P2",
            f"slots {mine} were cached as a page of {size}",
        )
        model.require(
            isinstance(model.device.owner.get(page), str),
            "P1",
            f"page {page} was cached for {show(part)}; {model.device.says(page)}",
        )
        model.device.adopt(part, page)


@judges(f.Evict)
def _evict(model: Model, call: f.Evict) -> None:
    """Its frees are inner records."""


def returned(model: Model, line: f.Line) -> None:
    """E1: what an eviction returns is what it gave back, on its own tier."""
    call = line.call
    if not isinstance(call, f.Evict | f.EvictHost) or call.error is not None or not model.totals:
        return
    kind, what = (f.Free, "tokens") if isinstance(call, f.Evict) else (f.HostFree, "host slots")
    parts = [part for part in line.inner if isinstance(part, kind) and part.error is None]
    pages = [page for part in parts for page in model.pages_of(part.slots)]
    freed = len(pages) * model.page_size
    model.require(
        call.num_tokens_evicted == freed or len({*pages}) < len(pages),
        "E1",
        f"{op_of(call)} returned {call.num_tokens_evicted}, it freed {freed} {what}",
    )


def evicted_enough(model: Model, call: f.Evict, after: f.Sizes) -> None:
    """E3; under write-back a leaf without room on the host may have to stay."""
    freed = call.num_tokens_evicted
    if freed >= call.num_tokens or model.header.write_policy == "write_back":
        return
    locked = model.device.locked()
    busy = {page for copy in model.copies.values() for page in copy.device}
    left = (p for p, page in model.device.cached.items() if p not in locked and page not in busy)
    unlocked = next(left, None)
    model.require(
        unlocked is None or after.evictable == 0,
        "E3",
        f"evict({call.num_tokens}) freed {freed} although {show(unlocked or (None, ()))} is "
        "not locked",
    )


@judges(f.IncLockRef)
def _inc_lock_ref(model: Model, call: f.IncLockRef) -> None:
    _lock(model, call.node, model.prefix_of(call.node))


def _lock(model: Model, node: int, prefix: Prefix) -> None:
    gone = prefix[1] and prefix not in model.device.cached
    model.require(not gone, "L2", f"{show(prefix)} was locked, and is not on the device")
    if prefix[1]:
        model.device.hold(node, prefix)


@judges(f.DecLockRef)
def _dec_lock_ref(model: Model, call: f.DecLockRef) -> None:
    _unlock(model, call.node, model.prefix_of(call.node))


def _unlock(model: Model, node: int, prefix: Prefix) -> None:
    if prefix[1]:
        model.device.drop(node, prefix)


@judges(f.Reset)
def _reset(model: Model, call: f.Reset) -> None:
    model.device.forget()
    model.host.forget()
    model.copies.clear()


def due(model: Model, call: f.CacheUnfinishedReq | f.CacheFinishedReq) -> set[int]:
    """The pages that the call has to free: duplicates, and at the end the tail."""
    if call.tokens is None or call.row is None:
        raise Undecidable("the cache did not ask how many tokens were computed")
    if len(call.row) != len(call.tokens):
        raise Undecidable(f"{len(call.row)} slots for {len(call.tokens)} tokens")
    protected = call.cache_protected_len
    whole = model.whole(call.tokens, call.extra_key)
    known = len(model.device.longest(whole)[1])
    row = call.row
    _check_row(model, call, (whole[0], whole[1][:protected]))
    slots = row[protected:known]
    if isinstance(call, f.CacheFinishedReq):
        slots = slots + row[len(whole[1]) :] if call.is_insert else row[protected:]
    return set(model.pages_of(slots))


def _check_row(
    model: Model, call: f.CacheUnfinishedReq | f.CacheFinishedReq, protected: Prefix
) -> None:
    """The row before the call: first the tree's pages, then the request's own."""
    assert call.row is not None
    size, row, length = model.page_size, call.row, call.cache_protected_len
    model.require(
        length % size == 0 and 0 <= length <= len(protected[1]),
        "R2",
        f"{length} protected tokens of {len(row)}, page size {size}",
    )
    ours = model.device.slots(protected) if model.is_cached(protected) else None
    if ours != row[:length]:
        pages = model.pages_of(row[:length])
        raise Violation(
            "R2",
            f"the row starts with pages {pages[:4]}; the tree has {show(protected)} in "
            f"{'no' if ours is None else model.pages_of(ours)[:4]} pages",
        )
    for start in range(length, len(row), size):
        page, mine = row[start] // size, row[start : start + size]
        model.require(
            mine == list(range(page * size, page * size + len(mine))),
            "R1",
            f"tokens {start} to {start + len(mine) - 1} are in slots {mine}, page size {size}",
        )
        model.require(
            isinstance(model.device.owner.get(page), str),
            "P1",
            f"token {start} of the row is in page {page}; {model.device.says(page)}",
        )


@judges(f.CacheUnfinishedReq)
def _cache_unfinished_req(model: Model, call: f.CacheUnfinishedReq) -> None:
    whole = model.whole(call.tokens, call.extra_key)
    _settle(model, call, whole, call.row, insert=True)
    model.require(
        call.new_protected_len == len(whole[1]),
        "R2",
        f"cache_protected_len = {call.new_protected_len}, but {len(whole[1])} tokens fill "
        "whole pages",
    )
    expected = model.device.slots(whole) + call.row[len(whole[1]) :]
    model.require(
        call.new_row == expected,
        "R2",
        f"the row is {call.new_row[:16]} after the call, expected {expected[:16]} "
        f"(pages {model.pages_of(expected)[:4]})",
    )
    model.nodes[call.new_node] = whole
    _lock(model, call.new_node, whole)
    _unlock(model, call.last_node, _held_by(model, call, whole))


@judges(f.CacheFinishedReq)
def _cache_finished_req(model: Model, call: f.CacheFinishedReq) -> None:
    assert call.tokens is not None
    assert call.row is not None
    whole = model.whole(call.tokens, call.extra_key)
    _settle(model, call, whole, call.row, call.is_insert)
    _unlock(model, call.last_node, _held_by(model, call, whole))


def _held_by(model: Model, call: Any, whole: Prefix) -> Prefix:
    model.prefix_of(call.last_node)
    return whole[0], whole[1][: call.cache_protected_len]


def _settle(model: Model, call: Any, whole: Prefix, row: f.Slots, insert: bool) -> None:
    freed = set(model.device.freed.pages)
    known = len(model.device.longest(whole)[1])
    due = set(model.pages_of(row[call.cache_protected_len : known]))
    if isinstance(call, f.CacheFinishedReq):
        start = len(whole[1]) if insert else call.cache_protected_len
        due = (due if insert else set()) | set(model.pages_of(row[start:]))
    lost = sorted(due - freed)
    model.require(
        not lost,
        "P1",
        f"pages {lost} belong to nobody: the request gave them up, they were not freed",
    )
    if insert:
        _adopt(model, whole, row, known)
