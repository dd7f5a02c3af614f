"""Drives the serving loop over a target's tree and allocator, with pools of a few pages.

The scheduler, the batches, the request rows and the forwards are refcache's engine; the two
components on trial are the target's. Every forward reads every KV row of its requests and compares
it (C-READ); after every step the invariants see who owns each page. A page is known to be handed
out or free from the calls on the allocator alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from refcache.engine.io_struct import AbortReq, SamplingParams, TokenizedGenerateReqInput
from refcache.engine.model_config import ModelConfig
from refcache.engine.models.content import RowCheck
from refcache.engine.req import Req
from refcache.engine.schedule_batch import ScheduleBatch
from refcache.engine.scheduling.observer import SchedulerObserver
from refcache.engine.scheduling.scheduler import Scheduler
from refcache.errors import OutOfSlots
from refcache.oracle.ledger.ledger import Ledger, Note
from refcache.oracle.ledger.recording import RecordingAllocator
from refcache.oracle.program.driver import Driver, step
from refcache.oracle.program.trial import Trial
from refcache.oracle.rules.check import check_state, check_sums
from refcache.oracle.rules.violation import Violation
from refcache.oracle.target.config import CacheConfig
from refcache.oracle.view.scheduler import private_tokens, running, state_of
from refcache.oracle.view.state import State
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

    def __init__(self, note: Note) -> None:
        self.note = note
        self.computed: dict[str, int] = {}

    def on_batch(self, batch: ScheduleBatch) -> None:
        if not batch.forward_mode.is_extend():
            return
        for req, start, length in zip(
            batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True
        ):
            ended = self.computed.get(req.rid)
            if ended is not None and start != ended:
                self.note(
                    "PROGRESS",
                    f"request {req.rid} computed {ended} tokens, "
                    f"and its next chunk starts at {start}",
                )
            self.computed[req.rid] = start + length

    def on_retract(self, req: Req) -> None:
        self.computed.pop(req.rid, None)

    def on_finish(self, req: Req) -> None:
        self.computed.pop(req.rid, None)


class LoopBench:
    """The serving loop over the target's components, with the ledger and the checks.

    Attributes:
        scheduler: refcache's, with the target's tree and allocator in it.
    """

    def __init__(self, trial: Trial, config: LoopConfig) -> None:
        c, target = config, trial.target
        self.trial, self.config, self.target = trial, config, target
        self.ledger = Ledger(c.pages, c.page_size, trial.note, may_free=lambda page: None)
        self._stuck = 0
        self.scheduler: Scheduler = self.trial.call(
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
            make_allocator=lambda runner: RecordingAllocator(
                target.allocator(c), self.ledger, "the engine"
            ),
            make_tree=lambda params, args: target.tree(
                c, params.token_to_kv_pool_allocator, params.req_to_token_pool
            ),
            check=RowCheck(on_wrong=lambda wrong: trial.note("C-READ", str(wrong))),
            observer=_Watch(trial.note),
        )
        self.tree = self.scheduler.tree_cache
        self.allocator = self.scheduler.token_to_kv_pool_allocator

    @property
    def subject(self) -> Any:
        """What a trace records: the tree."""
        return self.tree

    def step(self) -> None:
        """One iteration; a budget that the components promised and do not keep is their fault."""
        before = self._progress()
        try:
            self.trial.call(self.scheduler.step)
        except Violation as violation:
            if isinstance(violation.__cause__, OutOfSlots):
                raise Violation("BUDGET", str(violation.__cause__)) from violation
            raise
        self.check()
        moved = self._progress() != before or self.scheduler.is_idle()
        self._stuck = 0 if moved else self._stuck + 1
        self.trial.require(
            self._stuck < PATIENCE,
            "PROGRESS",
            f"{self._stuck} steps changed nothing; live are {list(self.scheduler.live_reqs)}",
        )

    def _progress(self) -> tuple[int, int]:
        """Grows with every step that computes or finishes something."""
        return self.scheduler.forward_ct, len(self.scheduler.finished_reqs)

    # ---- checks ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Sums, and every rule about the state."""
        size = self.config.page_size
        free = int(self.trial.call(self.allocator.available_size))
        self.trial.require(
            free == len(self.ledger.free) * size,
            "P1",
            f"available_size() = {free}, but {len(self.ledger.free)} pages of {size} were not "
            "handed out",
        )
        check_sums(
            free,
            int(self.trial.call(self.tree.evictable_size)),
            int(self.trial.call(self.tree.protected_size)),
            private_tokens(self.scheduler),
            self.config.size,
        )
        if "inspect" in self.target.capabilities:
            check_state(self.state())

    def state(self) -> State:
        """What the invariants look at."""
        view = self.target.inspect(self.tree)
        free, queued = self.ledger.free, self.ledger.queued or ()
        return state_of(self.scheduler, view, self.config.pages, free, queued)

    def choices(self) -> dict[str, Any]:
        """None: the loop's own policies decide as well."""
        return {}

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


class LoopDriver(Driver):
    """See the module docstring."""

    needs = frozenset({"allocator", "tree"})
    Config = LoopConfig
    config: LoopConfig
    bench_type = LoopBench
    bench: LoopBench
    submitted = 0

    @property
    def scheduler(self) -> Scheduler:
        """The one that runs."""
        return self.bench.scheduler

    @property
    def running(self) -> list[Req]:
        """The requests with a row."""
        return running(self.scheduler)

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
                str(self.submitted),
                tokens,
                SamplingParams(max_new_tokens=max_new_tokens),
                extra_key,
                priority,
            )
        )
        self.submitted += 1

    @step
    def run(self, steps: int = 1) -> None:
        """Iterations of the loop."""
        for _ in range(steps):
            self.bench.step()

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
        self.trial.call(self.bench.tree.evict, self.target.EvictParams(num_tokens=num_tokens))

    @step
    def flush(self) -> None:
        """Forget every prefix, when nothing runs."""
        if self.scheduler.is_idle():
            self.trial.call(self.scheduler.flush_cache)
            total = int(self.bench.tree.total_size())
            self.trial.require(total == 0, "Z1", f"{total} tokens are cached after flush_cache")

    @step
    def wind_down(self) -> None:
        """Run until nothing is left; then evict everything: every page and row must be free."""
        bound = 50 * (1 + len(self.scheduler.live_reqs) + len(self.scheduler.inbox))
        for _ in range(bound):
            if self.scheduler.is_idle():
                break
            self.bench.step()
        live = list(self.scheduler.live_reqs.values())
        self.trial.require(not live, "PROGRESS", f"after {bound} more steps there are still {live}")
        self.trial.call(self.bench.tree.evict, self.target.EvictParams(num_tokens=self.config.size))
        free, rows = self.bench.allocator.available_size(), self.scheduler.req_to_token_pool
        self.trial.require(
            free == self.config.size,
            "P1",
            f"{free} of {self.config.size} tokens are free after everything was evicted",
        )
        self.trial.require(
            rows.available_size() == rows.size,
            "R3",
            f"{rows.available_size()} of {rows.size} rows are free and nothing runs",
        )
