"""The kernel of ``alloc_decode``.

A program places ``ROWS`` requests: it counts the pages that the requests before them open, in
blocks of a fixed size, and numbers its own with a running sum. With a cursor there is one program,
which places ``BATCH_BLOCK`` requests at a time and raises the cursor when it is through: nobody
else reads it meanwhile, and one launch does. Nothing depends on the batch at compile time: one
compilation a page size.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from refcache_ops._launch import Variant, pointer_to, pointers

BATCH_BLOCK = 1024  # earlier requests counted at once
ROWS = 128  # requests a program
WARPS = 8


@triton.jit
def opens_page(lens, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 where the last of ``lens`` tokens is the first of its page."""
    return ((lens - 1).to(tl.uint32) % PAGE == 0).to(tl.int32)


@triton.jit
def _place(  # type: ignore[no-untyped-def]
    seq_lens, last_loc, free_pages, out, first, batch, free, used,
    PAGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Place ``ROWS`` requests from ``first`` on; their pages start at entry ``used``.

    Returns how many pages they open.
    """
    row = first + tl.arange(0, ROWS)
    live = row < batch
    opens = opens_page(tl.load(seq_lens + row, mask=live, other=2).to(tl.int32), PAGE)
    opens = tl.where(live, opens, 0)
    last = tl.load(last_loc + row, mask=live, other=0).to(tl.int64)
    entry = used + tl.cumsum(opens) - 1
    there = entry < free
    page = tl.load(free_pages + entry, mask=(opens > 0) & there, other=0).to(tl.int64)
    slot = tl.where(opens > 0, tl.where(there, page * PAGE, -1), tl.where(last < 0, -1, last + 1))
    tl.store(out + row, slot, mask=live)
    return tl.sum(opens)


@triton.jit
def alloc_decode_kernel(  # type: ignore[no-untyped-def]
    seq_lens,
    last_loc,
    free_pages,
    out,
    cursor,
    batch: tl.int32,
    free: tl.int32,
    PAGE: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CURSOR: tl.constexpr,
):
    """Grid (rows / ROWS,), or (1,) with CURSOR; ``free`` entries in the free list."""
    first = tl.program_id(0) * ROWS
    if CURSOR:
        before = tl.load(cursor)
        there = (before >= 0) & (before < free)
        used = tl.where(there, before, free).to(tl.int32)
        opened = first
        while first < batch:
            opened += _place(
                seq_lens, last_loc, free_pages, out, first, batch, free, used + opened, PAGE, ROWS
            )
            first += ROWS
        tl.store(cursor, before + opened)
    else:
        opened_before = first * 0
        start = first * 0
        while start < first:
            i = start + tl.arange(0, BATCH_BLOCK)
            earlier = i < first
            lens = tl.load(seq_lens + i, mask=earlier, other=2).to(tl.int32)
            opened_before += tl.sum(tl.where(earlier, opens_page(lens, PAGE), 0))
            start += BATCH_BLOCK
        _place(seq_lens, last_loc, free_pages, out, first, batch, free, opened_before, PAGE, ROWS)


def run(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    page_size: int,
    cursor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the kernel; arguments and result as the op's."""
    batch = seq_lens.numel()
    out = seq_lens.new_empty(batch, dtype=torch.int64)
    if batch == 0:
        return out
    counts = cursor is not None
    variant = _variant(page_size, counts, seq_lens.dtype, last_loc.dtype, free_pages.dtype)
    tensors = (seq_lens, last_loc, free_pages, out, out if cursor is None else cursor)
    programs = 1 if counts else -(-batch // ROWS)
    variant.launch(programs, out, (*pointers(out, tensors), batch, free_pages.numel()))
    return out


@cache
def _variant(page_size: int, counts: bool, *dtypes: torch.dtype) -> Variant:
    types = (*map(pointer_to, dtypes), "*i64", "*i64", "i32", "i32")
    constants = (page_size, BATCH_BLOCK, BATCH_BLOCK if counts else ROWS, counts)
    return Variant(alloc_decode_kernel, types, constants, WARPS)
