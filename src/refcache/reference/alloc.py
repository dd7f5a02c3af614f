"""Which slots a batch gets: ``alloc_extend`` and ``alloc_decode`` as page walks.

A *slot* is the place of one token's KV; page ``p`` holds the slots ``p*page_size ...
(p+1)*page_size - 1``. Both functions only read the free list; the caller takes the pages off it,
or passes a *cursor*: how many entries of the list are used, which the call raises by the pages that
it opens. So a decode loop that was captured as a CUDA graph gets other slots at every replay.
Slots are int64. Models SGLang's ``alloc_extend_kernel`` and ``alloc_decode_kernel``.

Both functions are total: where the free list is too short the missing slots are -1, because an op
cannot return ``None``; a request whose last slot is -1 gets -1 until it opens a page. Capacity is
the allocator's decision, before the call. With a cursor it shows afterwards: a cursor behind the
end of the list counts the pages that were missing.

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
>>> cursor = t([1])
>>> alloc_decode(t([5, 6]), t([11, 17]), t([7, 8]), 4, cursor).tolist(), cursor.tolist()
([32, 18], [2])
>>> alloc_decode(t([5, 7]), t([11, 18]), t([7, 8]), 4, cursor).tolist(), cursor.tolist()
([-1, 19], [3])
"""

import torch

from refcache.errors import InvalidArgument


def new_pages_needed(prefix_lens: torch.Tensor, seq_lens: torch.Tensor, page_size: int) -> int:
    """Pages that growing each request from ``prefix_lens[i]`` to ``seq_lens[i]`` tokens opens.

    Both are integer tensors ``[batch]``, counted in tokens. A request opens
    ``ceil(seq/page) - ceil(prefix/page)`` pages: its old last page, if partial, is filled first.

    Raises:
        InvalidArgument: a page size, dtypes or shapes that do not fit.
    """
    check_alloc(seq_lens, page_size, None, prefix_lens=prefix_lens, seq_lens=seq_lens)
    before = (prefix_lens + page_size - 1) // page_size
    after = (seq_lens + page_size - 1) // page_size
    return int((after - before).sum())


def check_alloc(
    free_pages: torch.Tensor, page_size: int, cursor: torch.Tensor | None, **batch: torch.Tensor
) -> None:
    """Raise InvalidArgument unless shapes, dtypes, devices and integers fit; reads no element.

    ``batch``: the tensors that have one element a request, by name.
    """
    if not 0 < page_size <= MAX_PAGE_SIZE:
        raise InvalidArgument(f"page_size={page_size}: expected 1 to {MAX_PAGE_SIZE}")
    first = next(iter(batch.values()))
    for what, t in (*batch.items(), ("free_pages", free_pages)):
        if t.dim() != 1 or t.dtype not in _INTEGERS:
            raise InvalidArgument(
                f"{what}: {t.dtype} of shape {tuple(t.shape)}; expected int32 or int64 of one "
                "dimension"
            )
        if t.device != first.device:
            raise InvalidArgument(f"{what} on {t.device}: expected {first.device}, as the others")
        if what != "free_pages" and t.shape != first.shape:
            shown = ", ".join(f"{len(t)} {what}" for what, t in batch.items())
            raise InvalidArgument(f"{shown}: expected as many of each")
    if cursor is not None and (cursor.shape, cursor.dtype) != ((1,), torch.int64):
        raise InvalidArgument(
            f"cursor: {cursor.dtype} of shape {tuple(cursor.shape)}; expected int64 [1]"
        )
    if cursor is not None and cursor.device != first.device:
        raise InvalidArgument(f"cursor on {cursor.device}: expected {first.device}, as the others")


def check_total(extend_num_tokens: int) -> None:
    """Raise InvalidArgument for a count of tokens that no batch has."""
    if not 0 <= extend_num_tokens < 2**31:
        raise InvalidArgument(f"extend_num_tokens={extend_num_tokens}: expected 0 to 2^31 - 1")


MAX_PAGE_SIZE = 2**30
_INTEGERS = (torch.int64, torch.int32)


def _fresh_pages(
    free_pages: torch.Tensor, needed: int, cursor: torch.Tensor | None
) -> torch.Tensor:
    """The next ``needed`` pages of the free list as int64; -1 for each one it does not have."""
    used = 0 if cursor is None else int(cursor)
    if used < 0:
        raise InvalidArgument(f"cursor={used}: expected 0 or more")
    pages = free_pages[used : used + needed].to(torch.int64)
    return torch.cat([pages, pages.new_full((needed - len(pages),), -1)])


def alloc_extend(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    page_size: int,
    extend_num_tokens: int,
    cursor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Slots of the tokens that are new when request i grows from prefix_lens[i] to seq_lens[i].

    Request by request, and within a request in token order: (1) the rest of its old last page,
    starting at ``last_loc[i] + 1``; (2) whole new pages; (3) the head of one more. New pages come
    from the front of ``free_pages`` in order.

    Args:
        prefix_lens, seq_lens: int32 or int64 ``[batch]``, tokens; ``seq_lens >= prefix_lens >= 0``.
        last_loc: ``[batch]``, the slot of token ``prefix_lens[i] - 1`` (-1 when there is none).
        free_pages: ``[free]``, page numbers.
        page_size: slots a page, at least 1.
        extend_num_tokens: ``sum(seq_lens - prefix_lens)``; the length of the result.
        cursor: int64 ``[1]``, entries of ``free_pages`` that are used, 0 or more; raised by the
            pages that are opened, those that were missing too.

    Returns:
        int64 ``[extend_num_tokens]`` on the device of ``seq_lens``; -1 where the free list ended.

    Raises:
        InvalidArgument: shapes, dtypes, devices, a page size or lengths that do not fit, or
            ``extend_num_tokens`` is not the sum of the growths. The cursor is as it was.
    """
    check_alloc(
        free_pages, page_size, cursor,
        prefix_lens=prefix_lens, seq_lens=seq_lens, last_loc=last_loc,
    )  # fmt: skip
    check_total(extend_num_tokens)
    if bool(((prefix_lens < 0) | (seq_lens < prefix_lens)).any()):
        raise InvalidArgument(
            f"from {prefix_lens.tolist()} to {seq_lens.tolist()} tokens: expected lengths of 0 or "
            "more that do not shrink"
        )
    growth = int((seq_lens - prefix_lens).sum())
    if growth != extend_num_tokens:
        raise InvalidArgument(
            f"extend_num_tokens={extend_num_tokens}, but seq_lens - prefix_lens sums to {growth}"
        )
    pages = _fresh_pages(free_pages, new_pages_needed(prefix_lens, seq_lens, page_size), cursor)
    fresh = pages[:, None] * page_size + torch.arange(page_size, device=pages.device)
    fresh[pages < 0] = -1
    fresh = fresh.flatten()  # slots of the new pages, in order
    out = [fresh[:0]]
    used = 0  # of ``fresh``
    for prefix, seq, last in zip(
        prefix_lens.tolist(), seq_lens.tolist(), last_loc.tolist(), strict=True
    ):
        room = -prefix % page_size  # free slots of the old last page
        head = min(room, seq - prefix)
        first = torch.arange(head, device=fresh.device) + last + 1
        out.append(first if last >= 0 else torch.full_like(first, -1))  # part 1
        rest = seq - prefix - head
        out.append(fresh[used : used + rest])  # parts 2 and 3
        used += -(-rest // page_size) * page_size
    if cursor is not None:
        cursor += len(pages)
    return torch.cat(out).to(seq_lens.device)


def alloc_decode(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    page_size: int,
    cursor: torch.Tensor | None = None,
) -> torch.Tensor:
    """One slot a request, for its token ``seq_lens[i] - 1``.

    The slot after ``last_loc[i]``, or the first of a new page where ``(seq_len - 1) % page_size``
    is 0. Shapes, dtypes, ``cursor``, errors and the value -1 as in :func:`alloc_extend`.

    Args:
        seq_lens: ``[batch]``, length of each request including the token to place; at least 1.
        last_loc: ``[batch]``, the slot of token ``seq_lens[i] - 2`` (-1 when there is none).
    """
    check_alloc(free_pages, page_size, cursor, seq_lens=seq_lens, last_loc=last_loc)
    if bool((seq_lens < 1).any()):
        raise InvalidArgument(f"seq_lens {seq_lens.tolist()}: expected 1 token or more")
    opens = (seq_lens - 1) % page_size == 0
    pages = _fresh_pages(free_pages, int(opens.sum()), cursor)
    out = last_loc.to(torch.int64) + 1
    out[last_loc < 0] = -1
    out[opens] = (pages * page_size).clamp_(min=-1)
    if cursor is not None:
        cursor += len(pages)
    return out
