"""Slots for a batch: make room in the tree, allocate, write the request rows; and the way back.

Models ``sglang.srt.mem_cache.common``. The adder has checked that the memory is there (free plus
evictable), so an allocation that still fails is a fault of the tree or the allocator, not a state
of the loop: :class:`~refcache.errors.OutOfSlots`.
"""

from typing import Any, Protocol

import torch

from refcache.engine.hybrid import (
    give_back_state,
    make_room_for_states,
    shortage,
    tokens_within_reach,
)
from refcache.engine.req import Req
from refcache.errors import InvalidArgument, OutOfSlots


class Batch(Protocol):
    """What an allocation reads of a batch: a ``ScheduleBatch``."""

    reqs: list[Req]
    prefix_lens: list[int]
    extend_lens: list[int]
    extend_num_tokens: int
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    req_pool_indices: torch.Tensor
    tree_cache: Any
    req_to_token_pool: Any

    @property
    def device(self) -> Any:
        """Where its tensors are."""


def evict_from_tree_cache(tree_cache: Any, num_tokens: int) -> None:
    """Have at least ``num_tokens`` free, as far as the tree can give.

    As in SGLang 0.5.10, a shortage evicts ``num_tokens``, not only what is missing: the next steps
    then need not evict again.
    """
    short = shortage(tree_cache, num_tokens)
    if short is not None:
        tree_cache.evict(short)


def _granted(slots: torch.Tensor | None, what: str, tree_cache: Any) -> torch.Tensor:
    if slots is None:
        raise OutOfSlots(
            f"{what}: {tree_cache.token_to_kv_pool_allocator.available_size()} tokens free, "
            f"{tokens_within_reach(tree_cache)} with what can be evicted; the budget had them"
        )
    return slots


def alloc_token_slots(tree_cache: Any, num_tokens: int, backup_state: bool = False) -> Any:
    """``num_tokens`` slots at page size 1, int64.

    With ``backup_state`` the allocator's state before it, too, for its ``restore_state``.
    """
    allocator = tree_cache.token_to_kv_pool_allocator
    evict_from_tree_cache(tree_cache, num_tokens)
    state = allocator.backup_state() if backup_state else None
    slots = _granted(allocator.alloc(num_tokens), f"alloc of {num_tokens} tokens", tree_cache)
    return (slots, state) if backup_state else slots


def alloc_paged_token_slots_extend(
    tree_cache: Any,
    prefix_lens: torch.Tensor,
    prefix_lens_cpu: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
    extend_num_tokens: int,
    backup_state: bool = False,
) -> Any:
    """Slots for an extend, int64; room is made for one page more a request than its tokens fill.

    With ``backup_state`` the allocator's state before it, too.
    """
    allocator = tree_cache.token_to_kv_pool_allocator
    evict_from_tree_cache(tree_cache, extend_num_tokens + len(seq_lens_cpu) * allocator.page_size)
    state = allocator.backup_state() if backup_state else None
    slots = allocator.alloc_extend(
        prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens
    )
    slots = _granted(slots, f"alloc_extend of {extend_num_tokens} tokens", tree_cache)
    return (slots, state) if backup_state else slots


def alloc_paged_token_slots_decode(
    tree_cache: Any,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
    token_per_req: int = 1,
) -> torch.Tensor:
    """One slot a request; room is made for one page a request.

    Raises:
        InvalidArgument: another ``token_per_req``, which speculation needs.
    """
    _check_token_per_req(token_per_req)
    allocator = tree_cache.token_to_kv_pool_allocator
    evict_from_tree_cache(tree_cache, len(seq_lens_cpu) * allocator.page_size)
    slots = allocator.alloc_decode(seq_lens, seq_lens_cpu, last_loc)
    return _granted(slots, f"alloc_decode of {len(seq_lens_cpu)} tokens", tree_cache)


def write_cache_indices(batch: Batch, out_cache_loc: torch.Tensor) -> None:
    """Write each request's row: the slots of its prefix, then its part of ``out_cache_loc``."""
    pool, start = batch.req_to_token_pool, 0
    for req, prefix, extend in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
        if prefix:
            pool.write((req.req_pool_idx, slice(0, prefix)), req.prefix_indices)
        new = out_cache_loc[start : start + extend]
        pool.write((req.req_pool_idx, slice(prefix, prefix + extend)), new)
        start += extend


def alloc_for_extend(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Rows and slots for a prefill batch, written to ``req_to_token``.

    Returns:
        The new slots int64 ``[extend_num_tokens]``, the rows int64 ``[batch]``, the rows as a list.

    Raises:
        OutOfSlots: see the module docstring.
    """
    make_room_for_states(batch.tree_cache, batch.reqs)
    rows = batch.req_to_token_pool.alloc(batch.reqs)
    if rows is None:
        raise OutOfSlots(
            f"{len(batch.reqs)} request rows: {batch.req_to_token_pool.available_size()} are free"
        )
    if batch.tree_cache.page_size == 1:
        out_cache_loc = alloc_token_slots(batch.tree_cache, batch.extend_num_tokens)
    else:
        none = torch.tensor([-1], device=batch.device)
        last_loc = [r.prefix_indices[-1:] if len(r.prefix_indices) else none for r in batch.reqs]
        prefix_lens_cpu = torch.tensor(batch.prefix_lens)
        out_cache_loc = alloc_paged_token_slots_extend(
            batch.tree_cache,
            prefix_lens_cpu.to(batch.device),
            prefix_lens_cpu,
            batch.seq_lens,
            batch.seq_lens_cpu,
            torch.cat(last_loc),
            batch.extend_num_tokens,
        )
    write_cache_indices(batch, out_cache_loc)
    return out_cache_loc, torch.tensor(rows, device=batch.device), rows


def _check_token_per_req(token_per_req: int) -> None:
    if token_per_req != 1:
        raise InvalidArgument(f"{token_per_req=}: expected 1, speculation is not modelled")


def alloc_for_decode(batch: Batch, token_per_req: int = 1) -> torch.Tensor:
    """One slot a request for its token ``seq_lens[i]``, written to ``req_to_token``; int64.

    ``batch.seq_lens`` are the lengths before this step.

    Raises:
        InvalidArgument: another ``token_per_req``, which speculation needs.
    """
    _check_token_per_req(token_per_req)
    if batch.tree_cache.page_size == 1:
        out_cache_loc: torch.Tensor = alloc_token_slots(batch.tree_cache, len(batch.reqs))
    else:
        # a request that decodes has a prompt, so its last token has a slot
        last_loc = batch.req_to_token_pool.read(batch.req_pool_indices, batch.seq_lens - 1)
        out_cache_loc = alloc_paged_token_slots_decode(
            batch.tree_cache, batch.seq_lens + 1, batch.seq_lens_cpu + 1, last_loc
        )
    batch.req_to_token_pool.write((batch.req_pool_indices, batch.seq_lens), out_cache_loc)
    return out_cache_loc


def release_kv_cache(req: Req, tree_cache: Any, is_insert: bool = True) -> None:
    """Give up everything a request holds: KV to the tree (or free), lock, row.

    With ``is_insert`` false its private pages are freed, not cached. These are three parts: a call
    that raises has done the first ones wholly, and goes on from there when it is made again.

    A request that still waits has at most a copy of a state.

    Raises:
        DoubleFree: the request has given up everything already.
    """
    if req.req_pool_idx is None and req.mamba_pool_idx is not None:
        give_back_state(tree_cache, req)
        return
    if not req.kv_committed_freed or req.req_pool_idx is None:
        tree_cache.cache_finished_req(req, is_insert=is_insert)
    page_size = tree_cache.page_size
    start, end = -(-req.kv_committed_len // page_size) * page_size, req.kv_allocated_len
    if not req.kv_overallocated_freed:
        if start < end:
            row = tree_cache.req_to_token_pool.read(req.req_pool_idx, slice(start, end))
            tree_cache.token_to_kv_pool_allocator.free(row)
        req.pop_overallocated_kv_cache()
    tree_cache.req_to_token_pool.free(req)


def available_and_evictable_str(tree_cache: Any) -> str:
    """What an allocation can have, in words, for a message."""
    text: str = tree_cache.available_and_evictable_str()
    return text
