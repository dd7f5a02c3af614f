"""Re-entrancy: every allocation first evicts all that can be evicted, on its tier.

An operation that allocates half-way through may find that the eviction this causes has taken, or
detached, what it was working on. With room to spare that never happens; here it happens at every
allocation. What the operation still needs must be locked or protected by then.
"""

from collections.abc import Callable
from typing import Any

import torch

from refcache.oracle.ledger import Ledger, RecordingAllocator


class EvictingAllocator(RecordingAllocator):
    """The target's allocator; ``make_room`` runs before each allocation.

    ``make_room``: evicts everything; what that frees is judged as the frees of an eviction.
    """

    def __init__(self, inner: Any, ledger: Ledger) -> None:
        super().__init__(inner, ledger)
        self.make_room: Callable[[], object] = lambda: None

    def alloc(self, *args: Any) -> torch.Tensor | None:
        return self._after_room("alloc", args)

    def alloc_extend(self, *args: Any) -> torch.Tensor | None:
        return self._after_room("alloc_extend", args)

    def alloc_decode(self, *args: Any) -> torch.Tensor | None:
        return self._after_room("alloc_decode", args)

    def _after_room(self, name: str, args: Any) -> torch.Tensor | None:
        outer, self.ledger.may_free = self.ledger.may_free, self.ledger.only_unlocked
        try:
            self.make_room()
        finally:
            self.ledger.may_free = outer
        slots: torch.Tensor | None = getattr(self.inner, name)(*args)
        return slots
