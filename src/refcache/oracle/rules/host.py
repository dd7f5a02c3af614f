"""Rules about a two-tier state at a boundary between two calls; see
:mod:`refcache.oracle.rules.catalog`.

A :class:`HostState` is the one-tier :class:`~refcache.oracle.view.state.State` with the host view
and the copies in flight. A copy in flight is known by what it was submitted with: its host slots
and device slots must keep their owner until it is acknowledged (X1, X2).
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from refcache.oracle.rules.catalog import stated
from refcache.oracle.rules.violation import Violation, switched_off
from refcache.oracle.view.host import HostView, TransferView
from refcache.oracle.view.state import State
from refcache.oracle.view.tree import PagePrefix

Slots = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class InFlight:
    """A copy as it was submitted: slots of both tiers, and the prefix that each page stands for.

    ``pages``: (namespace, elements to the end of the page) -> (host page, device page).
    """

    transfer: TransferView
    pages: dict[PagePrefix, tuple[int, int]]


@dataclass(frozen=True)
class HostState:
    """What the host checks look at.

    Attributes:
        prefix_closed: the policy keeps host copies prefix-closed (write-through).
        in_flight: every copy that is not acknowledged, as it was submitted.
        threshold: hits until a node is written, or None when hits do not count.
        no_room: a write found no host room (or a parent without a copy) since the cache was empty.
        lent: host slots of prefetches, from their allocation until a node has them or they are
            freed.
    """

    state: State
    host: HostView
    prefix_closed: bool
    in_flight: Sequence[InFlight]
    threshold: int | None = None
    no_room: bool = False
    lent: Collection[int] = ()


HostCheck = Callable[[HostState], Iterator[str]]
HOST_CHECKS: dict[str, HostCheck] = {}
host_invariant = partial(stated, HOST_CHECKS)


def check_host_state(state: HostState) -> None:
    """Raise the first :class:`Violation`."""
    for rule, check in HOST_CHECKS.items():
        for evidence in () if switched_off(rule) else check(state):
            raise Violation(rule, evidence)


@host_invariant("H1", "each host slot has exactly one owner: free, one node, or a prefetch")
def _every_host_slot_has_one_owner(s: HostState) -> Iterator[str]:
    owners = Counter([*s.host.free.tolist(), *s.lent])
    for node in s.state.view.nodes:
        if node.host is not None:
            owners.update(node.host.tolist())
    if owners == Counter(range(s.host.size)):
        return
    free = set(s.host.free.tolist())
    for slot in sorted({*range(s.host.size), *owners}):
        if owners[slot] != 1 or not 0 <= slot < s.host.size:
            named = ["the free list"] * (slot in free) + ["a prefetch"] * (slot in s.lent)
            for index, node in enumerate(s.state.view.nodes):
                if node.host is not None and slot in node.host.tolist():
                    named.append(s.state.name(index))
            yield f"host slot {slot} of {s.host.size} belongs to {' and '.join(named) or 'nobody'}"


@host_invariant("H2", "a node's host slots, cut by page, are aligned ascending pages")
def _host_slots_are_whole_pages(s: HostState) -> Iterator[str]:
    size = s.state.page_size
    for index, node in enumerate(s.state.view.nodes):
        slots = [] if node.host is None else node.host.tolist()
        for start in range(0, len(slots), size):
            page = slots[start : start + size]
            if page[0] % size or page != list(range(page[0], page[0] + size)):
                yield f"{s.state.name(index)} has host slots {slots}, page size {size}"
                break


@host_invariant("T3", "under write-through, a node on the host has its parent on the host")
def _host_is_prefix_closed(s: HostState) -> Iterator[str]:
    nodes = s.state.view.nodes
    for index, node in enumerate(nodes):
        orphan = node.host is not None and node.parent >= 0 and nodes[node.parent].host is None
        if orphan and s.prefix_closed:
            yield f"{s.state.name(index)} is on the host, its parent is not"


@host_invariant(
    "A4",
    "the evictable host leaves are the unlocked nodes on the host only, without a child on "
    "the host",
)
def _host_leaf_set_is_exact(s: HostState) -> Iterator[str]:
    nodes = s.state.view.nodes
    parents = {node.parent for node in nodes if node.host is not None}
    known = {node.handle for node in nodes}
    for handle in s.host.leaves - known:
        yield f"{handle!r} is listed as an evictable host leaf, but is no node of the tree"
    for index, node in enumerate(nodes):
        expected = (
            node.device is None
            and node.host is not None
            and node.lock_ref == 0
            and index not in parents
        )
        if (node.handle in s.host.leaves) != expected:
            yield f"{s.state.name(index)} is {'not ' * expected}listed as an evictable host leaf"


@host_invariant(
    "L3",
    "a node counts one use of its host slots for each copy in flight that uses them",
)
def _host_references_count_operations(s: HostState) -> Iterator[str]:
    uses: Counter[object] = Counter()
    for transfer in s.host.transfers:
        uses.update(transfer.handles)
    for index, node in enumerate(s.state.view.nodes):
        seen = s.host.nodes[node.handle].host_ref
        if seen != uses[node.handle]:
            yield (
                f"{s.state.name(index)} counts {seen} users of its host slots, but "
                f"{uses[node.handle]} copies use them"
            )


@host_invariant(
    "X1",
    "the host slots of a queued or running copy keep their owner until it is acknowledged",
)
def _host_slots_in_flight_keep_their_owner(s: HostState) -> Iterator[str]:
    yield from _keep_their_owner(s, "host", 0)


@host_invariant(
    "X2",
    "the device pages of a queued or running copy keep their owner until it is acknowledged",
)
def _device_pages_in_flight_keep_their_owner(s: HostState) -> Iterator[str]:
    yield from _keep_their_owner(s, "device", 1)


def _keep_their_owner(s: HostState, tier: str, which: int) -> Iterator[str]:
    size, nodes = s.state.page_size, s.state.view.nodes
    for transfer in s.host.transfers:  # also those that were given up in the call that began them
        for handle in transfer.handles if tier in transfer.tiers else ():
            index = s.state.place.get(handle, -1)
            mine = None if index < 0 else getattr(nodes[index], tier)
            if mine is None:
                whose = repr(handle) if index < 0 else s.state.name(index)
                yield f"a {transfer.kind} in flight uses {tier} slots of {whose}, which has none"
    if not s.in_flight:
        return
    here: dict[PagePrefix, int] = {}
    for index, names in s.state.view.pages(size):
        slots = getattr(nodes[index], tier)
        if slots is not None:
            here.update(zip(names, (slots[::size] // size).tolist(), strict=False))
    for copy in s.in_flight:
        for name, pages in copy.pages.items():
            if here.get(name) != pages[which]:
                now = "nowhere" if name not in here else f"in page {here[name]}"
                yield (
                    f"a {copy.transfer.kind} in flight uses {tier} page {pages[which]} for prefix "
                    f"{list(name[1])}, which the tree now has {now}"
                )


@host_invariant(
    "W1",
    "under write-through, enough hits mean a host copy unless there was no room, and a host "
    "copy means enough hits",
)
def _hits_mean_copies(s: HostState) -> Iterator[str]:
    if s.threshold is None:
        return
    for index, node in enumerate(s.state.view.nodes):
        hits = s.host.nodes[node.handle].hit_count
        if node.host is not None and hits < s.threshold:
            yield f"{s.state.name(index)} has a host copy after {hits} hits of {s.threshold}"
        if node.host is None and hits >= s.threshold and not s.no_room:
            yield f"{s.state.name(index)} has no host copy after {hits} hits of {s.threshold}"
