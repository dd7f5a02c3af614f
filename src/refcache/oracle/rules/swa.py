"""Rules about a tree over a full and a sliding-window pool, at a boundary between two calls.

A :class:`WindowState` is the one-tier :class:`~refcache.oracle.view.state.State` (full KV, full
locks) with what the tree shows of its windows and with the mapping from full to window slots. The
rules of the plain tree hold as well. See :mod:`refcache.oracle.rules.catalog`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from refcache.oracle.rules.catalog import stated
from refcache.oracle.rules.mamba import list_order
from refcache.oracle.rules.violation import Violation, switched_off
from refcache.oracle.view.component import ComponentView
from refcache.oracle.view.state import State


@dataclass(frozen=True)
class WindowState:
    """What the checks look at.

    Attributes:
        window: how many tokens a window layer looks back.
        mapping: window slot of each full slot from 0 on; 0 where it has none.
        windows: each full page that has a window page, with that page; ``pages``: of the pool.
        available: free window slots, as the allocator says.
        holds: each lock that somebody holds: the handle, and what the lock call returned.
        private: window tokens that requests own alone.
    """

    state: State
    swa: ComponentView
    window: int
    mapping: Sequence[int]
    windows: Mapping[int, int]
    pages: int
    available: int
    holds: Sequence[tuple[Any, int | None]]
    private: int

    def node(self, index: int) -> Any:
        """What a node shows of its window."""
        return self.swa.nodes[self.state.view.nodes[index].handle]

    def path(self, handle: Any) -> Iterator[int]:
        """Indices of nodes from ``handle`` up to the root."""
        index = self.state.place.get(handle, -1)
        while index >= 0:
            yield index
            index = self.state.view.nodes[index].parent


WindowCheck = Callable[[WindowState], Iterator[str]]
SWA_CHECKS: dict[str, WindowCheck] = {}
swa_invariant = partial(stated, SWA_CHECKS)


def check_window_state(state: WindowState) -> None:
    """Raise the first :class:`Violation`."""
    for rule, check in SWA_CHECKS.items():
        for evidence in () if switched_off(rule) else check(state):
            raise Violation(rule, evidence)
    for evidence in () if switched_off("MB4") else window_lists(state):
        raise Violation("MB4", evidence)


@swa_invariant(
    "SW1",
    "each window slot has one owner: free, or one full slot, whose mapping names it; a slot "
    "without a window, and a free one, is mapped to 0",
)
def _windows_have_one_owner(s: WindowState) -> Iterator[str]:
    size = s.state.page_size
    for slot, window in enumerate(s.mapping):
        own = s.windows.get(slot // size)
        allowed = {0} if own is None else {0, own * size + slot % size}
        if window not in allowed:
            yield (
                f"slot {slot} is mapped to window slot {window}; its page has "
                f"{'no window' if own is None else f'window page {own}'}"
            )
    taken = Counter(window for window in s.mapping if window)
    for window, count in taken.items():
        if count > 1:
            yield f"window slot {window} belongs to {count} full slots"


@swa_invariant("SW2", "a node without a window is mapped to 0 everywhere, any other nowhere")
def _tombstones_are_unmapped(s: WindowState) -> Iterator[str]:
    for index, node in enumerate(s.state.view.nodes):
        slots = [] if node.device is None else node.device.tolist()
        mapped = [s.mapping[slot] for slot in slots]
        live = s.node(index).live
        if (live and 0 in mapped) or (not live and any(mapped)):
            yield (
                f"{s.state.name(index)} is {'live' if live else 'without a window'}; its slots "
                f"{slots} are mapped to {mapped}"
            )


@swa_invariant("SW3", "a leaf has its window")
def _leaves_are_live(s: WindowState) -> Iterator[str]:
    parents = {node.parent for node in s.state.view.nodes}
    for index in range(len(s.state.view.nodes)):
        if index not in parents and not s.node(index).live:
            yield f"{s.state.name(index)} is a leaf without its window"


@swa_invariant(
    "SW4",
    "window locks are below full locks, only on nodes with a window, and cover the last window of "
    "tokens before each holder's node",
)
def _window_locks_cover(s: WindowState) -> Iterator[str]:
    least: Counter[int] = Counter()
    for handle, _ in s.holds:
        covered = 0
        for index in s.path(handle):
            if covered >= s.window:
                break
            least[index] += 1
            covered += len(s.state.view.nodes[index].key)
    for index, node in enumerate(s.state.view.nodes):
        own = s.node(index)
        if own.lock_ref > node.lock_ref or (own.lock_ref and not own.live):
            yield (
                f"{s.state.name(index)} has {own.lock_ref} window locks, {node.lock_ref} full "
                f"locks and {'its' if own.live else 'no'} window"
            )
        if own.lock_ref < least[index]:
            yield (
                f"{s.state.name(index)} has {own.lock_ref} window locks; it is in the window of "
                f"{least[index]} holders"
            )


@swa_invariant(
    "SW6",
    "free, evictable and protected window tokens and those of requests are all there are; "
    "evictable and protected are those of live nodes without and with a window lock",
)
def _windows_add_up(s: WindowState) -> Iterator[str]:
    size = s.state.page_size
    true = [0, 0]
    for index, node in enumerate(s.state.view.nodes):
        own = s.node(index)
        if own.live:
            true[own.lock_ref > 0] += len(node.key)
    seen = [s.swa.evictable, s.swa.protected]
    if seen != true:
        yield (
            f"{seen[0]} window tokens evictable and {seen[1]} protected; live nodes have {true[0]} "
            f"unlocked and {true[1]} locked"
        )
    total = s.available + sum(seen) + s.private
    if total != s.pages * size:
        yield (
            f"{s.available} free + {seen[0]} evictable + {seen[1]} protected + {s.private} of "
            f"requests = {total} window tokens, but the pool has {s.pages * size}"
        )


@swa_invariant(
    "SW8",
    "a window lock ends at the one node with the holder's uuid, which is on its path; without a "
    "uuid it reaches the root",
)
def _uuids_are_on_the_path(s: WindowState) -> Iterator[str]:
    uuids = [s.node(i).uuid for i in range(len(s.state.view.nodes))]
    for uuid, count in Counter(uuids).items():
        if uuid is not None and count > 1:
            yield f"{count} nodes have the uuid {uuid}"
    least: Counter[int] = Counter()
    for handle, uuid in s.holds:
        path = list(s.path(handle))
        if uuid is not None and all(uuids[index] != uuid for index in path):
            yield f"a holder's window ends at uuid {uuid}, which no node of its path has"
        for index in path:
            least[index] += 1
            if uuid is not None and uuids[index] == uuid:
                break
    for index in range(len(uuids)):
        if s.node(index).lock_ref != least[index]:
            yield (
                f"{s.state.name(index)} has {s.node(index).lock_ref} window locks; by the uuids of "
                f"the holders {least[index]} reach it"
            )


def window_lists(s: WindowState) -> Iterator[str]:
    """MB4 for windows: the second list has the live nodes."""
    yield from list_order(s.state, s.swa)
