"""What happens to a batch's tokens once the host has them: append, finish, cache, release."""

from typing import Any

from refcache.engine.alloc import release_kv_cache
from refcache.engine.req import Req
from refcache.engine.schedule_batch import ScheduleBatch
from refcache.engine.scheduling.observer import SchedulerObserver
from refcache.engine.tp_worker import GenerationBatchResult
from refcache.runtime import Runtime


class SchedulerOutputProcessorMixin:
    """The result half of :class:`refcache.engine.scheduling.scheduler.Scheduler`.

    In the overlap loop a result is processed after the next batch was launched, so a request may be
    finished, or have been retracted, since: its token is dropped (a retracted request computes it
    again).
    """

    runtime: Runtime
    tree_cache: Any
    token_to_kv_pool_allocator: Any
    observer: SchedulerObserver
    live_reqs: dict[str, Req]
    finished_reqs: list[Req]

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
                self._finish(req)
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
            # most requests go on: ask those that may not
            last = len(req.output_ids) >= req.sampling_params.max_new_tokens
            if (last or req.to_finish or req.stop_token_ids) and req.check_finished():
                self._finish(req)
        self.token_to_kv_pool_allocator.free_group_end()

    def _finish(self, req: Req, is_insert: bool = True) -> None:
        """A request with memory has ended: release it, and hand it out."""
        release_kv_cache(req, self.tree_cache, is_insert=is_insert)
        self._hand_out(req)

    def _hand_out(self, req: Req) -> None:
        del self.live_reqs[req.rid]
        self.finished_reqs.append(req)
        self.observer.on_finish(req)
