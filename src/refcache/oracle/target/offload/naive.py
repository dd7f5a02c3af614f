"""The naive manager: a dictionary from key to slot. It shares no code with the reference.

It decides differently where the contract leaves a choice: the highest slot comes first, and the
block that goes is the one with the smallest key.
"""

from collections import Counter
from collections.abc import Sequence

from refcache.oracle.target.config import CacheConfig
from refcache.oracle.target.offload.contract import Key


class NaiveOffload:
    """See the module docstring."""

    def __init__(self, config: CacheConfig) -> None:
        self.every = range(config.pages)
        self.reset()

    def reset(self) -> None:
        self.slots: dict[Key, int] = {}
        self.ready: set[Key] = set()
        self.readers: Counter[Key] = Counter()
        self.data: dict[int, bytes] = {}

    def lookup(self, keys: Sequence[Key]) -> int:
        missing = (i for i, key in enumerate(keys) if key not in self.ready)
        return next(missing, len(keys))

    def prepare_store(self, keys: Sequence[Key]) -> dict[Key, int] | None:
        wanted = [key for key in keys if key not in self.slots]
        free = sorted({*self.every} - {*self.slots.values()})
        idle = sorted(k for k in self.ready if not self.readers[k] and k not in keys)
        short = max(0, len(wanted) - len(free))
        if short > len(idle):
            return None
        for key in idle[:short]:
            self.ready.discard(key)
            free.append(self.slots.pop(key))
        answer = {key: free.pop() for key in wanted}
        self.slots |= answer
        return answer

    def complete_store(self, keys: Sequence[Key], ok: bool) -> None:
        for key in keys:
            if ok:
                self.ready.add(key)
            else:
                del self.slots[key]

    def prepare_load(self, keys: Sequence[Key]) -> list[int]:
        self.readers.update(keys)
        return [self.slots[key] for key in keys]

    def complete_load(self, keys: Sequence[Key]) -> None:
        self.readers.subtract(keys)

    def touch(self, keys: Sequence[Key]) -> None:
        """Nothing: it does not know who was used last."""

    def write(self, key: Key, data: bytes) -> None:
        self.data[self.slots[key]] = data

    def read(self, key: Key) -> bytes:
        return self.data[self.slots[key]]
