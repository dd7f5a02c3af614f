"""What the serving loop does for windows and recurrent states.

*Room.* A token of a model with windows needs a slot of two pools, a request of a model with states
needs states: what the next batch can have is what is free or can be evicted, of each kind.

*Windows.* A running request gives back the window slots that its next tokens do not look at
(:func:`evict_window`); what the tree owns is the tree's to evict.

*States.* Where a request leaves a snapshot (with the extra buffer): a prefill at the last multiple
of the chunk size, counted from its prefix, or at the branching point that the match named, since
that is where the next request like this one would start (:func:`track_point`); a decode each so
many tokens. One a forward.

Models parts of SGLang 0.5.10's ``schedule_batch``, ``schedule_policy`` and ``common``. Stricter
than that: admission counts states, and is short of them instead of asserting.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from refcache.engine.req import Req
from refcache.types import EvictParams

KERNEL_CHUNK_SIZE = 64  # tokens between the states that a linear-attention kernel has at hand


def supports_swa(tree_cache: Any) -> bool:
    """The tree is of a model with sliding windows."""
    return bool(getattr(tree_cache, "supports_swa", bool)())


def supports_mamba(tree_cache: Any) -> bool:
    """The tree is of a model with recurrent states."""
    return bool(getattr(tree_cache, "supports_mamba", bool)())


# ---- room ----------------------------------------------------------------------------------------


def tokens_within_reach(tree_cache: Any) -> int:
    """Tokens that an allocation can have: free or evictable, in every pool that a token needs."""
    allocator = tree_cache.token_to_kv_pool_allocator
    if supports_swa(tree_cache):
        full = allocator.full_available_size() + tree_cache.full_evictable_size()
        swa = allocator.swa_available_size() + tree_cache.swa_evictable_size()
        spare = allocator.page_size if allocator.page_size > 1 else 0  # its bound: a page a request
        tokens: int = min(full, swa) - spare
        return tokens
    if supports_mamba(tree_cache):
        return int(allocator.available_size() + tree_cache.full_evictable_size())
    return int(allocator.available_size() + tree_cache.evictable_size())


def shortage(tree_cache: Any, num_tokens: int) -> EvictParams | None:
    """What to evict so that ``num_tokens`` are free; None: they are."""
    allocator = tree_cache.token_to_kv_pool_allocator
    if not supports_swa(tree_cache):
        return EvictParams(num_tokens) if allocator.available_size() < num_tokens else None
    full = num_tokens if allocator.full_available_size() < num_tokens else 0
    swa = num_tokens if allocator.swa_available_size() < num_tokens else 0
    return EvictParams(full, swa_num_tokens=swa) if full or swa else None


def states_missing(tree_cache: Any, reqs: Sequence[Req]) -> int:
    """How many states more than are free or evictable a batch of these requests takes."""
    if not supports_mamba(tree_cache):
        return 0
    rows = tree_cache.req_to_token_pool
    within_reach = rows.mamba_pool.available_size() + tree_cache.mamba_evictable_size()
    short: int = rows.states_short_of(reqs) - within_reach
    return max(0, short)


def make_room_for_states(tree_cache: Any, reqs: Sequence[Req]) -> None:
    """Evict as many states as a batch of these requests is short of."""
    if supports_mamba(tree_cache):
        rows = tree_cache.req_to_token_pool
        short = rows.states_short_of(reqs) - rows.mamba_pool.available_size()
        if short > 0:
            tree_cache.evict(EvictParams(0, mamba_num=short))


def give_back_state(tree_cache: Any, req: Req) -> None:
    """A request that was not admitted, or ends while it waits, keeps no copy of a state."""
    if req.mamba_pool_idx is not None and req.req_pool_idx is None:
        tree_cache.req_to_token_pool.mamba_pool.free(req.mamba_pool_idx.reshape(1))
        req.mamba_pool_idx = None


# ---- windows -------------------------------------------------------------------------------------


def evict_window(tree_cache: Any, req: Req, pre_len: int) -> None:
    """Give back the request's window slots that lie more than a window behind ``pre_len`` tokens.

    In whole pages, and none that the tree owns. Sets ``req.swa_evicted_seqlen``.
    """
    page, window = tree_cache.page_size, tree_cache.sliding_window_size
    gone = max(req.swa_evicted_seqlen, req.cache_protected_len)
    now = max(gone, pre_len - window) // page * page
    if now > gone:
        slots = tree_cache.req_to_token_pool.read(req.req_pool_idx, slice(gone, now))
        tree_cache.token_to_kv_pool_allocator.free_swa(slots)
        gone = now
    req.swa_evicted_seqlen = gone


# ---- states --------------------------------------------------------------------------------------


class TrackPoint(NamedTuple):
    """``kernel_len``: what SGLang tells its kernel; ``seqlen``: the tokens that the state is of."""

    kernel_len: int
    seqlen: int


def track_point(
    prefix_len: int, extend_len: int, branching_seqlen: int | None, chunk_size: int
) -> TrackPoint | None:
    """Where a prefill leaves a snapshot; None: it is too short.

    >>> track_point(0, 100, None, 64)
    TrackPoint(kernel_len=100, seqlen=64)
    >>> track_point(0, 200, 64, 64)
    TrackPoint(kernel_len=65, seqlen=64)
    """
    if extend_len < chunk_size:
        return None
    end, seqlen = prefix_len + extend_len, prefix_len + extend_len // chunk_size * chunk_size
    kernel = prefix_len + extend_len // KERNEL_CHUNK_SIZE * KERNEL_CHUNK_SIZE
    if chunk_size > KERNEL_CHUNK_SIZE and kernel != seqlen:
        end = seqlen + 1
    branching = branching_seqlen or 0
    if prefix_len < branching < end and (branching - prefix_len) % chunk_size == 0:
        return TrackPoint(branching + 1, branching)
    return TrackPoint(end, seqlen)


def track_prefill(tree_cache: Any, req: Req, prefix_len: int) -> tuple[int, int] | None:
    """Decide on the snapshot of a request's prefill: (tokens, slot), or None.

    Sets ``mamba_last_track_seqlen`` and turns to the other slot. Nothing where the state would not
    end a page.
    """
    buffer = req.mamba_ping_pong_track_buffer
    if buffer is None or prefix_len % tree_cache.page_size:
        return None
    chunk = tree_cache.mamba_cache_chunk_size
    point = track_point(prefix_len, req.extend_input_len, req.mamba_branching_seqlen, chunk)
    if point is None:
        return None
    slot = int(buffer[req.mamba_next_track_idx])
    turn(tree_cache, req)
    req.mamba_last_track_seqlen = point.seqlen
    return point.seqlen, slot


def track_decode(req: Req, seqlen: int, interval: int) -> tuple[int, int] | None:
    """The snapshot that a decode to ``seqlen`` tokens leaves: (tokens, slot), or None."""
    buffer = req.mamba_ping_pong_track_buffer
    if buffer is None or seqlen % interval:
        return None
    return seqlen, int(buffer[req.mamba_next_track_idx])


def tracked_decode(tree_cache: Any, req: Req, interval: int) -> None:
    """The result of a decode is processed: if it left a snapshot, that is the newest one now."""
    if (req.seqlen - 1) % interval == 0:
        turn(tree_cache, req)
        req.mamba_last_track_seqlen = req.seqlen - 1


def turn(tree_cache: Any, req: Req) -> None:
    """The next snapshot goes to the other ping-pong slot, if there are two."""
    rows = tree_cache.req_to_token_pool
    req.mamba_next_track_idx = rows.get_mamba_ping_pong_other_idx(req.mamba_next_track_idx)
