"""Choosing the next batch: go on with a chunk, prefill waiting requests, or decode.

Prefill goes first: a decode step is prepared only when no request can be added. A prompt that was
cut (at most one at a time, ``chunked_req``) keeps its row and its lock between its chunks, and its
whole pages are cached after each, so that others can use them.
"""

from typing import Any

from refcache.engine.alloc import release_kv_cache
from refcache.engine.model_config import ModelConfig
from refcache.engine.req import Req
from refcache.engine.schedule_batch import ScheduleBatch
from refcache.engine.scheduling.output_processor import SchedulerOutputProcessorMixin
from refcache.engine.scheduling.schedule_policy import AddReqResult, PrefillAdder, SchedulePolicy
from refcache.errors import CopyFailed
from refcache.types import ServerArgs, SpeculativeAlgorithm


class SchedulerBatchingMixin(SchedulerOutputProcessorMixin):
    """The choosing half of :class:`refcache.engine.scheduling.scheduler.Scheduler`."""

    server_args: ServerArgs
    page_size: int
    max_running_requests: int
    enable_hierarchical_cache: bool
    enable_priority_preemption: bool
    enable_overlap: bool
    model_config: ModelConfig
    spec_algorithm: SpeculativeAlgorithm
    req_to_token_pool: Any
    policy: SchedulePolicy
    waiting_queue: list[Req]
    running_batch: ScheduleBatch
    last_batch: ScheduleBatch | None
    chunked_req: Req | None
    new_token_ratio: float
    min_new_token_ratio: float
    new_token_ratio_decay: float
    max_prefill_bs: int
    num_retracted_reqs: int
    _retraction_requested: bool

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """A prefill batch if one can be made, else the next decode step of the running batch."""
        if self.chunked_req is not None:
            self.stash_chunked_request(self.chunked_req)
        if self.last_batch is not None and self.last_batch.forward_mode.is_extend():
            self._merge_last_batch(self.last_batch)
        batch = self.get_new_batch_prefill()
        if batch is None and not self.running_batch.is_empty():
            self.update_running_batch(self.running_batch)
            batch = None if self.running_batch.is_empty() else self.running_batch
        return batch

    def stash_chunked_request(self, req: Req) -> None:
        """A chunk is launched: cache it, so that others can use it; or end an aborted request."""
        self.tree_cache.cache_unfinished_req(req, chunked=True)
        if req.to_finish is not None:
            req.finished_reason, req.to_finish = req.to_finish, None
            self.chunked_req = None
            self._finish(req, is_insert=False)

    def _merge_last_batch(self, last_batch: ScheduleBatch) -> None:
        """What was prefilled decodes from now on, except a prompt that was cut."""
        chunked = [r for r in (self.chunked_req, last_batch.chunked_req) if r is not None]
        last_bs = last_batch.batch_size()
        last_batch.filter_batch(chunked_req_to_exclude=chunked)
        if last_batch.batch_size() < last_bs:
            self.running_batch.batch_is_full = False
        if last_batch.is_empty():
            return
        if self.running_batch.is_empty():
            self.running_batch = last_batch
        else:
            self.running_batch.merge_batch(last_batch)

    def get_num_allocatable_reqs(self, running_bs: int) -> int:
        return self.max_running_requests - running_bs

    def get_new_batch_prefill(self) -> ScheduleBatch | None:
        """A prefill batch, prepared; None when no request can be added now."""
        return self._get_new_batch_prefill_raw()

    def _get_new_batch_prefill_raw(self) -> ScheduleBatch | None:
        if self.enable_hierarchical_cache:
            self._acknowledge_copies()
        running = self.running_batch
        if self.enable_priority_preemption:
            running.batch_is_full = False  # it may be so for lower priorities only
        if (running.batch_is_full or not self.waiting_queue) and self.chunked_req is None:
            return None
        self.policy.calc_priority(self.waiting_queue, running)
        adder, consumer_index = self._add_reqs()
        if not adder.can_run_list:
            return None
        if adder.new_chunked_req is not None:
            self.chunked_req = adder.new_chunked_req
        if self.chunked_req is not None:
            self.chunked_req.is_chunked += 1
        added = set(adder.can_run_list)
        self.waiting_queue = [r for r in self.waiting_queue if r not in added]
        self.max_prefill_bs = max(self.max_prefill_bs, len(added))

        batch = self._new_batch(adder.can_run_list, self.chunked_req)
        batch.hicache_consumer_index = consumer_index
        batch.prepare_for_extend()
        return batch

    def _acknowledge_copies(self) -> None:
        try:
            self.tree_cache.check_hicache_events()
        except CopyFailed as error:
            self.observer.on_copy_failed(error)

    def _add_reqs(self) -> tuple[PrefillAdder, int]:
        """Fill a batch, and start what it loads: the adder, and the load's slot (-1: none).

        When the load cannot be started, the requests that it was for are added again without it:
        they compute what they would have loaded.
        """
        full, chunked_req = self.running_batch.batch_is_full, self.chunked_req
        while True:
            adder = self._try_reqs()
            if not (adder.can_run_list and self.enable_hierarchical_cache):
                return adder, -1
            try:
                # the copies start now, before anything else is put on the schedule stream
                return adder, self.tree_cache.ready_to_load_host_cache()
            except CopyFailed as error:
                self._take_back(adder, error)
            self.running_batch.batch_is_full, self.chunked_req = full, chunked_req

    def _take_back(self, adder: PrefillAdder, error: CopyFailed) -> None:
        """Undo what the adder did for the requests of the queue."""
        self.observer.on_copy_failed(error)
        for req in adder.can_run_list:
            if req.req_pool_idx is None:  # else it is the chunked one, which had its lock before
                node = req.last_node
                req.load_failed = node in error.moved
                self.tree_cache.dec_lock_ref(error.moved.get(node, node))
                if req.retraction_count == 0:
                    req.cached_tokens = None

    def _try_reqs(self) -> PrefillAdder:
        """Add as many requests to a prefill batch as fit, the chunked one first."""
        running = self.running_batch
        adder = PrefillAdder(
            self.page_size,
            self.tree_cache,
            self.token_to_kv_pool_allocator,
            running,
            self.new_token_ratio,
            self.server_args.max_prefill_tokens,
            self.server_args.chunked_prefill_size,
            0,
            self.server_args.priority_scheduling_preemption_threshold,
            prefill_max_requests=self.server_args.prefill_max_requests,
        )
        if self.chunked_req is not None:
            self.chunked_req.init_next_round_input()
            chunked, self.chunked_req = self.chunked_req, adder.add_chunked_req(self.chunked_req)
            if not adder.can_run_list:
                self._retract_chunked_req(chunked)
                return adder
        for req in self.waiting_queue:
            if len(adder.can_run_list) >= self.get_num_allocatable_reqs(running.batch_size()):
                running.batch_is_full = True
            if running.batch_is_full and not (
                self.enable_priority_preemption and adder.preempt_to_schedule(req, self.server_args)
            ):
                break
            req.init_next_round_input(self.tree_cache)
            result = adder.add_one_req(req, has_chunked_req=self.chunked_req is not None)
            if result is not AddReqResult.CONTINUE:
                if result is AddReqResult.NO_TOKEN:
                    # with nothing running, nothing would ever make it less full
                    running.batch_is_full = bool(adder.can_run_list) or not running.is_empty()
                break
        for req in adder.preempt_list:
            self._back_to_queue(req, len(self.waiting_queue))
        return adder

    def _new_batch(self, reqs: list[Req], chunked_req: Req | None = None) -> ScheduleBatch:
        return ScheduleBatch.init_new(
            reqs,
            self.req_to_token_pool,
            self.token_to_kv_pool_allocator,
            self.tree_cache,
            self.model_config,
            self.enable_overlap,
            self.spec_algorithm,
            chunked_req=chunked_req,
            runtime=self.runtime,
        )

    def _retract_chunked_req(self, req: Req) -> None:
        """Its next chunk has no room: its whole pages stay cached, and it queues again, first."""
        self.chunked_req = None
        release_kv_cache(req, self.tree_cache, is_insert=False)
        req.reset_for_retract()
        self._back_to_queue(req, 0)

    def _back_to_queue(self, req: Req, place: int) -> None:
        self.num_retracted_reqs += 1
        self.waiting_queue.insert(place, req)
        self.observer.on_retract(req)

    def update_running_batch(self, batch: ScheduleBatch) -> None:
        """Drop finished requests, retract some if memory is short, prepare the decode step."""
        initial_bs = batch.batch_size()
        batch.filter_batch()
        if self.enable_hierarchical_cache:
            self.tree_cache.flush_write_through_acks()
        forced, self._retraction_requested = self._retraction_requested, False
        if not batch.is_empty() and (forced or not batch.check_decode_mem()):
            retracted, self.new_token_ratio, _ = batch.retract_decode(self.server_args)
            for req in retracted:
                self._back_to_queue(req, len(self.waiting_queue))
        else:
            self.new_token_ratio = max(
                self.new_token_ratio - self.new_token_ratio_decay, self.min_new_token_ratio
            )
        if batch.batch_size() < initial_bs:
            batch.batch_is_full = False
        if not batch.is_empty():
            batch.prepare_for_decode()
