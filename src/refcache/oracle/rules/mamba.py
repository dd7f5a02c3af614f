"""Rules about a tree of tokens and recurrent states, at a boundary between two calls.

A :class:`MambaState` is the one-tier :class:`~refcache.oracle.view.state.State` (full KV, full
locks) with what the tree shows of its states and with the bytes of every slot. The rules of the
plain tree hold as well. See :mod:`refcache.oracle.rules.catalog`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

from refcache.oracle.rules.catalog import stated
from refcache.oracle.rules.violation import Violation, switched_off
from refcache.oracle.view.component import ComponentView
from refcache.oracle.view.state import State
from refcache.oracle.view.tree import PagePrefix


@dataclass(frozen=True)
class StateHolder:
    """A running request's states. ``slots``: all of them; ``computed``: its running slot, with the
    prefix whose state that is; ``tracked``: a buffer, with the prefix that it was taken at."""

    name: str
    slots: tuple[int, ...]
    computed: tuple[int, PagePrefix] | None
    tracked: tuple[int, PagePrefix] | None = None


@dataclass(frozen=True)
class MambaState:
    """What the checks look at.

    Attributes:
        size, free: of the state pool; slots that nobody owns.
        grid: lengths at which states may stand are multiples of it.
        differs: what a slot holds instead of the state after a prefix; "" when it is that.
    """

    state: State
    mamba: ComponentView
    size: int
    free: Sequence[int]
    holders: Sequence[StateHolder]
    grid: int
    differs: Callable[[int, PagePrefix], str]

    @cached_property
    def prefixes(self) -> list[PagePrefix]:
        """Of each node, in the order of the view."""
        nodes = self.state.view.nodes
        return [(nodes[i].extra_key, prefix) for i, prefix in self.state.view.paths()]

    def node(self, index: int) -> Any:
        """What a node shows of its state."""
        return self.mamba.nodes[self.state.view.nodes[index].handle]


MambaCheck = Callable[[MambaState], Iterator[str]]
MAMBA_CHECKS: dict[str, MambaCheck] = {}
mamba_invariant = partial(stated, MAMBA_CHECKS)


def check_mamba_state(state: MambaState) -> None:
    """Raise the first :class:`Violation`."""
    for rule, check in MAMBA_CHECKS.items():
        for evidence in () if switched_off(rule) else check(state):
            raise Violation(rule, evidence)


@mamba_invariant(
    "MB1",
    "each state slot has exactly one owner: free, one node, or one request, which has a running "
    "slot and perhaps buffers",
)
def _every_state_has_one_owner(s: MambaState) -> Iterator[str]:
    owners: dict[int, list[str]] = {slot: ["the free list"] for slot in s.free}
    for index in range(len(s.state.view.nodes)):
        slot = s.node(index).slot
        if slot is not None:
            owners.setdefault(slot, []).append(s.state.name(index))
    for holder in s.holders:
        for slot in holder.slots:
            owners.setdefault(slot, []).append(holder.name)
    for slot in sorted({*range(1, s.size + 1), *owners}):
        found = owners.get(slot, [])
        if len(found) != 1 or not 1 <= slot <= s.size:
            yield f"state slot {slot} belongs to {' and '.join(found) or 'nobody'}"


@mamba_invariant("MB2", "every leaf has a state")
def _leaves_have_states(s: MambaState) -> Iterator[str]:
    parents = {node.parent for node in s.state.view.nodes}
    for index in range(len(s.state.view.nodes)):
        if index not in parents and not s.node(index).live:
            yield f"{s.state.name(index)} is a leaf without a state"


@mamba_invariant(
    "MB3",
    "the state lock of a node counts the holders that end there, is below its full lock, and only "
    "a node with a state is locked so",
)
def _state_locks_count_holders(s: MambaState) -> Iterator[str]:
    ends = Counter(s.state.holders)
    for index, node in enumerate(s.state.view.nodes):
        own = s.node(index)
        if own.lock_ref != ends[node.handle]:
            yield (
                f"the state of {s.state.name(index)} has {own.lock_ref} locks, but "
                f"{ends[node.handle]} holders end there"
            )
        if own.lock_ref > node.lock_ref or (own.lock_ref and not own.live):
            yield (
                f"{s.state.name(index)} has {own.lock_ref} state locks, {node.lock_ref} full locks "
                f"and {'a' if own.live else 'no'} state"
            )


@mamba_invariant(
    "MB4",
    "one list has every node, the other every node with a state (or with its window), both in the "
    "order of their last use",
)
def _lists_have_all(s: MambaState) -> Iterator[str]:
    yield from list_order(s.state, s.mamba)


def list_order(state: State, component: ComponentView) -> Iterator[str]:
    """MB4: where one of the two lists is not as it must be."""
    every = [node.handle for node in state.view.nodes]
    live = [handle for handle in every if component.nodes[handle].live]
    yield from wrong_order(state, "full", component.full_order, every)
    yield from wrong_order(state, "second", component.order, live)


def wrong_order(
    state: State, what: str, order: Sequence[Any] | None, expected: Sequence[Any]
) -> Iterator[str]:
    """Where a list of nodes is not exactly ``expected``, least recently used first.

    A parent need not be older than its child: a split makes the lower half the most recent one,
    and what is below that half stays where it is.
    """
    if order is None:
        return
    if len(order) != len(expected) or set(order) != set(expected):
        yield f"the {what} list has {len(order)} nodes, the tree {len(expected)} of that kind"
        return
    access = {node.handle: node.access for node in state.view.nodes}
    for one, two in pairwise(order):
        earlier, later = access[one], access[two]
        if earlier is not None and later is not None and earlier > later:
            yield (
                f"in the {what} list {state.name(state.place[one])}, used at {earlier}, comes "
                f"before {state.name(state.place[two])}, used at {later}"
            )


@mamba_invariant(
    "MB5", "evictable and protected states are those of nodes without and with a state lock"
)
def _states_add_up(s: MambaState) -> Iterator[str]:
    own = [s.node(index) for index in range(len(s.state.view.nodes))]
    seen = (s.mamba.evictable, s.mamba.protected)
    true = (
        sum(node.live and not node.lock_ref for node in own),
        sum(node.live and node.lock_ref > 0 for node in own),
    )
    if seen != true:
        yield (
            f"{seen[0]} states evictable and {seen[1]} protected; nodes have {true[0]} unlocked "
            f"and {true[1]} locked"
        )


@mamba_invariant(
    "MB6", "the state in a node's slot is the state after exactly the tokens up to the node's end"
)
def _states_are_of_their_nodes(s: MambaState) -> Iterator[str]:
    for index, prefix in enumerate(s.prefixes):
        slot = s.node(index).slot
        wrong = "" if slot is None else s.differs(slot, prefix)
        if wrong:
            yield f"{s.state.name(index)} ends after {len(prefix[1])} tokens; its {wrong}"


@mamba_invariant(
    "MB7",
    "a request's running slot holds the state after exactly the tokens that it has computed or "
    "matched, beside the KV of as many",
)
def _running_states(s: MambaState) -> Iterator[str]:
    for holder in s.holders:
        for what, found in (("running", holder.computed), ("tracked", holder.tracked)):
            wrong = "" if found is None else s.differs(*found)
            if found is not None and wrong:
                yield (f"{holder.name} has KV of {len(found[1][1])} tokens; its {what} {wrong}")


@mamba_invariant("MB8", "states stand at lengths that are whole chunks (buffers), or at any")
def _on_the_grid(s: MambaState) -> Iterator[str]:
    for index, prefix in enumerate(s.prefixes):
        if s.node(index).live and len(prefix[1]) % s.grid:
            yield (
                f"{s.state.name(index)} has a state after {len(prefix[1])} tokens; states are "
                f"taken every {s.grid}"
            )


def leaf_prefixes(cached: Mapping[PagePrefix, int], size: int) -> Iterator[PagePrefix]:
    """Cached prefixes that no longer cached one starts with."""
    above = {(space, elements[:-size]) for space, elements in cached}
    yield from (prefix for prefix in cached if prefix not in above)
