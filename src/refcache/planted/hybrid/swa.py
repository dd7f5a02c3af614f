"""Bugs planted in the tree over a full and a sliding-window pool, and in the allocator of both."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from refcache.planted.bug import PlantedBug

TREE = "refcache.tree.swa_radix_cache:SWARadixCache"
WINDOW = "refcache.tree.components.window:WindowComponent"
HYBRID = "refcache.tree.components.hybrid:HybridRadixCache"
COMPONENT = "refcache.tree.components.component:TreeComponent"
ALLOCATOR = "refcache.allocator.swa:SWATokenToKVPoolAllocator"
Function = Callable[..., Any]
_bug = partial(PlantedBug, suite="swa.state")


def _leaf_without_windows(original: Function) -> Function:
    def _plan_insert(self: Any, params: Any) -> Any:
        gone = params.swa_evicted_seqlen
        if gone and gone >= len(params.key):
            params = replace(params, swa_evicted_seqlen=0)
        return original(self, params)

    return _plan_insert


def _evicted_forgotten(original: Function) -> Function:
    def _row_params(self: Any, *args: Any) -> Any:
        return replace(original(self, *args), swa_evicted_seqlen=0)

    return _row_params


def _evicted_a_page_too_far(original: Function) -> Function:
    def _row_params(self: Any, *args: Any) -> Any:
        params = original(self, *args)
        gone = params.swa_evicted_seqlen
        if not self.is_eagle or not gone:
            return params
        return replace(params, swa_evicted_seqlen=gone + self.page_size)

    return _row_params


def _decode_takes_full_first(original: Function) -> Function:
    def alloc_decode(self: Any, seq_lens: Any, seq_lens_cpu: Any, last_loc: Any) -> Any:
        full, _ = self._both()
        pages = full.pages_to_decode(seq_lens, seq_lens_cpu, last_loc) * self.page_size
        if self.swa_available_size() < pages <= self.full_available_size():
            full.alloc_decode(seq_lens, seq_lens_cpu, last_loc)
            return None
        return original(self, seq_lens, seq_lens_cpu, last_loc)

    return alloc_decode


def _mapping_survives(original: Function) -> Function:
    def free_swa(self: Any, free_index: Any) -> None:
        kept = self.full_to_swa_index_mapping[free_index].clone()
        original(self, free_index)
        self.full_to_swa_index_mapping[free_index[:1]] = kept[:1]

    return free_swa


def _window_of_a_slot_leaks(original: Function) -> Function:
    def free(self: Any, free_index: Any) -> None:
        self.full_attn_allocator.free(free_index)
        self.free_swa(free_index[self.page_size :])

    return free


def _mapped_backwards(original: Function) -> Function:
    def _mapped(self: Any, full: Any, swa: Any) -> Any:
        original(self, full, swa)
        if swa is not None and len(full) > 2:
            self.full_to_swa_index_mapping[full[1]] = swa[0]
        return full

    return _mapped


def _locks_one_node(original: Function) -> Function:
    return lambda self, path: original(self, path)[:1]


def _locks_the_path(original: Function) -> Function:
    def to_lock(self: Any, path: Any) -> Any:
        original(self, path)
        return [node for node in path if self.holds(node)]

    return to_lock


def _unlock_stops_early(original: Function) -> Function:
    def to_unlock(self: Any, path: Any, uuid: Any) -> Any:
        nodes = original(self, path, uuid)
        return nodes[:-1] if len(nodes) > 1 and uuid is not None else nodes

    return to_unlock


def _split_keeps_the_uuid(original: Function) -> Function:
    def split(self: Any, child: Any, upper: Any) -> None:
        original(self, child, upper)
        self.of(child).uuid, self.of(upper).uuid = self.of(upper).uuid, None

    return split


def _split_copies_the_uuid(original: Function) -> Function:
    def split(self: Any, child: Any, upper: Any) -> None:
        original(self, child, upper)
        self.of(child).uuid = self.of(upper).uuid

    return split


def _split_is_unlocked(original: Function) -> Function:
    def halve(self: Any, child: Any, upper: Any) -> None:
        original(self, child, upper)
        self.of(upper).lock_ref = 0

    return halve


def _window_of_one_less(original: Function) -> Function:
    def covered(self: Any, pieces: Any) -> bool:
        self.window -= 1
        try:
            live: bool = original(self, pieces)
        finally:
            self.window += 1
        return live

    return covered


def _whole_path_must_live(original: Function) -> Function:
    def usable(self: Any, path: Any) -> bool:
        return all(self.holds(node) for node in path)

    return usable


def _only_the_last_node_counts(original: Function) -> Function:
    def usable(self: Any, path: Any) -> bool:
        return bool(self.holds(path[-1]))

    return usable


def _lock_is_ignored(original: Function) -> Function:
    def first_unlocked(self: Any) -> Any:
        found = original(self)
        if self.name != "swa" or found is not None:
            return found
        return next((node for node in self.lru if node.children), None)

    return first_unlocked


def _tombstones_stay(original: Function) -> Function:
    def _evict_upwards(self: Any, leaf: Any) -> Any:
        parent = leaf.parent
        return self._evict_leaf(leaf), parent

    return _evict_upwards


def _leaf_loses_its_window(original: Function) -> Function:
    def evict(self: Any, params: Any) -> Any:
        node = self.windows.first_unlocked()
        if params.num_tokens == 0 and node is not None and not node.children:
            size = len(node.key)
            if size >= params.swa_num_tokens > 0:
                self.windows.evict(node)
                return self._evict_result(0, size)
        return original(self, params)

    return evict


def _not_counted(original: Function) -> Function:
    def _evict_result(self: Any, tokens: int, of_component: int) -> Any:
        return replace(original(self, tokens, of_component), swa_num_tokens_evicted=tokens)

    return _evict_result


def _tombstone_stays_dead(original: Function) -> Function:
    def _plan_insert(self: Any, params: Any) -> Any:
        plan = original(self, params)
        if any(own is not None for own in plan.own):
            whole = len(plan.params.key) // self.page_size * self.page_size
            behind = sum(len(node.key) for node in plan.path)
            gone = min(behind, whole)
            return original(self, replace(params, swa_evicted_seqlen=gone))
        return plan

    return _plan_insert


def _filled_stays_in_no_list(original: Function) -> Function:
    def _revive(self: Any, node: Any, slots: Any) -> None:
        node.value = slots
        self.windows.of(node).value = slots
        self.windows.evictable_size += len(node.key)

    return _revive


def _refresh_beyond(original: Function) -> Function:
    def _refresh(self: Any, entered: Any, found: Any, now: float) -> None:
        self._use(entered)

    return _refresh


def _any_uuid(original: Function) -> Function:
    def to_unlock(self: Any, path: Any, uuid: Any) -> Any:
        if not any(self.of(node).uuid == uuid for node in path):
            uuid = next((u for u in (self.of(node).uuid for node in path) if u), None)
        return original(self, path, uuid)

    return to_unlock


BUGS = (
    _bug(
        "leaf-without-windows",
        "PR 22469, PR 22470",
        "a request that has given all its windows back is cached as if it had them",
        f"{TREE}._plan_insert",
        _leaf_without_windows,
    ),
    _bug(
        "given-back-windows-forgotten",
        "PR 30845, PR 36909",
        "a caching call does not say which windows the request has given back",
        f"{TREE}._row_params",
        _evicted_forgotten,
    ),
    _bug(
        "bigram-frontier-too-far",
        "PR 34870",
        "with keys of pairs the windows that a request has begin one page too late",
        f"{TREE}._row_params",
        _evicted_a_page_too_far,
    ),
    _bug(
        "decode-takes-full-pages-first",
        "PR 35338",
        "a decode that finds no window page keeps the full page that it has taken",
        f"{ALLOCATOR}.alloc_decode",
        _decode_takes_full_first,
    ),
    _bug(
        "window-mapping-survives",
        "PR 27586, PR 27779, PR 38519",
        "a slot whose window was given back is still mapped to it, and frees it again",
        f"{ALLOCATOR}.free_swa",
        _mapping_survives,
    ),
    _bug(
        "window-of-a-freed-slot-leaks",
        "slip",
        "a free of full slots leaves the first one's window",
        f"{ALLOCATOR}.free",
        _window_of_a_slot_leaks,
    ),
    _bug(
        "two-slots-one-window",
        "slip",
        "the second of three new slots is mapped to the first one's window",
        f"{ALLOCATOR}._mapped",
        _mapped_backwards,
    ),
    _bug(
        "window-lock-of-one-node",
        "issue 24153, PR 23882",
        "a lock holds the window slots of its last node only",
        f"{WINDOW}.to_lock",
        _locks_one_node,
    ),
    _bug(
        "window-lock-of-the-path",
        "slip",
        "a lock holds the window slots of the whole path",
        f"{WINDOW}.to_lock",
        _locks_the_path,
    ),
    _bug(
        "window-unlock-stops-early",
        "issue 24153",
        "an unlock leaves the lock of the node where the window ends",
        f"{WINDOW}.to_unlock",
        _unlock_stops_early,
    ),
    _bug(
        "uuid-goes-down-at-a-split",
        "PR 38835",
        "when the node is cut where a window's lock ends, the lower half keeps the mark",
        f"{WINDOW}.split",
        _split_keeps_the_uuid,
    ),
    _bug(
        "uuid-on-both-halves",
        "slip",
        "when the node is cut where a window's lock ends, both halves have the mark",
        f"{WINDOW}.split",
        _split_copies_the_uuid,
    ),
    _bug(
        "upper-half-without-window-locks",
        "PR 38835",
        "the upper half of a node that is cut has no window locks",
        f"{WINDOW}.halve",
        _split_is_unlocked,
    ),
    _bug(
        "window-one-short",
        "slip",
        "a prefix is usable with one token less than a window",
        f"{WINDOW}.covered",
        _window_of_one_less,
    ),
    _bug(
        "old-tombstone-vetoes",
        "PR 29351, PR 29860",
        "a prefix is usable only if the whole path has its window slots",
        f"{WINDOW}.usable",
        _whole_path_must_live,
    ),
    _bug(
        "only-the-last-node-is-looked-at",
        "slip",
        "a prefix is usable if its last node has window slots, however short it is",
        f"{WINDOW}.usable",
        _only_the_last_node_counts,
    ),
    _bug(
        "held-windows-evicted",
        "issue 24153",
        "an eviction that finds nothing else takes a holder's window",
        f"{COMPONENT}.first_unlocked",
        _lock_is_ignored,
    ),
    _bug(
        "window-tombstone-without-children-stays",
        "PR 22592",
        "a node without window slots stays when its last child goes",
        f"{HYBRID}._evict_upwards",
        _tombstones_stay,
    ),
    _bug(
        "leaf-keeps-kv-without-window",
        "PR 23882",
        "an eviction of windows leaves a leaf that no match can end at",
        f"{HYBRID}.evict",
        _leaf_loses_its_window,
    ),
    _bug(
        "evicted-windows-miscounted",
        "PR 29662",
        "an eviction returns the full tokens that it freed for those of windows",
        f"{TREE}._evict_result",
        _not_counted,
    ),
    _bug(
        "tombstone-stays-dead",
        "slip",
        "an insert with windows does not give them to the nodes that have lost theirs",
        f"{TREE}._plan_insert",
        _tombstone_stays_dead,
    ),
    _bug(
        "filled-tombstone-in-no-list",
        "slip",
        "a node that gets window slots again is not in the order of use: they are never evicted",
        f"{TREE}._revive",
        _filled_stays_in_no_list,
    ),
    _bug(
        "kv-behind-its-window-is-refreshed",
        "slip",
        "a match makes what lies beyond its window recent, which no request can use",
        f"{HYBRID}._refresh",
        _refresh_beyond,
        suite="swa.exact",
    ),
    _bug(
        "unlock-takes-any-uuid",
        "PR 38835",
        "an unlock with a mark that nobody was given unlocks somebody else's window",
        f"{WINDOW}.to_unlock",
        _any_uuid,
        suite="swa.misuse",
    ),
)
