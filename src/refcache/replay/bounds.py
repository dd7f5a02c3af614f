"""How many tokens a cache of a size can find: hits with the future known, and without a limit.

The optimal cache evicts the page that is found again furthest in the future; of pages that are
found at the same time (or never again) the one deepest in its prefix. It holds whole prefixes, as a
tree does, and no cache that holds whole prefixes finds more. Its requests come one by one,
in order, and their outputs take no room, so what a serving loop finds is at most this. It is a
bound to compare with, no policy: nobody knows the future.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from refcache.readers import TraceRequest

NEVER = 2**62


def optimal_hits(
    requests: Sequence[TraceRequest], page_size: int, device_tokens: int | None
) -> int | None:
    """Prompt tokens that an optimal cache of ``device_tokens`` finds, in whole pages.

    As in the loop, at least one token of a prompt is computed. A prompt that does not fit alone
    finds what it can and leaves the cache as it was.

    Args:
        page_size: tokens; a divisor or a multiple of the trace's block size.
        device_tokens: capacity, cut to whole pages; None is without bound.

    Returns:
        The tokens, or None where pages and blocks do not nest.

    >>> trace = [TraceRequest(0, 1024, 1, ids) for ids in ((0, 1), (2, 3), (0, 1))]
    >>> [optimal_hits(trace, 512, tokens) for tokens in (1024, 2048, None)]
    [0, 512, 512]
    """
    if not nests(requests, page_size):
        return None
    chains = _pages(requests, page_size)
    capacity = NEVER if device_tokens is None else device_tokens // page_size
    most = [(request.input_length - 1) // page_size for request in requests]
    next_uses = _next_uses(chains, most)
    cached: dict[int, int] = {}  # page -> the request that uses it next
    heap: list[tuple[int, int, int]] = []  # (-next use, -depth, page); old entries are passed over
    hits = 0
    for now, pages in enumerate(chains):
        found = next((i for i, page in enumerate(pages) if page not in cached), len(pages))
        hits += min(found, most[now])
        if len(pages) > capacity:
            continue
        room = capacity - len(cached) - sum(page not in cached for page in pages)
        pinned = set(pages)
        while room < 0:
            use, _, page = heappop(heap)
            if cached.get(page) == -use and page not in pinned:
                del cached[page]
                room += 1
        for depth, (page, use) in enumerate(zip(pages, next_uses[now], strict=True)):
            cached[page] = use
            heappush(heap, (-use, -depth, page))
    return hits * page_size


def nests(requests: Sequence[TraceRequest], page_size: int) -> bool:
    """Whether pages and blocks of a trace nest, so that pages are known by their blocks."""
    size = requests[0].block_size if requests else page_size
    return size % page_size == 0 or page_size % size == 0


def _pages(requests: Sequence[TraceRequest], page_size: int) -> list[list[int]]:
    """A number for each whole page of each prompt; equal numbers are equal prefixes."""
    nodes: dict[tuple[int, int], int] = {}
    chains = []
    for request in requests:
        size = request.block_size
        prefix, blocks = 0, []
        for block in request.hash_ids:
            prefix = nodes.setdefault((prefix, block), len(nodes) + 1)
            blocks.append(prefix)
        whole = request.input_length // page_size
        if page_size >= size:
            step = page_size // size
            chains.append([blocks[(i + 1) * step - 1] for i in range(whole)])
        else:
            share = size // page_size
            chains.append([blocks[i // share] * share + i % share for i in range(whole)])
    return chains


def _next_uses(chains: list[list[int]], most: list[int]) -> list[list[int]]:
    """For each page of each request, the next request that can find it, or NEVER.

    Of request i the first ``most[i]`` pages can be found; a page behind them is computed again
    whether it is cached or not.
    """
    following: dict[int, int] = {}
    uses: list[list[int]] = []
    for now in range(len(chains) - 1, -1, -1):
        uses.append([following.get(page, NEVER) for page in chains[now]])
        for page in chains[now][: most[now]]:
            following[page] = now
    return uses[::-1]
