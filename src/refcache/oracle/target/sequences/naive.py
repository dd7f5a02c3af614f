"""The naive cache of sequences: a dictionary from page prefix to page, and counts of users.

It shares no code with the reference and decides differently wherever the contract leaves a choice:
a duplicate page stays its sequence's own, a prefix is cached when its sequence ends, a page of it
may go while a longer one stays, and the page that goes is the one with the highest number.
"""

from collections import Counter
from collections.abc import Sequence

from refcache.oracle.target.config import CacheConfig

Prefix = tuple[str | None, tuple[int, ...]]


class NaiveSequences:
    """Implements the contract ``sequences``, with all that is optional but events and bytes."""

    def __init__(self, config: CacheConfig) -> None:
        self.size, self.every = config.page_size, range(1, config.pages + 1)
        self.pages: dict[Prefix, int] = {}
        self.tables: dict[int, list[int]] = {}
        self.spaces: dict[int, str | None] = {}
        self.done: dict[int, int] = {}
        self.users: Counter[int] = Counter()
        self._copies: list[tuple[int, int]] = []

    def _prefixes(self, seq: int, tokens: Sequence[int], end: int) -> list[Prefix]:
        ends = range(self.size, end + 1, self.size)
        return [(self.spaces[seq], tuple(tokens[:length])) for length in ends]

    def _take(self, count: int) -> list[int] | None:
        """Pages that nobody uses: those without KV first, then cached ones."""
        unused = [page for page in self.every if not self.users[page]]
        cached = set(self.pages.values())
        unused.sort(key=lambda page: (page in cached, -page))
        if count > len(unused):
            return None
        taken = set(unused[:count])
        self.pages = {p: page for p, page in self.pages.items() if page not in taken}
        return self._use(unused[:count])

    def _use(self, pages: list[int]) -> list[int]:
        self.users.update(pages)
        return pages

    def _drop(self, seq: int) -> None:
        self.users.subtract(self.tables.pop(seq))
        self.users += Counter()
        del self.spaces[seq], self.done[seq]

    def start(self, seq: int, tokens: Sequence[int], namespace: str | None) -> int | None:
        self.spaces[seq] = namespace
        found: list[int] = []
        for prefix in self._prefixes(seq, tokens, len(tokens) - 1):
            if prefix not in self.pages:
                break
            found.append(self.pages[prefix])
        self.tables[seq], self.done[seq] = self._use(found), len(found) * self.size
        return self.done[seq]

    def grow(self, seq: int, tokens: Sequence[int], n: int) -> bool:
        table, written = self.tables[seq], self.done[seq]
        index = written // self.size
        split = index < len(table) and self.users[table[index]] > 1
        taken = self._take(max(0, -(-n // self.size) - len(table)) + split)
        if taken is None:
            return False
        if split:  # a fork shares the page that is written next
            mine = taken.pop()
            self._copies.append((table[index], mine))
            self.users[table[index]] -= 1
            table[index] = mine
        table += taken
        return True

    def copies(self) -> list[tuple[int, int]]:
        made, self._copies = self._copies, []
        return made

    def computed(self, seq: int, tokens: Sequence[int], n: int) -> None:
        if seq in self.done:
            self.done[seq] = n

    def finish(self, seq: int, tokens: Sequence[int]) -> None:
        prefixes = self._prefixes(seq, tokens, self.done[seq])
        for prefix, page in zip(prefixes, self.tables[seq], strict=False):
            self.pages.setdefault(prefix, page)
        self._drop(seq)

    def abort(self, seq: int) -> None:
        self._drop(seq)

    def preempt(self, seq: int) -> None:
        self._drop(seq)

    def fork(self, seq: int, child: int) -> bool:
        self.spaces[child], self.done[child] = self.spaces[seq], self.done[seq]
        self.tables[child] = self._use(self.tables[seq][: -(-self.done[seq] // self.size)])
        return True

    def invalidate(self, namespace: str | None) -> None:
        self.pages = {p: page for p, page in self.pages.items() if p[0] != namespace}

    def reset(self) -> None:
        self.pages.clear()

    def table(self, seq: int) -> list[int]:
        return list(self.tables[seq])
