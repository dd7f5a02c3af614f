"""Drives an allocator: sequences of tokens that grow, shrink and go, and a ledger of every page.

Any free page is a legal answer. What is not free to choose is checked at each call: which slots of
which page, distinctness, order, the count of free tokens, and that a refusal is for lack of pages.
:meth:`AllocatorDriver.drain` takes everything that is left, so the exact set of free pages is seen
without looking inside.
"""

from collections.abc import Sequence
from typing import Any

import torch

from refcache.oracle.driver import Driver, step
from refcache.oracle.target import Target


class AllocatorDriver(Driver):
    """See the module docstring.

    Attributes:
        sequences: slots of each live sequence; token j of it sits in element j.
        free: pages that nobody owns.
        queued: pages given back in the open free group; None when none is open.
    """

    needs = frozenset({"allocator"})

    def __init__(self, target: Target, **config: Any) -> None:
        super().__init__(target, **config)
        self.page_size = self.config.page_size
        self.subject = self.on_target(target.allocator, self.config)
        self._start()

    def _start(self) -> None:
        self.sequences: list[list[int]] = []
        self.free = set(range(1, self.config.pages + 1))
        self.queued: set[int] | None = None

    @step
    def alloc(self, pages: int) -> None:
        """A new sequence of whole pages."""
        slots = self._alloc(pages * self.page_size, [[]], [pages * self.page_size])
        if slots and slots[0]:
            self.sequences.append(slots[0])

    @step
    def extend(self, growth: Sequence[tuple[int, int]]) -> None:
        """One batch; each pair is (sequence, tokens more), the sequence past the last a new one."""
        batch: dict[int, int] = {}
        for index, more in growth:
            batch.setdefault(index % (len(self.sequences) + len(growth)), more)
        known = [i for i in batch if i < len(self.sequences)]
        new = [i for i in batch if i >= len(self.sequences)]
        olds = [self.sequences[i] for i in known] + [[] for _ in new]
        grows = [batch[i] for i in known + new]
        if not olds:
            return
        if self.page_size == 1:
            parts = self._alloc(sum(grows), olds, grows)
        else:
            parts = self._extend(olds, grows)
        self._grow(olds, parts)
        self.sequences += [old for old in olds[len(known) :] if old]

    @step
    def decode(self, indices: Sequence[int]) -> None:
        """One token more for each of these sequences, in one batch."""
        if not self.sequences:
            return
        olds = [self.sequences[i] for i in dict.fromkeys(i % len(self.sequences) for i in indices)]
        if not olds:
            return
        ones = [1] * len(olds)
        if self.page_size == 1:
            parts = self._alloc(len(olds), olds, ones)
        else:
            lens = torch.tensor([len(old) + 1 for old in olds])
            last = torch.tensor([old[-1] for old in olds])
            before = self._available()
            out = self.on_target(self.subject.alloc_decode, lens, lens, last)
            parts = self._read(out, olds, ones, before)
        self._grow(olds, parts)

    @step
    def release(self, index: int, keep: int = 0, sparse: bool = False) -> None:
        """Free a sequence's pages after its first ``keep`` tokens; ``sparse``: by one slot each."""
        if not self.sequences:
            return
        index %= len(self.sequences)
        slots = self.sequences[index]
        keep = min(len(slots), -(-keep // self.page_size) * self.page_size)
        gone = slots[keep :: self.page_size] if sparse else slots[keep:]
        del slots[keep:]
        if not slots:
            del self.sequences[index]
        self.on_target(self.subject.free, torch.tensor(gone, dtype=torch.int64))
        (self.free if self.queued is None else self.queued).update(
            s // self.page_size for s in gone
        )

    @step
    def release_together(self, indices: Sequence[int], stride: int = 1) -> None:
        """Free several sequences in one call, as an engine does for a batch. Their slots come in
        rounds of every ``stride``-th, so those of one page need not be neighbours."""
        if not self.sequences:
            return
        gone = list(dict.fromkeys(i % len(self.sequences) for i in indices))
        slots = [slot for i in gone for slot in self.sequences[i]]
        stride = max(1, stride)
        mixed = [slot for first in range(stride) for slot in slots[first::stride]]
        self.sequences = [s for i, s in enumerate(self.sequences) if i not in gone]
        self.on_target(self.subject.free, torch.tensor(mixed, dtype=torch.int64))
        (self.free if self.queued is None else self.queued).update(
            slot // self.page_size for slot in slots
        )

    @step
    def begin_group(self) -> None:
        if self.queued is None:
            self.on_target(self.subject.free_group_begin)
            self.queued = set()

    @step
    def end_group(self) -> None:
        if self.queued is not None:
            self.on_target(self.subject.free_group_end)
            self.free |= self.queued
            self.queued = None

    @step
    def draft(self, pages: int) -> None:
        """Allocate for draft tokens and take it back, as speculative decoding does.

        Nothing on an allocator without that pair of methods, which not every release has.
        """
        if self.queued is not None or not hasattr(self.subject, "backup_state"):
            return
        state = self.on_target(self.subject.backup_state)
        self.on_target(self.subject.alloc, pages * self.page_size)
        self.on_target(self.subject.restore_state, state)

    @step
    def sort(self) -> None:
        self.on_target(self.subject.merge_and_sort_free)

    @step
    def drain(self) -> None:
        """Take every free page and give them back: the whole free set must come, once."""
        count = len(self.free) * self.page_size
        parts = self._alloc(count, [[]], [count])
        if not parts or not count or self.queued is not None:
            self.sequences += [part for part in parts or () if part]
            return
        self.on_target(self.subject.free, torch.tensor(parts[0]))
        self.free.update(slot // self.page_size for slot in parts[0])

    @step
    def clear(self) -> None:
        self.on_target(self.subject.clear)
        self._start()

    @step
    def wind_down(self) -> None:
        """Free every sequence; then every page must come, once."""
        if self.queued is not None:
            self.on_target(self.subject.free_group_end)
            self.free |= self.queued
            self.queued = None
        for slots in self.sequences:
            self.on_target(self.subject.free, torch.tensor(slots, dtype=torch.int64))
            self.free.update(slot // self.page_size for slot in slots)
        self.sequences = []
        self._alloc(self.config.size, [[]], [self.config.size])

    def check(self) -> None:
        self._available()

    def choices(self) -> dict[str, Any]:
        return {f"slots of sequence {i}": slots for i, slots in enumerate(self.sequences)}

    def describe(self) -> str:
        lines = [f"free pages: {sorted(self.free)}"]
        if self.queued is not None:
            lines.append(f"queued in the free group: {sorted(self.queued)}")
        lines += [f"sequence {i}: slots {slots}" for i, slots in enumerate(self.sequences)]
        return "\n".join(lines)

    def _available(self) -> int:
        seen = int(self.on_target(self.subject.available_size))
        expected = len(self.free) * self.page_size
        self.require(
            seen == expected,
            "P1",
            f"available_size() = {seen}, but {len(self.free)} pages of {self.page_size} are owned "
            f"by nobody: expected {expected}",
        )
        return seen

    def _alloc(self, count: int, olds: list[list[int]], grows: list[int]) -> list[list[int]] | None:
        before = self._available()
        return self._read(self.on_target(self.subject.alloc, count), olds, grows, before)

    def _extend(self, olds: list[list[int]], grows: list[int]) -> list[list[int]] | None:
        prefix = torch.tensor([len(old) for old in olds])
        seq = prefix + torch.tensor(grows)
        last = torch.tensor([old[-1] if old else -1 for old in olds])
        before = self._available()
        out = self.on_target(self.subject.alloc_extend, prefix, prefix, seq, seq, last, sum(grows))
        return self._read(out, olds, grows, before)

    def _read(
        self, out: Any, olds: list[list[int]], grows: list[int], available: int
    ) -> list[list[int]] | None:
        """Judge the answer to an allocation; the slots of each sequence, or None for a refusal."""
        size = self.page_size
        need = sum(
            -(-(len(o) + g) // size) - -(-len(o) // size) for o, g in zip(olds, grows, strict=True)
        )
        if out is None:
            self.require(
                need > len(self.free),
                "AL2",
                f"refused {need} pages although {len(self.free)} are free",
            )
            return None
        tensor = isinstance(out, torch.Tensor)
        kind = f"{out.dtype} {list(out.shape)}" if tensor else f"a {type(out).__name__}"
        self.require(
            tensor and out.dtype == torch.int64 and out.dim() == 1,
            "AL1",
            f"the slots are {kind}, expected torch.int64 [{sum(grows)}]",
        )
        slots = out.tolist()
        self.require(
            len(slots) == sum(grows), "AL1", f"{len(slots)} slots, but {sum(grows)} were asked for"
        )
        parts, start = [], 0
        for old, more in zip(olds, grows, strict=True):
            part = slots[start : start + more]
            start += more
            self._judge_growth(old, part)
            parts.append(part)
        self.require(
            need <= available // size, "AL2", f"{need} new pages out of {available // size} free"
        )
        return parts

    def _judge_growth(self, old: list[int], part: list[int]) -> None:
        size = self.page_size
        last = old[-1] if old else -1
        for position, slot in enumerate(part, start=len(old)):
            if position % size:
                self.require(
                    slot == last + 1,
                    "AL1",
                    f"token {position} got slot {slot}, expected {last + 1}, the next of its page",
                )
            else:
                page, offset = divmod(slot, size)
                self.require(
                    1 <= page <= self.config.pages,
                    "P0",
                    f"token {position} got slot {slot} of page {page}; pages are 1 to "
                    f"{self.config.pages}",
                )
                self.require(
                    offset == 0,
                    "AL1",
                    f"token {position} opens a page at slot {slot}, offset {offset}; expected 0",
                )
                self.require(
                    page in self.free,
                    "P1",
                    f"token {position} got page {page}, which {self._owner(page)} owns",
                )
                self.free.discard(page)
            last = slot

    def _owner(self, page: int) -> str:
        if self.queued is not None and page in self.queued:
            return "the open free group"
        owners = (
            i for i, s in enumerate(self.sequences) if any(x // self.page_size == page for x in s)
        )
        index = next(owners, None)
        return "this very answer" if index is None else f"sequence {index}"

    @staticmethod
    def _grow(olds: list[list[int]], parts: list[list[int]] | None) -> None:
        for old, part in zip(olds, parts or (), strict=False):
            old += part
