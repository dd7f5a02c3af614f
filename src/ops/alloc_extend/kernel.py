"""The kernel of ``alloc_extend``.

The grid is (request, chunk). A program sums what the requests before its own take, of the output
and of the free list, in blocks of a fixed size and both in one 64-bit sum; then it walks its
request's new tokens in tiles, ``num_programs(1)`` tiles apart. Each token computes its slot from
its position alone, so the old page, the whole new pages and the head of the last one are one
expression. Slots are stored as streaming data: a long extend is larger than the cache, and the free
list should stay in it.

A cursor is read by every program, so a second kernel of one program raises it afterwards.

Counts are 32-bit and unsigned where they are divided (a batch grows by less than 2^31 tokens); page
numbers are widened before they are multiplied. Nothing depends on the batch or on the lengths at
compile time: one compilation a page size.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from refcache_ops._launch import Variant, pointer_to, pointers

BATCH_BLOCK = 1024  # requests summed at once
TOKEN_BLOCK = 512  # tokens placed at once
PROGRAMS = 1024  # about as many as fill a large GPU; more only repeat the sums
WARPS = 4


@triton.jit
def pages_of(tokens, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pages that ``tokens`` tokens occupy."""
    return ((tokens + (PAGE - 1)).to(tl.uint32) // PAGE).to(tl.int32)


@triton.jit
def alloc_extend_kernel(  # type: ignore[no-untyped-def]
    prefix_lens,
    seq_lens,
    last_loc,
    free_pages,
    out,
    cursor,
    free: tl.int32,
    total: tl.int32,
    PAGE: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    CURSOR: tl.constexpr,
):
    """Grid (request, chunk); ``free`` entries in the free list, ``total`` in the output."""
    request = tl.program_id(0)
    prefix = tl.load(prefix_lens + request).to(tl.int32)
    length = tl.load(seq_lens + request).to(tl.int32) - prefix
    last = tl.load(last_loc + request).to(tl.int64)
    start = tl.program_id(1) * TOKEN_BLOCK
    if start < length:
        before = tl.zeros((), tl.int64)  # tokens in the upper half, pages in the lower
        block = request * 0
        while block < request:
            i = block + tl.arange(0, BATCH_BLOCK)
            earlier = i < request
            low = tl.load(prefix_lens + i, mask=earlier, other=0).to(tl.int32)
            high = tl.load(seq_lens + i, mask=earlier, other=0).to(tl.int32)
            high = tl.maximum(low, high)
            pages = pages_of(high, PAGE) - pages_of(low, PAGE)
            before += tl.sum(((high - low).to(tl.int64) << 32) + pages)
            block += BATCH_BLOCK
        tokens_before = (before >> 32).to(tl.int32)
        pages_before = before.to(tl.int32)
        if CURSOR:
            used = tl.load(cursor)
            pages_before += tl.where((used >= 0) & (used < free), used, free).to(tl.int32)

        free_left = free - pages_before
        length = tl.minimum(length, total - tokens_before)
        offset = (prefix.to(tl.uint32) % PAGE).to(tl.int32)  # of the first new token in its page
        old_page = (offset > 0).to(tl.int32)
        while start < length:
            token = start + tl.arange(0, TOKEN_BLOCK)
            live = token < length
            at = (offset + token).to(tl.uint32)
            entry = (at // PAGE).to(tl.int32) - old_page  # of the free list; -1 on the old page
            there = (entry >= 0) & (entry < free_left)
            page = tl.load(free_pages + pages_before + entry, mask=live & there, other=0)
            opened = page.to(tl.int64) * PAGE + (at % PAGE).to(tl.int32)
            old = tl.where(last < 0, -1, last + 1 + token)
            slot = tl.where(entry < 0, old, tl.where(there, opened, -1))
            tl.store(out + tokens_before + token, slot, mask=live, cache_modifier=".cs")
            start += tl.num_programs(1) * TOKEN_BLOCK


@triton.jit
def advance_kernel(  # type: ignore[no-untyped-def]
    prefix_lens,
    seq_lens,
    cursor,
    batch: tl.int32,
    PAGE: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
):
    """Grid (1,): raise the cursor by the pages that the batch opens."""
    opened = tl.load(cursor)
    start = tl.program_id(0)
    while start < batch:
        i = start + tl.arange(0, BATCH_BLOCK)
        low = tl.load(prefix_lens + i, mask=i < batch, other=0).to(tl.int32)
        high = tl.load(seq_lens + i, mask=i < batch, other=0).to(tl.int32)
        pages = pages_of(tl.maximum(low, high), PAGE) - pages_of(low, PAGE)
        opened += tl.sum(pages.to(tl.int64))
        start += BATCH_BLOCK
    tl.store(cursor, opened)


def run(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    page_size: int,
    extend_num_tokens: int,
    cursor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the kernel; arguments and result as the op's."""
    out = seq_lens.new_empty(extend_num_tokens, dtype=torch.int64)
    batch = seq_lens.numel()
    if batch == 0 or extend_num_tokens == 0:
        return out
    chunks = min(-(-extend_num_tokens // TOKEN_BLOCK), max(1, PROGRAMS // batch))
    tensors = (prefix_lens, seq_lens, last_loc, free_pages)
    place, advance = _variants(page_size, cursor is not None, *(t.dtype for t in tensors))
    given = pointers(out, (*tensors, out, out if cursor is None else cursor))
    place.launch((batch, chunks), out, (*given, free_pages.numel(), extend_num_tokens))
    if cursor is not None:
        advance.launch(1, out, (given[0], given[1], given[5], batch))
    return out


@cache
def _variants(page_size: int, counts: bool, *dtypes: torch.dtype) -> tuple[Variant, Variant]:
    """The kernel, and the one that raises the cursor."""
    types = (*map(pointer_to, dtypes), "*i64", "*i64", "i32", "i32")
    constants = (page_size, BATCH_BLOCK, TOKEN_BLOCK, counts)
    return (
        Variant(alloc_extend_kernel, types, constants, WARPS, aligned=(4,)),
        Variant(advance_kernel, (*types[:2], "*i64", "i32"), (page_size, BATCH_BLOCK), WARPS),
    )
