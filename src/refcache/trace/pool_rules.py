"""Rules about the device allocator: any free page will do, but which slots of it is fixed."""

from typing import Any

import torch

from refcache.oracle.rules.violation import Violation
from refcache.reference import alloc_extend
from refcache.trace import format as f
from refcache.trace.rules import Rules, Undecidable


class PoolRules(Rules):
    """The calls of an allocator."""

    def _may_refuse(self, call: f.AnyCall) -> bool:
        """Whether the contract lets this call raise: a misuse, which then changes nothing."""
        if isinstance(call, f.Free):
            pages = self.pages_of(call.slots)
            return any(not isinstance(self.device.owner.get(p), str) for p in pages)
        if isinstance(call, f.DecLockRef):
            prefix = self.nodes.get(call.node)
            return prefix is None or not self.device.holding[call.node, prefix]
        if isinstance(call, f.IncLockRef):
            prefix = self.nodes.get(call.node)
            return prefix is None or (bool(prefix[1]) and prefix not in self.device.cached)
        if isinstance(call, f.Alloc):
            return call.need_size < 0 or call.need_size % self.page_size != 0
        if isinstance(call, f.FreeGroupBegin | f.FreeGroupEnd):
            return (self.device.queued is None) == isinstance(call, f.FreeGroupEnd)
        return False

    def _alloc(self, call: f.Alloc) -> None:
        self._grow([0], [call.need_size], [-1], call.slots)

    def _alloc_extend(self, call: f.AllocExtend) -> None:
        self._grow(call.prefix_lens, call.seq_lens, call.last_loc, call.slots)

    def _alloc_decode(self, call: f.AllocDecode) -> None:
        prefix_lens = [seq - 1 for seq in call.seq_lens]
        self._grow(prefix_lens, call.seq_lens, call.last_loc, call.slots)

    def _grow(
        self, prefix_lens: list[int], seq_lens: list[int], last_loc: list[int], slots: Any
    ) -> None:
        """Any free pages will do; which slots of them, and in which order, is fixed."""
        size = self.page_size
        lanes = list(zip(prefix_lens, seq_lens, last_loc, strict=False))
        if len({len(prefix_lens), len(seq_lens), len(last_loc)}) > 1 or any(
            not 0 <= prefix <= seq < 2**40 for prefix, seq, _ in lanes
        ):
            raise Undecidable(f"lengths {prefix_lens} to {seq_lens} after {last_loc}")
        need = sum(-(-seq // size) - -(-prefix // size) for prefix, seq, _ in lanes)
        free = self.device.free_count
        if slots is None:
            self._require(
                need > free or not self.totals,
                "AL2",
                f"refused {need} pages although {free} are free",
            )
            return
        count = sum(seq - prefix for prefix, seq, _ in lanes)
        self._require(len(slots) == count, "AL1", f"{len(slots)} slots, but {count} were asked for")
        opened, start = [], 0
        for before, after, end in lanes:
            growth = slots[start : start + after - before]
            start += after - before
            opened += [s // size for s in growth[-before % size :: size]]
            if growth and before % size:
                self._require(
                    isinstance(self.device.owner.get(end // size), str),
                    "P1",
                    f"tokens were put behind slot {end}: {self.device.says(end // size)}",
                )
        prefix, seq, last, pages = (
            torch.tensor(part, dtype=torch.int64)
            for part in (prefix_lens, seq_lens, last_loc, opened)
        )
        expected = alloc_extend(prefix, seq, last, pages, size, count).tolist()
        wrong = next((i for i, s in enumerate(slots) if s != expected[i]), None)
        if wrong is not None:
            raise Violation(
                "AL1",
                f"slot {wrong} of the answer is {slots[wrong]}, expected {expected[wrong]} with "
                "the pages that it opens",
            )
        self._require(
            len(set(opened)) == len(opened),
            "P1",
            f"pages {sorted(p for p in opened if opened.count(p) > 1)} were handed out twice in "
            "one answer",
        )
        self.device.take([page * size for page in opened], f"record {self.n}")

    def _free(self, call: f.Free) -> None:
        self._file_written()
        self.device.release(self.pages_of(call.slots))

    def _free_group_begin(self, call: f.FreeGroupBegin) -> None:
        self.device.queued = set()

    def _free_group_end(self, call: f.FreeGroupEnd) -> None:
        self.device.queued = None

    def _clear(self, call: f.Clear) -> None:
        cached = len(self.device.cached)
        self._require(not cached, "P1", f"every page was cleared while {cached} pages are cached")
        self.device.clear()

    def _backup_state(self, call: f.BackupState) -> None:
        self.states[call.state] = (dict(self.device.owner), dict(self.device.cached))

    def _restore_state(self, call: f.RestoreState) -> None:
        if call.state not in self.states:
            raise Undecidable(f"state {call.state} was saved before the recording")
        owner, cached = self.states[call.state]
        self._require(
            cached == self.device.cached,
            "P1",
            "the free list of an earlier state was restored although what is cached has changed",
        )
        self.device.owner = dict(owner)
