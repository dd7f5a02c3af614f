"""What the serving loop does when a copy fails after it was started, or a step raises: compute it
again.

A thread that issues copies can fail when the batch that reads what they bring is already launched.
Then nothing that was computed since can be trusted: not the batch's output, not what the next batch
made of it, not the rows that were cached of either, nor the host copies of a failed write. That is
rare, so it is not sorted out: the loop waits for what runs, throws away every result that it has
not processed, forgets the whole cache, and queues each request again with the outputs that it had.
The controller leaves the copy engine alone from then on.

A step that raises has left its batch half-way: rows, slots and locks of some requests, a forward
that was not launched. The same is done, and the error goes on to the caller of the step.
"""

from typing import Any

from refcache.errors import CopyFailed


def failed_copy(scheduler: Any) -> CopyFailed | None:
    """The copy that failed after it was started, if one has.

    Ask once the results at the head of the queue are there: a forward that has waited for a load
    ends after the load has failed.
    """
    controller = getattr(scheduler.tree_cache, "cache_controller", None)
    failure: CopyFailed | None = getattr(controller, "failure", None)
    return failure


def compute_again(scheduler: Any, failure: Exception) -> None:
    """See the module docstring.

    Raises:
        Exception: ``failure``, where the scheduler is one of several ranks: the others know
            nothing of it.
    """
    if scheduler.tp_cpu_group is not None:
        raise failure
    scheduler.runtime.synchronize()
    scheduler.result_queue.clear()
    again = [req for req in scheduler.live_reqs.values() if req not in scheduler.waiting_queue]
    ended = [req for req in again if req.finished()]  # what it held was being released
    for req in again:
        req.req_pool_idx = None
        if req not in ended:
            req.reset_for_retract()
    again = [req for req in again if req not in ended]
    scheduler.waiting_queue = again + scheduler.waiting_queue
    scheduler.running_batch = scheduler._new_batch([])
    scheduler.cur_batch = scheduler.last_batch = scheduler.chunked_req = None
    scheduler.tree_cache.reset()
    scheduler.token_to_kv_pool_allocator.clear()
    scheduler.req_to_token_pool.clear()
    for req in ended:
        scheduler.output_processor.hand_out(req)
