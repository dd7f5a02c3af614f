"""Drives the serving loop over a target's tree and allocator, with pools of a few pages.

The scheduler, the batches, the request rows and the forwards are refcache's engine; the two
components on trial are the target's. Every forward reads every KV row of its requests and compares
it (C-READ); after every step the invariants see who owns each page. A page is known to be handed
out or free from the calls on the allocator alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from refcache.engine.content import RowCheck, WrongContent
from refcache.engine.io_struct import AbortReq, SamplingParams, TokenizedGenerateReqInput
from refcache.engine.model_config import ModelConfig
from refcache.engine.observer import SchedulerObserver
from refcache.engine.req import Req
from refcache.engine.schedule_batch import ScheduleBatch
from refcache.engine.scheduler import Scheduler
from refcache.errors import OutOfSlots
from refcache.oracle.driver import Driver, step
from refcache.oracle.invariants import check_state, check_sums
from refcache.oracle.ledger import CountingAllocator, Ledger
from refcache.oracle.state import RequestView, State
from refcache.oracle.target import CacheConfig, Target
from refcache.oracle.violation import Violation
from refcache.types import ServerArgs

PATIENCE = 4
"""Steps in a row that may neither compute nor finish anything."""


@dataclass(frozen=True)
class LoopConfig(CacheConfig):
    """How the loop is built. ``chunk_pages``: of a prefill chunk; None never cuts a prompt."""

    overlap: bool = False
    chunk_pages: int | None = None
    max_prefill_tokens: int = 64
    schedule_policy: str = "fcfs"


class _Watch(SchedulerObserver):
    """Sees that a prefill goes on where its last chunk ended."""

    def __init__(self, driver: "LoopDriver") -> None:
        self.driver = driver
        self.computed: dict[str, int] = {}

    def on_batch(self, batch: ScheduleBatch) -> None:
        if not batch.forward_mode.is_extend():
            return
        for req, start, length in zip(
            batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True
        ):
            ended = self.computed.get(req.rid)
            if ended is not None and start != ended:
                self.driver.note(
                    "PROGRESS",
                    f"request {req.rid} computed {ended} tokens, "
                    f"and its next chunk starts at {start}",
                )
            self.computed[req.rid] = start + length

    def on_retract(self, req: Req) -> None:
        self.computed.pop(req.rid, None)

    def on_finish(self, req: Req) -> None:
        self.computed.pop(req.rid, None)


class LoopDriver(Driver):
    """See the module docstring. ``scheduler`` runs; ``running`` are the requests with a row."""

    needs = frozenset({"allocator", "tree"})
    Config = LoopConfig
    config: LoopConfig

    def __init__(self, target: Target, **config: Any) -> None:
        super().__init__(target, **config)
        c = self.config
        self.ledger = Ledger(c.pages, c.page_size, self.note)
        self.ledger.may_free = lambda page: None
        self._names = 0
        self.scheduler: Scheduler = self.on_target(
            Scheduler,
            ServerArgs(
                page_size=c.page_size,
                max_running_requests=c.max_requests,
                max_total_tokens=c.size,
                max_prefill_tokens=c.max_prefill_tokens,
                chunked_prefill_size=None if c.chunk_pages is None else c.chunk_pages * c.page_size,
                context_length=c.context_length,
                schedule_policy=c.schedule_policy,
                disable_overlap_schedule=not c.overlap,
                radix_eviction_policy=c.eviction_policy,
            ),
            ModelConfig(num_hidden_layers=2, vocab_size=3),
            make_allocator=lambda runner: CountingAllocator(target.allocator(c), self.ledger),
            make_tree=lambda params, args: target.tree(
                c, params.token_to_kv_pool_allocator, params.req_to_token_pool
            ),
            check=RowCheck(on_wrong=self._wrong),
            observer=_Watch(self),
        )
        self.tree = self.scheduler.tree_cache
        self.allocator = self.scheduler.token_to_kv_pool_allocator

    def _wrong(self, wrong: WrongContent) -> None:
        self.note("C-READ", str(wrong))

    @property
    def running(self) -> list[Req]:
        return [r for r in self.scheduler.live_reqs.values() if r.req_pool_idx is not None]

    # ---- steps -----------------------------------------------------------------------------------

    @step
    def submit(
        self,
        tokens: Sequence[int],
        max_new_tokens: int = 1,
        extra_key: str | None = None,
        priority: int = 0,
    ) -> None:
        """A request comes in; the next step receives it."""
        if not tokens:
            return
        self.scheduler.submit(
            TokenizedGenerateReqInput(
                str(self._names),
                tokens,
                SamplingParams(max_new_tokens=max_new_tokens),
                extra_key,
                priority,
            )
        )
        self._names += 1

    @step
    def run(self, steps: int = 1) -> None:
        """Iterations of the loop."""
        for _ in range(steps):
            self._step()

    @step
    def abort(self, index: int) -> None:
        """A request is cancelled, wherever it is."""
        live = list(self.scheduler.live_reqs)
        if live:
            self.scheduler.submit(AbortReq(live[index % len(live)]))

    @step
    def retract(self) -> None:
        """The next decode step takes memory away from somebody."""
        self.scheduler.force_retraction()

    @step
    def evict(self, num_tokens: int) -> None:
        """Evict between two steps."""
        self.on_target(self.tree.evict, self.target.EvictParams(num_tokens=num_tokens))

    @step
    def flush(self) -> None:
        """Forget every prefix, when nothing runs."""
        if self.scheduler.is_idle():
            self.on_target(self.scheduler.flush_cache)
            total = int(self.tree.total_size())
            self.require(total == 0, "Z1", f"{total} tokens are cached after flush_cache")

    @step
    def wind_down(self) -> None:
        """Run until nothing is left; then evict everything: every page and row must be free."""
        bound = 50 * (1 + len(self.scheduler.live_reqs) + len(self.scheduler.inbox))
        for _ in range(bound):
            if self.scheduler.is_idle():
                break
            self._step()
        live = list(self.scheduler.live_reqs.values())
        self.require(not live, "PROGRESS", f"after {bound} more steps there are still {live}")
        self.on_target(self.tree.evict, self.target.EvictParams(num_tokens=self.config.size))
        free, rows = self.allocator.available_size(), self.scheduler.req_to_token_pool
        self.require(
            free == self.config.size,
            "P1",
            f"{free} of {self.config.size} tokens are free after everything was evicted",
        )
        self.require(
            rows.available_size() == rows.size,
            "R3",
            f"{rows.available_size()} of {rows.size} rows are free and nothing runs",
        )

    def _step(self) -> None:
        """One iteration; a budget that the components promised and do not keep is their fault."""
        before = self._done()
        try:
            self.on_target(self.scheduler.step)
        except Violation as violation:
            if isinstance(violation.__cause__, OutOfSlots):
                raise Violation("BUDGET", str(violation.__cause__)) from violation
            raise
        self.check()
        self._stuck = 0 if self._done() != before or self.scheduler.is_idle() else self._stuck + 1
        self.require(
            self._stuck < PATIENCE,
            "PROGRESS",
            f"{self._stuck} steps changed nothing; live are {list(self.scheduler.live_reqs)}",
        )

    _stuck = 0

    def _done(self) -> tuple[int, int]:
        return self.scheduler.forward_ct, len(self.scheduler.finished_reqs)

    # ---- checks ----------------------------------------------------------------------------------

    def check(self) -> None:
        size = self.config.page_size
        free = int(self.on_target(self.allocator.available_size))
        self.require(
            free == len(self.ledger.free) * size,
            "P1",
            f"available_size() = {free}, but {len(self.ledger.free)} pages of {size} were not "
            "handed out",
        )
        private = sum(
            -(-req.kv_allocated_len // size) * size - req.cache_protected_len
            for req in self.running
        )
        check_sums(
            free,
            int(self.on_target(self.tree.evictable_size)),
            int(self.on_target(self.tree.protected_size)),
            private,
            self.config.size,
        )
        if "inspect" in self.target.capabilities:
            check_state(self.state())

    def state(self) -> State:
        """What the invariants look at."""
        rows = self.scheduler.req_to_token_pool.req_to_token
        return State(
            view=self.target.inspect(self.tree),
            page_size=self.config.page_size,
            pages=self.config.pages,
            free=self.ledger.free,
            queued=self.ledger.queued or (),
            holders=[req.last_node for req in self.running],
            requests=[
                RequestView(
                    f"request {req.rid}",
                    rows[req.req_pool_idx, : req.kv_allocated_len],
                    req.cache_protected_len,
                    req.last_node,
                    req.req_pool_idx,
                )
                for req in self.running
            ],
        )

    def describe(self) -> str:
        rows = self.scheduler.req_to_token_pool.req_to_token
        lines = [
            f"free pages: {self.ledger.free}",
            f"evictable {self.tree.evictable_size()}, protected {self.tree.protected_size()}",
        ]
        for req in self.scheduler.live_reqs.values():
            tokens = [*req.origin_input_ids, *req.output_ids]
            place = "waiting"
            if req.req_pool_idx is not None:
                slots = rows[req.req_pool_idx, : req.kv_allocated_len].tolist()
                place = f"{req.cache_protected_len} protected, slots {slots}"
            lines.append(f"request {req.rid}: tokens {tokens}, {place}")
        return "\n".join(lines)
