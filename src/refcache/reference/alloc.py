"""Which slots a batch gets: ``alloc_extend`` and ``alloc_decode`` as page walks.

A *slot* is the place of one token's KV; page ``p`` holds the slots ``p*page_size ...
(p+1)*page_size - 1``. Both functions only read the free list; the caller takes the pages off it.
Slots are int64. Models SGLang's ``alloc_extend_kernel`` and ``alloc_decode_kernel``.

Both functions are total: where the free list is too short the missing slots are -1, because an op
cannot return ``None``. Capacity is the allocator's decision, before the call.

>>> import torch
>>> def extend(prefix, seq, last, free, page=4):
...     t = torch.tensor
...     new = sum(seq) - sum(prefix)
...     return alloc_extend(t(prefix), t(seq), t(last), t(free), page, new).tolist()
>>> extend([2], [11], [5], [3, 4])
[6, 7, 12, 13, 14, 15, 16, 17, 18]
>>> extend([4], [11], [7], [2, 3])
[8, 9, 10, 11, 12, 13, 14]
>>> extend([4], [4], [7], [2, 3])
[]
>>> extend([2, 0, 4], [11, 4, 6], [5, -1, 11], [3, 4, 5, 6])
[6, 7, 12, 13, 14, 15, 16, 17, 18, 20, 21, 22, 23, 24, 25]
>>> extend([0], [12], [-1], [3])
[12, 13, 14, 15, -1, -1, -1, -1, -1, -1, -1, -1]
>>> t = torch.tensor
>>> alloc_decode(t([5, 6]), t([11, 17]), t([7, 8]), 4).tolist()
[28, 18]
"""

import torch

from refcache.errors import InvalidArgument


def new_pages_needed(prefix_lens: torch.Tensor, seq_lens: torch.Tensor, page_size: int) -> int:
    """Pages that growing each request from ``prefix_lens[i]`` to ``seq_lens[i]`` tokens opens.

    Both are integer tensors ``[batch]``, counted in tokens. A request opens
    ``ceil(seq/page) - ceil(prefix/page)`` pages: its old last page, if partial, is filled first.
    """
    before = (prefix_lens + page_size - 1) // page_size
    after = (seq_lens + page_size - 1) // page_size
    return int((after - before).sum())


def _fresh_pages(free_pages: torch.Tensor, needed: int) -> torch.Tensor:
    """The first ``needed`` pages of the free list as int64; -1 for each one it does not have."""
    pages = free_pages[:needed].to(torch.int64)
    missing = needed - len(pages)
    return torch.cat([pages, pages.new_full((missing,), -1)]) if missing > 0 else pages


def alloc_extend(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    page_size: int,
    extend_num_tokens: int,
) -> torch.Tensor:
    """Slots of the tokens that are new when request i grows from prefix_lens[i] to seq_lens[i].

    Request by request, and within a request in token order: (1) the rest of its old last page,
    starting at ``last_loc[i] + 1``; (2) whole new pages; (3) the head of one more. New pages come
    from the front of ``free_pages`` in order.

    Args:
        prefix_lens, seq_lens: int32 or int64 ``[batch]``, tokens; ``seq_lens >= prefix_lens``.
        last_loc: ``[batch]``, the slot of token ``prefix_lens[i] - 1`` (-1 when there is none).
        free_pages: ``[free]``, page numbers.
        page_size: slots a page, at least 1.
        extend_num_tokens: ``sum(seq_lens - prefix_lens)``; the length of the result.

    Returns:
        int64 ``[extend_num_tokens]`` on the device of ``seq_lens``; -1 where the free list ended.

    Raises:
        InvalidArgument: ``extend_num_tokens`` is not the sum of the growths.
    """
    growth = int((seq_lens - prefix_lens).sum())
    if growth != extend_num_tokens:
        raise InvalidArgument(
            f"extend_num_tokens={extend_num_tokens}, but seq_lens - prefix_lens sums to {growth}"
        )
    pages = _fresh_pages(free_pages, new_pages_needed(prefix_lens, seq_lens, page_size))
    fresh = pages[:, None] * page_size + torch.arange(page_size, device=pages.device)
    if len(free_pages) < len(pages):
        fresh[len(free_pages) :] = -1
    fresh = fresh.flatten()  # slots of the new pages, in order
    out = [fresh[:0]]
    used = 0  # of ``fresh``
    for prefix, seq, last in zip(
        prefix_lens.tolist(), seq_lens.tolist(), last_loc.tolist(), strict=True
    ):
        room = -prefix % page_size  # free slots of the old last page
        head = min(room, seq - prefix)
        out.append(torch.arange(last + 1, last + 1 + head, device=fresh.device))  # part 1
        rest = seq - prefix - head
        out.append(fresh[used : used + rest])  # parts 2 and 3
        used += -(-rest // page_size) * page_size
    return torch.cat(out).to(seq_lens.device)


def alloc_decode(
    seq_lens: torch.Tensor, last_loc: torch.Tensor, free_pages: torch.Tensor, page_size: int
) -> torch.Tensor:
    """One slot a request, for its token ``seq_lens[i] - 1``.

    The slot after ``last_loc[i]``, or the first of a new page where ``(seq_len - 1) % page_size``
    is 0. Shapes, dtypes and the value -1 as in :func:`alloc_extend`.

    Args:
        seq_lens: ``[batch]``, length of each request including the token to place.
        last_loc: ``[batch]``, the slot of token ``seq_lens[i] - 2`` (-1 when there is none).
    """
    opens = (seq_lens - 1) % page_size == 0
    pages = _fresh_pages(free_pages, int(opens.sum()))
    out = last_loc.to(torch.int64) + 1
    out[opens] = (pages * page_size).clamp_(min=-1)
    return out
