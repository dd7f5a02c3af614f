"""The life of a request with recurrent states: a copied state, buffers, states taken on the way.

Without buffers the tree takes a copy of the running state at each caching call, and the running
slot itself at the end. With them a forward leaves the state of a chunk boundary in a buffer, and
the tree gets that; only so many tokens are cached.
"""

from array import array
from collections.abc import Sequence

import torch

from refcache.keys import TOKEN
from refcache.oracle.drivers.mamba.bench import MambaBench
from refcache.oracle.drivers.mamba.request import MambaRequest
from refcache.oracle.drivers.tree.request import Request
from refcache.oracle.drivers.tree.serving import SAMPLED, Serving
from refcache.oracle.ledger.ledger import Prefix


def track_at(prefix: int, extend: int, branching: int | None, chunk: int) -> int | None:
    """Where a prefill of ``extend`` tokens after ``prefix`` takes its one state; None: nowhere.

    The branching point wins over the last boundary, if it is on the request's grid.

    >>> track_at(0, 100, None, 64), track_at(0, 200, 64, 64), track_at(64, 200, 100, 64)
    (64, 64, 256)
    """
    if extend < chunk:
        return None
    on_the_way = range(prefix + chunk, prefix + extend, chunk)
    if branching is not None and branching in on_the_way:
        return branching
    return prefix + extend // chunk * chunk


class MambaServing(Serving):
    """See the module docstring."""

    bench: MambaBench

    def admit(
        self, tokens: Sequence[int], extra_key: str | None, chunk: int | None, priority: int
    ) -> None:
        """Match all but the last token with a copy of the state, lock, take the states that are
        missing, and compute the first ``chunk`` of the rest."""
        bench, c = self.bench, self.bench.config
        if not tokens or len(bench.requests) >= c.max_requests or len(tokens) >= c.context_length:
            return
        req = self.wait(tokens, extra_key, priority)
        if req is None:
            return
        prefix: Prefix = (extra_key, tuple(tokens[: req.cache_protected_len]))
        bench.lock(req.last_node, prefix)
        if not self._rows(req):
            bench.unlock(req.last_node, prefix)
            self.leave(req)
            return
        self._write(req, 0, req.prefix_indices)
        req.computed = req.allocated = req.cache_protected_len
        if self.compute(req, chunk):
            bench.requests.append(req)
        else:
            bench.unlock(req.last_node, prefix)
            with bench.states.permits(set(req.states)):
                self.trial.call(bench.rows.free_mamba_cache, req)
            self.trial.call(bench.rows.free, req)

    def wait(
        self, tokens: Sequence[int], extra_key: str | None, priority: int = 0
    ) -> MambaRequest | None:
        """A request that has matched and not been admitted; None where no state can be copied."""
        bench = self.bench
        cached = bench.ledger.longest((extra_key, bench.whole(tokens[:-1])))
        best = bench.states.best(cached)
        if best[1] and not bench.can_copy(best):
            return None
        req = MambaRequest(f"request {self.admitted}", tokens, extra_key, priority)
        self.admitted += 1
        found = bench.match(tokens[:-1], extra_key, req)
        req.last_node, req.prefix_indices = found.last_device_node, found.device_indices
        req.cache_protected_len = len(found.device_indices)
        req.mamba_branching_seqlen = found.mamba_branching_seqlen
        return req

    def leave(self, req: MambaRequest) -> None:
        """A waiting request is not admitted, or aborted: the state that it copied is given back."""
        self.bench.free_states(req.states)
        req.mamba_pool_idx = None

    def _rows(self, req: MambaRequest) -> bool:
        """A row, and the states that are missing, evicting some; False when there are too few."""
        bench = self.bench
        missing = bench.config.buffers + (req.running is None)
        bench.make_states(missing)
        if len(bench.states.free) < missing:
            return False
        had, bench.pool.owner = req.running, req.rid
        bench.pool.handed.clear()
        rows = self.trial.call(bench.rows.alloc, [req])
        handed = bench.pool.handed
        self.trial.require(
            rows is not None
            and sorted(handed) == sorted({*req.states} - {had})
            and len(req.states) == 1 + bench.config.buffers,
            "MB1",
            f"{req.rid} had state {had} and needs {missing} more; slots {handed} were handed out, "
            f"and it has {req.states}",
        )
        for slot in handed:
            bench.judge_zero(slot, req.rid)
        return True

    def compute(self, req: Request, chunk: int | None) -> bool:
        """As on a plain tree; with buffers, chunks of a prefill are whole ones of the grid."""
        c = self.bench.config
        if chunk is not None and c.extra_buffer:
            chunk = -(-max(1, chunk) // c.chunk) * c.chunk
        return super().compute(req, chunk)

    def _forward(self, req: Request, end: int) -> None:
        assert isinstance(req, MambaRequest)
        start, pending, prefill = req.computed, req.pending, not req.prefilled
        self._read_state(req)
        super()._forward(req, end)
        slot = req.running
        assert slot is not None
        self.bench.bytes.write(slot, (req.extra_key, req.tokens[:end]))
        req.pending = pending or prefill
        c = self.bench.config
        if not c.extra_buffer:
            return
        at: int | None
        if prefill:
            at = track_at(start, end - start, req.mamba_branching_seqlen, c.chunk)
        else:
            at = end if end % c.chunk == 0 else None
        if at is not None:
            index = req.mamba_next_track_idx or 0
            self.bench.bytes.write(req.buffers[index], (req.extra_key, req.tokens[:at]))
            req.mamba_next_track_idx = 1 - index if len(req.buffers) == 2 else index
            req.mamba_last_track_seqlen = at

    def _read_state(self, req: MambaRequest) -> None:
        """MB7: a forward reads the state of exactly the tokens before it."""
        assert req.running is not None
        wrong = self.bench.bytes.differs(req.running, (req.extra_key, req.tokens[: req.computed]))
        self.trial.require(
            not wrong, "MB7", f"{req.rid} goes on after {req.computed} tokens; its {wrong}"
        )

    def cached_length(self, req: MambaRequest) -> int | None:
        """How many tokens a caching call caches; None: nothing."""
        return req.mamba_last_track_seqlen if self.bench.config.extra_buffer else req.computed

    def cache(self, req: Request) -> None:
        """``cache_unfinished_req``: R2, MB1 for the copy of the state."""
        assert isinstance(req, MambaRequest)
        bench, require = self.bench, self.trial.require
        req.fill_ids = array(TOKEN, req.tokens[: req.computed])
        row, end, protected = bench.row(req), self.cached_length(req), req.cache_protected_len
        if end is None:
            self.trial.call(bench.tree.cache_unfinished_req, req, chunked=not req.prefilled)
            require(
                (req.prefix_indices.tolist(), req.cache_protected_len)
                == (row[: req.computed], protected),
                "R2",
                f"{req.rid} had no state to cache; prefix_indices = {req.prefix_indices.tolist()}, "
                f"cache_protected_len = {req.cache_protected_len}",
            )
            req.pending = False
            return
        if not bench.states.free and not bench.states.evictable():
            return
        prefix = (req.extra_key, bench.elements(req.tokens[:end]))
        held = (req.last_node, (req.extra_key, prefix[1][:protected]))
        self._cache_with_state(req, prefix, row)
        bench.drop(*held)
        bench.hold(req.last_node, prefix)
        require(
            req.cache_protected_len == end and req.mamba_last_track_seqlen is None,
            "R2",
            f"{req.rid}: {end} tokens were cached; "
            f"cache_protected_len = {req.cache_protected_len}, "
            f"mamba_last_track_seqlen = {req.mamba_last_track_seqlen}",
        )
        require(
            req.prefix_indices.tolist() == bench.row(req)[: req.computed],
            "R2",
            f"{req.rid}: prefix_indices = {req.prefix_indices.tolist()}, its row has "
            f"{bench.row(req)[: req.computed]}",
        )
        req.pending = False

    def _cache_with_state(self, req: MambaRequest, prefix: Prefix, row: list[int]) -> None:
        """The call, with what it may free and must adopt: the duplicates of what was cached, after
        one state was evicted where none was free."""
        bench, size, start = self.bench, self.bench.page_size, req.cache_protected_len
        own = {slot // size for slot in row[start : len(prefix[1])]}
        short, states = not bench.states.free, bench.states
        bench.pool.owner = req.rid
        bench.pool.handed.clear()

        def may_free(page: int) -> tuple[str, str] | None:
            if page in own:
                return None
            return bench.ledger.only_unlocked(page) if short else bench.ledger.only(own)(page)

        def may_free_state(slot: int) -> tuple[str, str] | None:
            if slot in bench.pool.handed:
                return None
            return states.only_unlocked(slot) if short else states.only(())(slot)

        with bench.ledger.permits(may_free) as freed, states.permits(may_free_state) as gone:
            self.trial.call(bench.tree.cache_unfinished_req, req, chunked=not req.prefilled)
        evicted = [slot for slot in gone.pages if slot not in bench.pool.handed]
        self.trial.require(
            len(evicted) <= 1, "MB10", f"one state was needed, {len(evicted)} were evicted"
        )
        known = len(bench.ledger.longest(prefix)[1])
        duplicates = {slot // size for slot in row[start:known]}
        self.trial.require(
            duplicates == own & {*freed.pages},
            "P1",
            f"{known} tokens were cached; of {req.rid}'s pages {sorted(own)} those of them are "
            f"duplicates: {sorted(duplicates)}, freed were {sorted(own & {*freed.pages})}",
        )
        left = [slot for slot in bench.pool.handed if states.owner.get(slot) == req.rid]
        existed = prefix in states.cached
        self.trial.require(
            len(left) == (not existed),
            "MB1",
            f"{list(prefix[1])} had {'a' if existed else 'no'} state; of the copies "
            f"{bench.pool.handed} the slots {left} are not freed",
        )
        bench.adopt(prefix, row, known)
        if left:
            states.adopt(prefix, left[0])

    def finish(self, req: Request, insert: bool) -> None:
        """``cache_finished_req``: so many tokens as have a state are cached, or none; MB1."""
        assert isinstance(req, MambaRequest)
        bench, computed, states = self.bench, req.computed, self.bench.states
        req.output_ids.append(SAMPLED)
        committed, row = req.tokens[:computed], bench.row(req)
        end = (self.cached_length(req) or 0) if insert else 0
        prefix: Prefix = (req.extra_key, committed[:end])
        held = (req.last_node, (req.extra_key, committed[: req.cache_protected_len]))
        known = len(bench.ledger.longest(prefix)[1])
        given_up = {
            *row[req.cache_protected_len : known],
            *row[max(end, req.cache_protected_len) : computed],
        }
        moved = None
        if end and prefix not in states.cached:
            moved = req.tracked if bench.config.extra_buffer else req.running
        mine = set(req.states) - {moved}
        with self._gives_up(given_up), states.permits(mine) as gone:
            self.trial.call(bench.tree.cache_finished_req, req, is_insert=insert)
        lost = sorted(mine - {*gone.pages})
        self.trial.require(
            not lost, "MB1", f"states {lost} belong to nobody: {req.rid} ended, they are not freed"
        )
        bench.adopt(prefix, row, known)
        if moved is not None:
            states.adopt(prefix, moved)
        bench.drop(*held)
        start = -(-computed // bench.page_size) * bench.page_size
        bench.free(row[start : req.allocated])
        if bench.ledger.queued is None:
            self._write(req, 0, torch.full((req.allocated,), -1))
        self.trial.call(bench.rows.free, req)
        bench.requests.remove(req)
        if end:
            found = bench.match(committed, req.extra_key)
            self.trial.require(
                len(found.device_indices) >= end,
                "M2",
                f"{end} tokens were cached, {len(found.device_indices)} match",
            )
