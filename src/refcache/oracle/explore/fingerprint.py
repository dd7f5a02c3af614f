"""What of a state decides everything that can happen later, without its names.

Two states with one fingerprint are one state to the explorer. What counts: who owns what, locks,
the order of access or of creation by rank (not by time), hits up to the largest number that makes a
difference, priorities, free lists in their order, requests in their order. What does not: *names*,
which are tokens, named namespaces, pages and host slots; they are numbered in the order in which
the state mentions them. Requests keep their order, so a step means the same in both states once its
tokens and namespaces are translated (:func:`translated`).

Left out: bytes that nobody may read, and what the race tracker knows. The explorer goes on from a
sample of merged pairs and compares; that is the check of this module.
"""

import inspect
import marshal
from collections.abc import Callable, Iterable
from functools import cache
from hashlib import blake2b
from typing import Any, NamedTuple

from refcache.oracle.drivers.allocator import AllocatorDriver
from refcache.oracle.drivers.hicache.bench import HITS_UNTIL_WRITTEN
from refcache.oracle.drivers.hicache.driver import HiCacheDriver
from refcache.oracle.drivers.tree.driver import TreeDriver
from refcache.oracle.program.driver import Call, Driver
from refcache.oracle.view.tree import NodeView

DIGEST = 16
"""Bytes of a digest."""


class Names:
    """Numbers for names, by first mention."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}
        self.spaces: dict[str, int] = {}
        self.pages: dict[int, int] = {}
        self.host_pages: dict[int, int] = {}

    def token(self, token: int) -> int:
        return self.tokens.setdefault(token, len(self.tokens))

    def element(self, element: Any) -> Any:
        """A token, or a pair of tokens."""
        return tuple(map(self.token, element)) if type(element) is tuple else self.token(element)

    def key(self, elements: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(map(self.element, elements))

    def space(self, name: str | None) -> int:
        return -1 if name is None else self.spaces.setdefault(name, len(self.spaces))

    def page(self, page: int) -> int:
        return self.pages.setdefault(page, len(self.pages))

    def slots(self, slots: Iterable[int], size: int) -> tuple[int, ...]:
        return tuple(self.page(slot // size) * size + slot % size for slot in slots)

    def host_slots(self, slots: Iterable[int], size: int) -> tuple[int, ...]:
        pages = self.host_pages
        return tuple(
            pages.setdefault(slot // size, len(pages)) * size + slot % size for slot in slots
        )


class Fingerprint(NamedTuple):
    """A state without its names. ``whole``: everything that decides is in it, as far as the target
    can say; else states that differ may have one fingerprint."""

    digest: bytes
    names: Names
    whole: bool


def fingerprint(driver: Driver) -> Fingerprint:
    """The fingerprint of what ``driver`` drives, between two steps.

    Raises:
        KeyError: a kind of driver that no fingerprint is known for.
    """
    names = Names()
    kind = next(kind for kind in type(driver).__mro__ if kind in STATES)
    state, whole = STATES[kind](driver, names)
    digest = blake2b(marshal.dumps(state, 2), digest_size=DIGEST).digest()
    return Fingerprint(digest, names, whole)


# ---- allocator -----------------------------------------------------------------------------------


def _lists(driver: Any, allocator: Any, names: Names) -> tuple[Any, bool]:
    lists = driver.target.free_lists(allocator)
    return tuple(tuple(map(names.page, pages)) for pages in lists or ()), lists is not None


def allocator_state(driver: AllocatorDriver, names: Names) -> tuple[Any, bool]:
    """Sequences in their order, the free lists, an open free group."""
    bench, size = driver.bench, driver.config.page_size
    sequences = tuple(names.slots(slots, size) for slots in bench.sequences)
    queued = None if bench.ledger.queued is None else len(bench.ledger.queued)
    lists, whole = _lists(driver, bench.subject, names)
    return (sequences, queued, lists), whole


# ---- tree ----------------------------------------------------------------------------------------


class Order(NamedTuple):
    """What an eviction strategy goes by: the ``clock`` of a node, up to how many hits count, and
    whether priorities do."""

    clock: str
    hits: int = 0
    priority: bool = False


ENDLESS = 4
"""Hits that lfu tells apart: a state where a node has more is not gone on from."""

ORDERS = {
    "lru": Order("access"),
    "mru": Order("access"),
    "fifo": Order("created"),
    "filo": Order("created"),
    "lfu": Order("access", hits=ENDLESS),
    "slru": Order("access", hits=2),
    "priority": Order("access", priority=True),
}


def in_order(nodes: Iterable[NodeView], clock: str) -> tuple[list[int], bool]:
    """Indices of nodes from the oldest on, parents first; whether every node has a time."""
    depth: list[int] = []
    keys = []
    whole = True
    for index, node in enumerate(nodes):
        depth.append(depth[node.parent] + 1 if node.parent >= 0 else 0)
        time = getattr(node, clock)
        whole &= time is not None
        keys.append((0 if time is None else time, depth[index], index))
    keys.sort()
    return [index for _, _, index in keys], whole


def tree_state(driver: TreeDriver, names: Names) -> tuple[Any, bool]:
    """Requests in their order, nodes in that of the eviction strategy, holds, the free lists."""
    state, whole, _ = _tree_state(driver, names, lambda node, names: ())
    return state, whole


def hicache_state(driver: HiCacheDriver, names: Names) -> tuple[Any, bool]:
    """Both tiers: also host slots, visits up to the threshold, copies in flight in their order,
    what waits on the machine, and the loads that nobody has waited for yet."""
    bench, size = driver.bench, driver.config.page_size
    threshold = HITS_UNTIL_WRITTEN[driver.config.write_policy] or 0
    host = bench.host()

    def more(node: NodeView, names: Names) -> tuple[Any, ...]:
        slots = None if node.host is None else names.host_slots(node.host.tolist(), size)
        seen = host.nodes[node.handle]
        return slots, seen.host_ref, _upto(seen.hit_count, threshold)

    state, whole, place = _tree_state(driver, names, more)
    copies = tuple(
        (t.kind, tuple(place.get(handle, -1) for handle in t.handles)) for t in host.transfers
    )
    forwards = (bench.forwards.consumer >= 0, bench.forwards.loads)
    free = names.host_slots(host.free.tolist(), size)
    machine = tuple(driver.machine.pending())
    whole &= host.waiting is not None
    return (*state, copies, host.waiting, forwards, machine, free, bench.no_room), whole


def _tree_state(
    driver: TreeDriver, names: Names, more: Callable[[NodeView, Names], tuple[Any, ...]]
) -> tuple[tuple[Any, ...], bool, dict[Any, int]]:
    size, order = driver.config.page_size, ORDERS[driver.config.eviction_policy]
    state = driver.bench.state()
    nodes = state.view.nodes
    indices, whole = in_order(nodes, order.clock)
    place = {nodes[index].handle: number for number, index in enumerate(indices)}
    numbers = {index: number for number, index in enumerate(indices)}
    requests = tuple(
        (
            names.space(req.extra_key),
            names.key(req.tokens),
            len(req.origin_input_ids),
            req.computed,
            req.allocated,
            req.pending,
            req.cache_protected_len,
            getattr(req, "cache_counted_len", 0),
            req.priority if order.priority else 0,
            place.get(req.last_node, -1),
            names.slots(view.row.tolist(), size),
        )
        for req, view in zip(driver.requests, state.requests, strict=True)
    )
    shown = []
    for index in indices:
        node = nodes[index]
        shown.append(
            (
                numbers.get(node.parent, -1),
                names.space(node.extra_key),
                names.key(node.key),
                None if node.device is None else names.slots(node.device.tolist(), size),
                node.lock_ref,
                _upto(node.hits, order.hits),
                (node.priority or 0) if order.priority else 0,
                *more(node, names),
            )
        )
        whole &= not (order.hits and node.hits is None) and not (
            order.priority and node.priority is None
        )
    holds = tuple(place.get(handle, -1) for handle, _ in driver.holds)
    lists, known = _lists(driver, driver.allocator, names)
    return (requests, tuple(shown), holds, lists), whole and known, place


def _upto(hits: int | None, most: int) -> int:
    return 0 if not most or hits is None else min(hits, most)


def beyond(driver: Driver) -> bool:
    """Whether a node has more hits than are told apart, although there is no largest number that
    makes a difference: such a state is checked and not gone on from."""
    if not isinstance(driver, TreeDriver) or driver.config.eviction_policy != "lfu":
        return False
    return any((node.hits or 0) > ENDLESS for node in driver.bench.state().view.nodes)


State = Callable[[Any, Names], tuple[Any, bool]]
STATES: dict[type[Driver], State] = {
    AllocatorDriver: allocator_state,
    HiCacheDriver: hicache_state,
    TreeDriver: tree_state,
}


# ---- the same step in another state --------------------------------------------------------------


Move = tuple[Call, ...]
"""What is made at once: one step, or a few that seldom make sense alone."""


class Vocabulary(NamedTuple):
    """All names that steps may use."""

    tokens: tuple[int, ...]
    spaces: tuple[str, ...]


def translated(driver: Driver, move: Move, mine: Names, theirs: Names, all_: Vocabulary) -> Move:
    """``move``, made in a state with names ``mine``, for the state with names ``theirs``."""
    tokens = _bijection(mine.tokens, theirs.tokens, all_.tokens)
    spaces = _bijection(mine.spaces, theirs.spaces, all_.spaces)

    def value(kind: str, given: Any) -> Any:
        if kind == "tokens":
            return tuple(tokens[token] for token in given)
        if kind == "token":
            return tokens[given]
        return given if kind != "extra_key" or given is None else spaces[given]

    calls = []
    for name, args in move:
        kinds = _parameters(getattr(type(driver), name))
        calls.append((name, tuple(map(value, kinds, args))))
    return tuple(calls)


@cache
def _parameters(method: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(method).parameters)[1:]


def _bijection(mine: dict[Any, int], theirs: dict[Any, int], every: Iterable[Any]) -> Any:
    back = {number: name for name, number in theirs.items()}
    known = {name: back[number] for name, number in mine.items()}
    others = [name for name in every if name not in mine]
    return known | dict(zip(others, [n for n in every if n not in theirs], strict=True))
