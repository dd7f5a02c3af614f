"""Who is prefilled next: the order of the waiting queue, and ``PrefillAdder`` with its budgets.

Budgets, in tokens:

* ``rem_total_tokens``: free and evictable slots, less what is promised: to running requests the
  outputs they are expected to need (``new_token_ratio`` of what they may need), to requests of this
  batch their input, their outputs, and a page for rounding;
* ``cur_rem_tokens``: the same without expected outputs: what this very step can have;
* ``rem_input_tokens``: of this batch; the first request may exceed it;
* ``rem_chunk_tokens``: of this batch; a longer prompt is cut there (``None``: never cut).

Models ``sglang.srt.managers.schedule_policy``; left out: preemption, grammars, LoRA limits, mixed
chunks, the sliding-window and hybrid budgets.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

import torch

from refcache.engine.req import Req
from refcache.types import InitLoadBackParams

CLIP_MAX_NEW_TOKENS = 4096  # outputs of one request that a budget reserves at most
LPM_MAX_QUEUE = 128  # longer queues are served first come, first served


class SchedulePolicy:
    """Orders the waiting queue: ``fcfs`` leaves it, ``lpm`` puts long cached prefixes first."""

    def __init__(self, policy: str, tree_cache: Any) -> None:
        self.policy = policy
        self.tree_cache = tree_cache

    def calc_priority(self, waiting_queue: list[Req]) -> None:
        """Sort in place; ``lpm`` looks every prefix up, which refreshes its access time."""
        if self.policy == "lpm" and len(waiting_queue) <= LPM_MAX_QUEUE:
            for req in waiting_queue:
                req.init_next_round_input(self.tree_cache)
            waiting_queue.sort(
                key=lambda r: len(r.prefix_indices) + r.host_hit_length, reverse=True
            )


class AddReqResult(Enum):
    """Whether the adder takes another request, or what it is short of."""

    CONTINUE = auto()
    NO_TOKEN = auto()
    OTHER = auto()


class PrefillAdder:
    """Collects the requests of one prefill batch in ``can_run_list``, within the budgets.

    Args:
        running_batch: whose expected outputs are reserved.
        new_token_ratio: the share of its remaining outputs a running request is expected to need.
        rem_input_tokens, rem_chunk_tokens: see the module docstring.
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
    ) -> None:
        self.page_size = page_size
        self.tree_cache = tree_cache
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.rem_input_tokens = rem_input_tokens
        self.rem_chunk_tokens = rem_chunk_tokens
        self.can_run_list: list[Req] = []
        self.new_chunked_req: Req | None = None
        self.cur_rem_token_offset = 0
        self.rem_total_token_offset: float = new_token_ratio * sum(
            min(r.max_new_tokens - len(r.output_ids), CLIP_MAX_NEW_TOKENS)
            for r in running_batch.reqs
        )

    @property
    def _available_and_evictable(self) -> int:
        free: int = self.token_to_kv_pool_allocator.available_size()
        evictable: int = self.tree_cache.evictable_size()
        return free + evictable

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
        """
        assert self.rem_chunk_tokens is not None
        room = min(self.rem_chunk_tokens, int(self.rem_total_tokens))
        if room <= 0:  # all is reserved for outputs: take what is free now
            room = min(self.rem_chunk_tokens, self.cur_rem_tokens)
        if room <= 0:
            return req
        truncated = req.extend_input_len > room
        self._add(req, min(req.extend_input_len, room), 0 if truncated else req.max_new_tokens)
        return req if truncated else None

    @contextmanager
    def _lock_node(self, last_node: Any) -> Iterator[None]:
        """Keep a matched prefix from being evicted while its request is being decided on."""
        self.tree_cache.inc_lock_ref(last_node)
        try:
            yield
        finally:
            self.tree_cache.dec_lock_ref(last_node)

    def add_one_req(self, req: Req) -> AddReqResult:
        """Try a request of the queue, after ``init_next_round_input``; at most one is cut.

        A prefix that is only on the host is brought back first (``init_load_back``): the slots are
        allocated here, the copy starts when the batch is complete. An added request holds a lock on
        its ``last_node``.

        Returns:
            CONTINUE: added, try the next. NO_TOKEN, OTHER: stop; ``can_run_list`` tells whether
            this one was still added.
        """
        max_new = max(req.max_new_tokens - len(req.output_ids), 0)
        total_tokens = req.extend_input_len + min(max_new, CLIP_MAX_NEW_TOKENS)
        if total_tokens >= self.rem_total_tokens:
            return AddReqResult.NO_TOKEN
        real_input_tokens = self.ceil_paged_tokens(req.extend_input_len - req.host_hit_length)
        if self.can_run_list and real_input_tokens >= self.rem_input_tokens:
            return AddReqResult.OTHER

        with self._lock_node(req.last_node):
            if total_tokens >= self.rem_total_tokens:  # what was just locked is not evictable now
                return AddReqResult.NO_TOKEN
            if req.host_hit_length > 0:
                self._load_back(req)
            input_tokens = self.ceil_paged_tokens(req.extend_input_len)
            if self.can_run_list and input_tokens >= self.rem_input_tokens:
                return AddReqResult.OTHER
            if self.rem_chunk_tokens is None or input_tokens <= self.rem_chunk_tokens:
                self._admit(req, req.extend_input_len, req.max_new_tokens)
            else:
                chunk = self.rem_chunk_tokens // self.page_size * self.page_size
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
        self.tree_cache.inc_lock_ref(req.last_node)
        if req.cached_tokens is None:
            req.cached_tokens = len(req.prefix_indices)
        self._add(req, extend_input_len, max_new_tokens)

    def _add(self, req: Req, extend_input_len: int, max_new_tokens: int) -> None:
        req.set_extend_input_len(extend_input_len)
        req.fill_ids = req.fill_ids[: len(req.prefix_indices) + extend_input_len]
        self.can_run_list.append(req)
        self._update_prefill_budget(extend_input_len, min(max_new_tokens, CLIP_MAX_NEW_TOKENS))

    def _update_prefill_budget(self, extend_input_len: int, max_new_tokens: int) -> None:
        extend_input_len = self.ceil_paged_tokens(extend_input_len)
        self.rem_total_token_offset += extend_input_len + max_new_tokens + self.page_size
        self.cur_rem_token_offset += extend_input_len + self.page_size
        self.rem_input_tokens -= extend_input_len
        if self.rem_chunk_tokens is not None:
            self.rem_chunk_tokens -= extend_input_len
