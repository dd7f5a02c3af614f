"""The contract ``offload``: keyed blocks go to a second tier and come back, with copies in between.

A manager owns slots and says which block is where; somebody else copies. So each way has two calls:
``prepare_*`` says where, ``complete_*`` that the copy is over. Between the two anything else may be
called, and jobs end in any order, key by key if need be.

A key names the content of a block (a hash of its prefix, say): 8 bytes here. The same key is always
the same content. Keys of one call are distinct.

====================  ==============================================================================
call                  what it must do
====================  ==============================================================================
``lookup(keys)``      how many of the keys, from the first on, can be loaded now
``prepare_store``     a slot for each key that it has not yet and that is not being stored, as a
                      dictionary; blocks that nobody reads may go for them, but none of ``keys``.
                      None: no room, and nothing changed
``complete_store``    the copies of these keys are over: with ``ok`` they can be loaded from here
                      on; without it they leave nothing, and their slots are free
``prepare_load``      the slots of these keys, in order, which stay theirs until each load of them
                      is complete; called only for keys that ``lookup`` has just found
``complete_load``     the copies of these keys are over
``touch``             these keys were used; those that it has not do not matter
====================  ==============================================================================

Optional calls, which the suite makes where the object has them:

* ``events()``: what came and went since the last call, in order: pairs ``("stored", key)`` and
  ``("removed", key)``. A block is stored when it can be loaded;
* ``write(key, data)``: the copy of a store, between its two calls; ``data`` are bytes;
* ``read(key)``: the copy of a load, between its two calls; gives bytes: what was written;
* ``reset()``: every block is gone; called when no job is open.

With the trait ``partial`` blocks may be shorter than a whole one: ``prepare_store(keys, tokens)``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from refcache.errors import InvalidArgument

Key = bytes
USES = frozenset({"store", "load", "touch"})


class OffloadManager(Protocol):
    """What :meth:`refcache.oracle.Target.offload` gives; see the module docstring."""

    def lookup(self, keys: Sequence[Key]) -> int: ...

    def prepare_store(self, keys: Sequence[Key]) -> Mapping[Key, int] | None: ...

    def complete_store(self, keys: Sequence[Key], ok: bool) -> None: ...

    def prepare_load(self, keys: Sequence[Key]) -> Iterable[int]: ...

    def complete_load(self, keys: Sequence[Key]) -> None: ...

    def touch(self, keys: Sequence[Key]) -> None: ...


@dataclass(frozen=True)
class OffloadTraits:
    """What a manager says of itself. The defaults are those of a plain one.

    Attributes:
        batch: keys of one ``prepare_store``, at most; None: any number. A manager that evicts key
            by key, and so cannot take back half a store, says 1.
        uses: what makes a block a recently used one: some of ``"store"`` (as of
            ``prepare_store``), ``"load"`` (``prepare_load``), ``"touch"``. Then blocks must go in
            that order. Empty: they may go in any order.
        token_bytes: of one token, in ``write`` and ``read``.
        partial: blocks may be shorter than a whole one.
        whole_jobs: a job is complete with one call for all its keys, not key by key.
        tiers: there are more tiers below: a lookup may start to bring a block back, so it may take
            room, and what is not found now may be found later.
    """

    batch: int | None = None
    uses: frozenset[str] = frozenset()
    token_bytes: int = 8
    partial: bool = False
    whole_jobs: bool = False
    tiers: bool = False

    def __post_init__(self) -> None:
        if self.batch is not None and self.batch < 1:
            raise InvalidArgument(f"batch={self.batch}: expected None, or at least 1")
        if not self.uses <= USES:
            raise InvalidArgument(f"uses={sorted(self.uses)}: expected some of {sorted(USES)}")
        if self.token_bytes < 1:
            raise InvalidArgument(f"token_bytes={self.token_bytes}: expected at least 1")


def key_of(number: int) -> Key:
    """The key that programs write as a number."""
    return number.to_bytes(8, "big")
