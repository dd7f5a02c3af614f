"""What a replay is made of: prompts, trees and an observer that count, the scheduler."""

import json
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from refcache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from refcache.engine.model_config import ModelConfig
from refcache.engine.model_runner import ModelRunner
from refcache.engine.model_runner import make_allocator as make_own_allocator
from refcache.engine.models.content import (
    ReadPlan,
    RowCheck,
    SampledRows,
    WrongContent,
    read_every_row,
    read_nothing,
)
from refcache.engine.req import Req
from refcache.engine.schedule_batch import ScheduleBatch
from refcache.engine.scheduling.observer import SchedulerObserver
from refcache.engine.scheduling.scheduler import Scheduler
from refcache.errors import InvalidArgument
from refcache.keys import TOKEN
from refcache.oracle.rules.violation import Violation
from refcache.oracle.target.base import Target
from refcache.oracle.target.config import CacheConfig
from refcache.pool import BaseLinearStateParams, Mamba2StateDType, StateShape
from refcache.readers import TraceRequest
from refcache.replay.config import ReplayConfig
from refcache.replay.feed import TraceClock
from refcache.replay.keeping import RetainStrategy, strategy_of
from refcache.tree import HiRadixCache, MambaRadixCache, RadixCache, SWARadixCache, TreeNode
from refcache.types import (
    CacheInitParams,
    EvictParams,
    EvictResult,
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
    ServerArgs,
)

CHUNK = 32768  # tokens of a prefill step: fewer, larger steps cost less here

Progress = Callable[[int, int], None]
"""Called with the number of requests that are finished, and of all."""


def prompt_of(request: TraceRequest) -> "array[int]":
    """``request.token_ids()``, made without a Python object a token."""
    size = request.block_size
    blocks = torch.tensor(request.hash_ids, dtype=torch.int64) * size
    first = blocks.to(torch.int32)[:, None]  # the low 32 bits
    ids = (first + torch.arange(size, dtype=torch.int32)).flatten()[: request.input_length]
    tokens = array(TOKEN, bytes(4 * len(ids)))
    torch.frombuffer(tokens, dtype=torch.int32).copy_(ids)
    return tokens


class CountingRadixCache(RadixCache):
    """A tree that counts what it evicts, in ``evicted_tokens``."""

    evicted_tokens = 0

    def evict(self, params: EvictParams) -> EvictResult:
        result = super().evict(params)
        self.evicted_tokens += result.num_tokens_evicted
        return result


class CountingHiRadixCache(CountingRadixCache, HiRadixCache):
    """A two-tier tree that also counts the tokens that move between the tiers."""

    host_hit_tokens = 0
    written_tokens = 0
    loaded_tokens = 0

    def write_backup(self, node: TreeNode, write_back: bool = False) -> int:
        written = super().write_backup(node, write_back)
        self.written_tokens += written
        return written

    def init_load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, TreeNode]:
        slots, node = super().init_load_back(params)
        self.loaded_tokens += len(slots)
        if params.req.cached_tokens is None:
            self.host_hit_tokens += len(slots)
        return slots, node


def counted(tree: Any) -> Any:
    """A tree, with what it evicts counted in ``evicted_tokens``."""
    evict = tree.evict

    def counting(params: EvictParams) -> EvictResult:
        result: EvictResult = evict(params)
        tree.evicted_tokens += result.num_tokens_evicted
        return result

    tree.evicted_tokens, tree.evict = 0, counting
    return tree


def without_branching(tree: Any) -> Any:
    """A tree of states whose matches name no branching points."""
    match = tree.match_prefix

    def unbranched(params: MatchPrefixParams) -> MatchResult:
        found: MatchResult = match(params)
        return found._replace(mamba_branching_seqlen=None)

    tree.match_prefix = unbranched
    return tree


class Counts(SchedulerObserver):
    """Counts requests that finish, and tokens: prompts, hits, computed in prefills, outputs.

    Attributes:
        batch: of the step, if it launched one: "prefill" or "decode", requests, tokens computed.
    """

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total, self.progress = total, progress
        self.finished = self.hits = self.prompts = self.computed = self.outputs = 0
        self.storage_hits = 0
        self.batch: tuple[str, int, int] | None = None

    def on_batch(self, batch: ScheduleBatch) -> None:
        extend = batch.forward_mode.is_extend()
        computed = batch.extend_num_tokens if extend else 0
        self.computed += computed
        self.batch = "prefill" if extend else "decode", len(batch.reqs), computed

    def on_finish(self, req: Req) -> None:
        self.finished += 1
        self.hits += req.cached_tokens or 0
        self.prompts += len(req.origin_input_ids)
        self.storage_hits += req.storage_hit_length
        self.outputs += len(req.output_ids)
        if self.progress is not None:
            self.progress(self.finished, self.total)


def model_of(config: ReplayConfig) -> ModelConfig:
    """One plane of one word a token is enough to know it by; so is one word a state."""
    if config.model == "swa":
        return ModelConfig(2, swa_attention_layer_ids=(0,), sliding_window_size=config.window)
    if config.model == "mamba":
        word = StateShape([(1,)], (1,))
        kinds = Mamba2StateDType(conv=torch.int64, temporal=torch.int64)
        states = BaseLinearStateParams(shape=word, layers=(0,), dtype=kinds)
        return ModelConfig(2, kv_lora_rank=1, mamba2_cache_params=states)
    return ModelConfig(kv_lora_rank=1)


def _storage(config: ReplayConfig) -> dict[str, Any]:
    """Arguments of the server for pages in a directory."""
    if config.storage is None:
        return {}
    options = {"prefetch_threshold": config.page_size, "file_path": config.storage}
    return {
        "hicache_storage_backend": "file",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps(options),
    }


def make_scheduler(
    trace: list[TraceRequest],
    config: ReplayConfig,
    observer: SchedulerObserver,
    target: Target | None = None,
    clock: TraceClock | None = None,
) -> Scheduler:
    """A scheduler whose pool has room for the longest request of ``trace``.

    Args:
        target: makes allocator and tree; None: the reference's are taken.
        clock: of the tree; its own by default.

    Raises:
        InvalidArgument: a request that does not fit into ``config.device_tokens``.
    """
    page = config.page_size
    lengths = [r.input_length + (1 if config.no_decode else r.output_length) for r in trace]
    longest = max(lengths, default=1) + 1
    unlimited = config.device_tokens is None
    size = config.device_tokens or sum(-(-n // page) * page for n in lengths) + longest + page
    size = size // page * page
    if longest > size:
        line = lengths.index(longest - 1) + 1
        raise InvalidArgument(
            f"device_tokens={config.device_tokens}: request {line} of the trace has "
            f"{longest - 1} tokens with its output; expected room for one token more, in whole "
            f"pages of {page}"
        )

    built = CacheConfig(
        page,
        size,
        need_sort=unlimited,
        eviction_policy=config.policy if target is not None else "lru",
        max_requests=config.max_running_requests,
        context_length=longest,
    )

    def make_allocator(runner: ModelRunner) -> Any:
        if config.model == "swa":
            return make_own_allocator(runner)
        if target is not None:
            return target.allocator(built)
        # without a bound the free list is long: freed pages wait aside, instead of in its front
        dtype, pool = runner.kv_cache_dtype, runner.token_to_kv_pool
        if page == 1:
            return TokenToKVPoolAllocator(size, dtype, "cpu", pool, need_sort=unlimited)
        return PagedTokenToKVPoolAllocator(size, page, dtype, "cpu", pool, need_sort=unlimited)

    own = strategy_of(config, clock)

    def make_tree(params: CacheInitParams, server_args: ServerArgs) -> Any:
        if target is not None:
            rows = params.req_to_token_pool
            return counted(target.tree(built, params.token_to_kv_pool_allocator, rows))
        params = replace(params, clock=clock)
        if isinstance(own, RetainStrategy):
            params = replace(params, hit_policy="per_request")
        tree: RadixCache
        if config.model != "full":
            params = replace(params, hit_refreshes=config.hit_refreshes)
            if config.model == "swa":
                return counted(SWARadixCache(params))
            states = counted(MambaRadixCache(params))
            return states if config.branching else without_branching(states)
        if server_args.enable_hierarchical_cache:
            tree = CountingHiRadixCache(params, server_args)
            if config.load_back_threshold is not None:
                tree.load_back_threshold = config.load_back_threshold
        else:
            tree = CountingRadixCache(params)
        if own is not None:
            tree.eviction_strategy = own
        return tree

    def on_wrong(wrong: WrongContent) -> None:
        raise Violation("C-READ", str(wrong))

    plans: dict[str, ReadPlan] = {
        "every": read_every_row,
        "sampled": SampledRows(seed=config.seed),
        "off": read_nothing,
    }
    chunk = max(CHUNK // page, 1) * page
    return Scheduler(
        ServerArgs(
            page_size=page,
            max_running_requests=1 if config.serial else config.max_running_requests,
            max_total_tokens=size,
            max_prefill_tokens=chunk,
            chunked_prefill_size=chunk,
            context_length=longest,
            radix_eviction_policy="lru" if own is not None else config.policy,
            disable_overlap_schedule=config.serial,  # nothing else runs: nothing to overlap
            enable_hierarchical_cache=config.host_ratio is not None,
            hicache_ratio=config.host_ratio or 1,
            hicache_write_policy=config.write_policy,
            swa_full_tokens_ratio=1.0,
            mamba_scheduler_strategy="extra_buffer" if config.model == "mamba" else "auto",
            mamba_track_interval=config.state_interval,
            mamba_cache_chunk_size=page,
            max_mamba_cache_size=config.states,
            **_storage(config),
        ),
        model_of(config),
        make_allocator=make_allocator,
        make_tree=make_tree,
        check=RowCheck(plans[config.check], on_wrong),
        observer=observer,
        keep_kv=not unlimited,
    )
