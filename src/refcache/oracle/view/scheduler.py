"""What a scheduler shows: its running requests with their rows, as a :class:`State`.

For everything that runs refcache's serving loop over a cache on trial: the driver of the loop and
the replay of traces.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from refcache.engine.req import Req
from refcache.engine.scheduling.scheduler import Scheduler
from refcache.oracle.view.state import RequestView, State
from refcache.oracle.view.tree import TreeView


def running(scheduler: Scheduler) -> list[Req]:
    """The requests that have a row."""
    return [r for r in scheduler.live_reqs.values() if r.req_pool_idx is not None]


def private_tokens(scheduler: Scheduler) -> int:
    """Tokens in whole pages that belong to running requests alone."""
    size = scheduler.page_size
    return sum(
        -(-req.kv_allocated_len // size) * size - req.cache_protected_len
        for req in running(scheduler)
    )


def state_of(
    scheduler: Scheduler,
    view: TreeView,
    pages: int,
    free: Sequence[int] | torch.Tensor,
    queued: Iterable[int] = (),
    holders: Sequence[Any] = (),
) -> State:
    """The state of a scheduler's cache. ``holders``: handles locked by others than requests."""
    rows = scheduler.req_to_token_pool.req_to_token
    reqs = running(scheduler)
    return State(
        view=view,
        page_size=scheduler.page_size,
        pages=pages,
        free=free,
        queued=queued,
        holders=[*(req.last_node for req in reqs), *holders],
        requests=[
            RequestView(
                name=f"request {req.rid}",
                row=rows[req.req_pool_idx, : req.kv_allocated_len],
                cache_protected_len=req.cache_protected_len,
                last_node=req.last_node,
                row_number=req.req_pool_idx,
            )
            for req in reqs
        ],
    )
