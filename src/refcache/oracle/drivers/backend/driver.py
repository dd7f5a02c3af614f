"""Drives storage backends through every call of the interface: ``storage.backend``.

Keys and engines are small numbers in a program. All calls that nothing disturbs must succeed.
"""

from collections.abc import Sequence

import torch

from refcache.oracle.drivers.backend.bench import KEYS, BackendBench, Page, key_of
from refcache.oracle.program.driver import Driver, step
from refcache.storage import PoolHitPolicy, PoolTransfer

GUARD = 0xA5
"""The bytes of a target before a call, and around it."""


class BackendDriver(Driver):
    """See the module docstring."""

    needs = frozenset({"storage"})
    bench_type = BackendBench
    bench: BackendBench

    @step
    def set(self, engine: int, key: int) -> None:
        page = self._page(engine, key)
        value = self.bench.bytes_of(page)
        self.bench.judge_set(page, self.bench.call(page.engine, "set", key_of(page.key), value))

    @step
    def get(self, engine: int, key: int, form: str = "flat") -> None:
        """Read a page: into a flat target, one with gaps, none, or one of another size."""
        page = self._page(engine, key)
        if form == "none" and self.bench.traits.no_target:
            self.bench.judge_get(page, self.bench.call(page.engine, "get", key_of(page.key)))
        elif form in ("shorter", "longer"):
            self._get_other_size(page, -1 if form == "shorter" else 1)
        else:
            self._get(page, gaps=form == "gaps")

    def _get(self, page: Page, gaps: bool = False) -> None:
        size = self.bench.page_bytes
        room = torch.full((size * 2,), GUARD, dtype=torch.uint8)
        target = room[::2] if gaps else room[size // 2 : size // 2 + size]
        found = self.bench.call(page.engine, "get", key_of(page.key), target)
        if found is not None:
            self.bench.judge_get(page, target, f"get into a target{' with gaps' * gaps}")
        self.bench.judge_get(page, found)
        beside = room[1::2] if gaps else torch.cat([room[: size // 2], room[size // 2 + size :]])
        self.bench.trial.require(
            bool(beside.eq(GUARD).all()), "SB4", f"get of {page} wrote beside its target"
        )

    def _get_other_size(self, page: Page, more: int) -> None:
        target = torch.full((self.bench.page_bytes + more,), GUARD, dtype=torch.uint8)
        found = self.bench.call(page.engine, "get", key_of(page.key), target)
        self.bench.trial.require(
            found is None,
            "SB1",
            f"get of {page}, of {self.bench.page_bytes} bytes, filled a target of {len(target)}",
        )

    @step
    def exists(self, engine: int, key: int) -> None:
        page = self._page(engine, key)
        self.bench.judge_exists(page, self.bench.call(page.engine, "exists", key_of(page.key)))

    @step
    def batch_set(self, engine: int, keys: Sequence[int]) -> None:
        pages = self._pages(engine, keys)
        values = [self.bench.bytes_of(page) for page in pages]
        done = self.bench.call(engine, "batch_set", self._names(pages), values)
        for page in pages:
            self.bench.judge_set(page, done)

    @step
    def batch_get(self, engine: int, keys: Sequence[int]) -> None:
        pages = self._pages(engine, keys)
        targets = [torch.full((self.bench.page_bytes,), GUARD, dtype=torch.uint8) for _ in pages]
        found = self.bench.call(engine, "batch_get", self._names(pages), targets)
        self._one_each("batch_get", pages, found)
        for page, one in zip(pages, found, strict=True):
            self.bench.judge_get(page, one, "batch_get")

    @step
    def batch_exists(self, engine: int, keys: Sequence[int]) -> None:
        pages = self._pages(engine, keys)
        found = self.bench.call(engine, "batch_exists", self._names(pages))
        right = self.bench.leading(pages)
        self.bench.trial.require(
            right is None or found == right,
            "SB3",
            f"batch_exists of keys {[p.key for p in pages]} answered {found!r}; the first {right} "
            "are stored",
        )

    @step
    def write_v1(self, engine: int, keys: Sequence[int]) -> None:
        """Store pages from slots of the registered pool."""
        if self.bench.traits.v1:
            pages = self._pages(engine, keys)
            slots = self._fill(pages)
            done = self.bench.call(engine, "batch_set_v1", self._names(pages), slots)
            self._one_each("batch_set_v1", pages, done)
            for page, one in zip(pages, done, strict=True):
                self.bench.judge_set(page, one)

    @step
    def read_v1(self, engine: int, keys: Sequence[int]) -> None:
        """Read pages into slots of the registered pool."""
        if self.bench.traits.v1:
            pages = self._pages(engine, keys)
            slots = self._slots(pages)
            self.bench.pools[self._backend(engine)]["kv"].rows.fill_(GUARD)
            found = self.bench.call(engine, "batch_get_v1", self._names(pages), slots)
            self._judge_read("batch_get_v1", pages, found)

    @step
    def write_v2(self, engine: int, keys: Sequence[int], states: Sequence[int]) -> None:
        """Store pages of two pools: KV of ``keys``, a state for each of ``states``."""
        if self.bench.traits.v2:
            every = [self._pages(engine, keys), self._pages(engine, states, "mamba")]
            moves = [self._transfer(pages, self._fill(pages)) for pages in every if pages]
            done = self.bench.call(engine, "batch_set_v2", moves)
            for pages in filter(None, every):
                self._one_each("batch_set_v2", pages, done.get(pages[0].pool, ()))
                for page, one in zip(pages, done[pages[0].pool], strict=True):
                    self.bench.judge_set(page, one)

    @step
    def read_v2(self, engine: int, keys: Sequence[int], states: Sequence[int]) -> None:
        """Read pages of two pools."""
        if self.bench.traits.v2:
            every = [self._pages(engine, keys), self._pages(engine, states, "mamba")]
            for pool in self.bench.pools[self._backend(engine)].values():
                pool.rows.fill_(GUARD)
            moves = [self._transfer(pages, self._slots(pages)) for pages in every if pages]
            found = self.bench.call(engine, "batch_get_v2", moves)
            for pages in filter(None, every):
                self._judge_read("batch_get_v2", pages, found.get(pages[0].pool, ()))

    @step
    def hits_v2(self, engine: int, keys: Sequence[int], last: int = 0) -> None:
        """The prefix that two pools cover: all pages of it, or its ``last`` states only."""
        if not self.bench.traits.v2:
            return
        kv = self._pages(engine, keys)
        policy = PoolHitPolicy.TRAILING_PAGES if last else PoolHitPolicy.ALL_PAGES
        names = self._names(kv)
        state = PoolTransfer("mamba", keys=names[-last:] if last else names, hit_policy=policy)
        found = self.bench.call(engine, "batch_exists_v2", names, [state])
        states = [page._replace(pool="mamba") for page in kv]
        if not self.bench.unsure & {*kv, *states}:
            right = self._usable(kv, states, last)
            self.bench.trial.require(
                found.kv_hit_pages == right,
                "SB6",
                f"of keys {[p.key for p in kv]} with {policy.value}, {found.kv_hit_pages!r} pages "
                f"are usable; {right} are",
            )

    @step
    def clear(self, engine: int) -> None:
        self.bench.clear(engine)

    @step
    def restart(self) -> None:
        self.bench.restart()

    @step
    def wind_down(self) -> None:
        """Every page is read; then each engine clears, and no file is left over."""
        for engine in range(self.bench.engines):
            for key in range(KEYS):
                self._get(Page(engine, key))
        for engine in range(self.bench.engines):
            self.bench.clear(engine)
        left = self.bench.files() if "durable" in self.target.capabilities else []
        self.bench.trial.require(
            len(left) <= self.bench.traits.files, "SB5", f"cleared, but {left} are left"
        )

    # ---- parts -----------------------------------------------------------------------------------

    def _usable(self, kv: Sequence[Page], states: Sequence[Page], last: int) -> int:
        """By trying every prefix: the longest whose pages are there."""
        there = self.bench.stored
        for count in range(len(kv), 0, -1):
            needed = states[max(0, count - last) : count] if last else states[:count]
            if there >= {*kv[:count], *needed}:
                return count
        return 0

    def _page(self, engine: int, key: int) -> Page:
        return Page(engine % self.bench.engines, key % KEYS)

    def _pages(self, engine: int, keys: Sequence[int], pool: str = "kv") -> list[Page]:
        distinct = dict.fromkeys(key % KEYS for key in keys)
        return [Page(engine % self.bench.engines, key, pool) for key in distinct]

    def _names(self, pages: Sequence[Page]) -> list[str]:
        return [key_of(page.key) for page in pages]

    def _backend(self, engine: int) -> int:
        """The engine, its backend and pools made."""
        engine %= self.bench.engines
        self.bench.backend(engine)
        return engine

    def _slots(self, pages: Sequence[Page]) -> torch.Tensor:
        """Slots of the pages, the last page first."""
        if pages:
            self._backend(pages[0].engine)
        size = self.config.page_size
        starts = range((len(pages) - 1) * size, -1, -size)
        return torch.tensor([start + i for start in starts for i in range(size)], dtype=torch.int64)

    def _fill(self, pages: Sequence[Page]) -> torch.Tensor:
        """Write the pages into slots of their pool."""
        slots = self._slots(pages)
        for page, at in zip(pages, slots[:: self.config.page_size].tolist(), strict=True):
            pool = self.bench.pools[page.engine][page.pool]
            pool.set_from_flat_data_page(at, self.bench.bytes_of(page))
        return slots

    def _transfer(self, pages: Sequence[Page], slots: torch.Tensor) -> PoolTransfer:
        return PoolTransfer(pages[0].pool, slots, keys=self._names(pages))

    def _one_each(self, name: str, pages: Sequence[Page], answer: Sequence[object]) -> None:
        self.bench.trial.require(
            len(answer) == len(pages), "SB3", f"{name} of {len(pages)} keys answered {answer!r}"
        )

    def _judge_read(self, name: str, pages: Sequence[Page], found: Sequence[bool]) -> None:
        """Slots of hits have the page, those of misses are as they were."""
        self._one_each(name, pages, found)
        for page, hit, at in zip(
            pages, found, self._slots(pages)[:: self.config.page_size].tolist(), strict=True
        ):
            seen = self.bench.pools[page.engine][page.pool].get_data_page(at)
            self.bench.judge_get(page, seen if hit else None, name)
            self.bench.trial.require(
                hit or bool(seen.eq(GUARD).all()), "SB4", f"{name}: {page} is a miss; slots changed"
            )
