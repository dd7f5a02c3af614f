"""Who is prefilled next: ``PrefillAdder`` with its budgets, and what orders the waiting queue.

The order is :mod:`refcache.engine.scheduling.queue_policy`; its classes are here, too, as in
SGLang.

Budgets, in tokens:

* ``rem_total_tokens``: free and evictable slots, less what is promised: to running requests the
  outputs they are expected to need (``new_token_ratio`` of what they may need), to requests of this
  batch their input, their outputs, and a page for rounding;
* ``cur_rem_tokens``: the same without expected outputs: what this very step can have;
* ``rem_input_tokens``: of this batch; the first request may exceed it;
* ``rem_chunk_tokens``: of this batch; a longer prompt is cut there (``None``: never cut).

Models ``sglang.srt.managers.schedule_policy``; left out: grammars, LoRA limits, diffusion models,
delayed prefills. Of a hybrid model, tokens are those of the shorter pool, and a request is added
only if it can have its states (:mod:`refcache.engine.hybrid`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from math import inf
from typing import Any

import torch

from refcache.engine.hybrid import states_missing, tokens_within_reach
from refcache.engine.req import Req
from refcache.engine.scheduling.queue_policy import CacheAgnosticPolicy as CacheAgnosticPolicy
from refcache.engine.scheduling.queue_policy import CacheAwarePolicy as CacheAwarePolicy
from refcache.engine.scheduling.queue_policy import SchedulePolicy as SchedulePolicy
from refcache.errors import InvalidArgument, refuse_unmodelled
from refcache.types import DecLockRefParams, InitLoadBackParams, ServerArgs

CLIP_MAX_NEW_TOKENS = 4096  # outputs of one request that a budget reserves at most
NOT_OF_THE_ADDER = {"prefill_delayer_single_pass": None, "dllm_config": None}


class AddReqResult(Enum):
    """Whether the adder takes another request, or what it is short of."""

    CONTINUE = auto()
    NO_TOKEN = auto()
    OTHER = auto()


class PrefillAdder:
    """Collects the requests of one prefill batch in ``can_run_list``, within the budgets.

    Args:
        running_batch: whose expected outputs are reserved; None: nothing runs.
        new_token_ratio: the share of its remaining outputs a running request is expected to need.
        rem_input_tokens, rem_chunk_tokens: see the module docstring.
        mixed_with_decode_tokens: tokens that decode in the same batch; off every budget.
        priority_scheduling_preemption_threshold: a request preempts those whose priority is lower
            by more than this.
        max_prefill_bs, max_running_requests: for delayed prefills; kept.
        prefill_max_requests: requests a batch at most; None: no bound.
        prefill_delayer_single_pass, dllm_config: must be None.

    Attributes:
        preempt_list: running requests that gave way (:meth:`preempt_to_schedule`).
        log_hit_tokens, log_input_tokens: cached and computed tokens of what was added.

    Raises:
        InvalidArgument: an argument that must be None.
    """

    def __init__(
        self,
        page_size: int,
        tree_cache: Any,
        token_to_kv_pool_allocator: Any,
        running_batch: Any,
        new_token_ratio: float,
        rem_input_tokens: int,
        rem_chunk_tokens: int | None,
        mixed_with_decode_tokens: int = 0,
        priority_scheduling_preemption_threshold: int = 0,
        max_prefill_bs: int = 0,
        max_running_requests: int | None = None,
        prefill_max_requests: int | None = None,
        prefill_delayer_single_pass: None = None,
        dllm_config: None = None,
    ) -> None:
        given = {"prefill_delayer_single_pass": prefill_delayer_single_pass}
        refuse_unmodelled("PrefillAdder", given | {"dllm_config": dllm_config}, NOT_OF_THE_ADDER)
        self.page_size = page_size
        self.tree_cache = tree_cache
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.running_batch = running_batch
        self.new_token_ratio = new_token_ratio
        self.rem_input_tokens = rem_input_tokens - mixed_with_decode_tokens
        self.rem_chunk_tokens = rem_chunk_tokens
        if rem_chunk_tokens is not None:
            self.rem_chunk_tokens = rem_chunk_tokens - mixed_with_decode_tokens
        self.priority_scheduling_preemption_threshold = priority_scheduling_preemption_threshold
        self.max_prefill_bs = max_prefill_bs
        self.max_running_requests = max_running_requests
        self.prefill_max_requests = prefill_max_requests
        self.can_run_list: list[Req] = []
        self.preempt_list: list[Req] = []
        self.new_chunked_req: Req | None = None
        self.log_hit_tokens = 0
        self.log_input_tokens = 0
        self.cur_rem_token_offset = mixed_with_decode_tokens
        running = [] if running_batch is None else running_batch.reqs
        self.rem_total_token_offset: float = mixed_with_decode_tokens + sum(
            self._expected_outputs(req) for req in running
        )

    def _expected_outputs(self, req: Req) -> float:
        """The outputs that are reserved for a running request."""
        rest = req.sampling_params.max_new_tokens - len(req.output_ids)
        return self.new_token_ratio * min(rest, CLIP_MAX_NEW_TOKENS)

    @property
    def _available_and_evictable(self) -> int:
        return tokens_within_reach(self.tree_cache)

    @property
    def rem_total_tokens(self) -> float:
        return self._available_and_evictable - self.rem_total_token_offset

    @property
    def cur_rem_tokens(self) -> int:
        return self._available_and_evictable - self.cur_rem_token_offset

    def ceil_paged_tokens(self, tokens: int) -> int:
        return -(-tokens // self.page_size) * self.page_size

    def budget_state(self) -> AddReqResult:
        """Whether another request may be tried."""
        if self.rem_total_tokens <= 0 or self.cur_rem_tokens <= 0:
            return AddReqResult.NO_TOKEN
        if self.rem_input_tokens <= 0:
            return AddReqResult.OTHER
        if self.rem_chunk_tokens is not None and self.rem_chunk_tokens <= 0:
            return AddReqResult.OTHER
        return AddReqResult.CONTINUE

    def add_chunked_req(self, req: Req) -> Req | None:
        """Go on with the request whose prompt was cut; it has its rows and its lock already.

        It is not added (see ``can_run_list``) when not one token fits: nothing is over-committed.

        Returns:
            The request when its prompt is still not done, else None.

        Raises:
            InvalidArgument: the adder cuts no prompts.
        """
        if self.rem_chunk_tokens is None:
            raise InvalidArgument("add_chunked_req: expected an adder with rem_chunk_tokens")
        room = min(self.rem_chunk_tokens, int(self.rem_total_tokens))
        if room <= 0:  # all is reserved for outputs: take what is free now
            room = min(self.rem_chunk_tokens, self.cur_rem_tokens)
        if room <= 0:
            return req
        truncated = req.extend_input_len > room
        max_new_tokens = 0 if truncated else req.sampling_params.max_new_tokens
        self._add(req, 0, min(req.extend_input_len, room), max_new_tokens)
        return req if truncated else None

    @contextmanager
    def _lock_node(self, last_node: Any) -> Iterator[None]:
        """Keep a matched prefix from being evicted while its request is being decided on."""
        uuid = self._lock(last_node)
        try:
            yield
        finally:
            given = () if uuid is None else (DecLockRefParams(uuid),)
            self.tree_cache.dec_lock_ref(last_node, *given)

    def _lock(self, node: Any) -> int | None:
        """Lock a node; what an unlock has to say of a window."""
        held = self.tree_cache.inc_lock_ref(node)
        uuid: int | None = getattr(held, "swa_uuid_for_lock", None)
        return uuid

    def add_one_req(
        self, req: Req, has_chunked_req: bool = False, truncation_align_size: int | None = None
    ) -> AddReqResult:
        """Try a request of the queue, after ``init_next_round_input``; at most one is cut.

        A prefix that is only on the host is brought back first (``init_load_back``): the slots are
        allocated here, the copy starts when the batch is complete. An added request holds a lock on
        its ``last_node``.

        Args:
            has_chunked_req: nothing reads it, as in SGLang.
            truncation_align_size: a prompt is cut after a multiple of so many tokens.

        Returns:
            CONTINUE: added, try the next. NO_TOKEN, OTHER: stop; ``can_run_list`` tells whether
            this one was still added.
        """
        most = self.prefill_max_requests
        if most is not None and len(self.can_run_list) >= most:
            return AddReqResult.OTHER
        max_new_tokens = req.sampling_params.max_new_tokens
        max_new = max(max_new_tokens - len(req.output_ids), 0)
        total_tokens = req.extend_input_len + min(max_new, CLIP_MAX_NEW_TOKENS)
        if total_tokens >= self.rem_total_tokens:
            return AddReqResult.NO_TOKEN
        real_input_tokens = self.ceil_paged_tokens(req.extend_input_len - req.host_hit_length)
        if self.can_run_list and real_input_tokens >= self.rem_input_tokens:
            return AddReqResult.OTHER

        with self._lock_node(req.last_node):
            if total_tokens >= self.rem_total_tokens:  # what was just locked is not evictable now
                return AddReqResult.NO_TOKEN
            if states_missing(self.tree_cache, [*self.can_run_list, req]):
                return AddReqResult.NO_TOKEN
            if req.host_hit_length > 0:
                self._load_back(req)
            input_tokens = self.ceil_paged_tokens(req.extend_input_len)
            if self.can_run_list and input_tokens >= self.rem_input_tokens:
                return AddReqResult.OTHER
            if self.rem_chunk_tokens is None or input_tokens <= self.rem_chunk_tokens:
                self._admit(req, req.extend_input_len, max_new_tokens)
            else:
                chunk = self.rem_chunk_tokens // self.page_size * self.page_size
                chunk -= chunk % (truncation_align_size or 1)
                if chunk <= 0:
                    return AddReqResult.OTHER
                self._admit(req, chunk, 0)
                self.new_chunked_req = req
        return self.budget_state()

    def _load_back(self, req: Req) -> None:
        new_indices, req.last_node = self.tree_cache.init_load_back(
            InitLoadBackParams(
                last_host_node=req.last_host_node,
                host_hit_length=req.host_hit_length,
                mem_quota=int(self.rem_total_tokens),
                req=req,
            )
        )
        req.prefix_indices = torch.cat([req.prefix_indices, new_indices])
        req.cache_protected_len = len(req.prefix_indices)
        req.set_extend_input_len(len(req.fill_ids) - len(req.prefix_indices))

    def _admit(self, req: Req, extend_input_len: int, max_new_tokens: int) -> None:
        req.swa_uuid_for_lock = self._lock(req.last_node)
        if req.cached_tokens is None:
            req.cached_tokens = len(req.prefix_indices)
        self._add(req, len(req.prefix_indices), extend_input_len, max_new_tokens)

    def _add(self, req: Req, prefix_len: int, extend_input_len: int, max_new_tokens: int) -> None:
        req.set_extend_input_len(extend_input_len)
        req.fill_ids = req.fill_ids[: len(req.prefix_indices) + extend_input_len]
        self.can_run_list.append(req)
        max_new_tokens = min(max_new_tokens, CLIP_MAX_NEW_TOKENS)
        self._update_prefill_budget(prefix_len, extend_input_len, max_new_tokens)

    def _update_prefill_budget(
        self, prefix_len: int, extend_input_len: int, max_new_tokens: int
    ) -> None:
        extend_input_len = self.ceil_paged_tokens(extend_input_len)
        self.rem_total_token_offset += extend_input_len + max_new_tokens + self.page_size
        self.cur_rem_token_offset += extend_input_len + self.page_size
        self.rem_input_tokens -= extend_input_len
        if self.rem_chunk_tokens is not None:
            self.rem_chunk_tokens -= extend_input_len
        self.log_hit_tokens += prefix_len
        self.log_input_tokens += extend_input_len

    # ---- preemption ----------------------------------------------------------------------------

    def preempt_to_schedule(self, req: Req, server_args: ServerArgs) -> bool:
        """Take the memory of running requests of lower priority, so that ``req`` fits.

        The lowest priorities go first, of one priority those that came last; no more than needed.
        They are in ``preempt_list`` then, out of ``running_batch``, and for the caller to queue.

        Returns:
            Whether room was made; if not, nothing has changed.
        """
        sign = 1 if server_args.schedule_low_priority_values_first else -1

        def rank(one: Req) -> float:
            """The larger, the sooner it gives way; soonest without a priority."""
            return inf if one.priority is None else sign * one.priority

        # a request that has finished is still in the batch, and its KV is freed already
        running = [r for r in self.running_batch.reqs if not r.finished()]
        victims: list[Req] = []
        missing = req.extend_input_len - self.rem_total_tokens
        missing += min(req.sampling_params.max_new_tokens, CLIP_MAX_NEW_TOKENS)
        states = states_missing(self.tree_cache, [*self.can_run_list, req])
        order = [r for r in running if r not in self.preempt_list]
        order.sort(key=lambda r: (rank(r), r.time_stats.wait_queue_entry_time), reverse=True)
        for victim in order:
            above = rank(victim) - rank(req) > self.priority_scheduling_preemption_threshold
            if not above or (victims and missing <= 0 and states <= 0):
                break
            victims.append(victim)
            states -= sum(
                0 if held is None else held.numel()
                for held in (victim.mamba_pool_idx, victim.mamba_ping_pong_track_buffer)
            )
            missing -= self._expected_outputs(victim)
        if not victims or missing > 0 or states > 0:
            return False
        keep = [i for i, r in enumerate(self.running_batch.reqs) if r not in victims]
        remaining = len(self.running_batch.reqs)
        for i, victim in enumerate(self.running_batch.reqs):
            if victim in victims:
                remaining -= 1
                self.rem_total_token_offset -= self._expected_outputs(victim)
                self.running_batch.release_req(i, remaining, server_args)
        self.running_batch.filter_batch(keep_indices=keep)
        self.preempt_list += victims
        return True
