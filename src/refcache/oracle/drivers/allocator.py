"""Drives an allocator: sequences of tokens that grow, shrink and go, and the ledger of every page.

Any free page is a legal answer. What is not free to choose is checked at each call: which slots of
which page, distinctness, order, the count of free tokens, and that a refusal is for lack of pages.
:meth:`AllocatorDriver.drain` takes everything that is left, so the exact set of free pages is seen
without looking inside.
"""

from collections.abc import Sequence
from typing import Any

import torch

from refcache.oracle.ledger.ledger import Ledger
from refcache.oracle.program.driver import Driver, step
from refcache.oracle.program.trial import Trial
from refcache.oracle.target.config import CacheConfig


class AllocatorBench:
    """The allocator on trial, the ledger, and what each answer must be.

    Attributes:
        subject: the target's allocator.
        sequences: slots of each live sequence; token j of it sits in element j.
    """

    def __init__(self, trial: Trial, config: CacheConfig) -> None:
        self.trial, self.config, self.page_size = trial, config, config.page_size
        self.subject = trial.make(trial.target.allocator, config)
        self.ledger = Ledger(config.pages, config.page_size, trial.note)
        self.sequences: list[list[int]] = []

    def check(self) -> None:
        self.available()

    def choices(self) -> dict[str, Any]:
        return {f"slots of sequence {i}": slots for i, slots in enumerate(self.sequences)}

    def describe(self) -> str:
        lines = [f"free pages: {self.ledger.free}"]
        if self.ledger.queued is not None:
            lines.append(f"queued in the free group: {sorted(self.ledger.queued)}")
        lines += [f"sequence {i}: slots {slots}" for i, slots in enumerate(self.sequences)]
        return "\n".join(lines)

    def available(self) -> int:
        """``available_size``; P1 unless it counts the pages that nobody owns."""
        seen = int(self.trial.call(self.subject.available_size))
        expected = len(self.ledger.free) * self.page_size
        self.trial.require(
            seen == expected,
            "P1",
            f"available_size() = {seen}, but {len(self.ledger.free)} pages of {self.page_size} are "
            f"owned by nobody: expected {expected}",
        )
        return seen

    def alloc(self, count: int, olds: list[list[int]], grows: list[int]) -> list[list[int]] | None:
        """``alloc``: the new slots of each sequence, or None for a refusal."""
        before = self.available()
        return self._judged(self.trial.call(self.subject.alloc, count), olds, grows, before)

    def extend(
        self, olds: list[list[int]], grows: list[int], unread: int
    ) -> list[list[int]] | None:
        """``alloc_extend`` of one batch; ``unread``: the ``last_loc`` of an empty prefix."""
        prefix = torch.tensor([len(old) for old in olds])
        seq = prefix + torch.tensor(grows)
        last = torch.tensor([old[-1] if old else unread for old in olds])
        before = self.available()
        out = self.trial.call(self.subject.alloc_extend, prefix, prefix, seq, seq, last, sum(grows))
        return self._judged(out, olds, grows, before)

    def _judged(
        self, out: Any, olds: list[list[int]], grows: list[int], available: int
    ) -> list[list[int]] | None:
        """Judge the answer to an allocation; the slots of each sequence, or None for a refusal."""
        size = self.page_size
        need = sum(
            -(-(len(o) + g) // size) - -(-len(o) // size) for o, g in zip(olds, grows, strict=True)
        )
        if out is None:
            self.trial.require(
                need > len(self.ledger.free),
                "AL2",
                f"refused {need} pages although {len(self.ledger.free)} are free",
            )
            return None
        tensor = isinstance(out, torch.Tensor)
        kind = f"{out.dtype} {list(out.shape)}" if tensor else f"a {type(out).__name__}"
        self.trial.require(
            tensor and out.dtype == torch.int64 and out.dim() == 1,
            "AL1",
            f"the slots are {kind}, expected torch.int64 [{sum(grows)}]",
        )
        slots = out.tolist()
        self.trial.require(
            len(slots) == sum(grows), "AL1", f"{len(slots)} slots, but {sum(grows)} were asked for"
        )
        parts, start = [], 0
        for old, more in zip(olds, grows, strict=True):
            part = slots[start : start + more]
            start += more
            self._judge_growth(old, part)
            parts.append(part)
        self.trial.require(
            need <= available // size, "AL2", f"{need} new pages out of {available // size} free"
        )
        return parts

    def _judge_growth(self, old: list[int], part: list[int]) -> None:
        """AL1, P0 and P1 of the new slots of one sequence; their pages are its own then."""
        size = self.page_size
        last = old[-1] if old else -1
        for position, slot in enumerate(part, start=len(old)):
            if position % size:
                self.trial.require(
                    slot == last + 1,
                    "AL1",
                    f"token {position} got slot {slot}, expected {last + 1}, the next of its page",
                )
            else:
                page, offset = divmod(slot, size)
                self.trial.require(
                    1 <= page <= self.config.pages,
                    "P0",
                    f"token {position} got slot {slot} of page {page}; pages are 1 to "
                    f"{self.config.pages}",
                )
                self.trial.require(
                    offset == 0,
                    "AL1",
                    f"token {position} opens a page at slot {slot}, offset {offset}; expected 0",
                )
                self.trial.require(
                    page in self.ledger.free,
                    "P1",
                    f"token {position} got page {page}, which {self._owner(page)} owns",
                )
                self.ledger.owner[page] = "a sequence"
            last = slot

    def _owner(self, page: int) -> str:
        """Who owns a page that is not free, for people."""
        if self.ledger.queued and page in self.ledger.queued:
            return "the open free group"
        owners = (
            i for i, s in enumerate(self.sequences) if any(x // self.page_size == page for x in s)
        )
        index = next(owners, None)
        return "this very answer" if index is None else f"sequence {index}"

    def decode(self, olds: list[list[int]]) -> list[list[int]] | None:
        """``alloc_decode``: one token more for each sequence."""
        lens = torch.tensor([len(old) + 1 for old in olds])
        last = torch.tensor([old[-1] for old in olds])
        before = self.available()
        out = self.trial.call(self.subject.alloc_decode, lens, lens, last)
        return self._judged(out, olds, [1] * len(olds), before)

    def free(self, slots: list[int], view: bool = False) -> None:
        """``free`` of slots of live sequences, in any order; ``view``: one of a larger tensor."""
        given = torch.tensor(slots, dtype=torch.int64)
        self.trial.call(self.subject.free, given.repeat_interleave(2)[::2] if view else given)
        for page in {slot // self.page_size for slot in slots}:
            self.ledger.owner.pop(page, None)
            if self.ledger.queued is not None:
                self.ledger.queued.add(page)

    def end_group(self) -> None:
        """``free_group_end``, if one is open."""
        if self.ledger.queued is not None:
            self.trial.call(self.subject.free_group_end)
            self.ledger.queued = None


class AllocatorDriver(Driver):
    """See the module docstring."""

    needs = frozenset({"allocator"})
    bench_type = AllocatorBench
    bench: AllocatorBench

    @property
    def sequences(self) -> list[list[int]]:
        """Slots of each live sequence."""
        return self.bench.sequences

    @property
    def queued(self) -> set[int] | None:
        """Pages given back in the open free group; None when none is open."""
        return self.bench.ledger.queued

    @step
    def alloc(self, pages: int) -> None:
        """A new sequence of whole pages."""
        slots = self.bench.alloc(pages * self.bench.page_size, [[]], [pages * self.bench.page_size])
        if slots and slots[0]:
            self.sequences.append(slots[0])

    @step
    def extend(self, growth: Sequence[tuple[int, int]], unread: int = -1) -> None:
        """One batch; each pair is (sequence, tokens more), the sequence past the last a new one.

        ``unread``: what stands in for the last slot of a new one, which nobody may read.
        """
        batch: dict[int, int] = {}
        for index, more in growth:
            batch.setdefault(index % (len(self.sequences) + len(growth)), more)
        known = [i for i in batch if i < len(self.sequences)]
        new = [i for i in batch if i >= len(self.sequences)]
        olds = [self.sequences[i] for i in known] + [[] for _ in new]
        grows = [batch[i] for i in known + new]
        if not olds:
            return
        if self.bench.page_size == 1:
            parts = self.bench.alloc(sum(grows), olds, grows)
        else:
            parts = self.bench.extend(olds, grows, unread)
        self._grow(olds, parts)
        self.sequences.extend(old for old in olds[len(known) :] if old)

    @step
    def decode(self, indices: Sequence[int]) -> None:
        """One token more for each of these sequences, in one batch."""
        if not self.sequences:
            return
        olds = [self.sequences[i] for i in dict.fromkeys(i % len(self.sequences) for i in indices)]
        if not olds:
            return
        if self.bench.page_size == 1:
            parts = self.bench.alloc(len(olds), olds, [1] * len(olds))
        else:
            parts = self.bench.decode(olds)
        self._grow(olds, parts)

    @step
    def release(self, index: int, keep: int = 0, sparse: bool = False) -> None:
        """Free a sequence's pages after its first ``keep`` tokens; ``sparse``: by one slot each."""
        if not self.sequences:
            return
        index %= len(self.sequences)
        slots = self.sequences[index]
        keep = min(len(slots), -(-keep // self.bench.page_size) * self.bench.page_size)
        gone = slots[keep :: self.bench.page_size] if sparse else slots[keep:]
        del slots[keep:]
        if not slots:
            del self.sequences[index]
        self.bench.free(gone)

    @step
    def release_together(self, indices: Sequence[int], stride: int = 1, view: bool = False) -> None:
        """Free several sequences in one call, as an engine does for a batch. Their slots come in
        rounds of every ``stride``-th, so those of one page need not be neighbours; ``view``: as
        every second element of a larger tensor."""
        if not self.sequences:
            return
        gone = list(dict.fromkeys(i % len(self.sequences) for i in indices))
        slots = [slot for i in gone for slot in self.sequences[i]]
        stride = max(1, stride)
        mixed = [slot for first in range(stride) for slot in slots[first::stride]]
        self.sequences[:] = [s for i, s in enumerate(self.sequences) if i not in gone]
        self.bench.free(mixed, view)

    @step
    def begin_group(self) -> None:
        if self.queued is None:
            self.trial.call(self.bench.subject.free_group_begin)
            self.bench.ledger.queued = set()

    @step
    def end_group(self) -> None:
        self.bench.end_group()

    @step
    def draft(self, pages: int) -> None:
        """Allocate for draft tokens and take it back, as speculative decoding does.

        Nothing on an allocator without that pair of methods, which not every release has.
        """
        if self.queued is not None or not hasattr(self.bench.subject, "backup_state"):
            return
        state = self.trial.call(self.bench.subject.backup_state)
        self.trial.call(self.bench.subject.alloc, pages * self.bench.page_size)
        self.trial.call(self.bench.subject.restore_state, state)

    @step
    def sort(self) -> None:
        self.trial.call(self.bench.subject.merge_and_sort_free)

    @step
    def drain(self) -> None:
        """Take every free page and give them back: the whole free set must come, once."""
        count = len(self.bench.ledger.free) * self.bench.page_size
        parts = self.bench.alloc(count, [[]], [count])
        if not parts or not count or self.queued is not None:
            self.sequences.extend(part for part in parts or () if part)
        else:
            self.bench.free(parts[0])

    @step
    def clear(self) -> None:
        self.trial.call(self.bench.subject.clear)
        self.bench.ledger.clear()
        self.sequences.clear()

    @step
    def wind_down(self) -> None:
        """Free every sequence; then every page must come, once."""
        self.bench.end_group()
        while self.sequences:
            self.bench.free(self.sequences.pop(0))
        self.bench.alloc(self.config.size, [[]], [self.config.size])

    @staticmethod
    def _grow(olds: list[list[int]], parts: list[list[int]] | None) -> None:
        """The sequences have their new slots."""
        for old, part in zip(olds, parts or (), strict=False):
            old += part
