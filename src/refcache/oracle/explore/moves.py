"""The steps that are tried from a state, for each kind of driver, at a tiny size.

A list of moves is a function of a driver: every step that may change something, with every argument
that matters. Names that the state does not mention are alike, so of these only the first is used:
what another would lead to is the same state under other names. A match of what is cached up to some
page stands for all matches that end there.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations, product
from typing import Any

from refcache.oracle.drivers.allocator import AllocatorDriver
from refcache.oracle.drivers.hicache.driver import HiCacheDriver
from refcache.oracle.drivers.tree.driver import TreeDriver
from refcache.oracle.explore.fingerprint import Move, Names, Vocabulary
from refcache.oracle.program.driver import Call

Moves = Callable[[Any, Names, Vocabulary], Iterable[Move]]


def one_by_one(steps: Callable[[Any, Names, Vocabulary], Iterable[Call]]) -> Moves:
    """Every step is a move of its own."""
    return lambda d, names, every: (((name, args),) for name, args in steps(d, names, every))


def allocator_steps(d: AllocatorDriver, names: Names, every: Vocabulary) -> Iterator[Call]:
    """All of an allocator's steps: growth of one and of two sequences by up to a page and a token,
    frees of a tail, of one slot a page and of several at once, groups, drafts."""
    size, pages, queued = d.config.page_size, d.config.pages, d.bench.ledger.queued
    count = len(d.bench.sequences)
    for n in range(1, pages + 1):
        yield "alloc", (n,)
    lengths = sorted({1, size - 1, size, size + 1} - {0})
    for i in range(count + 1):
        for n in lengths:
            yield "extend", (((i, n),),)
    for i, j in combinations(range(count + 2), 2):
        for n, m in ((1, 1), (1, size), (size, 1)):
            yield "extend", (((i, n), (j, m)),)
    for i in range(count):
        yield "decode", ((i,),)
        yield "release", (i,)
        if len(d.bench.sequences[i]) > size:
            yield "release", (i, size)
        if size > 1:
            yield "release", (i, 0, True)
    if count > 1:
        yield "decode", (tuple(range(count)),)
        yield "release_together", (tuple(range(count)),)
        yield "release_together", ((1, 0), 3)
    yield ("begin_group", ()) if queued is None else ("end_group", ())
    if queued is None:
        yield "draft", (1,)
        yield "draft", (2,)
    yield "sort", ()
    yield "drain", ()
    yield "clear", ()


def strings(every: Sequence[int], known: Iterable[int], most: int, size: int) -> list[Any]:
    """Token strings of up to ``most`` tokens; of unknown tokens the first comes first.

    With pages of several tokens only the last token of a page varies: pages can differ, and be
    left at any offset.
    """
    found: dict[tuple[int, ...], None] = {}
    for length in range(1, most + 1):
        for word in product(every, repeat=-(-length // size)):
            if fresh_in_order(word, every, known):
                tokens = [token for last in word for token in [every[0]] * (size - 1) + [last]]
                found[tuple(tokens[:length])] = None
    return list(found)


def fresh_in_order(word: Sequence[Any], every: Sequence[Any], known: Iterable[Any]) -> bool:
    """Whether the unknown names in ``word`` come in the order of ``every``."""
    fresh = [name for name in every if name not in known]
    seen = list(dict.fromkeys(name for name in word if name in fresh))
    return seen == fresh[: len(seen)]


def spaces(every: Sequence[str], known: Iterable[str]) -> list[str | None]:
    """No namespace, the known ones, and the first unknown one."""
    return [None, *(name for name in every if fresh_in_order((name,), every, known))]


def bare_steps(d: TreeDriver, names: Names, every: Vocabulary) -> Iterator[Call]:
    """The steps that are single calls: no request runs."""
    size, policy = d.config.page_size, d.config.eviction_policy
    words = strings(every.tokens, names.tokens, d.config.size, size)
    chunked = (False, True) if policy in ("lfu", "slru") else (False,)
    for space, word, chunk, rank in product(
        spaces(every.spaces, names.spaces), words, chunked, _ranks(d)
    ):
        if len(word) % size == 0:
            yield "insert", (word, space, chunk, rank)
    for space, elements in d.ledger.cached:
        yield "match", (elements, space)
        yield "lock_and_unlock", (elements, space)
        if not d.holds:
            yield "hold", (elements, space)
    if d.holds:
        yield "unhold", (0,)
    for pages in range(1, d.config.pages + 1):
        yield "evict", (pages * size,)
    if not d.requests and not d.holds:
        yield "reset", ()


def _ranks(d: TreeDriver) -> tuple[int, ...]:
    return (0, 1) if d.config.eviction_policy == "priority" else (0,)


def request_steps(d: TreeDriver, names: Names, every: Vocabulary) -> Iterator[Call]:
    """The steps of requests; a prompt comes whole, or in chunks of one token. And evictions."""
    if len(d.requests) < d.config.max_requests:
        words = strings(every.tokens, names.tokens, d.config.size, d.config.page_size)
        for space, word, rank in product(spaces(every.spaces, names.spaces), words, _ranks(d)):
            yield "admit", (word, space, None, rank)
            if len(word) > 1:
                yield "admit", (word, space, 1, rank)
    for i, req in enumerate(d.requests):
        if not req.prefilled:
            yield "proceed", (i,)
            yield "proceed", (i, 1)
        if req.pending:
            yield "cache", (i,)
        if req.prefilled:
            yield "finish", (i,)
            for token in every.tokens:
                if fresh_in_order((token,), every.tokens, names.tokens):
                    yield "decode", (i, token)
            yield "reserve", (i, 1)
        yield "abort", (i,)
        yield "retract", (i,)
    if len(d.requests) > 1:
        yield "finish_together", (tuple(range(len(d.requests))),)
    for pages in range(1, d.config.pages + 1):
        yield "evict", (pages * d.config.page_size,)


LONG = 8
"""Launches that one move runs on a stream, at most: a copy ends in one move."""


def hicache_moves(d: HiCacheDriver, names: Names, every: Vocabulary) -> Iterator[Move]:
    """All of a two-tier tree's steps, with a few in one: a request served from beginning to end,
    one for a prompt that is on the host only, one stream that runs to its end."""
    size, c = d.config.page_size, d.config
    words = strings(every.tokens, names.tokens, c.size, size)
    rooms = spaces(every.spaces, names.spaces)
    count = len(d.requests)
    bare = d.target.takes_bare_calls
    for space, word in product(rooms, words):
        if bare and len(word) % size == 0:
            yield (("insert", (word, space)),)
        if count < c.max_requests:
            yield (("admit", (word, space)),)
            yield ("admit", (word, space)), ("finish", (count,))
    for i, req in enumerate(d.requests):
        if req.pending:
            yield (("cache", (i,)),)
        if req.prefilled:
            yield (("finish", (i,)),)
            for token in every.tokens:
                if fresh_in_order((token,), every.tokens, names.tokens):
                    yield (("decode", (i, token)),)
        yield (("abort", (i,)),)
    for tokens, space in _on_host_only(d):
        yield (("load_back", (tokens, space)),)
        yield (("load_back", (tokens, space, None, False)),)
        yield (("load_back", (tokens, space, size)),)
        if count < c.max_requests:
            for token in every.tokens:
                if fresh_in_order((token,), every.tokens, names.tokens):
                    yield (("admit", ((*tokens, token), space)),)
                    yield ("admit", ((*tokens, token), space)), ("finish", (count,))
    for space, elements in d.ledger.cached:
        yield (("match", (elements, space)),)
        if not d.holds:
            yield (("hold", (elements, space)),)
    if d.holds:
        yield (("unhold", (0,)),)
    for pages in range(1, c.pages + 1):
        yield (("evict", (pages * size,)),)
    yield (("start_loads", ()),)
    yield (("poll", ()),)
    for stream in range(len(d.machine.runnable())):
        yield (("work", ((stream,),)),)
        yield (("work", ((stream,) * LONG,)),)
    yield (("settle", ()),)
    if not d.requests and not d.holds:
        yield (("reset", ()),)


def _on_host_only(d: HiCacheDriver) -> list[tuple[tuple[int, ...], str | None]]:
    """Tokens and namespaces of the nodes that are on the host only."""
    count = sum(node.device is None for node in d.bench.state().view.nodes)
    found = [d.bench.on_host_only(which) for which in range(count)]
    return [known for known in found if known is not None]


allocator_moves = one_by_one(allocator_steps)
bare_moves = one_by_one(bare_steps)
request_moves = one_by_one(request_steps)
