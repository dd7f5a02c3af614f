"""Each check of a two-tier state fires for the state it is for, alone, and for no legal one.

The counterpart of ``test_invariants.py``, for the functions of ``HOST_CHECKS``. A broken state
breaks one rule of the host tier in one place; no other check of ``HOST_CHECKS`` may see it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from refcache.oracle import CHECKS, NodeView, RequestView, State, TreeView, Violation, violations
from refcache.oracle.rules.host import HOST_CHECKS, HostState, InFlight, check_host_state
from refcache.oracle.rules.violation import without_rules
from refcache.oracle.view.host import HostNodeView, HostView, TransferView

Change = Callable[[HostState], HostState]


def slots(pages: list[int] | None) -> torch.Tensor | None:
    """Slots of pages of 2."""
    return None if pages is None else torch.tensor([p * 2 + i for p in pages for i in (0, 1)])


def node(
    handle: str,
    parent: int,
    key: list[int],
    device: list[int] | None,
    host: list[int] | None,
    lock: int = 0,
) -> NodeView:
    """A node with pages of 2 on each tier; ``handle`` names it."""
    first = tuple(key[:2])
    return NodeView(
        handle, parent, True, first, first, key, None, slots(device), slots(host), lock
    )  # fmt: skip


A, B, C, D, E, F, G, H = range(8)
WRITE = TransferView("write", 11, ("b", "c"), locks=True)
LOAD = TransferView("load", 12, ("d",), locks=True)


def legal() -> HostState:
    """Nine device pages, eight host pages, pages of 2.

    On both tiers: a [0 0]; below it b [1 1] > c [2 2 3 3], which a split made of one node while it
    is written, c locked by a request as well; d [4 4], which is being loaded. On the host only: e
    [5 5] > f [6 6]. On the device only, made by chunks: g [7 7] > h [8 8].
    """
    nodes = (
        node("a", -1, [0, 0], [1], [0], lock=3),
        node("b", A, [1, 1], [2], [1], lock=2),
        node("c", B, [2, 2, 3, 3], [3, 4], [2, 3], lock=2),
        node("d", A, [4, 4], [5], [4], lock=1),
        node("e", A, [5, 5], None, [5]),
        node("f", E, [6, 6], None, [6]),
        node("g", -1, [7, 7], [6], None),
        node("h", G, [8, 8], [7], None),
    )
    pages = {(): 0, (1, 1): 2, (1, 1, 2, 2): 3, (1, 1, 2, 2, 3, 3): 4, (4, 4): 5}
    cached = {(None, (0, 0, *k)): page or 1 for k, page in pages.items()}
    written = {
        (None, (0, 0, 1, 1)): (1, 2),
        (None, (0, 0, 1, 1, 2, 2)): (2, 3),
        (None, (0, 0, 1, 1, 2, 2, 3, 3)): (3, 4),
    }
    row = slots([1, 2, 3, 4, 8])
    assert row is not None
    state = State(
        view=TreeView(nodes, "root", evictable_size=4, protected_size=10,
                      evictable_leaves=frozenset({H})),
        page_size=2,
        pages=9,
        free=[9],
        holders=["c", "d", "c"],
        requests=[RequestView("request 0", row, 8, "c", 0)],
        cached={**cached, (None, (7, 7)): 6, (None, (7, 7, 8, 8)): 7},
    )  # fmt: skip
    free = torch.tensor([14, 15])
    host = HostView(
        size=16,
        free=free,
        transfers=(WRITE, LOAD),
        leaves=frozenset({"f"}),
        nodes={
            n.handle: HostNodeView(int(n.handle in "bcd"), int(n.handle not in "gh")) for n in nodes
        },
    )
    flying = [InFlight(WRITE, written), InFlight(LOAD, {(None, (0, 0, 4, 4)): (4, 5)})]
    return HostState(state, host, prefix_closed=True, in_flight=flying, threshold=1)


def having(*changes: Change) -> Change:
    """All of the changes."""

    def change(s: HostState) -> HostState:
        for one in changes:
            s = one(s)
        return s

    return change


def with_node(index: int, **fields: Any) -> Change:
    def change(s: HostState) -> HostState:
        nodes = list(s.state.view.nodes)
        nodes[index] = replace(nodes[index], **fields)
        view = replace(s.state.view, nodes=tuple(nodes))
        return replace(s, state=replace(s.state, view=view))

    return change


def with_host(**fields: Any) -> Change:
    return lambda s: replace(s, host=replace(s.host, **fields))


def with_counts(handle: str, **fields: int) -> Change:
    def change(s: HostState) -> HostState:
        nodes = {**s.host.nodes, handle: replace(s.host.nodes[handle], **fields)}
        return replace(s, host=replace(s.host, nodes=nodes))

    return change


def policy(**fields: Any) -> Change:
    return lambda s: replace(s, **fields)


def free(*host_slots: int) -> Change:
    return with_host(free=torch.tensor(host_slots))


def moved(device: bool, index: int, *numbers: int) -> Change:
    """A node at other slots, which nobody else has."""
    return with_node(index, **{"device" if device else "host": torch.tensor(numbers)})


BROKEN: dict[str, list[tuple[str, Change]]] = {
    "H1": [
        ("slot 15 of 16 belongs to nobody", free(14)),
        ("slot 0 of 16 belongs to the free list and node [0, 0]", free(0, 14, 15)),
        ("slot 14 of 16 belongs to the free list", free(14, 14, 15)),
        ("slot 16 of 16 belongs to the free list", free(14, 15, 16)),
        ("slot -1 of 16 belongs to the free list", free(-1, 14, 15)),
        (
            "slot 12 of 16 belongs to node [0, 0] > [5, 5] and node [0, 0] > [5, 5] > [6, 6]",
            having(moved(False, E, 12, 13), free(10, 11, 14, 15)),
        ),
    ],
    "H2": [
        ("[6, 6] has host slots [13, 12], page", moved(False, F, 13, 12)),
        (
            "[6, 6] has host slots [11, 12], page",
            having(moved(False, F, 11, 12), moved(False, E, 14, 15), free(10, 13)),
        ),
        (
            "3, 3] has host slots [4, 5, 6, 14], page size 2",
            having(moved(False, C, 4, 5, 6, 14), free(7, 15)),
        ),
        (
            "[6, 6] has host slots [12], page size 2",
            having(moved(False, F, 12), free(13, 14, 15)),
        ),
    ],
    "T3": [
        (
            "node [7, 7] > [8, 8] is on the host, its parent is not",
            having(moved(False, H, 14, 15), free(), with_counts("h", hit_count=1)),
        ),
        (
            "node [0, 0] > [4, 4] is on the host, its parent is not",
            having(with_node(A, host=None), free(0, 1, 14, 15), policy(no_room=True)),
        ),
    ],
    "A4": [
        ("[6, 6] is not listed as", with_host(leaves=frozenset())),
        ("[5, 5] is listed as", with_host(leaves=frozenset("ef"))),
        ("[4, 4] is listed as", with_host(leaves=frozenset("df"))),
        ("[8, 8] is listed as", with_host(leaves=frozenset("fh"))),
        ("'gone' is listed as an evictable host leaf, but", with_host(leaves={"f", "gone"})),
        ("[6, 6] is listed as", with_node(F, lock_ref=1)),
    ],
    "L3": [
        ("[1, 1] counts 0 users of its host slots, but 1", with_counts("b", host_ref=0)),
        ("3, 3] counts 2 users of its host slots, but 1", with_counts("c", host_ref=2)),
        ("[0, 0] counts -1 users of its host slots, but 0", with_counts("a", host_ref=-1)),
        (
            "[4, 4] counts 1 users of its host slots, but 2",
            with_host(transfers=(WRITE, LOAD, replace(LOAD, op=13))),
        ),
        ("[4, 4] counts 1 users of its host slots, but 0", with_host(transfers=(WRITE,))),
    ],
    "X1": [
        (
            "a load in flight uses host page 4 for prefix [0, 0, 4, 4], which the tree now has in "
            "page 7",
            having(moved(False, D, 14, 15), free(8, 9)),
        ),
        (
            "a write in flight uses host page 3 for prefix [0, 0, 1, 1, 2, 2, 3, 3], which the "
            "tree now has nowhere",
            having(with_node(C, host=None), free(4, 5, 6, 7, 14, 15), policy(no_room=True)),
        ),
        (
            "a write in flight uses host page 2 for prefix [0, 0, 1, 1, 2, 2], which the tree now "
            "has in page 3",
            moved(False, C, 6, 7, 4, 5),
        ),
        (  # nobody saw the copy with its slots
            "a load in flight uses host slots of node [0, 0] > [4, 4], which has none",
            having(with_node(D, host=None), free(8, 9, 14, 15), policy(no_room=True, in_flight=[])),
        ),
    ],
    "X2": [
        (
            "a load in flight uses device page 5 for prefix [0, 0, 4, 4], which the tree now has "
            "in page 9",
            moved(True, D, 18, 19),
        ),
        (
            "a write in flight uses device page 2 for prefix [0, 0, 1, 1], which the tree now has "
            "nowhere",
            with_node(B, device=None),
        ),
        (
            "a write in flight uses device slots of node [0, 0] > [1, 1], which has none",
            having(with_node(B, device=None), policy(in_flight=[])),
        ),
    ],
    "W1": [
        ("[4, 4] has a host copy after 0 hits of 1", with_counts("d", hit_count=0)),
        ("[8, 8] has no host copy after 1 hits of 1", with_counts("h", hit_count=1)),
        ("[0, 0] has a host copy after 1 hits of 2", policy(threshold=2)),
    ],
}  # fmt: skip


def fired(s: HostState) -> dict[str, list[str]]:
    found = {rule: list(check(s)) for rule, check in HOST_CHECKS.items()}
    return {rule: evidence for rule, evidence in found.items() if evidence}


def test_every_check_of_the_host_tier_is_tried() -> None:
    assert set(BROKEN) == set(HOST_CHECKS)
    assert not set(HOST_CHECKS) & set(CHECKS)


def test_silence_on_a_legal_state() -> None:
    assert fired(legal()) == {}
    assert list(violations(legal().state)) == []
    check_host_state(legal())


EACH = [(rule, *case) for rule, cases in BROKEN.items() for case in cases]


@pytest.mark.parametrize(("rule", "evidence", "broken"), EACH)
def test_fires(rule: str, evidence: str, broken: Change) -> None:
    found = fired(broken(legal()))
    assert set(found) == {rule}
    assert any(evidence in line for line in found[rule]), found[rule]


@pytest.mark.parametrize("rule", BROKEN)
def test_what_is_found_is_raised_unless_it_is_switched_off(rule: str) -> None:
    for _, broken in BROKEN[rule]:
        with pytest.raises(Violation) as caught:
            check_host_state(broken(legal()))
        assert caught.value.id == rule
        with without_rules(rule):
            check_host_state(broken(legal()))


def test_only_the_slots_that_are_wrong_are_named() -> None:
    assert len(fired(free(14)(legal()))["H1"]) == 1


def test_a_copy_is_looked_for_in_its_own_namespace() -> None:
    assert set(fired(with_node(D, extra_key="other")(legal()))) == {"X1", "X2"}


def test_a_copy_of_a_node_that_left_the_tree_is_found() -> None:
    gone = replace(LOAD, handles=("gone",))
    found = fired(having(with_host(transfers=(WRITE, gone)), with_counts("d", host_ref=0))(legal()))
    assert found == {
        "X1": ["a load in flight uses host slots of 'gone', which has none"],
        "X2": ["a load in flight uses device slots of 'gone', which has none"],
    }


UNUSUAL: dict[str, Change] = {
    "nothing cached": lambda s: HostState(
        State(TreeView((), "root", 0, 0, frozenset()), 2, 9, [*range(1, 10)], []),
        HostView(16, torch.arange(16), (), frozenset(), {}),
        prefix_closed=True,
        in_flight=[],
        threshold=1,
    ),
    "nothing in flight": having(
        with_host(transfers=()),
        policy(in_flight=[]),
        *(with_counts(handle, host_ref=0) for handle in "bcd"),
    ),
    "a write-back before its parent's, and nobody counts hits": having(
        moved(False, H, 14, 15), free(), policy(prefix_closed=False, threshold=None)
    ),
    "hits without a copy, there was no room": having(
        with_counts("h", hit_count=3), policy(no_room=True)
    ),
    "a page is moved by a load and written by nobody": having(
        moved(False, E, 14, 15), free(10, 11)
    ),
    "two loads of one node": having(
        with_host(transfers=(WRITE, LOAD, replace(LOAD, op=13))), with_counts("d", host_ref=2)
    ),
    "the free list is in another order": free(15, 14),
    # What follows breaks rules of one tier, and those say so (T2, T1, L2).
    "a node on no tier is no host leaf": having(
        with_node(F, host=None),
        free(12, 13, 14, 15),
        with_host(leaves=frozenset("e")),
        policy(no_room=True),
    ),
    "a child that is on the device only leaves its parent a host leaf": having(
        with_node(F, host=None, device=torch.tensor([18, 19])),
        free(12, 13, 14, 15),
        with_host(leaves=frozenset("e")),
        policy(no_room=True),
    ),
    "a locked node is no host leaf": having(
        with_node(F, lock_ref=1), with_host(leaves=frozenset())
    ),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_silence_on_unusual_but_legal_states(case: str) -> None:
    s = UNUSUAL[case](legal())
    assert fired(s) == {}
    check_host_state(s)
