"""Rules about a state, as functions of plain data: what holds at every boundary between two calls.

A :class:`State` is a tree's inspection view with who else owns pages. Each function yields one line
of evidence for each place where its rule does not hold. They see a whole state in one pass over its
nodes and a few tensor operations over all slots at once, so they run after every step at test
sizes, and every few hundred steps of a replay; :func:`check_sums` costs nothing and runs always.

Sentences and ids are in :mod:`refcache.oracle.catalog`.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from refcache.oracle.view import NodeView, TreeView
from refcache.oracle.violation import Violation, switched_off

Check = Callable[["State"], Iterator[str]]
CHECKS: dict[str, Check] = {}
"""Every check of a state, by id, in the order in which they run."""
BLOCK = 1 << 14  # slots compared at once: what fits into the processor's cache


@dataclass(frozen=True)
class RequestView:
    """A running request: its row up to the last slot that it was given, and what it has locked.

    Attributes:
        row: integer slots ``[allocated]``.
        cache_protected_len: tokens of the row that the tree owns.
        last_node: the handle it has locked; None for a request that holds none.
    """

    name: str
    row: torch.Tensor
    cache_protected_len: int
    last_node: Any
    row_number: int | None = None


@dataclass(frozen=True)
class State:
    """What the checks look at. ``pages`` counts the pool's pages, numbered from 1.

    Attributes:
        free, queued: pages on the free and release lists, and in an open free group.
        requests: the running requests.
        holders: handles that are locked, one entry a lock; each request's is one of them.
        cached: for each page prefix (namespace, elements), the page that must hold it; None when
            nobody recorded it (a replay).
    """

    view: TreeView
    page_size: int
    pages: int
    free: Sequence[int] | torch.Tensor
    holders: Sequence[Any]
    requests: Sequence[RequestView] = ()
    queued: Iterable[int] = ()
    cached: Mapping[tuple[str | None, tuple[Any, ...]], int] | None = None

    @cached_property
    def slots(self) -> torch.Tensor:
        """Device slots of all nodes, one after the other."""
        values = [node.device for node in self.view.nodes if node.device is not None]
        return torch.cat(values) if values else torch.zeros(0, dtype=torch.int64)

    @cached_property
    def place(self) -> dict[Any, int]:
        return {node.handle: index for index, node in enumerate(self.view.nodes)}

    @cached_property
    def owners(self) -> list[tuple[str, list[int]]]:
        """Everybody who owns pages, with the pages."""
        size = self.page_size
        free = self.free.tolist() if isinstance(self.free, torch.Tensor) else list(self.free)
        owners = [("the free list", free), ("the open free group", list(self.queued))]
        owners.append(("the tree", [slot // size for slot in self.slots[::size].tolist()]))
        for request in self.requests:
            own = request.row[request.cache_protected_len :: size].tolist()
            owners.append((request.name, [slot // size for slot in own]))
        return owners

    def name(self, index: int) -> str:
        """A node, for people: its path of keys from the root."""
        if index < 0:
            return "the root"
        path: list[str] = []
        node = self.view.nodes[index]
        space = "" if node.extra_key is None else f" in {node.extra_key!r}"
        while True:
            head = list(node.key)[:8]
            path.append(f"{head}{'...' if len(node.key) > 8 else ''}")
            if node.parent < 0:
                return "node " + " > ".join(reversed(path)) + space
            node = self.view.nodes[node.parent]


def invariant(rule: str) -> Callable[[Check], Check]:
    """Register a function of a state as the check of ``rule``."""

    def register(check: Check) -> Check:
        CHECKS[rule] = check
        return check

    return register


def check_state(state: State, rules: Iterable[str] | None = None) -> None:
    """Raise the first :class:`Violation` among ``rules`` (default: all of them)."""
    for violation in violations(state, rules):
        if not switched_off(violation.id):
            raise violation


def violations(state: State, rules: Iterable[str] | None = None) -> Iterator[Violation]:
    """Every violation, with its evidence."""
    for rule in CHECKS if rules is None else rules:
        for evidence in CHECKS[rule](state):
            yield Violation(rule, evidence)


def check_sums(available: int, evictable: int, protected: int, private: int, size: int) -> None:
    """P3 from four counts of tokens; ``private`` counts whole pages of requests."""
    seen = available + evictable + protected + private
    if seen != size:
        raise Violation(
            "P3",
            f"{available} free + {evictable} evictable + {protected} protected + {private} private "
            f"= {seen} tokens, but the pool has {size}",
        )


@invariant("S1")
def _filed_where_they_belong(state: State) -> Iterator[str]:
    if state.view.root_key_len:
        yield f"the root has a key of {state.view.root_key_len} elements"
    for index, node in enumerate(state.view.nodes):
        if node.filed_under != node.child_key:
            yield f"{state.name(index)} is filed under {node.filed_under}, not {node.child_key}"
        if not node.parent_agrees:
            yield f"{state.name(index)} is listed by {state.name(node.parent)}, not its parent"


@invariant("S2")
def _keys_fill_pages(state: State) -> Iterator[str]:
    for index, node in enumerate(state.view.nodes):
        if not len(node.key) or len(node.key) % state.page_size:
            yield (
                f"{state.name(index)} has a key of {len(node.key)} elements, "
                f"page size {state.page_size}"
            )


@invariant("S3")
def _one_slot_an_element(state: State) -> Iterator[str]:
    for index, node in enumerate(state.view.nodes):
        for tier, value in (("device", node.device), ("host", node.host)):
            if value is not None and len(value) != len(node.key):
                yield (
                    f"{state.name(index)} has {len(value)} {tier} slots for {len(node.key)} "
                    "elements"
                )


@invariant("S4")
def _slots_own_their_storage(state: State) -> Iterator[str]:
    for index, node in enumerate(state.view.nodes):
        value = node.device
        if value is not None and value.untyped_storage().nbytes() > value.nbytes:
            yield f"the slots of {state.name(index)} are a view of a larger tensor"


@invariant("S5")
def _siblings_differ(state: State) -> Iterator[str]:
    seen: dict[tuple[int, str | None, Hashable], int] = {}
    for index, node in enumerate(state.view.nodes):
        first = (node.parent, node.extra_key, node.first_page(state.page_size))
        if first in seen:
            yield f"{state.name(index)} and {state.name(seen[first])} start with the same page"
        seen[first] = index
        if node.parent >= 0 and state.view.nodes[node.parent].extra_key != node.extra_key:
            yield f"{state.name(index)} hangs below another namespace, {state.name(node.parent)}"


@invariant("T1")
def _device_is_prefix_closed(state: State) -> Iterator[str]:
    nodes = state.view.nodes
    for index, node in enumerate(nodes):
        if node.device is not None and node.parent >= 0 and nodes[node.parent].device is None:
            yield f"{state.name(index)} is on the device, its parent is not"


@invariant("T2")
def _every_node_is_somewhere(state: State) -> Iterator[str]:
    for index, node in enumerate(state.view.nodes):
        if node.device is None and node.host is None:
            yield f"{state.name(index)} has neither device nor host slots"


@invariant("L5")
def _holders_are_reachable(state: State) -> Iterator[str]:
    for handle in state.holders:
        if handle != state.view.root and handle not in state.place:
            yield f"{handle!r} is held, but is no node of the tree"


@invariant("L1")
def _locks_count_holders(state: State) -> Iterator[str]:
    nodes = state.view.nodes
    held = Counter(state.place[h] for h in state.holders if h in state.place)
    below = [held[index] for index in range(len(nodes))]
    for index in reversed(range(len(nodes))):
        if nodes[index].parent >= 0:
            below[nodes[index].parent] += below[index]
    for index, node in enumerate(nodes):
        if node.lock_ref != below[index]:
            yield (
                f"{state.name(index)} has lock count {node.lock_ref}, but {below[index]} holders "
                "at or below it"
            )


@invariant("L2")
def _locked_stays_on_device(state: State) -> Iterator[str]:
    for index, node in enumerate(state.view.nodes):
        if node.lock_ref < 0 or (node.lock_ref > 0 and node.device is None):
            where = "on the device" if node.device is not None else "not on the device"
            yield f"{state.name(index)} has lock count {node.lock_ref} and is {where}"


@invariant("A1")
def _evictable_size_adds_up(state: State) -> Iterator[str]:
    yield from _size(state, "evictable_size", state.view.evictable_size, locked=False)


@invariant("A2")
def _protected_size_adds_up(state: State) -> Iterator[str]:
    yield from _size(state, "protected_size", state.view.protected_size, locked=True)


def _size(state: State, name: str, seen: int, locked: bool) -> Iterator[str]:
    on_device = [n for n in state.view.nodes if n.device is not None]
    expected = sum(len(n.key) for n in on_device if (n.lock_ref > 0) == locked)
    if seen != expected:
        yield f"{name}() = {seen}, but the nodes hold {expected} such tokens"


@invariant("A3")
def _leaf_set_is_exact(state: State) -> Iterator[str]:
    if state.view.evictable_leaves is None:
        return
    for stranger in state.view.strangers:
        yield f"{stranger} is listed as an evictable leaf, but is no node of the tree"
    nodes = state.view.nodes
    parents = {node.parent for node in nodes if node.device is not None}
    for index, node in enumerate(nodes):
        expected = _unlocked(node) and index not in parents
        if (index in state.view.evictable_leaves) != expected:
            yield f"{state.name(index)} is {'not ' * expected}listed as an evictable leaf"


def _unlocked(node: NodeView) -> bool:
    return node.device is not None and node.lock_ref == 0


@invariant("P2")
def _slots_are_whole_pages(state: State) -> Iterator[str]:
    if not _out_of_page(state.slots, state.page_size):
        return
    for index, node in enumerate(state.view.nodes):
        if node.device is not None and _out_of_page(node.device, state.page_size, whole=True):
            slots = node.device.tolist()
            yield f"{state.name(index)} has slots {slots}, page size {state.page_size}"


def _out_of_page(slots: torch.Tensor, size: int, whole: bool = False) -> bool:
    """Whether some slot is not the next of the page that its run of ``size`` starts."""
    if whole and len(slots) % size:
        return True
    if size == 1:
        return False
    within = torch.arange(size, dtype=slots.dtype)
    for part in torch.split(slots, BLOCK // size * size or size):
        first = part[::size]
        expected = (first[:, None] + within).flatten()[: len(part)]
        if not torch.equal(part, expected) or int((first % size).count_nonzero()):
            return True
    return False


@invariant("P0")
def _pages_are_in_the_pool(state: State) -> Iterator[str]:
    for owner, pages in state.owners:
        bad = [page for page in pages if not 1 <= page <= state.pages]
        if bad:
            yield f"page {bad[0]} belongs to {owner}; pages are 1 to {state.pages}"


@invariant("P1")
def _every_page_has_one_owner(state: State) -> Iterator[str]:
    pages = [page for _, mine in state.owners for page in mine]
    if len(pages) == state.pages == len(set(pages)):
        return
    counts = Counter(pages)
    for page in range(1, state.pages + 1):
        if counts[page] != 1:
            named = [owner for owner, mine in state.owners for _ in range(mine.count(page))]
            yield f"page {page} belongs to {' and '.join(named) or 'nobody'}"


@invariant("R1")
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


@invariant("R2")
def _protected_row_is_the_tree_s(state: State) -> Iterator[str]:
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


@invariant("R3")
def _rows_are_distinct(state: State) -> Iterator[str]:
    seen: dict[int, str] = {}
    for request in state.requests:
        row = request.row_number
        if row is None:
            continue
        if row in seen:
            yield f"{request.name} and {seen[row]} both have row {row}"
        seen[row] = request.name


@invariant("C1")
def _nodes_hold_their_own_prefix(state: State) -> Iterator[str]:
    if state.cached is None:
        return
    size, nodes = state.page_size, state.view.nodes
    seen = set()
    for index, prefix in state.view.paths():
        node = nodes[index]
        if node.device is None:
            continue
        pages = (node.device[::size] // size).tolist()
        start = len(prefix) - len(node.key)
        for k, page in enumerate(pages):
            name = (node.extra_key, prefix[: start + (k + 1) * size])
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
