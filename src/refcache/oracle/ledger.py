"""Who owns each page, known exactly and from public observations only.

Pages are handed out by allocations, which the driver makes itself; they are given back by
``free``, which a :class:`RecordingAllocator` sees because the tree is built over it. In between,
the tree owns what was inserted and not freed. So every free is judged at the moment it happens,
before the target's allocator can object: by name, not by an exception.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch

Element = Hashable
Prefix = tuple[str | None, tuple[Element, ...]]
"""A namespace and the elements (tokens or pairs) up to the end of a page."""

Note = Callable[[str, str], None]


class Ledger:
    """Owners of ``pages`` pages, numbered from ``first``; a page without an entry is free.

    Attributes:
        owner: a request's name, or the prefix a page is cached under.
        cached: the reverse for the tree: each cached page prefix with its page.
        queued: pages given back in an open free group; None when none is open.
        holders: (handle, prefix) of every lock somebody holds.
        may_free: what the call in progress is allowed to free: a function from page to a complaint.
    """

    def __init__(self, pages: int, page_size: int, note: Note, first: int = 1) -> None:
        self.pages, self.page_size, self.note = pages, page_size, note
        self.numbers = range(first, first + pages)
        self.may_free: Callable[[int], tuple[str, str] | None] = self._nothing
        self.freed: list[int] = []
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

    def release(self, pages: Iterable[int]) -> None:
        """Judge a free, then make it."""
        for page in pages:
            if page not in self.numbers:
                self.note("P0", f"page {page} was freed; pages are {self.span}")
                return
            if page not in self.owner:
                where = "queued" if self.queued and page in self.queued else "free"
                self.note("P1", f"page {page} was freed although it is {where} already")
                return
            complaint = self.may_free(page)
            if complaint is not None:
                self.note(*complaint)
                return
        for page in pages:
            owner = self.owner.pop(page)
            if isinstance(owner, tuple):
                del self.cached[owner]
            if self.queued is not None:
                self.queued.add(page)
            self.freed.append(page)

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
        """What an eviction may free: cached pages that nobody holds."""
        owner = self.owner[page]
        if isinstance(owner, str):
            return "P1", f"{self.says(page)}, and was freed by an eviction"
        if owner in self.locked():
            return "L2", f"{self.says(page)}, is locked, and was evicted"
        return None

    def only(self, allowed: set[int]) -> Callable[[int], tuple[str, str] | None]:
        """What a call may free when it is known exactly."""

        def judge(page: int) -> tuple[str, str] | None:
            if page in allowed:
                return None
            return "P1", f"{self.says(page)}; this call may free pages {sorted(allowed)} only"

        return judge


class RecordingAllocator:
    """The target's allocator, with each hand-out and each free told to the ledger.

    Everything else goes through unchanged. A free that the ledger objects to is noted and not
    passed on. ``free_calls``: pages freed by each call since the driver emptied it.
    """

    def __init__(self, inner: Any, ledger: Ledger) -> None:
        self.inner, self.ledger = inner, ledger
        self.free_calls: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def free(self, free_index: torch.Tensor) -> None:
        before = len(self.ledger.freed)
        pages = list(dict.fromkeys(slot // self.ledger.page_size for slot in free_index.tolist()))
        self.ledger.release(pages)
        if len(self.ledger.freed) - before == len(pages):
            self.free_calls.append(len(pages))
            self.inner.free(free_index)

    def free_group_begin(self) -> None:
        self.inner.free_group_begin()
        self.ledger.queued = set()

    def free_group_end(self) -> None:
        self.inner.free_group_end()
        self.ledger.queued = None


class CountingAllocator(RecordingAllocator):
    """A :class:`RecordingAllocator` whose hand-outs are the engine's, and told to the ledger."""

    def alloc(self, need_size: int) -> torch.Tensor | None:
        return self._told(self.inner.alloc(need_size))

    def alloc_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        return self._told(self.inner.alloc_extend(*args, **kwargs))

    def alloc_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        return self._told(self.inner.alloc_decode(*args, **kwargs))

    def clear(self) -> None:
        self.inner.clear()
        self.ledger.clear()

    def _told(self, slots: torch.Tensor | None) -> torch.Tensor | None:
        if slots is not None:
            for slot in slots.tolist():
                page, offset = divmod(slot, self.ledger.page_size)
                if offset == 0 and page in self.ledger.owner:
                    self.ledger.note("P1", f"page {page} was handed out twice")
                self.ledger.take([slot], "the engine")
        return slots
