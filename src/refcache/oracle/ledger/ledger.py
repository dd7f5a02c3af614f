"""Who owns each page, known exactly and from public observations only.

Pages are handed out by allocations; they are given back by ``free``, which a
:class:`~refcache.oracle.ledger.recording.RecordingAllocator` sees because the tree is built over
it. In between, the tree owns what was inserted and not freed. So every free is judged at the moment
it happens, before the target's allocator can object: by name, not by an exception.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Element = Hashable
Prefix = tuple[str | None, tuple[Element, ...]]
"""A namespace and the elements (tokens or pairs) up to the end of a page."""

Note = Callable[[str, str], None]
Judge = Callable[[int], tuple[str, str] | None]
"""Says of a page that is freed which rule that breaks, with the evidence; None if it may be."""


@dataclass
class Freed:
    """What was freed during a call. ``pages``: in order; ``counts``: of pages, for each free."""

    pages: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


class Ledger:
    """Owners of ``pages`` pages, numbered from ``first``; a page without an entry is free.

    A call may free nothing, except inside :meth:`permits`.

    Attributes:
        owner: a request's name, or the prefix a page is cached under.
        cached: the reverse for the tree: each cached page prefix with its page.
        queued: pages given back in an open free group; None when none is open.
        holders: (handle, prefix) of every lock somebody holds.
        may_free: judges each page that is freed now; ``freed``: what was.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        note: Note,
        first: int = 1,
        may_free: Judge | None = None,
    ) -> None:
        self.pages, self.page_size, self.note = pages, page_size, note
        self.numbers = range(first, first + pages)
        self.may_free = may_free or self._nothing
        self.freed = Freed()
        self.clear()

    def clear(self) -> None:
        self.owner: dict[int, str | Prefix] = {}
        self.cached: dict[Prefix, int] = {}
        self.queued: set[int] | None = None
        self.holders: list[tuple[Any, Prefix]] = []

    @property
    def free(self) -> list[int]:
        queued = self.queued or ()
        return [p for p in self.numbers if p not in self.owner and p not in queued]

    @property
    def span(self) -> str:
        return f"{self.numbers.start} to {self.numbers.stop - 1}"

    def prefixes(self, prefix: Prefix) -> Iterator[Prefix]:
        """Its pages, from the root on."""
        space, elements = prefix
        for end in range(self.page_size, len(elements) + 1, self.page_size):
            yield space, elements[:end]

    def longest(self, prefix: Prefix) -> Prefix:
        """The longest cached part of it, in whole pages."""
        found: Prefix = (prefix[0], ())
        for part in self.prefixes(prefix):
            if part not in self.cached:
                break
            found = part
        return found

    def slots(self, prefix: Prefix) -> list[int]:
        """Where the KV of a cached prefix is."""
        size = self.page_size
        return [self.cached[p] * size + i for p in self.prefixes(prefix) for i in range(size)]

    def locked(self) -> set[Prefix]:
        return {part for _, prefix in self.holders for part in self.prefixes(prefix)}

    def hold(self, handle: Any, prefix: Prefix) -> None:
        self.holders.append((handle, prefix))

    def drop(self, handle: Any, prefix: Prefix) -> None:
        self.holders.remove((handle, prefix))

    def take(self, slots: Iterable[int], name: str) -> None:
        """Pages handed out to ``name``; it may own their page already (the rest of a last page)."""
        for slot in slots:
            page = slot // self.page_size
            if page not in self.numbers:
                self.note("P0", f"slot {slot} was handed out; pages are {self.span}")
            elif self.queued and page in self.queued:
                self.note("P1", f"page {page} was handed out while it waits in a free group")
            elif page in self.owner and self.owner[page] != name:
                self.note("P1", f"page {page} was handed out to {name}; {self.says(page)}")
            else:
                self.owner[page] = name

    def adopt(self, prefix: Prefix, page: int) -> None:
        """The tree takes a page over."""
        self.cached[prefix] = page
        self.owner[page] = prefix

    def release(self, pages: Collection[int]) -> bool:
        """Judge a free, then make it; False when it was noted as a violation, and not made."""
        for page in pages:
            if page not in self.numbers:
                self.note("P0", f"page {page} was freed; pages are {self.span}")
                return False
            if page not in self.owner:
                where = "queued" if self.queued and page in self.queued else "free"
                self.note("P1", f"page {page} was freed although it is {where} already")
                return False
            complaint = self.may_free(page)
            if complaint is not None:
                self.note(*complaint)
                return False
        for page in pages:
            owner = self.owner.pop(page)
            if isinstance(owner, tuple):
                del self.cached[owner]
            if self.queued is not None:
                self.queued.add(page)
        self.freed.pages += pages
        self.freed.counts.append(len(pages))
        return True

    @contextmanager
    def permits(self, may_free: Collection[int] | Judge) -> Iterator[Freed]:
        """In the block a call may free these pages, or what the judge has nothing against.

        Yields what is freed. Inside another such block this one counts alone, and what it frees
        was freed in the outer one too.
        """
        judge = may_free if callable(may_free) else self.only(may_free)
        outer = self.may_free, self.freed
        self.may_free, self.freed = judge, Freed()
        try:
            yield self.freed
        finally:
            inner = self.freed
            self.may_free, self.freed = outer
            self.freed.pages += inner.pages
            self.freed.counts += inner.counts

    def says(self, page: int) -> str:
        """Who owns a page, for people."""
        owner = self.owner.get(page)
        if owner is None:
            return f"page {page} is free"
        if isinstance(owner, str):
            return f"page {page} is {owner}'s"
        space = "" if owner[0] is None else f" in {owner[0]!r}"
        return f"page {page} is cached for {list(owner[1])}{space}"

    def _nothing(self, page: int) -> tuple[str, str]:
        return "P1", f"{self.says(page)}; this call frees nothing"

    def only_unlocked(self, page: int) -> tuple[str, str] | None:
        """The judge of an eviction: it may free cached pages that nobody holds."""
        owner = self.owner[page]
        if isinstance(owner, str):
            return "P1", f"{self.says(page)}, and was freed by an eviction"
        if owner in self.locked():
            return "L2", f"{self.says(page)}, is locked, and was evicted"
        return None

    def only(self, allowed: Collection[int]) -> Judge:
        """The judge of a call of which it is known exactly what it may free."""

        def judge(page: int) -> tuple[str, str] | None:
            if page in allowed:
                return None
            return "P1", f"{self.says(page)}; this call may free pages {sorted(allowed)} only"

        return judge
