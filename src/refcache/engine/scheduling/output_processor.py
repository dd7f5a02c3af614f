"""What happens to a batch's tokens once the host has them: append, finish, cache, release."""

from typing import Any

from refcache.engine.alloc import release_kv_cache
from refcache.engine.hybrid import tracked_decode
from refcache.engine.req import Req
from refcache.engine.schedule_batch import ScheduleBatch
from refcache.engine.scheduling.observer import SchedulerObserver
from refcache.engine.tp_worker import GenerationBatchResult


class SchedulerOutputProcessor:
    """What a :class:`refcache.engine.scheduling.scheduler.Scheduler` does with results.

    In the overlap loop a result is processed after the next batch was launched, so a request may be
    finished, or have been retracted, since: its token is dropped (a retracted request computes it
    again).
    """

    def __init__(
        self,
        tree_cache: Any,
        token_to_kv_pool_allocator: Any,
        observer: SchedulerObserver,
        live_reqs: dict[str, Req],
        finished_reqs: list[Req],
    ) -> None:
        self.tree_cache, self.token_to_kv_pool_allocator = tree_cache, token_to_kv_pool_allocator
        self.observer, self.live_reqs, self.finished_reqs = observer, live_reqs, finished_reqs

    def process_batch_result(self, batch: ScheduleBatch, result: GenerationBatchResult) -> None:
        """Wait for the tokens, then treat each request."""
        if batch.forward_mode.is_decode():
            self.process_batch_result_decode(batch, result)
        else:
            self.process_batch_result_prefill(batch, result)

    def process_batch_result_prefill(
        self, batch: ScheduleBatch, result: GenerationBatchResult
    ) -> None:
        """First tokens; nothing for a chunk that is not the last of its prompt."""
        tokens = result.tokens()
        for req, token in zip(batch.reqs, tokens, strict=True):
            if req.finished() or req.is_retracted:
                continue
            if req.is_chunked > 0:
                req.is_chunked -= 1
                continue
            req.output_ids.append(token)
            if req.check_finished():
                self.finish(req)
            else:
                self.tree_cache.cache_unfinished_req(req)

    def process_batch_result_decode(
        self, batch: ScheduleBatch, result: GenerationBatchResult
    ) -> None:
        """One more token each; what finished requests free is freed together."""
        tokens = result.tokens()
        self.token_to_kv_pool_allocator.free_group_begin()
        for req, token in zip(batch.reqs, tokens, strict=True):
            if req.finished_reason is not None or req.is_retracted:
                continue
            req.output_ids.append(token)
            if req.mamba_ping_pong_track_buffer is not None:
                tracked_decode(self.tree_cache, req, batch.mamba_track_interval)
            # most requests go on: ask those that may not
            last = len(req.output_ids) >= req.sampling_params.max_new_tokens
            if (last or req.to_finish or req.stop_token_ids) and req.check_finished():
                self.finish(req)
        self.token_to_kv_pool_allocator.free_group_end()

    def finish(self, req: Req, is_insert: bool = True) -> None:
        """A request with memory has ended: release it, and hand it out."""
        release_kv_cache(req, self.tree_cache, is_insert=is_insert)
        self.hand_out(req)

    def hand_out(self, req: Req) -> None:
        """A request holds nothing any more."""
        del self.live_reqs[req.rid]
        self.finished_reqs.append(req)
        self.observer.on_finish(req)


class SchedulerOutputProcessorMixin(SchedulerOutputProcessor):
    """SGLang's name of it; there it is a part of the scheduler's class."""
