"""Bugs planted in the serving loop."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from refcache.planted.bug import PlantedBug
from refcache.types import EvictParams

ENGINE = "refcache.engine"
Function = Callable[..., Any]


def _draft_not_recorded(original: Function) -> Function:
    def alloc_for_decode(batch: Any) -> Any:
        out = original(batch)
        allocator = batch.token_to_kv_pool_allocator
        if len(batch.reqs) > 1 and allocator.available_size() > 2 * allocator.page_size:
            allocator.alloc(allocator.page_size)
        return out

    return alloc_for_decode


def _released_twice(original: Function) -> Function:
    def release_kv_cache(req: Any, tree_cache: Any, is_insert: bool = True) -> None:
        rows, length = tree_cache.req_to_token_pool, req.kv_committed_len
        last = rows.read(req.req_pool_idx, slice(length - 1, length))
        tail = length % tree_cache.page_size == 1 or tree_cache.is_eagle
        original(req, tree_cache, is_insert)
        if tail:
            tree_cache.token_to_kv_pool_allocator.free(last)

    return release_kv_cache


def _insert_skipped(original: Function) -> Function:
    def stash_chunked_request(self: Any, req: Any) -> None:
        if req.to_finish is not None or req.extra_key is None:
            original(self, req)

    return stash_chunked_request


def _no_namespace(original: Function) -> Function:
    def init_next_round_input(self: Any, tree_cache: Any = None) -> None:
        space, self.extra_key = self.extra_key, None
        try:
            original(self, tree_cache)
        finally:
            self.extra_key = space

    return init_next_round_input


def _prefix_not_written(original: Function) -> Function:
    def write_cache_indices(batch: Any, out_cache_loc: Any) -> None:
        pool, known = batch.req_to_token_pool, [req.prefix_indices for req in batch.reqs]
        for req in batch.reqs[1:]:  # keeps what the row had
            req.prefix_indices = pool.read(req.req_pool_idx, slice(0, len(req.prefix_indices)))
        original(batch, out_cache_loc)
        for req, prefix in zip(batch.reqs, known, strict=True):
            req.prefix_indices = prefix

    return write_cache_indices


def _room_short(original: Function) -> Function:
    def evict_from_tree_cache(tree_cache: Any, num_tokens: int) -> None:
        missing = num_tokens - tree_cache.token_to_kv_pool_allocator.available_size()
        if missing > 1:
            tree_cache.evict(EvictParams(missing - 1))

    return evict_from_tree_cache


def _rows_swapped(original: Function) -> Function:
    def merge_batch(self: Any, other: Any) -> None:
        original(self, other)
        if len(self.reqs) > 1:
            self.req_pool_indices = self.req_pool_indices.clone()
            self.req_pool_indices[-2:] = self.req_pool_indices[-2:].flip(0)

    return merge_batch


def _retracted_keeps_lock(original: Function) -> Function:
    def release_req(self: Any, idx: int, *rest: Any) -> None:
        self.tree_cache.inc_lock_ref(self.reqs[idx].last_node)
        original(self, idx, *rest)

    return release_req


def _nothing_locked(original: Function) -> Function:
    return lambda self, last_node: nullcontext()


BUGS = (
    PlantedBug(
        "draft-slots-not-recorded",
        "sglang#7130, #31616, #35265",
        "a page for draft tokens is taken and written down nowhere",
        f"{ENGINE}.schedule_batch:alloc_for_decode",
        _draft_not_recorded,
        "loop.state",
    ),
    PlantedBug(
        "tail-released-twice",
        "sglang#18694, #12224, sglang-jax#982",
        "the last slot of a finished request is freed by two paths",
        f"{ENGINE}.scheduling.output_processor:release_kv_cache",
        _released_twice,
        "loop.state",
    ),
    PlantedBug(
        "chunk-computed-again",
        "sglang#36855, #37024",
        "where the insert of a chunk is skipped, its progress is lost",
        f"{ENGINE}.scheduling.scheduler:Scheduler.stash_chunked_request",
        _insert_skipped,
        "loop.state",
    ),
    PlantedBug(
        "request-key-without-namespace",
        "vllm#44701, sglang#25351",
        "a request looks its prefix up without its namespace",
        f"{ENGINE}.req:Req.init_next_round_input",
        _no_namespace,
        "loop.state",
    ),
    PlantedBug(
        "prefix-not-written",
        "slip",
        "of a batch, only the first request's cached prefix is written to its row",
        f"{ENGINE}.alloc:write_cache_indices",
        _prefix_not_written,
        "loop.state",
    ),
    PlantedBug(
        "room-short-by-one",
        "sglang#13826, #14645",
        "room is made for one token less than is allocated next",
        f"{ENGINE}.alloc:evict_from_tree_cache",
        _room_short,
        "loop.state",
    ),
    PlantedBug(
        "merged-rows-swapped",
        "slip",
        "the last two requests of a merged batch get each other's rows",
        f"{ENGINE}.schedule_batch:ScheduleBatch.merge_batch",
        _rows_swapped,
        "loop.state",
    ),
    PlantedBug(
        "retracted-keeps-lock",
        "slip",
        "a request that is retracted while it decodes keeps its lock",
        f"{ENGINE}.schedule_batch:ScheduleBatch.release_req",
        _retracted_keeps_lock,
        "loop.state",
    ),
    PlantedBug(
        "own-prefix-counts-as-room",
        "ROCm/ATOM#902",
        "a request is admitted as if the prefix that it is going to lock could be evicted for it",
        f"{ENGINE}.scheduling.schedule_policy:PrefillAdder._lock_node",
        _nothing_locked,
        "loop.state",
    ),
)
