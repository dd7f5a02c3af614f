"""Misuse by kind: each is tried alone on a fresh cache, and what comes of it is seen by going on.

======== =====================================================================================
outcome  meaning
======== =====================================================================================
refused  it raised, and everything is as it was
ignored  nothing was raised, and everything is as it was; not legal with ``refuses_misuse``
accepted something is different: a page has two owners, or none, or slots were handed out
crash    an exception that is no refusal, at once or when the cache was used afterwards
======== =====================================================================================

After the misuse of an allocator every page that can be had is taken, one at a time: each must come
once, and none that a live sequence has. A tree goes on with requests from their start to their end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from refcache.errors import InvalidArgument, RefcacheError
from refcache.oracle.drivers.misuse import AllocatorMisuseDriver, TreeMisuseDriver
from refcache.oracle.rules.violation import Violation
from refcache.oracle.target.base import Target

PAGES = 3
PROMPT = (1, 1, 1, 2)
ALLOCATOR = {
    "free_free_page": (0,), "free_with_free_page": (0,), "free_dummy_page": (), "free_floats": (),
    "free_outside": (0,), "alloc_odd": (1,), "shrink": (0,), "wrong_sum": (0, 1),
    "wrong_last_loc": (0,), "last_loc_outside": (0,),
}  # fmt: skip
"""Steps of :class:`AllocatorMisuseDriver`, and how each is called."""
TREE = {
    "unlock_unlocked": (PROMPT,), "lock_stranger": (PROMPT,), "lock_evicted": (PROMPT,),
    "insert_unfit": ((2, 1, 2, 1, 2),), "write_outside_row": (0, 1),
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What came of one kind. ``steps``: the program; ``evidence``: what was seen, "" if nothing."""

    kind: str
    outcome: str
    evidence: str = ""
    steps: tuple[str, ...] = ()


class _Over(Exception):
    """The step ends here: what follows in it takes the cache as it was."""


class Watch:
    """Makes the misuses of one step, in the place of ``Trial.misused``.

    Attributes:
        seen: the worst outcome so far, "" when no misuse was made; ``evidence``: of it.
        named: slots that a ``free`` named which was not refused: the caller has let go of them.
    """

    def __init__(self, target: Target) -> None:
        errors = target.errors if isinstance(target.errors, tuple) else (target.errors,)
        self.refusals: tuple[type[Exception], ...] = (*errors, RefcacheError)  # an adapter's, too
        self.seen = self.evidence = ""
        self.named: set[int] = set()

    def __call__(self, what: str, function: Callable[..., Any], *args: Any) -> None:
        try:
            result = function(*args)
        except self.refusals as error:
            if not self.seen:
                self.seen, self.evidence = "refused", f"{what}: {error!r}"
            return
        except Exception as error:
            self.seen, self.evidence = "crash", f"{what}: {error!r}"
            raise _Over from error
        slots = result.tolist() if isinstance(result, torch.Tensor) else []
        self.seen = "accepted" if slots else "ignored"
        self.evidence = f"{what}: gave slots {slots}" if slots else what
        if slots or getattr(function, "__name__", "") == "free":
            self.named = {int(slot) for slot in args[0]} if not slots else set()
            raise _Over


def misuse_by_kind(target: Target) -> list[Outcome]:
    """Every kind that can be tried on the target's allocator and, if it has one, its tree.

    Raises:
        InvalidArgument: it has no allocator.
        Violation: the legal calls before the misuse were not right.
    """
    if "allocator" not in target.capabilities:
        raise InvalidArgument(f"misuse: target {target.name!r} has no allocator to misuse")
    parts: list[tuple[Any, dict[str, Any]]] = [(AllocatorMisuseDriver, ALLOCATOR)]
    parts += [(TreeMisuseDriver, TREE)] * ("tree" in target.capabilities)
    found = [
        _tried(make, target, kind, args) for make, kinds in parts for kind, args in kinds.items()
    ]
    return [outcome for outcome in found if outcome is not None]


def _tried(make: Any, target: Target, kind: str, args: tuple[Any, ...]) -> Outcome | None:
    d = make(target, page_size=2, size=2 * PAGES * (1 if make is AllocatorMisuseDriver else 4))
    if isinstance(d, AllocatorMisuseDriver):
        d.alloc(1)
        d.alloc(1)
        d.release(0)
    else:
        d.insert(PROMPT)
        d.admit(PROMPT)
        if kind != "write_outside_row":
            d.finish(0)
    watch = d.trial.misused = Watch(target)
    changed = ""
    try:
        getattr(d, kind)(*args)
    except _Over:
        pass
    except Violation as violation:
        changed = f"{violation.id}: {violation.evidence}"
    if not watch.seen:
        return None
    outcome, evidence = watch.seen, watch.evidence
    if outcome != "crash":
        try:
            damage = (
                _pages_after(d, watch.named)
                if isinstance(d, AllocatorMisuseDriver)
                else _requests_after(d)
            )
        except Exception as error:
            outcome, evidence = "crash", f"{evidence}; then {error!r}"
        else:
            damage = damage or changed
            outcome = "accepted" if damage else outcome
            evidence = f"{evidence}; then {damage}" if damage else evidence
    return Outcome(kind, outcome, evidence, tuple(d.log))


def _pages_after(d: AllocatorMisuseDriver, named: set[int]) -> str:
    """Take every page: what is wrong with those that come, "" if nothing."""
    size, pages = d.config.page_size, range(1, d.config.pages + 1)
    live = {slot // size for slots in d.sequences for slot in slots}
    gone = {slot // size for slot in named}
    seen: list[int] = []
    while len(seen) <= 2 * len(pages):
        slots = d.bench.subject.alloc(size)
        if slots is None or not len(slots):
            break
        seen.append(int(slots[0]) // size)
    told = f"a pool of {len(pages)} pages, of which {len(live)} are in use, hands out {seen}"
    for page in seen:
        if page not in pages:
            return f"{told}: page {page} is not of the pool"
        if page in live - gone or seen.count(page) > 1:
            return f"{told}: page {page} has two owners"
    lost = sorted({*pages} - live - gone - {*seen})
    return f"{told}: pages {lost} are lost" if lost else ""


def _requests_after(d: TreeMisuseDriver) -> str:
    """Requests start, are cached and end: the rule that is broken, "" if none is."""
    try:
        d.admit((*PROMPT, 2, 2))
        d.cache(0)
        d.evict(d.config.size)
        d.wind_down()
    except Violation as violation:
        return f"{violation.id}: {violation.evidence}"
    return ""
