"""The bench of a cache of sequences: the five calls and the optional ones, judged by what they say.

A cache may do what it likes with pages that no running sequence has: keep them, lose them, let a
duplicate live. So room is what is not in a running sequence's table, and what is found is judged by
what was written there.
"""

from collections.abc import Callable
from typing import Any

from refcache.oracle.drivers.sequences.contents import Contents, Running
from refcache.oracle.program.trial import Trial
from refcache.oracle.rules.events import TierEvents
from refcache.oracle.target.config import SequencesConfig


class SequencesBench:
    """See the module docstring.

    Attributes:
        subject: what the target made; ``contents``: which KV is where.
        running: the sequences, oldest first; ``late``: aborted ones whose result is still to come.
        epochs: how often each namespace was invalidated.
    """

    def __init__(self, trial: Trial, config: SequencesConfig) -> None:
        self.trial, self.config, self.traits = trial, config, trial.target.traits
        self.page_size = config.page_size
        self.subject = trial.make(trial.target.sequences, config)
        kv = getattr(self.subject, "kv", None)
        self.contents = Contents(config.page_size, config.is_eagle, kv)
        self.running: list[Running] = []
        self.late: list[Running] = []
        self.epochs: dict[str | None, int] = {}
        self.replay = TierEvents() if self._emits() else None
        if self.replay is not None:
            self.replay.device.orphans = self.traits.loses_children
        self.check()

    def _emits(self) -> bool:
        return self.config.enable_kv_cache_events and self.optional("events") is not None

    # ---- what is known ---------------------------------------------------------------------------

    def optional(self, name: str) -> Callable[..., Any] | None:
        """The optional call of that name, where the target has it."""
        found: Callable[..., Any] | None = getattr(self.subject, name, None)
        return found

    def used(self) -> set[int]:
        """Pages in the tables of running sequences."""
        tables = (table for seq in self.running for table in seq.tables)
        return {page for table in tables for page in table} - {self.traits.dummy_page}

    def room(self) -> int:
        """Pages that a request for room must not be refused."""
        used = self.used()
        if not self.traits.alloc_evicts:
            used |= {page for _, page, _ in self.contents.origins}
        return self.config.pages - len(used)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens, in every group."""
        return -(-tokens // self.page_size) * len(self.traits.windows)

    def first_read(self, group: int, launched: int) -> int:
        """The first token that the next one of a sequence attends to."""
        window = self.traits.windows[group]
        return 0 if window is None else max(0, launched - window + 1)

    def describe(self) -> str:
        lines = []
        for seq in self.running:
            space = "" if seq.namespace is None else f" in {seq.namespace!r}"
            lines.append(
                f"{seq}{space}: tokens {seq.tokens}, room for {seq.granted}, {seq.launched} "
                f"launched, {seq.computed} computed, pages {' and '.join(map(str, seq.tables))}"
            )
        lines += [f"{seq}: aborted, its result is still to come" for seq in self.late]
        return "\n".join(lines) or "nothing runs"

    def choices(self) -> dict[str, Any]:
        return {str(seq): seq.tables for seq in self.running}

    # ---- rules -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Every table as it is now: SQ3 for its pages, SQ1 for what is read from them."""
        self._hear()
        for seq in self.running:
            self._see(seq)
        for seq in self.running:
            self._judge_reads(seq)

    def _hear(self) -> None:
        """Replay the events since the last time; N1 and N2 for their order."""
        if self.replay is not None:
            self.replay.apply(self.trial.call(self.subject.events))

    def _tables(self, seq: Running) -> list[list[int]]:
        """What ``table`` says, as a list of numbers a group."""
        answer = self.trial.call(self.subject.table, seq.number)
        one = len(self.traits.windows) == 1
        return [[int(page) for page in table] for table in ([answer] if one else answer)]

    def _all_tables(self) -> dict[str, list[list[int]]]:
        """The tables as they are now."""
        for seq in self.running:
            self._see(seq)
        return {str(seq): seq.tables for seq in self.running}

    def _see(self, seq: Running) -> None:
        """Look at a table; SQ3."""
        before, seq.tables = seq.tables, self._tables(seq)
        require, dummy = self.trial.require, self.traits.dummy_page
        every = range(self.config.pages + (dummy is not None))
        for group, table in enumerate(seq.tables):
            held = [page for page in table if page != dummy]
            strange = [page for page in held if page not in every]
            require(not strange, "SQ3", f"{seq} has pages {strange}; there are {every}")
            twice = sorted({page for page in held if held.count(page) > 1})
            require(not twice, "SQ3", f"{seq} has pages {twice} twice: {table}")
            require(
                len(table) * self.page_size >= seq.granted,
                "SQ3",
                f"{seq} was granted room for {seq.granted} tokens and has {len(table)} pages",
            )
            first = self.first_read(group, seq.launched) // self.page_size
            needed = table[first : -(-seq.granted // self.page_size)]
            require(dummy not in needed or dummy is None, "SQ3", f"{seq} needs page {dummy}")
            old = before[group] if before else []
            done = seq.launched // self.page_size
            same = self.traits.merges_duplicates or old[first:done] == table[first:done]
            require(same, "SQ3", f"{seq} was given other pages: {old} became {table}")

    def _judge_reads(self, seq: Running) -> None:
        """SQ1."""
        for group in range(len(seq.tables)):
            for position in range(self.first_read(group, seq.launched), seq.launched):
                wrong = self.contents.wrong(seq, group, position)
                self.trial.require(not wrong, "SQ1", f"{seq}: {wrong}")

    def judge_refusal(self, need: int, what: str, before: dict[str, Any]) -> None:
        """SQ5: there was no room, and nothing changed."""
        room = self.room()
        self.trial.require(
            need > room, "SQ5", f"{what} needs {need} pages at most; {room} are in no table"
        )
        after = self._all_tables()
        self.trial.require(
            after == before, "SQ5", f"{what} was refused and turned {before} into {after}"
        )

    def judge_found(self, seq: Running, found: Any) -> None:
        """SQ4 and SQ8: what is found was computed for this prefix, and may be found."""
        require = self.trial.require
        require(
            type(found) is int and 0 <= found < len(seq.tokens),
            "SQ4",
            f"start of {len(seq.tokens)} tokens found {found!r}: expected 0 to "
            f"{len(seq.tokens) - 1}, the last one is computed",
        )
        for group in range(len(seq.tables)):
            for position in range(self.first_read(group, found), found):
                self.contents.recognize(seq, group, position)
                wrong = self.contents.wrong(seq, group, position)
                stale = wrong.endswith("it was invalidated")
                require(
                    not wrong, "SQ8" if stale else "SQ4", f"{seq} found {found} tokens: {wrong}"
                )
                place = self.contents.place(seq, group, position)
                told = place is None or self.contents.origins[place] in self.contents.told
                require(
                    told or self.traits.abort_is_cached,
                    "SQ4",
                    f"{seq} found {found} tokens; the result of token {position} was never told",
                )
        self._hear()
        if self.replay is not None and found and found % self.page_size == 0:
            stored = self.replay.device.resident.values()
            known = {len(elements) for elements in stored if self._begins(seq, elements)}
            require(
                found in known,
                "N2",
                f"{seq} found {found} tokens; the events leave {sorted(known)} of them stored",
            )

    def _begins(self, seq: Running, elements: tuple[Any, ...]) -> bool:
        first = tuple(e[0] for e in elements) if self.config.is_eagle else elements
        return first == tuple(seq.tokens[: len(first)])

    # ---- calls -----------------------------------------------------------------------------------

    def start(self, seq: Running) -> bool:
        """``start``; False when there is no room."""
        call, before = self.trial.call, self._all_tables()
        seq.epoch = self.epochs.get(seq.namespace, 0)
        found = call(self.subject.start, seq.number, tuple(seq.tokens), seq.namespace)
        if found is None:
            need = self.pages_for(len(seq.tokens))
            self.judge_refusal(need, f"start of {len(seq.tokens)} tokens", before)
            return False
        seq.tables, seq.launched, seq.granted = self._tables(seq), 0, 0
        self.judge_found(seq, found)
        seq.launched = seq.computed = seq.granted = found
        self.running.append(seq)
        return True

    def grow(self, seq: Running, n: int) -> bool:
        """``grow``, if there is no room yet; False when there is none."""
        if n <= seq.granted:
            return True
        before = self._all_tables()
        need = self.pages_for(n) - sum(map(len, seq.tables)) + self._splits(seq)
        granted = self.trial.call(self.subject.grow, seq.number, tuple(seq.tokens), n)
        if not granted:
            self.judge_refusal(need, f"{seq}: room for {n} tokens", before)
            return False
        self._copy()
        seq.granted = n
        return True

    def _splits(self, seq: Running) -> int:
        """Pages that another one shares and this one is going to write."""
        index = seq.launched // self.page_size
        own = [table[index] for table in seq.tables if index < len(table)]
        others = {p for s in self.running if s is not seq for t in s.tables for p in t}
        return sum(page in others for page in own)

    def _copy(self) -> None:
        """Make the copies between pages that the cache asks for."""
        copies = self.optional("copies")
        pairs = self.trial.call(copies) if copies is not None else None
        for source, to in pairs or ():
            self._judge_write(None, int(to), range(self.page_size))
            self.contents.copy(0, int(source), int(to))

    def launch(self, seq: Running, end: int) -> None:
        """A forward writes up to ``end``; SQ2."""
        self._see(seq)
        for position in range(seq.launched, end):
            index, offset = divmod(position, self.page_size)
            for table in seq.tables:
                self._judge_write(seq, table[index], range(offset, offset + 1))
        self.contents.write(seq, seq.launched, end)
        seq.launched = end

    def _judge_write(self, seq: Running | None, page: int, offsets: range) -> None:
        """SQ2: no other running sequence reads what is written."""
        for other in self.running:
            for table in other.tables if other is not seq else []:
                if page not in table:
                    continue
                start = table.index(page) * self.page_size
                read = [start + offset for offset in offsets if start + offset < other.launched]
                self.trial.require(
                    not read,
                    "SQ2",
                    f"{seq or 'a copy'} writes page {page}, where {other} reads tokens {read}",
                )

    def result(self, seq: Running) -> None:
        """``computed`` of what was launched; of an aborted sequence nothing is known by it."""
        if seq in self.running:
            self.contents.tell(seq, seq.launched)
        seq.computed = seq.launched
        self.trial.call(self.subject.computed, seq.number, tuple(seq.tokens), seq.launched)

    def end(self, seq: Running, how: str) -> None:
        """``finish``, ``abort`` or ``preempt``."""
        self.running.remove(seq)
        args = (tuple(seq.tokens),) if how == "finish" else ()
        self.trial.call(getattr(self.subject, how), seq.number, *args)

    def fork(self, seq: Running, child: Running) -> bool:
        """``fork``; False when there is no room."""
        before = self._all_tables()
        granted = self.trial.call(self.subject.fork, seq.number, child.number)
        if granted is False:
            self.judge_refusal(self.pages_for(seq.computed), f"fork of {seq}", before)
            return False
        child.epoch, child.tables = seq.epoch, self._tables(child)
        self._copy()
        child.launched = child.computed = child.granted = seq.computed
        self.running.append(child)
        return True

    def invalidate(self, namespace: str | None) -> None:
        """``invalidate``: what is cached there is found no more."""
        self.trial.call(self.subject.invalidate, namespace)
        self.epochs[namespace] = self.epochs.get(namespace, 0) + 1

    def reset(self) -> None:
        """``reset``: nothing is found any more."""
        self.trial.call(self.subject.reset)
        self.contents.origins.clear()
        self.contents.told.clear()
