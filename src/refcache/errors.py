"""Named errors: every refusal of a public call is one of these.

A call that raises leaves the state as it was. "Not enough space" is a result (``None``), never an
error. Each message says what was seen, where, and what was expected, in that order.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

FEW = 20
"""So many names are listed next to the closest one; more would hide it."""


class RefcacheError(Exception):
    """Base of every error raised on purpose by refcache."""


class InvalidArgument(RefcacheError, ValueError):
    """An argument has the wrong value, dtype, shape or alignment."""


class UnknownName(InvalidArgument):
    """A policy, layout, backend or suite of that name does not exist.

    The message has the closest name, and all of them when they are few.

    >>> print(UnknownName("policy", "lrv", ["lru", "lfu"]))
    unknown policy 'lrv': did you mean 'lru'? Expected one of lfu, lru
    """

    def __init__(self, kind: str, name: object, known: object) -> None:
        choices = [str(k) for k in sorted(known)]  # type: ignore[call-overload]
        all_of_them = f"one of {', '.join(choices)}"
        close = get_close_matches(str(name), choices, n=1)
        if not close:
            hint = f"expected {all_of_them}"
        elif len(choices) <= FEW:
            hint = f"did you mean {close[0]!r}? Expected {all_of_them}"
        else:
            hint = f"did you mean {close[0]!r}?"
        super().__init__(f"unknown {kind} {name!r}: {hint}")


class InvalidTrace(InvalidArgument):
    """A request trace that cannot be read; the message names file, line and field."""

    def __init__(self, path: object, line: int | None, field: str | None, problem: str) -> None:
        where = [str(path), *([f"line {line}"] if line else []), *([field] if field else [])]
        super().__init__(f"{', '.join(where)}: {problem}")


class InvalidSlot(InvalidArgument):
    """A slot index is out of range, or belongs to the dummy page 0."""


class DoubleFree(RefcacheError, ValueError):
    """A page, slot or row was freed that is already free (or queued to be freed)."""


class LockUnderflow(RefcacheError, RuntimeError):
    """``dec_lock_ref`` on a node that nobody holds."""


class AmbiguousSize(RefcacheError, NotImplementedError):
    """A tree with several kinds of memory was asked for one size; each kind has its own."""


class BrokenAccounts(RefcacheError, AssertionError):
    """What a tree counts is not what its nodes have: a bug of the tree, not of its caller."""


class ForeignNode(RefcacheError, ValueError):
    """A node that does not belong to this tree (another tree's, or removed from it)."""


class StaleMatch(ForeignNode):
    """A match that is used after what it found has changed; match again."""


class NotProtected(RefcacheError, RuntimeError):
    """``release_host`` without a matching ``protect_host``."""


class NotIdle(RefcacheError, RuntimeError):
    """The call is legal only when nothing is in flight."""


class LoadSlotBusy(RefcacheError, RuntimeError):
    """The next producer slot of ``LayerDoneCounter`` still has a load that is not done."""


class CopyFailed(RefcacheError, RuntimeError):
    """A copy between the tiers was not made, and nothing of it stays; ``__cause__`` says why.

    Attributes:
        moved: for a load that was given up, each of its nodes (handles) that was locked, and the
            node on the device that is locked in its place.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.moved: dict[Any, Any] = {}


class NeverDone(RefcacheError, RuntimeError):
    """A wait for something that nothing will bring about any more (the simulated machine)."""


class HostPoolTooSmall(RefcacheError, ValueError):
    """A host pool that is not larger than its device pool."""


class WrongTier(RefcacheError, ValueError):
    """A pool (or a tensor) of the other tier was passed."""


class MemoryReleased(RefcacheError, RuntimeError):
    """A pool was touched while its memory is given back (the memory saver)."""


class HostRegisterError(RefcacheError, RuntimeError):
    """Pinning host memory was refused by the driver; carries its return code."""


class MissingExtra(RefcacheError, ImportError):
    """An optional dependency is needed for this call; the message names the extra to install."""


class StorageBusy(RefcacheError, RuntimeError):
    """A storage backend is attached already, or does not let its threads go."""


class OutOfSlots(RefcacheError, RuntimeError):
    """An allocation failed although free and evictable tokens together had covered it."""


def refuse_unmodelled(what: str, given: Mapping[str, Any], neutral: Mapping[str, Any]) -> None:
    """Refuse each argument that is not ``neutral``: what it asks for is not modelled.

    Raises:
        InvalidArgument: names the first of them.
    """
    for name, nothing in neutral.items():
        value = given.get(name, nothing)
        # of a tensor, neither == nor truth is one answer
        if hasattr(value, "shape") or (value != nothing and (value or nothing)):
            raise InvalidArgument(
                f"{name}={value!r} of {what}: expected {nothing!r}, it is not modelled"
            )
