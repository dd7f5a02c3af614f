"""Replay a request trace through the serving loop, with checks, and through the tree alone.

:func:`replay` feeds a trace to :class:`refcache.engine.Scheduler` in order, as fast as it admits
requests (times of arrival are ignored), and raises the first
:class:`~refcache.oracle.violation.Violation`. What is checked:

========  =====================================  ================================================
check     KV rows of each forward (C-READ)       state of the cache
========  =====================================  ================================================
every     every row it reads                     who owns each page (P0, P1) and sums (P3) after
                                                 each step; every rule each 256 steps
sampled   a prefill: every row; a decode step:   sums after each step; every rule each 256 steps
          the new rows and 64 that are drawn
off       none                                   none
========  =====================================  ================================================

Every rule is also checked at the end; with more than 3 M tokens cached, it comes more rarely.

Without a bound on the device memory no KV bytes are kept (they would be too many): then no row is
checked, and :attr:`ReplayResult.kv_kept` says so.

:func:`replay_tree` does what a cache without an engine does: match, insert, evict the excess.
"""

import gc
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from refcache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from refcache.engine.content import (
    ReadPlan,
    RowCheck,
    SampledRows,
    WrongContent,
    read_every_row,
    read_nothing,
)
from refcache.engine.io_struct import SamplingParams, TokenizedGenerateReqInput
from refcache.engine.model_config import ModelConfig
from refcache.engine.model_runner import ModelRunner
from refcache.engine.observer import SchedulerObserver
from refcache.engine.req import Req
from refcache.engine.schedule_batch import ScheduleBatch
from refcache.engine.scheduler import Scheduler
from refcache.errors import InvalidArgument, UnknownName
from refcache.keys import TOKEN, RadixKey
from refcache.oracle.replay_state import StateCheck
from refcache.oracle.request_trace import BLOCK, TraceRequest
from refcache.oracle.violation import Violation
from refcache.tree import HiRadixCache, RadixCache, TreeNode
from refcache.tree.hiradix_cache import LOAD_BACK_THRESHOLD
from refcache.types import (
    EVICTION_POLICIES,
    WRITE_POLICIES,
    CacheInitParams,
    EvictParams,
    EvictResult,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
    ServerArgs,
)

CHECKS = ("every", "sampled", "off")
STUCK = 8  # steps in a row that may launch nothing
CHUNK = 32768  # tokens of a prefill step: fewer, larger steps cost less here
COLLECT_AT = 100_000  # new objects: the loop makes few cycles, and looking for them costs a tenth
QUEUE = 16  # requests kept waiting, so that a batch never lacks candidates

Progress = Callable[[int, int], None]
"""Called with the number of requests that are finished, and of all."""


@dataclass(frozen=True)
class ReplayConfig:
    """How a trace is replayed.

    Attributes:
        page_size: tokens a page.
        device_tokens: capacity of the device, cut to whole pages; None is without bound.
        policy: eviction policy.
        limit: requests to replay at most.
        serial: each request runs to its end before the next arrives.
        no_decode: a request ends with its first token.
        check: see the module docstring; ``seed``: of the rows that are drawn.
        max_running_requests: that decode together.
        host_ratio: host tokens / device tokens; None: no host tier.
        write_policy, load_back_threshold: of the host tier.

    Raises:
        InvalidArgument: a number that is too small. UnknownName: a policy or check.
    """

    page_size: int = 64
    device_tokens: int | None = 3_000_000
    policy: str = "lru"
    limit: int | None = None
    serial: bool = False
    no_decode: bool = False
    check: str = "sampled"
    seed: int = 0
    max_running_requests: int = 256
    host_ratio: float | None = None
    write_policy: str = "write_through"
    load_back_threshold: int = LOAD_BACK_THRESHOLD

    def __post_init__(self) -> None:
        if self.host_ratio is not None and not (1 < self.host_ratio < float("inf")):
            raise InvalidArgument(f"host_ratio={self.host_ratio}: expected a finite number above 1")
        if self.host_ratio is not None and self.device_tokens is None:
            raise InvalidArgument("host_ratio without a bound on the device: nothing would move")
        if self.write_policy not in WRITE_POLICIES:
            raise UnknownName("write_policy", self.write_policy, WRITE_POLICIES)
        least = {"page_size": 1, "device_tokens": self.page_size, "limit": 0}
        for name, low in {**least, "max_running_requests": 1}.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise InvalidArgument(f"{name}={value}: expected at least {low}")
        if self.policy not in EVICTION_POLICIES:
            raise UnknownName("policy", self.policy, EVICTION_POLICIES)
        if self.check not in CHECKS:
            raise UnknownName("check", self.check, CHECKS)


@dataclass(frozen=True)
class ReplayResult:
    """What a replay did, in tokens unless the name says otherwise.

    Attributes:
        hit_tokens: prompt tokens that the cache had when their request was admitted.
        computed_tokens: that prefills computed (again after a retraction); ``output_tokens`` made.
        evicted_tokens: that the tree gave up to make room.
        steps: of the loop; ``retractions``: requests that lost their memory on the way.
        rows_checked: KV rows compared, one of each layer and plane counted as one.
        states_checked: times that every rule was checked.
        seconds: by the clock on the wall.
        kv_kept: False when no KV bytes were kept, so that no row could be checked.
        host_hit_tokens: of ``hit_tokens``, those that were loaded from the host.
        bytes_to_host, bytes_to_device: moved by writes and loads.
    """

    requests: int
    prompt_tokens: int
    hit_tokens: int
    computed_tokens: int
    output_tokens: int
    evicted_tokens: int
    steps: int
    retractions: int
    rows_checked: int
    states_checked: int
    seconds: float
    kv_kept: bool
    host_hit_tokens: int = 0
    bytes_to_host: int = 0
    bytes_to_device: int = 0


def prompt_of(request: TraceRequest) -> "array[int]":
    """``request.token_ids()``, made without a Python object a token."""
    blocks = torch.tensor(request.hash_ids, dtype=torch.int64) * BLOCK
    first = blocks.to(torch.int32)[:, None]  # the low 32 bits
    ids = (first + torch.arange(BLOCK, dtype=torch.int32)).flatten()[: request.input_length]
    return array(TOKEN, ids.numpy().tobytes())


class CountingRadixCache(RadixCache):
    """A tree that counts what it evicts, in ``evicted_tokens``."""

    evicted_tokens = 0

    def evict(self, params: EvictParams) -> EvictResult:
        result = super().evict(params)
        self.evicted_tokens += result.num_tokens_evicted
        return result


class CountingHiRadixCache(HiRadixCache):
    """A two-tier tree that counts what it evicts, and the tokens that move between the tiers."""

    evicted_tokens = 0
    host_hit_tokens = 0
    written_tokens = 0
    loaded_tokens = 0

    def evict(self, params: EvictParams) -> EvictResult:
        result = super().evict(params)
        self.evicted_tokens += result.num_tokens_evicted
        return result

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


class _Counts(SchedulerObserver):
    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total, self.progress = total, progress
        self.finished = self.hits = self.computed = self.outputs = 0

    def on_batch(self, batch: ScheduleBatch) -> None:
        if batch.forward_mode.is_extend():
            self.computed += batch.extend_num_tokens

    def on_finish(self, req: Req) -> None:
        self.finished += 1
        self.hits += req.cached_tokens or 0
        self.outputs += len(req.output_ids)
        if self.progress is not None:
            self.progress(self.finished, self.total)


@torch.inference_mode()  # no autograd beside many small operations: a fifth less time
def replay(
    requests: Iterable[TraceRequest], config: ReplayConfig, progress: Progress | None = None
) -> ReplayResult:
    """Replay a trace; see the module docstring.

    Raises:
        Violation: the first that a check finds; ``call`` says at which step.
        InvalidArgument: a request that does not fit into ``device_tokens``.
    """
    trace = list(requests)[: config.limit]
    counts = _Counts(len(trace), progress)
    scheduler = _scheduler(trace, config, counts)
    state = StateCheck(scheduler, config.check)
    began = time.perf_counter()
    steps = idle = submitted = 0
    keep = 1 if config.serial else QUEUE
    gc.collect()
    gc.freeze()  # what is alive now stays so; collections during the run need not look at it
    collect_at = gc.get_threshold()
    gc.set_threshold(COLLECT_AT)
    try:
        while True:
            waiting = len(scheduler.live_reqs) if config.serial else len(scheduler.waiting_queue)
            for request in trace[submitted : submitted + max(0, keep - waiting)]:
                scheduler.submit(_generate(submitted, request, config))
                submitted += 1
            if scheduler.is_idle():
                break
            idle = 0 if scheduler.step() is not None else idle + 1
            steps += 1
            scheduler.finished_reqs.clear()
            if idle > STUCK:
                raise Violation("PROGRESS", f"{idle} steps in a row launched nothing")
            state.after_step()
        state.every_rule()
    except Violation as violation:
        violation.call = f"step {steps} of the replay, {counts.finished} requests finished"
        raise
    finally:
        gc.set_threshold(*collect_at)
        gc.unfreeze()
    tree = scheduler.tree_cache
    moved: dict[str, int] = {}
    if isinstance(tree, CountingHiRadixCache):
        row = tree.token_to_kv_pool_host.get_size_per_token()
        moved = {
            "host_hit_tokens": tree.host_hit_tokens,
            "bytes_to_host": tree.written_tokens * row,
            "bytes_to_device": tree.loaded_tokens * row,
        }
    return ReplayResult(
        requests=counts.finished,
        prompt_tokens=sum(r.input_length for r in trace),
        hit_tokens=counts.hits,
        computed_tokens=counts.computed,
        output_tokens=counts.outputs,
        evicted_tokens=tree.evicted_tokens,
        steps=steps,
        retractions=scheduler.num_retracted_reqs,
        rows_checked=scheduler.model_runner.check.rows_checked,
        states_checked=state.checked,
        seconds=time.perf_counter() - began,
        kv_kept=config.device_tokens is not None,
        **moved,
    )


def _generate(index: int, request: TraceRequest, config: ReplayConfig) -> TokenizedGenerateReqInput:
    outputs = 1 if config.no_decode else request.output_length
    return TokenizedGenerateReqInput(str(index), prompt_of(request), SamplingParams(outputs))


def _scheduler(
    trace: list[TraceRequest], config: ReplayConfig, observer: SchedulerObserver
) -> Scheduler:
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

    def make_allocator(runner: ModelRunner) -> Any:
        # without a bound the free list is long: freed pages wait aside, instead of in its front
        dtype, pool = runner.kv_cache_dtype, runner.token_to_kv_pool
        if page == 1:
            return TokenToKVPoolAllocator(size, dtype, "cpu", pool, need_sort=unlimited)
        return PagedTokenToKVPoolAllocator(size, page, dtype, "cpu", pool, need_sort=unlimited)

    def make_tree(params: CacheInitParams, server_args: ServerArgs) -> RadixCache:
        if not server_args.enable_hierarchical_cache:
            return CountingRadixCache(params)
        tree = CountingHiRadixCache(params, server_args)
        tree.load_back_threshold = config.load_back_threshold
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
            radix_eviction_policy=config.policy,
            disable_overlap_schedule=config.serial,  # nothing else runs: nothing to overlap
            enable_hierarchical_cache=config.host_ratio is not None,
            hicache_ratio=config.host_ratio or 1,
            hicache_write_policy=config.write_policy,
        ),
        ModelConfig(kv_lora_rank=1),  # one plane of one word a token is enough to know it by
        make_allocator=make_allocator,
        make_tree=make_tree,
        check=RowCheck(plans[config.check], on_wrong),
        observer=observer,
        keep_kv=not unlimited,
    )


@dataclass(frozen=True)
class TreeReplayResult:
    """Tokens that were matched, and that were evicted."""

    hit_tokens: int
    evicted_tokens: int


class _NoAllocator:
    """Takes back slots that nobody hands out."""

    device = "cpu"

    def free(self, free_index: torch.Tensor) -> None: ...


def replay_tree(
    requests: Iterable[TraceRequest],
    page_size: int = 64,
    device_tokens: int | None = 3_000_000,
    policy: str = "lru",
) -> TreeReplayResult:
    """Match each whole prompt, insert it in whole pages, evict what exceeds ``device_tokens``."""
    tree = CountingRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=_NoAllocator(),
            page_size=page_size,
            eviction_policy=policy,
        )
    )
    hits = 0
    for request in requests:
        key = RadixKey(prompt_of(request)).page_aligned(page_size)
        hits += len(tree.match_prefix(MatchPrefixParams(key)).device_indices)
        tree.insert(InsertParams(key, torch.zeros(len(key), dtype=torch.int64)))
        excess = 0 if device_tokens is None else tree.evictable_size() - device_tokens
        if excess > 0:
            tree.evict(EvictParams(excess))
    return TreeReplayResult(hits, tree.evicted_tokens)
