"""Each check of a state fires for the state it is for, and for no legal one.

A check that cannot fail is a defect: every function of ``CHECKS`` has a state here that breaks it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from refcache.oracle import CHECKS, NodeView, RequestView, State, TreeView, Violation, violations
from refcache.oracle.rules.pages import _out_of_page


def node(
    handle: str, parent: int, key: list[int], pages: list[int] | None, **more: Any
) -> NodeView:
    """A node of a tree with pages of 2; ``handle`` names it."""
    slots = None if pages is None else torch.tensor([p * 2 + i for p in pages for i in (0, 1)])
    fields: dict[str, Any] = {
        "parent_agrees": True,
        "filed_under": tuple(key[:2]),
        "child_key": tuple(key[:2]),
        "extra_key": None,
    }
    return NodeView(handle, parent, key=key, device=slots, **fields | more)


def legal() -> State:
    """Pages of 2, six of them: [0 0] > [1 1 2 2] locked by a request, [0 0] > [3 3] a leaf."""
    nodes = (
        node("a", -1, [0, 0], [1], lock_ref=1),
        node("b", 0, [1, 1, 2, 2], [2, 3], lock_ref=1),
        node("c", 0, [3, 3], [4]),
    )
    row = torch.tensor([2, 3, 4, 5, 6, 7, 10])
    return State(
        view=TreeView(nodes, "root", evictable_size=2, protected_size=6,
                      evictable_leaves=frozenset({2})),
        page_size=2,
        pages=6,
        free=[6],
        holders=["b"],
        requests=[RequestView("request 0", row, 6, "b", 0)],
        cached={
            (None, (0, 0)): 1,
            (None, (0, 0, 1, 1)): 2,
            (None, (0, 0, 1, 1, 2, 2)): 3,
            (None, (0, 0, 3, 3)): 4,
        },
    )  # fmt: skip


def with_node(index: int, **changes: Any) -> Callable[[State], State]:
    def change(state: State) -> State:
        nodes = list(state.view.nodes)
        nodes[index] = replace(nodes[index], **changes)
        return replace(state, view=replace(state.view, nodes=tuple(nodes)))

    return change


def with_view(**changes: Any) -> Callable[[State], State]:
    return lambda state: replace(state, view=replace(state.view, **changes))


def with_request(**changes: Any) -> Callable[[State], State]:
    return lambda state: replace(state, requests=[replace(state.requests[0], **changes)])


def twice(state: State) -> State:
    first = state.requests[0]
    return replace(state, requests=[first, replace(first, name="request 1")])


ROW = torch.tensor([2, 3, 4, 5, 6, 7, 10])
BROKEN: dict[str, list[Callable[[State], State]]] = {
    "S1": [
        with_node(1, filed_under=(1, 2)),
        with_node(2, parent_agrees=False),
        with_view(root_key_len=1),
    ],
    "S2": [with_node(2, key=[3]), with_node(2, key=[])],
    "S3": [with_node(2, device=torch.tensor([8]))],
    "S4": [with_node(2, device=torch.tensor([8, 9, 10, 11])[:2])],
    "S5": [with_node(2, key=[1, 1]), with_node(2, extra_key="a")],
    "T1": [with_node(0, device=None, host=torch.tensor([0, 1]))],
    "T2": [with_node(2, device=None)],
    "L5": [lambda state: replace(state, holders=["gone"])],
    "L1": [
        with_node(0, lock_ref=2),
        with_node(1, lock_ref=0),
        lambda state: replace(state, holders=[]),
    ],
    "L2": [with_node(2, lock_ref=-1), with_node(1, device=None)],
    "A1": [with_view(evictable_size=4)],
    "A2": [with_view(protected_size=4)],
    "A3": [
        with_view(evictable_leaves=frozenset()),
        with_view(evictable_leaves=frozenset({1, 2})),
        with_view(evictable_leaves=frozenset({0, 2})),
        with_view(strangers=("a node that was removed",)),
    ],
    "P2": [
        with_node(2, device=torch.tensor([9, 8])),
        with_node(1, device=torch.tensor([4, 5, 7, 8])),
        with_node(2, device=torch.tensor([8, 8])),
        with_node(1, device=torch.tensor([4, 5, 6, 6])),
        with_node(0, device=torch.tensor([2])),
    ],
    "P0": [with_node(2, device=torch.tensor([0, 1])), lambda state: replace(state, free=[6, 7])],
    "P1": [
        lambda state: replace(state, free=[]),
        lambda state: replace(state, free=[4, 6]),
        lambda state: replace(state, queued=[6]),
        with_request(row=torch.tensor([2, 3, 4, 5, 6, 7, 8])),
    ],
    "R1": [
        with_request(row=torch.tensor([2, 3, 4, 5, 6, 7, 11])),
        with_request(row=torch.tensor([2, 3, 4, 4, 6, 7, 10])),
    ],
    "R2": [
        with_request(row=torch.tensor([2, 3, 4, 5, 8, 9, 10])),
        with_request(cache_protected_len=4),
        with_request(cache_protected_len=5),
    ],
    "R3": [twice],
    "C1": [
        lambda state: replace(state, cached={**state.cached, (None, (0, 0, 3, 3)): 5}),  # type: ignore[dict-item]
        lambda state: replace(state, cached={**state.cached, (None, (7, 7)): 6}),  # type: ignore[dict-item]
    ],
}  # fmt: skip


def fired(state: State) -> list[Violation]:
    return list(violations(state, BROKEN))


def test_every_check_of_one_tier_is_tried() -> None:
    assert set(BROKEN) == set(CHECKS)


def test_silence_on_a_legal_state() -> None:
    assert fired(legal()) == []


@pytest.mark.parametrize(
    ("rule", "broken"), [(rule, change) for rule, changes in BROKEN.items() for change in changes]
)
def test_fires(rule: str, broken: Callable[[State], State]) -> None:
    found = {violation.id: violation for violation in fired(broken(legal()))}
    assert rule in found
    assert found[rule].evidence
    assert found[rule].sentence in str(found[rule])


UNUSUAL: dict[str, Callable[[State], State]] = {
    "nothing cached": lambda state: State(
        TreeView((), "root", 0, 0, frozenset()), 2, 6, [1, 2, 3, 4, 5, 6], []
    ),
    "the root is held": lambda state: replace(state, holders=["b", "root", "root"]),
    "a tree that keeps no leaf set": with_view(evictable_leaves=None),
    "pages wait in a free group": lambda state: replace(state, free=[], queued=[6]),
    "the free list is a tensor": lambda state: replace(state, free=torch.tensor([6])),
    "nobody recorded what is cached": lambda state: replace(state, cached=None),
    "a node on both tiers": with_node(2, host=torch.tensor([0, 1])),
    "equal first pages in two places": with_node(2, key=[0, 0]),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_silence_on_unusual_but_legal_states(case: str) -> None:
    state = UNUSUAL[case](legal())
    if case == "equal first pages in two places":
        state = replace(state, cached=None)
    if case == "a node on both tiers":
        state = replace(state, cached=None)
    assert fired(state) == []


@pytest.mark.parametrize("size", [2, 3, 64, 50_000])
def test_every_block_of_a_long_row_is_looked_at(size: int) -> None:
    slots = torch.arange(size, 3 * size + 60_000 // size * size)
    assert not _out_of_page(slots, size)
    for place in (0, 1, len(slots) // 2, len(slots) - 1):
        broken = slots.clone()
        broken[place] += 1
        assert _out_of_page(broken, size), place
    assert _out_of_page(slots[1:], size)  # whole runs that do not start a page
