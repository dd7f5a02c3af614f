"""Exact profiles: step by step, the target must decide as the reference does.

Invariants find corruption; they accept every legal choice, so they cannot see a changed *policy*:
another victim, another free page. Under a profile (``profile=`` of a driver) the same step is made
on the target and on the reference, and afterwards both must have made the same choices: the same
slots handed out, the same pages cached for the same prefixes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_turns = 0


def reference_turn() -> bool:
    """Whether the reference of a profile is being called: planted bugs do not act on it."""
    return _turns > 0


@contextmanager
def on_the_reference() -> Iterator[None]:
    """The block calls the reference of a profile."""
    global _turns
    _turns += 1
    try:
        yield
    finally:
        _turns -= 1


def difference(choices: dict[str, Any], reference: dict[str, Any]) -> str | None:
    """The first choice that differs, as evidence; None when all agree."""
    for name in sorted(choices.keys() | reference.keys()):
        mine, theirs = choices.get(name), reference.get(name)
        if mine != theirs:
            return f"{name}: {mine}, the reference has {theirs}"
    return None
