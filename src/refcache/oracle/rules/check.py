"""Rules about a state, as functions of plain data: what holds at every boundary between two calls.

A :class:`State` is a tree's inspection view with who else owns pages. Each function yields one line
of evidence for each place where its rule does not hold. They see a whole state in one pass over its
nodes and a few tensor operations over all slots at once, so they run after every step at test
sizes, and every few hundred steps of a replay; :func:`check_sums` costs nothing and runs always.

Sentences and ids are in :mod:`refcache.oracle.rules.catalog`.
"""

from collections.abc import Iterable, Iterator

from refcache.oracle.rules.pages import PAGE_CHECKS
from refcache.oracle.rules.tree import TREE_CHECKS
from refcache.oracle.rules.violation import Violation, switched_off
from refcache.oracle.view.state import Check, State

CHECKS: dict[str, Check] = {**TREE_CHECKS, **PAGE_CHECKS}
"""Every check of a state, by id, in the order in which they run."""


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
