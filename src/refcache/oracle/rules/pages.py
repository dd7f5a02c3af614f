"""Rules about pages and rows: who owns each page (P), request rows (R), content (C).

See :mod:`refcache.oracle.rules.check`.
"""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from refcache.oracle.rules.catalog import stated
from refcache.oracle.view.state import Check, State

if TYPE_CHECKING:
    import torch

PAGE_CHECKS: dict[str, Check] = {}
invariant = partial(stated, PAGE_CHECKS)
BLOCK = 1 << 14  # slots compared at once: what fits into the processor's cache


@invariant("P2", "a node's slots, cut by page, are aligned ascending pages")
def _slots_are_whole_pages(state: State) -> Iterator[str]:
    if not _out_of_page(state.slots, state.page_size):
        return
    for index, node in enumerate(state.view.nodes):
        if node.device is not None and _out_of_page(node.device, state.page_size, whole=True):
            slots = node.device.tolist()
            yield f"{state.name(index)} has slots {slots}, page size {state.page_size}"


def _out_of_page(slots: "torch.Tensor", size: int, whole: bool = False) -> bool:
    """Whether some slot is not the next of the page that its run of ``size`` starts."""
    if whole and len(slots) % size:
        return True
    if size == 1:
        return False
    import torch

    within = torch.arange(size, dtype=slots.dtype)
    block = max(BLOCK // size, 1) * size
    for start in range(0, len(slots), block):
        part = slots[start : start + block]
        first = part[::size]
        expected = (first[:, None] + within).flatten()[: len(part)]
        if not torch.equal(part, expected) or int((first % size).count_nonzero()):
            return True
    return False


@invariant("P0", "page 0 is never handed out and never freed, nor is a page outside the pool")
def _pages_are_in_the_pool(state: State) -> Iterator[str]:
    for owner, pages in state.owners:
        bad = [page for page in pages if not 1 <= page <= state.pages]
        if bad:
            yield f"page {bad[0]} belongs to {owner}; pages are 1 to {state.pages}"


@invariant(
    "P1",
    "each page has exactly one owner: free, queued in a free group, the tree, or one request",
)
def _every_page_has_one_owner(state: State) -> Iterator[str]:
    pages = [page for _, mine in state.owners for page in mine]
    if len(pages) == state.pages == len(set(pages)):
        return
    counts = Counter(pages)
    for page in range(1, state.pages + 1):
        if counts[page] != 1:
            named = [owner for owner, mine in state.owners for _ in range(mine.count(page))]
            yield f"page {page} belongs to {' and '.join(named) or 'nobody'}"


@invariant(
    "R1",
    "token j of a request sits at offset j % page_size of a page, one page for each page of tokens",
)
def _rows_sit_in_pages(state: State) -> Iterator[str]:
    size = state.page_size
    for request in state.requests:
        if _out_of_page(request.row, size):
            row = request.row.tolist()
            j = next(
                j
                for j, s in enumerate(row)
                if s != row[j // size * size] + j % size or (s - j) % size
            )
            yield f"{request.name}: token {j} is in slot {row[j]}, page size {size}: {row}"


@invariant("R2", "the protected part of a request's row holds the tree's slots for its prefix")
def _protected_row_is_the_tree_s(state: State) -> Iterator[str]:
    import torch

    for request in state.requests:
        length = request.cache_protected_len
        if length % state.page_size or length > len(request.row):
            yield (
                f"{request.name} has {length} protected tokens of {len(request.row)}, page size "
                f"{state.page_size}"
            )
            continue
        values: list[torch.Tensor] = []
        index = state.place.get(request.last_node, -1)
        while index >= 0:
            node = state.view.nodes[index]
            if node.device is not None:
                values.append(node.device)
            index = node.parent
        path = torch.cat(values[::-1]) if values else state.slots[:0]
        row = request.row[:length]
        if not torch.equal(path, row.to(path.dtype)):
            yield (
                f"{request.name}: its row starts with {row.tolist()[:16]}, the path to its last "
                f"node has {path.tolist()[:16]} (lengths {length} and {len(path)})"
            )


@invariant(
    "R3",
    "row numbers of running requests are distinct and in range; free + used rows = size",
)
def _rows_are_distinct(state: State) -> Iterator[str]:
    seen: dict[int, str] = {}
    for request in state.requests:
        row = request.row_number
        if row is None:
            continue
        if row in seen:
            yield f"{request.name} and {seen[row]} both have row {row}"
        seen[row] = request.name


@invariant("C1", "each slot of a node holds the KV of the node's own prefix")
def _nodes_hold_their_own_prefix(state: State) -> Iterator[str]:
    if state.cached is None:
        return
    size, seen = state.page_size, set()
    for index, names in state.view.pages(size):
        device = state.view.nodes[index].device
        if device is None:
            continue
        for name, page in zip(names, (device[::size] // size).tolist(), strict=False):
            seen.add(name)
            if state.cached.get(name) != page:
                yield (
                    f"{state.name(index)} has page {page} for {_short(name)}, whose KV is in "
                    f"{'no page' if name not in state.cached else f'page {state.cached[name]}'}"
                )
    for name, page in state.cached.items():
        if name not in seen:
            yield f"page {page} was cached for {_short(name)} and not freed; no node has it"


def _short(name: tuple[str | None, tuple[Any, ...]]) -> str:
    space, elements = name
    return f"prefix {list(elements)}" + ("" if space is None else f" in {space!r}")
