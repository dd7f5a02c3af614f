"""What a judge knows: who owns each page of both tiers, and how it came to be so.

:class:`History` is the oracle's :class:`~refcache.oracle.ledger.ledger.Ledger` with two additions:
locks are counted, so that a long trace costs no more than a short one; and each page remembers the
records that made it what it is, which is the argument behind a verdict.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from refcache.oracle.ledger.ledger import Ledger, Prefix
from refcache.oracle.rules.violation import Violation

SHOWN = 12


class History(Ledger):
    """See the module docstring.

    Attributes:
        at: the record in progress, for people.
        past: for each page, what happened to it since it was handed out last.
        below: cached pages that directly follow a prefix.
        dropped: prefixes that left this tier in the record in progress.
        tier: "" for the device, "host " for the host, whose pages are numbered from 0.
        gaps: lines were left out before this one: a page that is handed out was freed by one of
            them, and a page that is freed may be one that they handed out.
    """

    def __init__(self, pages: int, page_size: int, tier: str = "") -> None:
        self.at = ""
        self.gaps = False
        self.tier = tier
        super().__init__(pages, page_size, self._raise, first=0 if tier else 1)

    def _raise(self, rule: str, evidence: str) -> None:
        if self.tier:
            rule = {"P0": "H1", "P1": "H1"}.get(rule, rule)
            evidence = re.sub(r"\b(pages?|slot)\b", rf"{self.tier}\1", evidence)
        raise Violation(rule, evidence)

    def clear(self) -> None:
        super().clear()
        self.past: dict[int, list[str]] = {}
        self.below: Counter[Prefix] = Counter()
        self.holding: Counter[tuple[Any, Prefix]] = Counter()
        self.lock_count: Counter[Prefix] = Counter()
        self.locked_at: dict[tuple[Any, Prefix], str] = {}
        self.unlocked_at = ""
        self.dropped: list[Prefix] = []

    @property
    def free_count(self) -> int:
        return self.pages - len(self.owner) - len(self.queued or ())

    def locked(self) -> Any:
        return self.lock_count.keys()

    def hold(self, handle: Any, prefix: Prefix) -> None:
        self.holding[handle, prefix] += 1
        self.locked_at[handle, prefix] = self.at
        self.lock_count.update(self.prefixes(prefix))

    def drop(self, handle: Any, prefix: Prefix) -> None:
        if not self.holding[handle, prefix]:
            raise Violation("L2", f"node {handle} was unlocked, and nobody holds it")
        self.holding[handle, prefix] -= 1
        if not self.holding[handle, prefix]:
            del self.holding[handle, prefix]
            self.unlocked_at = self.at
        for part in self.prefixes(prefix):
            self.lock_count[part] -= 1
            if not self.lock_count[part]:
                del self.lock_count[part]

    def take(self, slots: Iterable[int], name: str) -> None:
        pages = list(dict.fromkeys(slot // self.page_size for slot in slots))
        if self.gaps:
            self._free_unseen(pages)
        super().take((page * self.page_size for page in pages), name)
        for page in pages:
            self.past[page] = [f"{self.at} handed out {self.tier}page {page}"]

    def adopt(self, prefix: Prefix, page: int) -> None:
        super().adopt(prefix, page)
        self.below[self.above(prefix)] += 1
        self._tell(page, f"cached it for {show(prefix)}")

    def _free_unseen(self, pages: Iterable[int]) -> None:
        """Pages are free, whoever had them."""
        for page in pages:
            owner = self.owner.pop(page, None)
            if isinstance(owner, tuple):
                del self.cached[owner]
                self.left(owner)
        self.dropped.clear()

    def release(self, pages: Iterable[int]) -> bool:
        pages = [page for page in pages if page in self.owner or not self.gaps]
        owners = [self.owner.get(page) for page in pages]
        freed = super().release(pages)
        for page, owner in zip(pages, owners, strict=True):
            self._tell(page, "freed it")
            if isinstance(owner, tuple):
                self.left(owner)
        return freed

    def left(self, prefix: Prefix) -> None:
        """A prefix is no longer in this tier."""
        self.dropped.append(prefix)
        self.below[self.above(prefix)] -= 1
        if not self.below[self.above(prefix)]:
            del self.below[self.above(prefix)]

    def forget(self) -> None:
        """The tree gives up all that it has; the pages are nobody's until they are cleared."""
        for prefix in list(self.cached):
            self.owner[self.cached[prefix]] = "the tree before its reset"
        self.cached.clear()
        self.below.clear()
        self.holding.clear()
        self.unlocked_at = self.at
        self.lock_count.clear()

    def above(self, prefix: Prefix) -> Prefix:
        return prefix[0], prefix[1][: -self.page_size]

    def _tell(self, page: int, what: str) -> None:
        self.past.setdefault(page, []).append(f"{self.at} {what}")

    def lock_story(self) -> Iterator[str]:
        """Who holds which prefix, one line each; or since when nobody does."""
        for handle, prefix in self.holding:
            at = self.locked_at[handle, prefix]
            yield f"node {handle} is held for {show(prefix)} since {at}"
        if not self.holding and self.unlocked_at:
            yield f"nobody holds a node since {self.unlocked_at}"

    def story(self, pages: Iterable[int]) -> list[str]:
        """What happened to pages, one line each."""
        return [
            f"{self.tier}page {page}: " + "; then ".join(self.past[page])
            for page in pages
            if page in self.past
        ]


def show(prefix: Prefix) -> str:
    """A prefix, for people."""
    space, elements = prefix
    shown = ", ".join(map(str, elements[:SHOWN]))
    more = f", ... {len(elements)} in all" if len(elements) > SHOWN else ""
    return f"[{shown}{more}]" + ("" if space is None else f" in {space!r}")
