"""A store below a cache on trial: pages in memory, every call watched, faults by a seed.

Each fault is one that a real store has, at the place where the cache meets it:

==============  ====================================================================================
fault           what the cache sees
==============  ====================================================================================
``gone``        a page that existed a moment ago is not there when it is read
``damaged``     a page does not pass the store's check (a short read, a flipped bit): a miss
``raised``      the call raises
``full``        a page cannot be stored
``partial``     of a batch the first half is done, and no more
``blind``       the store says that it has none of the pages
==============  ====================================================================================

A store that is slow needs no fault: calls are jobs of threads of the simulated machine, which may
run as late as the program likes.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from refcache.storage import HiCacheMemory

READS = ("gone", "damaged", "raised", "partial")
WRITES = ("full", "raised", "partial")
QUERIES = ("raised", "blind")


class WatchedStore(HiCacheMemory):
    """See the module docstring.

    Args:
        rate: how often each fault is met, of 1; ``seed``: where.
        note: told of what no store may be asked to do, ``note(rule, evidence)``.

    Attributes:
        met: how often each fault was; ``lost``: how many pages the store has evicted.
        ever: every key that was stored.
    """

    def __init__(self, rate: float, seed: int, note: Callable[[str, str], None]) -> None:
        super().__init__()
        self.rate, self.random, self.note = rate, random.Random(seed), note
        self.met: Counter[str] = Counter()
        self.ever: set[str] = set()
        self.lost = 0

    def _fault(self, kinds: Sequence[str]) -> str | None:
        """The fault of this call, if it has one."""
        if not self.rate:
            return None
        chosen = [kind for kind in kinds if self.random.random() < self.rate]
        if not chosen:
            return None
        self.met[chosen[0]] += 1
        if chosen[0] == "raised":
            raise OSError("the store does not answer")
        return chosen[0]

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        return 0 if self._fault(QUERIES) else super().batch_exists(keys, extra_info)

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        fault = self._fault(READS)
        pages = super().batch_get(keys, target_locations)
        if fault == "partial":
            return pages[: len(pages) // 2]
        if fault is not None:
            lost = self.random.randrange(len(pages))
            page = pages[lost]
            if fault == "damaged" and page is not None:
                page.fill_(-1)  # what was read is in the target, and is no page
            pages[lost] = None
        return pages

    def batch_set(
        self,
        keys: Sequence[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        fault = self._fault(WRITES)
        for key, value in zip(keys, values, strict=True):
            known = self._pages.get(key)
            if known is not None and not torch.equal(known, value.reshape(-1).view(torch.uint8)):
                self.note("ST2", f"two different pages under the key {key[:12]}")
        if fault is None:
            return super().batch_set(keys, values)
        if fault == "partial":
            super().batch_set(keys[: len(keys) // 2], values[: len(keys) // 2])
        return False

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        self.ever.add(key)
        return super().set(key, value)

    def lose(self, which: int) -> None:
        """The store evicts one of its pages."""
        if self._pages:
            self.lost += 1
            del self._pages[sorted(self._pages)[which % len(self._pages)]]

    def has(self, key: str) -> bool:
        """Whether a page is stored, without a fault."""
        return key in self._pages
