"""The kernel of ``alloc_extend``.

The grid is (request, chunk). A program sums what the requests before its own take, of the output
and of the free list, in blocks of a fixed size; then it walks its request's new tokens in chunks,
``num_programs(1)`` chunks apart. Each token computes its slot from its position alone, so the old
page, the whole new pages and the head of the last one are one expression.

Nothing depends on the batch or on the lengths at compile time: one compilation a page size.
"""

import torch
import triton
import triton.language as tl

from refcache_ops._launch import launch

BATCH_BLOCK = 1024  # requests summed at once
TOKEN_BLOCK = 1024  # tokens placed at once
PROGRAMS = 1024  # about as many as fill a large GPU; more only repeat the sums


@triton.jit
def pages_of(tokens, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pages that ``tokens`` tokens occupy."""
    return (tokens + PAGE - 1) // PAGE


@triton.jit(
    do_not_specialize=["batch", "free", "total"],
    do_not_specialize_on_alignment=["prefix_lens", "seq_lens", "last_loc", "free_pages"],
)
def alloc_extend_kernel(  # type: ignore[no-untyped-def]
    prefix_lens,
    seq_lens,
    last_loc,
    free_pages,
    out,
    free: tl.int64,
    total: tl.int64,
    PAGE: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
):
    """Grid (request, chunk); ``free`` entries in the free list, ``total`` in the output."""
    request = tl.program_id(0)
    chunk = tl.program_id(1)
    prefix = tl.load(prefix_lens + request).to(tl.int64)
    length = tl.load(seq_lens + request).to(tl.int64) - prefix
    first = chunk.to(tl.int64) * TOKEN_BLOCK
    if first >= length:
        return

    tokens_before = tl.zeros((), tl.int64)
    pages_before = tl.zeros((), tl.int64)
    start = request * 0
    while start < request:
        i = start + tl.arange(0, BATCH_BLOCK)
        earlier = i < request
        low = tl.load(prefix_lens + i, mask=earlier, other=0).to(tl.int64)
        high = tl.load(seq_lens + i, mask=earlier, other=0).to(tl.int64)
        high = tl.maximum(low, high)
        tokens_before += tl.sum(high - low)
        pages_before += tl.sum(pages_of(high, PAGE) - pages_of(low, PAGE))
        start += BATCH_BLOCK

    last = tl.load(last_loc + request).to(tl.int64)
    old_pages = pages_of(prefix, PAGE)
    while first < length:
        token = first + tl.arange(0, TOKEN_BLOCK)
        position = prefix + token
        new_page = position // PAGE - old_pages  # -1: still on the request's old page
        entry = pages_before + new_page
        live = (token < length) & (tokens_before + token < total)
        fresh = new_page >= 0
        page = tl.load(free_pages + entry, mask=live & fresh & (entry < free), other=-1)
        page = page.to(tl.int64)
        opened = tl.where(page < 0, -1, page * PAGE + position % PAGE)
        slot = tl.where(fresh, opened, last + 1 + token)
        tl.store(out + tokens_before + token, slot, mask=live)
        first += tl.num_programs(1).to(tl.int64) * TOKEN_BLOCK


def run(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    page_size: int,
    extend_num_tokens: int,
) -> torch.Tensor:
    """Launch the kernel; arguments and result as the op's."""
    out = torch.empty(extend_num_tokens, dtype=torch.int64, device=seq_lens.device)
    batch = seq_lens.numel()
    if batch == 0 or extend_num_tokens == 0:
        return out
    chunks = min(-(-extend_num_tokens // TOKEN_BLOCK), max(1, PROGRAMS // batch))
    dtypes = (prefix_lens.dtype, seq_lens.dtype, last_loc.dtype, free_pages.dtype)
    launch(
        alloc_extend_kernel,
        (batch, chunks),
        (page_size, dtypes),
        out.device,
        (
            prefix_lens, seq_lens, last_loc, free_pages, out,
            free_pages.numel(), extend_num_tokens, page_size, BATCH_BLOCK, TOKEN_BLOCK,
        ),
        num_warps=4,
    )  # fmt: skip
    return out
