"""Which slots a batch gets: ``alloc_extend`` and ``alloc_decode`` as page walks.

A *slot* is the place of one token's KV; page ``p`` holds the slots ``p*page_size ...
(p+1)*page_size - 1``. Both functions only read the free list; the caller takes the pages off it.
Slots are int64. Models SGLang's ``alloc_extend_kernel`` and ``alloc_decode_kernel``.

Both functions are total: where the free list is too short the missing slots are -1, because an op
cannot return ``None``. Capacity is the allocator's decision, before the call.

>>> import torch
>>> def extend(prefix, seq, last, free, page=4):
...     t = torch.tensor
...     return alloc_extend(t(prefix), t(seq), t(last), t(free), page, sum(seq) - sum(prefix)).tolist()
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


def _slot(free_pages: list[int], opened: int, offset: int, page_size: int) -> int:
    if opened >= len(free_pages):
        return -1
    return free_pages[opened] * page_size + offset


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
    pages = free_pages.tolist()
    opened = 0
    out: list[int] = []
    for prefix, seq, last in zip(
        prefix_lens.tolist(), seq_lens.tolist(), last_loc.tolist(), strict=True
    ):
        for position in range(prefix, seq):
            offset = position % page_size
            if offset == 0:
                out.append(_slot(pages, opened, 0, page_size))
                opened += 1
            elif position == prefix:
                out.append(last + 1)
            else:
                out.append(out[-1] + 1 if out[-1] >= 0 else -1)
    if len(out) != extend_num_tokens:
        raise InvalidArgument(
            f"extend_num_tokens={extend_num_tokens}, but seq_lens - prefix_lens sums to {len(out)}"
        )
    return torch.tensor(out, dtype=torch.int64, device=seq_lens.device)


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
    pages = free_pages.tolist()
    opened = 0
    out: list[int] = []
    for seq, last in zip(seq_lens.tolist(), last_loc.tolist(), strict=True):
        if (seq - 1) % page_size == 0:
            out.append(_slot(pages, opened, 0, page_size))
            opened += 1
        else:
            out.append(last + 1)
    return torch.tensor(out, dtype=torch.int64, device=seq_lens.device)
