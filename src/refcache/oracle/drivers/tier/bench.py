"""The bench of a cache of three tiers: what :class:`HiCacheBench` sees, and what storage does.

From outside: which host slots a prefetch was given (``alloc`` inside the call) and when they come
back (``free``, or a node has them); which slots a thread works on (``page_get_func``,
``page_set_func``); what the store was given. Bytes are compared like everything on the host.

Liveness is a rule here (ST9): when every job of every thread has run and the scheduler has made a
few steps, whatever the store did, every request may be scheduled and every write is acknowledged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from refcache.oracle.drivers.hicache.bench import HiCacheBench
from refcache.oracle.drivers.tier.store import WatchedStore
from refcache.oracle.ledger.ledger import Prefix
from refcache.oracle.target.config import StorageTierConfig

STEPS = 12
"""Steps of the scheduler within which a request may be scheduled once its threads are done."""


@dataclass(frozen=True)
class Waiting:
    """A request whose prefetch began: its prompt, from which element on, and the operation.

    ``sure``: how many tokens from there on the store had, when it was not known to fail.
    """

    rid: str
    tokens: tuple[int, ...]
    extra_key: str | None
    start: int
    operation: Any
    sure: int


class TierBench(HiCacheBench):
    """See the module docstring.

    Attributes:
        store: below the host; ``attached``: now.
        waiting: requests whose prefetch goes on, oldest first. ``named``: how many there were.
        lent: host slots of prefetches that are neither free nor a node's.
        unwritten: prefixes that reached the host while no store was attached.
        hurried: requests that were told to wait no longer.
    """

    config: StorageTierConfig
    hits_until_written = None  # what came from storage is on the host without a hit
    lent: set[int]

    def build(self) -> None:
        c = self.config
        self.store = WatchedStore(c.fault_rate, c.fault_seed, self.trial.note)
        self.attached = self.lending = False
        self.waiting: list[Waiting] = []
        self.named = 0
        self.hurried: set[str] = set()
        self.lent = set()
        self.unwritten: set[Prefix] = set()
        super().build()
        self._watch_slots(self.host_pool)
        self.attach()

    def _watch_slots(self, host_pool: Any) -> None:
        alloc, free = host_pool.alloc, host_pool.free

        def lend(need_size: int) -> Any:
            slots = alloc(need_size)
            if slots is not None and self.lending:
                self.lent.update(slots.tolist())
            return slots

        def take_back(indices: Any) -> Any:
            again = set(self.host().free.tolist()) & set(indices.tolist())
            if again:
                self.trial.note("H1", f"host slots {sorted(again)} are freed a second time")
            self.lent.difference_update(indices.tolist())
            return free(indices)

        host_pool.alloc, host_pool.free = lend, take_back

    def _watch_threads(self) -> None:
        """ST7 of each batch that a thread moves."""
        controller = self.tree.cache_controller
        read, write = controller.page_get_func, controller.page_set_func

        def get(operation: Any, keys: Any, slots: Any, *more: Any) -> Any:
            self._in_use(slots, "reads pages into")
            return read(operation, keys, slots, *more)

        def put(keys: Any, slots: Any, *more: Any) -> Any:
            self._in_use(slots, "writes pages from")
            return write(keys, slots, *more)

        controller.page_get_func, controller.page_set_func = get, put

    def _in_use(self, slots: Any, does: str) -> None:
        free = set(self.host().free.tolist()) & set(slots.tolist())
        if free:
            self.trial.note("ST7", f"a thread {does} host slots {sorted(free)}, which are free")

    # ---- attach and detach -----------------------------------------------------------------------

    def attach(self) -> None:
        """Attach the store, if it is not."""
        if self.attached:
            return
        self.attached = self.trial.call(
            self.target.attach_storage, self.tree, self.store, self.config
        )
        self.trial.require(self.attached, "ST12", "a store could not be attached")
        self._watch_threads()
        state = self.state()
        for index, names in state.view.pages(self.page_size):
            if state.view.nodes[index].host is not None:
                self.unwritten.update(names)

    def detach(self) -> None:
        """Detach, whatever goes on: it has ended then."""
        ok, message = self.trial.call(self.tree.detach_storage_backend)
        self.trial.require(ok, "ST12", f"the store could not be detached: {message}")
        self.attached = False
        left = [*self.tree.ongoing_prefetch, *self.tree.ongoing_backup]
        self.trial.require(not left, "ST12", f"after a detach {left} still go on")
        self._all_may_go("a detach")
        self._nothing_lent("a detach")

    def reset(self) -> None:
        super().reset()
        self.unwritten.clear()
        left = [*self.tree.ongoing_prefetch, *self.tree.ongoing_backup]
        self.trial.require(not left, "ST12", f"after a reset {left} still go on")
        self._all_may_go("a reset")
        free, size = len(self.host().free), self.config.host_size
        self.trial.require(
            free == size, "ST4", f"after a reset {free} of {size} host slots are free"
        )
        self.lent.clear()

    def _all_may_go(self, after: str) -> None:
        for request in self.waiting:
            may_go = self.trial.call(self.tree.check_prefetch_progress, request.rid)
            self.trial.require(may_go, "ST9", f"request {request.rid} still waits after {after}")
        self.waiting.clear()

    # ---- requests --------------------------------------------------------------------------------

    def prefetch(self, tokens: Sequence[int], extra_key: str | None) -> None:
        """A request is queued: ask storage for what its prompt has beyond the host."""
        found = self.match(tokens, extra_key)
        start = self._length(found.last_host_node)
        rid, self.named = f"q{self.named}", self.named + 1
        more = {} if extra_key is None else {"extra_key": extra_key}
        self.lending = True
        try:
            self.trial.call(
                self.tree.prefetch_from_storage,
                rid,
                found.last_host_node,
                list(tokens[start:]),
                **more,
            )
        finally:
            self.lending = False
        going = self.tree.ongoing_prefetch.get(rid)
        if going is not None:
            sure = self._stored_after(tokens, extra_key, start)
            self.waiting.append(Waiting(rid, tuple(tokens), extra_key, start, going[-1], sure))

    def _stored_after(self, tokens: Sequence[int], extra_key: str | None, start: int) -> int:
        """How many tokens after ``start`` are in the store, in whole pages without a gap."""
        keys = self.target.page_keys(tokens, extra_key, self.config)[start // self.page_size :]
        pages = next((i for i, k in enumerate(keys) if not self.store.has(k)), len(keys))
        return pages * self.page_size

    def progress(self, request: Waiting) -> bool:
        """``check_prefetch_progress``; ST8 of what is in the tree then."""
        if not self.trial.call(self.tree.check_prefetch_progress, request.rid):
            return False
        self.waiting.remove(request)
        came = request.operation.completed_tokens
        end = request.start + came
        elements = self.elements(request.tokens)
        cached = self.content.longest(self.state(), request.extra_key, elements)
        revoked = request.rid in self.tree.ongoing_prefetch
        self.trial.require(not revoked, "ST12", f"request {request.rid} may go, and still goes on")
        self.trial.require(
            came == 0 or (cached >= end and came <= (request.operation.hits or 0)),
            "ST8",
            f"storage brought {came} tokens after {request.start} for {request.rid}, of a hit of "
            f"{request.operation.hits}; of the prompt {cached} are cached",
        )
        certain = (
            self.config.stop_policy == "wait_complete"
            and request.sure >= self.config.prefetch_threshold
            and request.rid not in self.hurried
            and not (self.store.met or self.store.lost)
        )
        self.trial.require(
            not certain or came >= request.sure,
            "ST8",
            f"storage brought {came} tokens for {request.rid}; asked, it had {request.sure}, and "
            "nothing failed",
        )
        self._on_the_host(request, end)
        keys = self.target.page_keys(request.tokens, request.extra_key, self.config)
        strange = [k for k in keys[request.start // self.page_size : end // self.page_size]
                   if k not in self.store.ever]  # fmt: skip
        self.trial.require(
            not strange, "ST1", f"pages {strange} were brought, which the store never had"
        )
        loaded = self.trial.call(self.tree.pop_prefetch_loaded_tokens, request.rid)
        again = self.trial.call(self.tree.pop_prefetch_loaded_tokens, request.rid)
        self.trial.require(
            0 <= loaded <= came and again == 0,
            "ST8",
            f"{loaded} tokens are said to be loaded, then {again}; {came} came",
        )
        return True

    def _on_the_host(self, request: Waiting, end: int) -> None:
        """ST8: every page of what came is on the host, in a node of its own namespace."""
        state = self.state()
        wanted = (request.extra_key, self.elements(request.tokens)[:end])
        there: set[Prefix] = set()
        for index, names in state.view.pages(self.page_size):
            if state.view.nodes[index].host is not None:
                there.update(names)
        pages = [
            (wanted[0], wanted[1][:stop])
            for stop in range(request.start + self.page_size, end + 1, self.page_size)
        ]
        missing = [page for page in pages if page not in there]
        self.trial.require(
            not missing, "ST8", f"pages that storage brought, {missing}, are nowhere"
        )

    def abort(self, request: Waiting) -> None:
        """``release_aborted_request``."""
        self.waiting.remove(request)
        self.trial.call(self.tree.release_aborted_request, request.rid)
        may_go = self.trial.call(self.tree.check_prefetch_progress, request.rid)
        self.trial.require(may_go, "ST9", f"request {request.rid} was aborted, and still waits")

    def _length(self, handle: Any) -> int:
        state = self.state()
        index, length = state.place.get(handle, -1), 0
        while index >= 0:
            length += len(state.view.nodes[index].key)
            index = state.view.nodes[index].parent
        return length

    # ---- when everything is over -----------------------------------------------------------------

    def settle(self) -> None:
        """As for two tiers; before it, storage comes to an end: ST9, ST4 and ST10."""
        for _ in range(STEPS):
            self.forwards.finish()
            self.poll()
            for request in list(self.waiting):
                self.progress(request)
            if not self.waiting and not self.host().transfers and not self.lent_now():
                break
        stuck = [request.rid for request in self.waiting]
        self.trial.require(
            not stuck, "ST9", f"every thread is done, {STEPS} steps went by, and {stuck} still wait"
        )
        left = [f"{t.kind} {t.op}" for t in self.host().transfers if "device" not in t.tiers]
        self.trial.require(not left, "ST9", f"every thread is done, but {left} have no end")
        self._nothing_lent("everything was over")
        super().settle()
        self._judge_written()

    def _nothing_lent(self, after: str) -> None:
        left = self.lent_now()
        self.trial.require(
            not left, "ST4", f"after {after} host slots {sorted(left)} belong to nobody"
        )

    def _judge_written(self) -> None:
        """ST10, where no fault can be the reason."""
        if not self.attached or self.store.met or self.store.lost:
            return
        state = self.state()
        for index, names in state.view.pages(self.page_size):
            node = state.view.nodes[index]
            if node.host is None:
                continue
            tokens = self.content.tokens(state, index)
            keys = self.target.page_keys(tokens, node.extra_key, self.config)
            for (extra_key, prefix), key in zip(names, keys[len(keys) - len(names) :], strict=True):
                self.trial.require(
                    (extra_key, prefix) in self.unwritten or self.store.has(key),
                    "ST10",
                    f"the page that ends prefix {list(prefix)} is on the host, its copy there is "
                    "acknowledged, and the store does not have it",
                )

    # ---- checks ----------------------------------------------------------------------------------

    def lent_now(self) -> set[int]:
        """``lent`` without what nodes have by now."""
        for node in self.target.inspect(self.tree).nodes:
            if node.host is not None:
                self.lent.difference_update(node.host.tolist())
        return self.lent

    def check(self) -> None:
        self.lent_now()
        super().check()
        going = self.tree.ongoing_prefetch.values()
        asked = sum(len(prefetch[1]) for prefetch in going)
        seen = self.tree.cache_controller.prefetch_tokens_occupied
        self.trial.require(
            seen == asked, "ST5", f"prefetches are said to occupy {seen} tokens; it is {asked}"
        )

    def describe(self) -> str:
        lines = [super().describe(), f"host slots of prefetches: {sorted(self.lent)}"]
        lines += [f"{r.rid} waits for {list(r.tokens[r.start :])}" for r in self.waiting]
        lines += [f"pages in the store: {len(self.store.ever)}, faults: {dict(self.store.met)}"]
        return "\n".join(lines)
