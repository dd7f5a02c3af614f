"""Bugs planted in the tree of recurrent states, its rows and its pool of states."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from refcache.errors import OutOfSlots
from refcache.planted.bug import PlantedBug

TREE = "refcache.tree.mamba_radix_cache:MambaRadixCache"
HYBRID = "refcache.tree.components.hybrid:HybridRadixCache"
STATE = "refcache.tree.components.state:StateComponent"
COMPONENT = "refcache.tree.components.component:TreeComponent"
POOL = "refcache.pool.mamba:MambaPool"
ROWS = "refcache.pool.hybrid_req_to_token:HybridReqToTokenPool"
Function = Callable[..., Any]
_bug = partial(PlantedBug, suite="mamba.state")


def _split_moves_up(original: Function) -> Function:
    def split(self: Any, child: Any, upper: Any) -> None:
        own, above = self.of(child), self.of(upper)
        if own.value is not None and not own.lock_ref:
            above.value, own.value = own.value, None
            self.lru[upper] = self.lru.pop(child)

    return split


def _copy_is_shared(original: Function) -> Function:
    def _copy_state(self: Any, node: Any, req: Any) -> None:
        if req.mamba_pool_idx is None:
            req.mamba_pool_idx = self.states.slot(node)[0]
        else:
            original(self, node, req)

    return _copy_state


def _copy_is_fresh(original: Function) -> Function:
    def _copy_state(self: Any, node: Any, req: Any) -> None:
        had = req.mamba_pool_idx
        original(self, node, req)
        if had is None:
            for plane in self.states.pool.planes:
                plane.buffer[:, int(req.mamba_pool_idx)] = 0

    return _copy_state


def _copy_forgets_a_slot(original: Function) -> Function:
    def _copy_state(self: Any, node: Any, req: Any) -> None:
        if self.states.pool.available_size() > 0:
            req.mamba_pool_idx = None
        original(self, node, req)

    return _copy_state


def _no_plane(plane: int) -> Callable[[Function], Function]:
    def without(original: Function) -> Function:
        def copy_from(self: Any, src_index: Any, dst_index: Any) -> None:
            buffer = self.planes[plane].buffer
            kept = buffer[:, dst_index].clone()
            original(self, src_index, dst_index)
            buffer[:, dst_index] = kept

        return copy_from

    return without


def _not_cleared(original: Function) -> Function:
    def alloc(self: Any, need_size: int) -> Any:
        kept = [plane.buffer.clone() for plane in self.planes]
        taken = original(self, need_size)
        for plane, bytes_ in zip(self.planes, kept, strict=True):
            plane.buffer.copy_(bytes_)
        return taken

    return alloc


def _freed_go_first(original: Function) -> Function:
    def free(self: Any, free_index: Any) -> None:
        before = self.free_slots
        original(self, free_index)
        count = len(self.free_slots) - len(before)
        self.free_slots = self.free_slots.roll(count)

    return free


def _lock_is_ignored(original: Function) -> Function:
    def first_unlocked(self: Any) -> Any:
        return next(iter(self.lru), None) if self.name == "mamba" else original(self)

    return first_unlocked


def _lock_goes_up(original: Function) -> Function:
    def to_lock(self: Any, path: Any) -> Any:
        return [node for node in path if self.holds(node)]

    return to_lock


def _lock_of_kv_only(original: Function) -> Function:
    return lambda self, path, *uuid: []


def _unlock_forgets(original: Function) -> Function:
    def to_unlock(self: Any, path: Any, uuid: Any) -> Any:
        nodes = original(self, path, uuid)
        return nodes if not any(node.children for node in nodes) else []

    return to_unlock


def _not_counted(original: Function) -> Function:
    def _evict_result(self: Any, tokens: int, of_component: int) -> Any:
        return replace(original(self, tokens, of_component), mamba_num_evicted=0)

    return _evict_result


def _leaf_loses_its_state(original: Function) -> Function:
    def evict(self: Any, params: Any) -> Any:
        left = params.mamba_num
        if params.num_tokens == 0 and left == 1:
            node = self.states.first_unlocked()
            if node is not None and not node.children:
                self.states.evict(node)
                return self._evict_result(0, 1)
        return original(self, params)

    return evict


def _tombstones_stay(original: Function) -> Function:
    def _evict_upwards(self: Any, leaf: Any) -> Any:
        parent = leaf.parent
        return self._evict_leaf(leaf), parent

    return _evict_upwards


def _state_of_a_leaf_leaks(original: Function) -> Function:
    def free_with_leaf(self: Any, node: Any) -> None:
        if self.pool.available_size() == 0:
            original(self, node)

    return free_with_leaf


def _tombstone_is_not_filled(original: Function) -> Function:
    def put(self: Any, node: Any, value: Any) -> None:
        if not (self.name == "mamba" and node.children):
            original(self, node, value)

    return put


def _says_no_state(original: Function) -> Function:
    def insert(self: Any, params: Any) -> Any:
        return replace(original(self, params), mamba_exist=False)

    return insert


def _says_a_state(original: Function) -> Function:
    def insert(self: Any, params: Any) -> Any:
        result = original(self, params)
        return replace(result, mamba_exist=result.prefix_len == len(params.key))

    return insert


def _other_buffer(original: Function) -> Function:
    return lambda self, next_idx: next_idx


def _all_tokens_cached(original: Function) -> Function:
    def _tracked(self: Any, req: Any, length: int) -> int | None:
        tracked: int | None = original(self, req, length)
        return tracked and length // self.page_size * self.page_size

    return _tracked


def _track_is_kept(original: Function) -> Function:
    def cache_unfinished_req(self: Any, req: Any, chunked: bool = False) -> None:
        tracked = getattr(req, "mamba_last_track_seqlen", None)
        original(self, req, chunked)
        if chunked:
            req.mamba_last_track_seqlen = tracked

    return cache_unfinished_req


def _buffers_leak(original: Function) -> Function:
    def free_mamba_cache(self: Any, req: Any, keep: Any = None) -> None:
        if keep is not None and len(req.mamba_ping_pong_track_buffer) == 2:
            self.mamba_pool.free(req.mamba_pool_idx.reshape(1))
            req.mamba_pool_idx = req.mamba_ping_pong_track_buffer = None
        else:
            original(self, req, keep)

    return free_mamba_cache


def _buffers_go_all(original: Function) -> Function:
    return lambda self, req, keep=None: original(self, req)


def _running_state_leaks(original: Function) -> Function:
    def cache_finished_req(self: Any, req: Any, is_insert: bool = True) -> None:
        free = self.req_to_token_pool.free_mamba_cache
        if not self.enable_mamba_extra_buffer and is_insert:
            self.req_to_token_pool.free_mamba_cache = lambda *_: None
        try:
            original(self, req, is_insert)
        finally:
            self.req_to_token_pool.free_mamba_cache = free

    return cache_finished_req


def _fork_is_the_state(original: Function) -> Function:
    def fork_from(self: Any, src_index: Any) -> Any:
        taken = original(self, src_index)
        for plane in self.planes if taken is not None else ():
            plane.buffer[:, taken] = 0
        return taken

    return fork_from


def _branching_of_pages(original: Function) -> Function:
    def match_prefix(self: Any, params: Any) -> Any:
        chunk, self.mamba_cache_chunk_size = self.mamba_cache_chunk_size, self.page_size
        try:
            return original(self, params)
        finally:
            self.mamba_cache_chunk_size = chunk

    return match_prefix


def _any_end_is_usable(original: Function) -> Function:
    def usable(self: Any, path: Any) -> bool:
        return self.holds(path[-1]) or (bool(path[-1].children) and len(path) > 1)

    return usable


def _rows_before_states(original: Function) -> Function:
    def alloc(self: Any, reqs: Any) -> Any:
        if self.states_short_of(reqs) > self.mamba_pool.available_size():
            super(type(self), self).alloc(reqs)
            raise OutOfSlots("not enough states")
        return original(self, reqs)

    return alloc


def _copy_without_a_look(original: Function) -> Function:
    def match_prefix(self: Any, params: Any) -> Any:
        try:
            return original(self, params)
        except OutOfSlots:
            found = original(self, replace(params, cow_mamba=False))
            self.inc_lock_ref(found.last_device_node)
            raise

    return match_prefix


BUGS = (
    _bug(
        "state-moves-up-at-a-split",
        "PR 31108",
        "the upper half of a node that is cut takes the state of the whole: KV of 2, state of 4",
        f"{STATE}.split",
        _split_moves_up,
    ),
    _bug(
        "copied-state-is-shared",
        "slip",
        "a match gives the request the tree's own slot in place of a copy",
        f"{TREE}._copy_state",
        _copy_is_shared,
    ),
    _bug(
        "copied-state-is-zero",
        "PR 30986",
        "a match gives the request a fresh slot and copies nothing",
        f"{TREE}._copy_state",
        _copy_is_fresh,
    ),
    _bug(
        "second-match-leaks-a-state",
        "PR 16067, PR 21404, PR 12693",
        "a waiting request that matches again gets a second slot; nobody has the first",
        f"{TREE}._copy_state",
        _copy_forgets_a_slot,
    ),
    _bug(
        "copy-leaves-a-convolution",
        "issue 39830, PR 39862",
        "a copy of a state leaves one of its tensors out",
        f"{POOL}.copy_from",
        _no_plane(1),
    ),
    _bug(
        "copy-leaves-the-recurrence",
        "slip",
        "a copy of a state takes the convolutions only",
        f"{POOL}.copy_from",
        _no_plane(2),
    ),
    _bug(
        "state-not-cleared",
        "slip",
        "a new request starts from the state of its slot's last owner",
        f"{POOL}.alloc",
        _not_cleared,
    ),
    _bug(
        "held-state-evicted",
        "issue 24153",
        "an eviction of states takes one that a request is about to copy",
        f"{COMPONENT}.first_unlocked",
        _lock_is_ignored,
    ),
    _bug(
        "state-lock-goes-up",
        "slip",
        "a lock holds the states of the whole path, not only that of its end",
        f"{STATE}.to_lock",
        _lock_goes_up,
    ),
    _bug(
        "state-lock-forgotten",
        "PR 23882",
        "a lock holds the KV and not the state",
        f"{STATE}.to_lock",
        _lock_of_kv_only,
    ),
    _bug(
        "state-unlock-forgets-inner-nodes",
        "slip",
        "an unlock leaves the state lock of a node with children",
        f"{STATE}.to_unlock",
        _unlock_forgets,
    ),
    _bug(
        "evicted-states-not-counted",
        "PR 29662",
        "an eviction says that it freed no states",
        f"{TREE}._evict_result",
        _not_counted,
    ),
    _bug(
        "leaf-keeps-kv-without-state",
        "PR 22592, PR 23696",
        "an eviction of states leaves a leaf that no match can end at",
        f"{HYBRID}.evict",
        _leaf_loses_its_state,
    ),
    _bug(
        "tombstone-without-children-stays",
        "PR 22592",
        "a node that has lost its state stays when its last child goes",
        f"{HYBRID}._evict_upwards",
        _tombstones_stay,
    ),
    _bug(
        "state-of-a-leaf-leaks",
        "PR 12994",
        "an evicted leaf gives its state back only when no other is free",
        f"{STATE}.free_with_leaf",
        _state_of_a_leaf_leaks,
    ),
    _bug(
        "tombstone-not-filled",
        "slip",
        "an insert that ends at an inner node without a state does not leave its own there",
        f"{COMPONENT}.put",
        _tombstone_is_not_filled,
    ),
    _bug(
        "insert-says-no-state",
        "slip",
        "an insert always says that it has taken the state",
        f"{TREE}.insert",
        _says_no_state,
    ),
    _bug(
        "insert-says-a-state",
        "slip",
        "an insert that fills a tombstone says that the state was there",
        f"{TREE}.insert",
        _says_a_state,
    ),
    _bug(
        "buffer-still-written-is-cached",
        "issue 24221, PR 24954",
        "the tree gets the buffer that the next forward writes",
        f"{ROWS}.get_mamba_ping_pong_other_idx",
        _other_buffer,
    ),
    _bug(
        "all-tokens-cached-with-a-tracked-state",
        "issue 31833, PR 33450, PR 37836",
        "the state of a chunk boundary is cached as that of all tokens: KV of 6, state of 4",
        f"{TREE}._tracked",
        _all_tokens_cached,
    ),
    _bug(
        "tracked-length-survives",
        "slip",
        "a chunk's tracked state is offered again once the tree has it",
        f"{TREE}.cache_unfinished_req",
        _track_is_kept,
    ),
    _bug(
        "other-buffer-leaks",
        "PR 21404",
        "a finished request whose snapshot was taken does not give its other buffer back",
        f"{ROWS}.free_mamba_cache",
        _buffers_leak,
    ),
    _bug(
        "taken-buffer-is-freed",
        "slip",
        "a finished request frees the buffer that the tree has just taken",
        f"{ROWS}.free_mamba_cache",
        _buffers_go_all,
    ),
    _bug(
        "running-state-leaks",
        "PR 12994",
        "a finished request whose state the tree had already does not give its own back",
        f"{TREE}.cache_finished_req",
        _running_state_leaks,
    ),
    _bug(
        "fork-is-empty",
        "PR 30986",
        "a request that goes on gives the tree a fresh slot, not a copy of its state",
        f"{POOL}.fork_from",
        _fork_is_the_state,
    ),
    _bug(
        "branching-point-off-the-grid",
        "PR 30882",
        "a match asks for a state where no forward leaves one",
        f"{TREE}.match_prefix",
        _branching_of_pages,
    ),
    _bug(
        "match-ends-at-a-tombstone",
        "slip",
        "a match may end at an inner node that has no state",
        f"{STATE}.usable",
        _any_end_is_usable,
    ),
    _bug(
        "freed-state-goes-first",
        "slip",
        "a freed state is handed out next, not last",
        f"{POOL}.free",
        _freed_go_first,
        suite="mamba.exact",
    ),
    _bug(
        "row-kept-without-a-state",
        "slip",
        "rows are taken before the states are counted, and stay taken",
        f"{ROWS}.alloc",
        _rows_before_states,
        suite="mamba.misuse",
    ),
    _bug(
        "refused-copy-leaves-a-lock",
        "PR 36770",
        "a match that finds no room for its copy leaves the node locked",
        f"{TREE}.match_prefix",
        _copy_without_a_look,
        suite="mamba.misuse",
    ),
)
