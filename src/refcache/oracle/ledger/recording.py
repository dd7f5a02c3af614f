"""The target's allocator as a tree or an engine is given it: the ledger hears of every free.

Everything else goes through unchanged. A free that the ledger objects to is noted and not passed
on. Where the engine allocates, and not a driver, the ledger hears of what is handed out as well.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from refcache.oracle.ledger.ledger import Ledger

ALLOCATIONS = ("alloc", "alloc_extend", "alloc_decode")


class RecordingAllocator:
    """See the module docstring.

    Attributes:
        owner: who has what is handed out; None where the driver allocates, and tells the ledger.
        make_room: runs before every allocation and evicts all that can be evicted, judged as any
            eviction is. An operation that allocates half-way through may find that this has taken,
            or detached, what it was working on. With room to spare that never happens; so it
            happens at every allocation. What the operation still needs must be locked by then.
    """

    def __init__(self, inner: Any, ledger: Ledger, owner: str | None = None) -> None:
        self.inner, self.ledger, self.owner = inner, ledger, owner
        self.make_room: Callable[[], object] | None = None

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)
        if name == "free_each":
            return self._free_each
        if name not in ALLOCATIONS:
            return method

        @functools.wraps(method)
        def hand_out(*args: Any, **kwargs: Any) -> Any:
            if self.make_room is not None:
                with self.ledger.permits(self.ledger.only_unlocked):
                    self.make_room()
            return self._recorded(method(*args, **kwargs))

        return hand_out

    def free(self, free_index: torch.Tensor) -> None:
        """Free what the ledger has nothing against."""
        if self._released(free_index):
            self.inner.free(free_index)

    def _free_each(self, lists: Sequence[torch.Tensor]) -> None:
        """As ``free``, of several lists in one call; for an allocator that has it."""
        self.inner.free_each([slots for slots in lists if self._released(slots)])

    def _released(self, slots: torch.Tensor) -> bool:
        size = self.ledger.page_size
        return self.ledger.release(list(dict.fromkeys(slot // size for slot in slots.tolist())))

    def free_group_begin(self) -> None:
        self.inner.free_group_begin()
        self.ledger.queued = set()

    def free_group_end(self) -> None:
        self.inner.free_group_end()
        self.ledger.queued = None

    def clear(self) -> None:
        """Every page is free; the driver clears the ledger where it hands pages out itself."""
        self.inner.clear()
        if self.owner is not None:
            self.ledger.clear()

    def _recorded(self, slots: Any) -> Any:
        """What was handed out is the owner's."""
        if self.owner is not None and slots is not None:
            for slot in slots.tolist():
                page, offset = divmod(slot, self.ledger.page_size)
                if offset == 0 and page in self.ledger.owner:
                    self.ledger.note("P1", f"page {page} was handed out twice")
                self.ledger.take([slot], self.owner)
        return slots
