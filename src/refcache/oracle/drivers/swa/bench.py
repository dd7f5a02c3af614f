"""The bench of a tree over two pools: which pages are cached, and which of them have their window.

The ledger knows the full pages, as on the bench of a plain tree; ``windows`` knows which of them
have a window page. A match may end only where the last window of tokens is there, or where the path
from the root has all of it; both follow from the two.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from refcache.oracle.drivers.swa.forwards import WindowForwards
from refcache.oracle.drivers.tree.bench import EvictionTerms, Shape, TreeBench
from refcache.oracle.ledger.ledger import Prefix
from refcache.oracle.ledger.windows import RecordingWindows, Windows
from refcache.oracle.rules.swa import WindowState, check_window_state
from refcache.oracle.target.config import SWAConfig

UUID = "swa_uuid_for_lock"
"""Of a request: what its lock has returned. The name is SGLang's."""


class SWABench(TreeBench):
    """See the module docstring.

    Attributes:
        windows: who owns each window page.
        uuids: of each lock that no request has, by handle and prefix, what ends its window.
    """

    config: SWAConfig
    forwards: WindowForwards

    def build(self) -> None:
        c = self.config
        self.windows = Windows(c.swa_size // c.page_size, c.page_size, self.trial.note)
        self.uuids: defaultdict[tuple[Any, Prefix], list[int | None]] = defaultdict(list)
        self.tree, self.allocator, self.rows = self.trial.call(
            self.target.swa,
            c,
            lambda allocator: RecordingWindows(allocator, self.ledger, self.windows),
        )
        self.forwards = WindowForwards(self.trial, c.window, self.mapped)
        self.events = None
        self.terms = EvictionTerms(last=self._last_victim)

    def mapped(self, slots: Sequence[int]) -> list[int]:
        """Window slots of full slots, 0 where there is none."""
        given = torch.tensor(list(slots), dtype=torch.int64)
        found = self.trial.call(self.allocator.translate_loc_from_full_to_swa, given)
        return [int(slot) for slot in found.tolist()]

    def _last_victim(self, counts: Sequence[int]) -> int:
        """Pages of the leaf that went last, with the nodes above that went with it: from the last
        free that gave back a window on."""
        full = [pair for pair in self.windows.freed if pair[0]]
        leaves = [at for at, (_, windows) in enumerate(full) if windows]
        return sum(count for count, _ in full[leaves[-1] :]) if leaves else counts[-1]

    def available(self) -> int:
        return int(self.trial.call(self.allocator.full_available_size))

    def evictable(self) -> int:
        return int(self.trial.call(self.tree.full_evictable_size))

    def protected(self) -> int:
        return int(self.trial.call(self.tree.full_protected_size))

    def total(self) -> int:
        return int(self.trial.call(self.tree.total_size)[0])

    def window_sizes(self) -> tuple[int, int, int]:
        """Window tokens that the tree calls evictable and protected, and free ones."""
        call = self.trial.call
        return (
            int(call(self.tree.swa_evictable_size)),
            int(call(self.tree.swa_protected_size)),
            int(call(self.allocator.swa_available_size)),
        )

    def shape(self) -> Shape:
        own: Shape = self.window_sizes()
        if self.trial.has("inspect"):
            nodes = self.target.inspect_component(self.tree).nodes
            own += ({handle: (node.live, node.lock_ref) for handle, node in nodes.items()},)
        return super().shape() + own

    # ---- what is cached --------------------------------------------------------------------------

    def live(self, prefix: Prefix) -> bool:
        """Whether a cached page has its window."""
        return self.ledger.cached[prefix] in self.windows.of

    def usable(self, cached: Prefix) -> Prefix:
        """The longest part of a cached prefix whose last window is there, or all of it from the
        root; it ends where the window does."""
        size, best = self.page_size, 0
        run: float = float("inf")
        parts = list(self.ledger.prefixes(cached))
        for at, part in enumerate(parts):
            if self.live(part):
                run += size
                continue
            best = at * size if run >= self.config.window else best
            run = 0
        best = len(parts) * size if run >= self.config.window else best
        return cached[0], cached[1][:best]

    def in_windows(self) -> set[Prefix]:
        """The page prefixes whose window a holder needs."""
        needed = set()
        for _, prefix in self.ledger.holders:
            start = len(prefix[1]) - self.config.window
            needed |= {p for p in self.ledger.prefixes(prefix) if len(p[1]) > start}
        return needed

    def _evictable_window(self, page: int) -> tuple[str, str] | None:
        """The judge of an eviction of windows: those of cached pages that no holder needs."""
        owner = self.ledger.owner.get(page)
        if not isinstance(owner, tuple):
            return "SW2", f"{self.ledger.says(page)}; its window was evicted"
        if owner in self.in_windows():
            return "SW4", f"{self.ledger.says(page)}, in a holder's window, which was evicted"
        return None

    # ---- calls -----------------------------------------------------------------------------------

    def judge_match(self, found: Any, extra_key: str | None, elements: tuple[Any, ...]) -> None:
        slots = found.device_indices.tolist()
        cached = self.ledger.longest((extra_key, elements))
        best = self.usable(cached)
        self.trial.require(
            len(slots) == len(best[1]) and not found.host_hit_length,
            "M0",
            f"match found {len(slots)} tokens; {len(cached[1])} are cached, and the last window is "
            f"there for {list(best[1])}",
        )
        self.judge_slots(slots, best)

    def plan(
        self, prefix: Prefix, pages: Sequence[int], kept: int, evicted: int
    ) -> tuple[set[int], list[tuple[Prefix, int]]]:
        """What an insert of ``prefix`` with these pages frees, and what the tree owns afterwards.

        The first ``kept`` tokens are the tree's; of the first ``evicted`` the caller has no window.
        The tree keeps its own pages where they have their window, or the caller's have none, or
        somebody holds them: the holder's row names them. Where no token has its window, the tree
        takes nothing new.
        """
        freed: set[int] = set()
        held = self.ledger.locked()
        adopted: list[tuple[Prefix, int]] = []
        for part, page in zip(self.ledger.prefixes(prefix), pages, strict=True):
            start = len(part[1]) - self.page_size
            if part not in self.ledger.cached and evicted >= len(prefix[1]):
                freed.add(page)
            elif part not in self.ledger.cached:
                adopted.append((part, page))
            elif start >= kept:
                if self.live(part) or start < evicted or part in held:
                    freed.add(page)
                else:
                    freed.add(self.ledger.cached[part])
                    adopted.append((part, page))
        return freed, adopted

    def insert(
        self,
        tokens: tuple[int, ...],
        extra_key: str | None,
        slots: list[int],
        chunked: bool,
        priority: int,
        evicted: int = 0,
    ) -> None:
        """``insert`` of whole pages, of which the caller gave the first ``evicted`` tokens' window
        back; the tree frees what it does not take."""
        prefix, size = (extra_key, self.elements(tokens)), self.page_size
        known = len(self.ledger.longest(prefix)[1])
        if evicted:
            gone = slots[:evicted]
            with self.windows.permits({slot // size for slot in gone}):
                self.trial.call(self.allocator.free_swa, torch.tensor(gone))
        freed, adopted = self.plan(prefix, [slot // size for slot in slots[::size]], 0, evicted)
        value = torch.tensor(slots)
        params = self.target.InsertParams(
            key=self.target.RadixKey(list(tokens), extra_key),
            value=value,
            swa_evicted_seqlen=evicted,
            chunked=chunked,
            priority=priority,
        )
        with self.ledger.permits(freed) as gone_pages:
            result = self.trial.call(self.tree.insert, params)
        value.fill_(-1)
        self.trial.require(
            result.prefix_len == known and {*gone_pages.pages} == freed,
            "M3",
            f"insert returned {result.prefix_len} and freed pages {gone_pages.pages}; {known} "
            f"tokens were cached, and {sorted(freed)} belong to nobody afterwards",
        )
        for part, page in adopted:
            self.ledger.adopt(part, page)

    def lock(self, handle: Any, prefix: Prefix) -> None:
        """``inc_lock_ref``: the KV of the whole path, the window at its end."""
        result = self.trial.call(self.tree.inc_lock_ref, handle)
        self.ledger.hold(handle, prefix)
        self.uuids[handle, prefix].append(result.swa_uuid_for_lock)

    def unlock(self, handle: Any, prefix: Prefix) -> None:
        """``dec_lock_ref`` with what the lock returned."""
        params = self.target.DecLockRefParams(self.ended(handle, prefix))
        self.trial.call(self.tree.dec_lock_ref, handle, params)
        self.ledger.drop(handle, prefix)

    def ended(self, handle: Any, prefix: Prefix) -> int | None:
        """A lock goes: what its window ends at."""
        uuid = self.uuids[handle, prefix].pop()
        if not self.uuids[handle, prefix]:
            del self.uuids[handle, prefix]
        return uuid

    def evict(self, num_tokens: int, windows: int = 0) -> None:
        """``evict`` of tokens, of window tokens, or of both: E1 to E3."""
        require, size = self.trial.require, self.page_size
        self.windows.freed.clear()
        with (
            self.ledger.permits(self.ledger.only_unlocked) as freed,
            self.windows.permits(self._evictable_window),
        ):
            before, had = self.available(), self.window_sizes()[2]
            params = self.target.EvictParams(num_tokens=num_tokens, swa_num_tokens=windows)
            result = self.trial.call(self.tree.evict, params)
            grown, more = self.available() - before, self.window_sizes()[2] - had
        gone = [count * size for _, count in self.windows.freed if count]
        count = result.swa_num_tokens_evicted
        require(
            count == more == sum(gone),
            "E1",
            f"evict returned {count} window tokens, it freed {sum(gone)}, the pool grew by {more}",
        )
        if not windows:
            self._judge_eviction(num_tokens, result.num_tokens_evicted, freed, grown)
            return
        self.judge_whole_prefixes()
        require(
            result.num_tokens_evicted <= grown,
            "E1",
            f"evict returned {result.num_tokens_evicted}, the free space grew by {grown}",
        )
        left = self.window_sizes()[0]
        require(
            more >= windows or left == 0,
            "E3",
            f"evict of {windows} window tokens freed {more}, and {left} are evictable",
        )
        require(
            grown >= num_tokens or self.evictable() == 0,
            "E3",
            f"evict({num_tokens}) freed {grown}, and {self.evictable()} are evictable",
        )
        if self.trial.has("minimal_evict") and not num_tokens and gone:
            require(
                more - gone[-1] < windows,
                "E2",
                f"evict of {windows} window tokens freed {more}, the last {gone[-1]} for nothing",
            )

    def make_room(self, count: int) -> None:
        """Evict what is short of ``count`` tokens in each pool, as a scheduler does."""
        full, window = count - self.available(), count - self.window_sizes()[2]
        if full > 0 or window > 0:
            self.evict(max(0, full), max(0, window))

    def granted(self, slots: Any, pages: int, owner: str) -> bool:
        """Whether an allocation gave slots of both pools: SW7, SW1, AL2."""
        free, windows = len(self.ledger.free), self.windows.free
        have = (self.available() // self.page_size, self.window_sizes()[2] // self.page_size)
        if slots is None:
            self.trial.require(
                have == (free, windows),
                "SW7",
                f"{pages} pages were refused; {free} pages and {windows} windows were free before, "
                f"and are {have[0]} and {have[1]} now",
            )
            return False
        self.trial.require(
            pages <= min(free, windows),
            "AL2",
            f"{pages} pages were granted, {free} are free, and {windows} windows",
        )
        found = slots.tolist()
        self.ledger.take(found, owner)
        self.windows.take(found, self.mapped(found))
        self.trial.raise_noted()
        return True

    def alloc(self, count: int, owner: str) -> list[int] | None:
        """Whole pages, evicting what is needed; None when there are none."""
        self.make_room(count + (self.page_size if self.page_size > 1 else 0))
        if self.page_size == 1:
            out = self.trial.call(self.allocator.alloc, count)
        else:
            none, all_ = torch.tensor([0]), torch.tensor([count])
            last = torch.tensor([-1])
            given = (none, none, all_, all_, last, count)
            out = self.trial.call(self.allocator.alloc_extend, *given)
        return out.tolist() if self.granted(out, count // self.page_size, owner) else None

    def reset(self) -> None:
        super().reset()
        sizes, whole = self.window_sizes(), (0, 0, self.config.swa_size)
        self.trial.require(sizes == whole, "Z1", f"after reset the windows have sizes {sizes}")

    def evict_everything(self) -> None:
        super().evict_everything()
        free = self.window_sizes()[2]
        self.trial.require(
            free == self.config.swa_size,
            "SW6",
            f"{free} of {self.config.swa_size} window tokens are free after everything was evicted",
        )

    # ---- checks ----------------------------------------------------------------------------------

    def check(self) -> None:
        super().check()
        evictable, protected, free = self.window_sizes()
        require, size = self.trial.require, self.page_size
        require(
            free == self.windows.free * size,
            "SW6",
            f"{free} window tokens are free, but nobody owns {self.windows.free * size}",
        )
        live = sum(self.live(prefix) for prefix in self.ledger.cached) * size
        require(
            evictable + protected == live,
            "SW6",
            f"{evictable} window tokens evictable and {protected} protected; {live} are cached",
        )
        if self.trial.has("inspect"):
            check_window_state(self.window_state())

    def window_state(self) -> WindowState:
        """What the rules about windows look at."""
        c, size = self.config, self.page_size
        private = sum(
            not isinstance(self.ledger.owner.get(page), tuple) for page in self.windows.of
        )
        return WindowState(
            state=self.state(),
            swa=self.target.inspect_component(self.tree),
            window=c.window,
            mapping=self.mapped(range(c.size + size)),
            windows=self.windows.of,
            pages=self.windows.pages,
            available=self.window_sizes()[2],
            holds=[
                *((key[0], uuid) for key, held in self.uuids.items() for uuid in held),
                *((req.last_node, getattr(req, UUID, None)) for req in self.requests),
            ],
            private=private * size,
        )

    def choices(self) -> dict[str, Any]:
        chosen = super().choices()
        for (space, elements), page in self.ledger.cached.items():
            name = f"window cached for {list(elements)} in namespace {space!r}"
            chosen[name] = self.windows.of.get(page)
        return chosen

    def describe(self) -> str:
        lines = [super().describe(), f"{self.windows.free} window pages are free"]
        lines += [f"page {page} has window page {own}" for page, own in self.windows.of.items()]
        return "\n".join(lines)
