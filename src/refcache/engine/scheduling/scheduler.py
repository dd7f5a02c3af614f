"""``Scheduler``: the serving loop. Receive, choose a batch, run it, process what it made.

One iteration is :meth:`Scheduler.step`. The normal loop processes a batch's result at once. The
overlap loop launches the next batch first, so that the host's work hides behind the forward::

    step k      choose batch k | launch k | wait for k-1, process its result
    step k+1    choose batch k+1 (with futures for k's tokens) | launch k+1 | process k

Allocation, request rows and eviction are decided on the schedule stream; forwards run on the
forward stream, in order. A slot that step k+1 frees may still be written by forward k+1; its next
owner's forward comes later on that stream. Results are treated in
:mod:`refcache.engine.scheduling.output_processor`.

Prefill goes first: a decode step is prepared only when no request can be added. A prompt that was
cut (at most one at a time, ``chunked_req``) keeps its row and its lock between its chunks, and its
whole pages are cached after each, so that others can use them.

Models SGLang 0.5.10's ``Scheduler`` for one rank that prefills and decodes; left out: grammars,
LoRA, speculation, disaggregation, mixed chunks, metrics, the control plane.
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from refcache.engine.alloc import release_kv_cache
from refcache.engine.future_map import FutureMap
from refcache.engine.hybrid import give_back_state, supports_mamba
from refcache.engine.io_struct import AbortReq, TokenizedGenerateReqInput
from refcache.engine.model_config import ModelConfig
from refcache.engine.model_runner import (
    MakeAllocator,
    MakeModel,
    ModelRunner,
    make_allocator,
    make_model,
)
from refcache.engine.models.content import RowCheck
from refcache.engine.req import FINISH_ABORT, Req, ReqTimeStats
from refcache.engine.schedule_batch import ScheduleBatch
from refcache.engine.scheduling import recovery
from refcache.engine.scheduling.observer import SchedulerObserver
from refcache.engine.scheduling.output_processor import SchedulerOutputProcessor
from refcache.engine.scheduling.schedule_policy import AddReqResult, PrefillAdder, SchedulePolicy
from refcache.engine.tp_worker import GenerationBatchResult, TpModelWorker
from refcache.errors import CopyFailed, InvalidArgument, NotIdle, OutOfSlots
from refcache.pool import KVCache, LayerRoutedKVPool
from refcache.runtime import Runtime
from refcache.tree import HiRadixCache, MambaRadixCache, RadixCache, SWAChunkCache, SWARadixCache
from refcache.types import CacheInitParams, ServerArgs, SpeculativeAlgorithm

MakeTree = Callable[[CacheInitParams, ServerArgs], Any]


def make_tree(params: CacheInitParams, server_args: ServerArgs) -> Any:
    """refcache's tree for these arguments."""
    hybrid = params.sliding_window_size or getattr(params.req_to_token_pool, "mamba_pool", None)
    if server_args.enable_hierarchical_cache:
        if hybrid:
            raise InvalidArgument("enable_hierarchical_cache of a hybrid model: expected one tier")
        return HiRadixCache(params, server_args)
    if params.sliding_window_size:
        return SWAChunkCache(params) if params.disable else SWARadixCache(params)
    if hybrid:
        return MambaRadixCache(params)
    return RadixCache(params)


class Scheduler:
    """See the module docstring.

    Args:
        server_args: sizes and policies; ``disable_overlap_schedule`` picks the normal loop.
        model_config: the KV's shape.
        runtime: the machine; the immediate one by default.
        make_allocator, make_tree: the components to drive; refcache's by default. The tree is
            called as SGLang's trees are.
        make_model: the model to run, given the runner; the stand-in model by default.
        check: which KV rows a forward of the stand-in model reads and compares; default all,
            raising at the first wrong.
        observer: told what the loop does.
        keep_kv: False keeps no KV bytes; nothing is checked then.
        pre_model_load_memory: GB of device memory; needed without ``max_total_tokens``.
        tp_cpu_group: the ranks that serve the same requests, each with a scheduler of its own: a
            ``torch.distributed`` group of CPU tensors, or a
            :class:`~refcache.tree.consensus.Consensus`. Their steps reduce the same values in the
            same order, whatever there is to report: two in every step, one more before a decode.
        attn_tp_cpu_group: the same for the ranks that share one layer's heads. Under
            ``enable_dp_attention`` groups of them serve requests of their own, so these are the
            ranks that must agree; any wider group would wait for ranks that take other steps.

    Attributes:
        finished_reqs: requests that ended, oldest first; the caller may empty it.
        new_token_ratio: see :class:`~refcache.engine.scheduling.schedule_policy.PrefillAdder`;
            falls with each decode step, rises after a retraction.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        model_config: ModelConfig | None = None,
        *,
        runtime: Runtime | None = None,
        make_allocator: MakeAllocator = make_allocator,
        make_tree: MakeTree = make_tree,
        make_model: MakeModel = make_model,
        check: RowCheck | None = None,
        observer: SchedulerObserver | None = None,
        keep_kv: bool = True,
        pre_model_load_memory: float | None = None,
        tp_cpu_group: Any = None,
        attn_tp_cpu_group: Any = None,
    ) -> None:
        if server_args.enable_dp_attention and tp_cpu_group and not attn_tp_cpu_group:
            raise InvalidArgument(
                "enable_dp_attention with tp_cpu_group alone: expected attn_tp_cpu_group, the "
                "ranks that serve the same requests"
            )
        self.tp_cpu_group = tp_cpu_group
        self.server_args = server_args
        self.model_config = model_config or ModelConfig()
        self.spec_algorithm = SpeculativeAlgorithm.from_string(server_args.speculative_algorithm)
        self.page_size = server_args.page_size
        self.observer = observer or SchedulerObserver()
        running_state = (
            self.model_config.is_hybrid_ssm and not server_args.enable_mamba_extra_buffer
        )
        # a running state is cached after its forward, and before the next one
        self.enable_overlap = not (server_args.disable_overlap_schedule or running_state)
        self.enable_hierarchical_cache = server_args.enable_hierarchical_cache
        self.enable_priority_preemption = (
            server_args.enable_priority_scheduling and not server_args.disable_priority_preemption
        )
        self.model_runner = ModelRunner(
            server_args,
            self.model_config,
            runtime=runtime,
            make_allocator=make_allocator,
            make_model=make_model,
            check=check,
            keep_kv=keep_kv,
            pre_model_load_memory=pre_model_load_memory,
        )
        self.runtime = self.model_runner.runtime
        self.tp_worker = TpModelWorker(self.model_runner)
        self.max_running_requests = self.model_runner.max_running_requests
        self.max_total_num_tokens = self.model_runner.max_total_num_tokens
        room = self.max_total_num_tokens
        if self.model_config.is_hybrid_swa:
            spare = self.page_size if self.page_size > 1 else 0
            room = min(room, self.model_runner.swa_max_total_num_tokens) - spare
        self.max_req_len = min(server_args.context_length, room) - 1
        group = attn_tp_cpu_group if server_args.enable_dp_attention else tp_cpu_group
        self.init_cache_with_memory_pool(make_tree, group)
        self.init_running_status()
        self.init_schedule_policy()
        self.init_overlap()

    # ---- start ---------------------------------------------------------------------------------

    def init_cache_with_memory_pool(self, make_tree: MakeTree, tp_cache_group: Any = None) -> None:
        """Make the tree over the runner's pools; tell the worker about a host tier's loads."""
        self.req_to_token_pool = self.model_runner.req_to_token_pool
        self.token_to_kv_pool_allocator = self.model_runner.token_to_kv_pool_allocator
        params = CacheInitParams(
            disable=self.server_args.disable_radix_cache,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            page_size=self.page_size,
            is_eagle=self.spec_algorithm.is_eagle(),
            tp_cache_group=tp_cache_group,
            eviction_policy=self.server_args.radix_eviction_policy,
            enable_metrics=self.server_args.enable_metrics,
            enable_kv_cache_events=self.server_args.enable_kv_cache_events,
            chunked_prefill_size=self.server_args.chunked_prefill_size,
            enable_mamba_extra_buffer=self.server_args.enable_mamba_extra_buffer,
            mamba_cache_chunk_size=self.server_args.mamba_cache_chunk_size,
            sliding_window_size=(
                self.model_config.sliding_window_size if self.model_config.is_hybrid_swa else None
            ),
            runtime=self.runtime,
        )
        self.tree_cache = make_tree(params, self.server_args)
        if self.enable_hierarchical_cache:
            self.tp_worker.register_hicache_layer_transfer_counter(
                self.tree_cache.cache_controller.layer_done_counter
            )

    def init_running_status(self) -> None:
        self.inbox: deque[TokenizedGenerateReqInput | AbortReq] = deque()
        self.waiting_queue: list[Req] = []
        self.running_batch = self._new_batch([])
        self.cur_batch: ScheduleBatch | None = None
        self.last_batch: ScheduleBatch | None = None
        self.chunked_req: Req | None = None
        self.live_reqs: dict[str, Req] = {}
        self.finished_reqs: list[Req] = []
        self.output_processor = SchedulerOutputProcessor(
            self.tree_cache,
            self.token_to_kv_pool_allocator,
            self.observer,
            self.live_reqs,
            self.finished_reqs,
        )
        self.forward_ct = 0
        self.max_prefill_bs = 0
        self.num_retracted_reqs = 0
        self._retraction_requested = False

    def init_schedule_policy(self) -> None:
        self.policy = SchedulePolicy(
            self.server_args.schedule_policy,
            self.tree_cache,
            self.enable_hierarchical_cache,
            self.server_args.enable_priority_scheduling,
            self.server_args.schedule_low_priority_values_first,
        )
        self.init_new_token_ratio = min(0.7 * self.server_args.schedule_conservativeness, 1.0)
        self.min_new_token_ratio = min(self.init_new_token_ratio * 0.14, 1.0)
        self.new_token_ratio_decay = (self.init_new_token_ratio - self.min_new_token_ratio) / 600
        self.new_token_ratio = self.init_new_token_ratio

    def init_overlap(self) -> None:
        self.schedule_stream = self.runtime.Stream("schedule")
        self.forward_stream = self.runtime.Stream("forward") if self.enable_overlap else None
        if self.enable_hierarchical_cache:
            self.tree_cache.cache_controller.register_forward_stream(self.forward_stream)
        self.future_map = FutureMap(
            self.max_running_requests, self.server_args.device, self.runtime
        )
        self.result_queue: deque[tuple[ScheduleBatch, GenerationBatchResult]] = deque()

    @property
    def forward_stream_ctx(self) -> AbstractContextManager[Any]:
        """A new block whose launches go to the forward stream."""
        if self.forward_stream is None:
            return nullcontext()
        return self.runtime.stream(self.forward_stream)

    # ---- the loops -----------------------------------------------------------------------------

    def dispatch_event_loop(self) -> None:
        """Run the loop that ``server_args`` asks for until nothing is left to do."""
        if self.enable_overlap:
            self.event_loop_overlap()
        else:
            self.event_loop_normal()

    def event_loop_normal(self) -> None:
        """Steps, each batch processed at once. A server's loop would then wait for more input."""
        while not self.is_idle():
            self.step()

    def event_loop_overlap(self) -> None:
        """Steps, each batch processed after the next one is launched."""
        while not self.is_idle():
            self.step()

    def step(self) -> ScheduleBatch | None:
        """One iteration of the loop; the batch it launched, if any.

        A step that raises (whatever came up inside it) has made every request that was running
        wait again, with the outputs it had, and the cache is empty; the next step goes on. With
        several ranks, which know nothing of it, the scheduler cannot go on.
        """
        with self.runtime.stream(self.schedule_stream):
            self.process_input_requests(self.recv_requests())
            try:
                batch = self._step()
            except Exception as error:
                recovery.compute_again(self, error)
                raise
            self.last_batch = batch
        return batch

    def _step(self) -> ScheduleBatch | None:
        """Choose a batch, launch it, process what is due; the batch, unless it is given up."""
        batch = self.cur_batch = self.get_next_batch_to_run()
        if batch is not None:
            self.observer.on_batch(batch)
            result = self.run_batch(batch)
            self.result_queue.append((batch.copy(), result))
        elif self.is_idle():
            self.new_token_ratio = self.init_new_token_ratio
        behind = 1 if self.enable_overlap and batch is not None else 0
        while len(self.result_queue) > behind:
            if self.enable_hierarchical_cache and self._give_up_failed():
                batch = None
                break
            self.process_batch_result(*self.result_queue.popleft())
        if batch is not None:
            self.launch_batch_sample_if_needed(result)
        return batch

    def process_batch_result(self, batch: ScheduleBatch, result: GenerationBatchResult) -> None:
        """Wait for the tokens, then treat each request."""
        self.output_processor.process_batch_result(batch, result)

    def _give_up_failed(self) -> bool:
        """Whether a copy has failed since; then all that runs is computed again."""
        self.result_queue[0][1].wait()
        failure = recovery.failed_copy(self)
        if failure is not None:
            recovery.compute_again(self, failure)
            self.observer.on_copy_failed(failure)
        return failure is not None

    def is_idle(self) -> bool:
        """Nothing received, waiting, running, or launched and not processed."""
        return not (self.inbox or self.live_reqs or self.result_queue)

    # ---- requests in ---------------------------------------------------------------------------

    def submit(self, request: TokenizedGenerateReqInput | AbortReq) -> None:
        """Put a request where the next step receives it."""
        self.inbox.append(request)

    def recv_requests(self) -> list[TokenizedGenerateReqInput | AbortReq]:
        """Everything that came in since the last step."""
        received = list(self.inbox)
        self.inbox.clear()
        return received

    def process_input_requests(self, recv_reqs: list[TokenizedGenerateReqInput | AbortReq]) -> None:
        """Take them one by one; what comes after one that is refused waits for the next step."""
        left = deque(recv_reqs)
        try:
            while left:
                request = left.popleft()
                if isinstance(request, AbortReq):
                    self.abort_request(request)
                else:
                    self.handle_generate_request(request)
        finally:
            self.inbox.extendleft(reversed(left))

    def handle_generate_request(self, recv_req: TokenizedGenerateReqInput) -> None:
        """Make a ``Req`` and queue it; one that can never fit ends at once, refused.

        ``max_new_tokens`` is cut so that the request fits when it is alone.

        Raises:
            InvalidArgument: the ``rid`` is in use, or a token id is out of range.
            MemoryReleased: between ``release_memory_occupation`` and the resume.
        """
        if self.model_runner.token_to_kv_pool is not None:
            self.model_runner.token_to_kv_pool.check_resident()
        if recv_req.rid in self.live_reqs:
            raise InvalidArgument(f"rid {recv_req.rid!r}: a request of that name is running")
        req = Req(
            recv_req.rid,
            recv_req.input_text,
            recv_req.input_ids,
            recv_req.sampling_params,
            lora_id=recv_req.lora_id,
            priority=recv_req.priority,
            extra_key=recv_req.extra_key,
            routing_key=recv_req.routing_key,
            time_stats=ReqTimeStats(self.forward_ct),
        )
        self.live_reqs[req.rid] = req
        prompt = len(req.origin_input_ids)
        if not 1 <= prompt < self.max_req_len:
            req.finished_reason = FINISH_ABORT(
                f"prompt of {prompt} tokens: expected 1 to {self.max_req_len - 1} "
                f"(context_length={self.server_args.context_length}, device memory for "
                f"{self.max_total_num_tokens} tokens)"
            )
            self.output_processor.hand_out(req)
            return
        outputs = max(1, min(req.sampling_params.max_new_tokens, self.max_req_len - prompt))
        req.sampling_params = replace(req.sampling_params, max_new_tokens=outputs)
        self._prefetch_kvcache(req)
        self.waiting_queue.append(req)

    @property
    def enable_hicache_storage(self) -> bool:
        """A storage backend is attached below the host tier."""
        return self.enable_hierarchical_cache and bool(
            getattr(self.tree_cache, "enable_storage", False)
        )

    def _prefetch_kvcache(self, req: Req) -> None:
        """Ask storage for what follows the host's copy of the prompt."""
        if not self.enable_hicache_storage:
            return
        req.init_next_round_input(self.tree_cache)
        node = req.last_host_node
        rest = req.fill_ids[self.tree_cache.prefix_length(node) :]
        self.tree_cache.prefetch_from_storage(req.rid, node, rest, extra_key=req.extra_key)

    def abort_request(self, recv_req: AbortReq) -> None:
        """End requests early: at once one that waits, else at its next result or chunk boundary.

        ``rid`` is a whole name. (SGLang's is a beginning: "1" ends "10" too, and "" all.)
        """
        named = list(self.live_reqs) if recv_req.abort_all else [recv_req.rid]
        for req in [self.live_reqs[rid] for rid in named if rid in self.live_reqs]:
            if req in self.waiting_queue:
                self.waiting_queue.remove(req)
                if self.enable_hicache_storage:
                    self.tree_cache.release_aborted_request(req.rid)
                req.finished_reason = FINISH_ABORT(recv_req.abort_message)
                self.output_processor.hand_out(req)
            else:
                req.to_finish = FINISH_ABORT(recv_req.abort_message)

    def force_retraction(self) -> None:
        """Have the next decode step retract as if memory had run out."""
        self._retraction_requested = True

    def flush_cache(self) -> None:
        """Forget every cached prefix.

        Raises:
            NotIdle: a request is not finished.
        """
        if not self.is_idle():
            raise NotIdle(f"flush_cache: {len(self.live_reqs)} requests are not finished")
        self.tree_cache.reset()
        self.token_to_kv_pool_allocator.clear()
        self.req_to_token_pool.clear()

    def release_memory_occupation(self) -> None:
        """Give the device pool's memory back (``enable_memory_saver``); every prefix is forgotten.

        What the pool held is lost, so a prefix that stayed in the tree would be read as garbage.

        Raises:
            NotIdle: a request is not finished.
            InvalidArgument, MemoryReleased: as :meth:`refcache.pool.KVCache.release`.
        """
        pool = self._pool_with_memory_saver()
        if not self.is_idle():
            raise NotIdle(
                f"release_memory_occupation: {len(self.live_reqs)} requests are not finished"
            )
        pool.check_resident()
        self.flush_cache()
        self.runtime.synchronize()  # the last forward may still write
        pool.release()

    def resume_memory_occupation(self) -> None:
        """Take the memory again, empty; raises as :meth:`refcache.pool.KVCache.resume`."""
        self._pool_with_memory_saver().resume()

    def _pool_with_memory_saver(self) -> KVCache | LayerRoutedKVPool:
        pool: Any = self.model_runner.token_to_kv_pool
        if pool is None or not pool.enable_memory_saver:
            raise InvalidArgument("memory occupation: expected enable_memory_saver, and KV kept")
        kept: KVCache | LayerRoutedKVPool = pool
        return kept

    # ---- running it ----------------------------------------------------------------------------

    def run_batch(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Launch the forward; ``batch.output_ids`` become its tokens, or futures for them."""
        self.forward_ct += 1
        worker_batch = batch.get_model_worker_batch()
        if self.forward_stream is None:
            result = self.tp_worker.forward_batch_generation(worker_batch)
            result.sample()
            batch.output_ids = result.next_token_ids
            return result
        future_indices = self.future_map.future_indices(worker_batch.req_pool_indices)
        with self.forward_stream_ctx:
            self.forward_stream.wait_stream(self.schedule_stream)
            self.future_map.resolve_future(worker_batch)
            result = self.tp_worker.forward_batch_generation(worker_batch)
            result.copy_done = self.runtime.Event()
            result.future_indices = future_indices
            if result.delay_sample_func is None:
                self._tokens_out(result, batch.return_logprob)
        batch.output_ids = -future_indices.indices
        if self.model_runner.rows_read is not None:  # rows are written again after that
            self.schedule_stream.wait_event(self.model_runner.rows_read)
        if supports_mamba(self.tree_cache):  # states are copied and cleared there
            self.schedule_stream.wait_stream(self.forward_stream)
        return result

    def launch_batch_sample_if_needed(self, batch_result: GenerationBatchResult) -> None:
        """Launch the sampling that a forward has delayed: the results before it are known now."""
        if batch_result.delay_sample_func is None:
            return
        with self.forward_stream_ctx:
            if self.forward_stream is not None:
                self.forward_stream.wait_stream(self.schedule_stream)
            batch_result.sample()
            self._tokens_out(batch_result)

    def _tokens_out(self, result: GenerationBatchResult, return_logprob: bool = False) -> None:
        """Launch where the tokens go: to the next batch, and to the host."""
        self.future_map.store_to_map(result.future_indices, result)
        result.copy_to_cpu(return_logprob=return_logprob)

    # ---- the next batch ------------------------------------------------------------------------

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
            self.output_processor.finish(req, is_insert=False)

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
            if self.enable_hicache_storage and not self._prefetched(req):
                continue
            result = self._try_req(adder, req)
            if result is not AddReqResult.CONTINUE:
                if result is AddReqResult.NO_TOKEN:
                    # with nothing running, nothing would ever make it less full
                    running.batch_is_full = bool(adder.can_run_list) or not running.is_empty()
                break
        for req in adder.preempt_list:
            self._back_to_queue(req, len(self.waiting_queue))
        return adder

    def _prefetched(self, req: Req) -> bool:
        """Whether nothing goes on in storage for a request; then what came for it is counted."""
        if not self.tree_cache.check_prefetch_progress(req.rid):
            return False
        req.storage_hit_length += self.tree_cache.pop_prefetch_loaded_tokens(req.rid)
        return True

    def _try_req(self, adder: PrefillAdder, req: Req) -> AddReqResult:
        """Look a request up and try to add it; without room for it, it holds nothing."""
        try:
            req.init_next_round_input(self.tree_cache)
            result = adder.add_one_req(req, has_chunked_req=self.chunked_req is not None)
        except OutOfSlots:  # no state for a copy of the one that was found
            result = AddReqResult.NO_TOKEN
        if req not in adder.can_run_list:
            give_back_state(self.tree_cache, req)
        return result

    def _new_batch(self, reqs: list[Req], chunked_req: Req | None = None) -> ScheduleBatch:
        batch = ScheduleBatch.init_new(
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
        batch.mamba_track_interval = self.server_args.mamba_track_interval
        return batch

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
