"""Replay a request trace through the serving loop, with checks.

:func:`replay` feeds a trace to :class:`refcache.engine.Scheduler` in order, as fast as it admits
requests or by their times of arrival (:mod:`refcache.replay.feed`), and raises the first
:class:`~refcache.oracle.rules.violation.Violation`. What is checked:

========  =====================================  ================================================
check     KV rows of each forward (C-READ)       state of the cache
========  =====================================  ================================================
every     every row it reads                     who owns each page (P0, P1) and sums (P3) after
                                                 each step; every rule each 256 steps
sampled   a prefill: every row; a decode step:   sums after each step; every rule each 256 steps
          the new rows and 64 that are drawn
off       none                                   none
========  =====================================  ================================================

Every rule is also checked at the end; with more than 3 M tokens cached, it comes more rarely.

Without a bound on the device memory no KV bytes are kept (they would be too many): then no row is
checked, and :attr:`ReplayResult.kv_kept` says so. :mod:`refcache.replay.tree` does without
an engine.
"""

import gc
import time
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from refcache.engine.io_struct import SamplingParams, TokenizedGenerateReqInput
from refcache.errors import InvalidArgument
from refcache.oracle.program.crash import told
from refcache.oracle.rules.violation import Violation
from refcache.oracle.target.base import Target
from refcache.oracle.target.resolve import resolve
from refcache.readers import TraceRequest
from refcache.replay.config import ReplayConfig, ReplayResult
from refcache.replay.feed import feed_of
from refcache.replay.history import Step, step_of
from refcache.replay.keeping import TTLStrategy
from refcache.replay.parts import (
    CountingHiRadixCache,
    Counts,
    Progress,
    make_scheduler,
    prompt_of,
)
from refcache.replay.state import StateCheck

STUCK = 8  # steps in a row that may launch nothing
COLLECT_AT = 100_000  # new objects: the loop makes few cycles, and looking for them costs a tenth


class Life:
    """One scheduler over a part of the trace, from its start to when nothing is left to do.

    Attributes:
        steps: of the loop. ``moved``: tokens between the tiers, by the result's names.
    """

    def __init__(
        self,
        part: Sequence[TraceRequest],
        trace: list[TraceRequest],
        config: ReplayConfig,
        counts: Counts,
        target: Target | None,
    ) -> None:
        self.part, self.config, self.counts = part, config, counts
        self.feed = feed_of(part, config)
        self.scheduler = make_scheduler(trace, config, counts, target, self.feed.clock)
        self.state = StateCheck(self.scheduler, config.check, target)
        self.tree = self.scheduler.tree_cache
        self.steps = 0

    def run(self, history: list[Step] | None) -> None:
        """Serve the part; the last check is of every rule."""
        scheduler, feed, counts, tree = self.scheduler, self.feed, self.counts, self.tree
        strategy = getattr(tree, "eviction_strategy", None)
        idle = 0
        while True:
            if isinstance(strategy, TTLStrategy):
                strategy.expire(tree)
            for index in feed.due(scheduler):
                scheduler.submit(_generate(index, self.part[index], self.config))
            if scheduler.is_idle():
                if not feed.more():
                    break
                continue
            computed, counts.batch = counts.computed, None
            idle = 0 if scheduler.step() is not None else idle + 1
            feed.passed(counts.computed - computed)
            self.steps += 1
            if history is not None:
                now = feed.clock.now if feed.clock else self.steps
                history += filter(None, [step_of(scheduler, counts, now)])
            scheduler.finished_reqs.clear()
            if idle > STUCK:
                raise Violation("PROGRESS", f"{idle} steps in a row launched nothing")
            self.state.after_step()
        self.state.every_rule()
        if self.config.storage is not None:
            tree.shutdown()
            tree.storage.drain()

    def moved(self) -> Counter[str]:
        """Tokens and bytes between the tiers, by the names of the result."""
        tree = self.tree
        if not isinstance(tree, CountingHiRadixCache):
            return Counter()
        row = tree.token_to_kv_pool_host.get_size_per_token()
        return Counter(
            host_hit_tokens=tree.host_hit_tokens,
            bytes_to_host=tree.written_tokens * row,
            bytes_to_device=tree.loaded_tokens * row,
            bytes_to_storage=tree.storage.completed * row,
        )


@torch.inference_mode()  # no autograd beside many small operations: a fifth less time
def replay(
    requests: Iterable[TraceRequest],
    config: ReplayConfig,
    progress: Progress | None = None,
    history: list[Step] | None = None,
) -> ReplayResult:
    """Replay a trace; see the module docstring. ``history``: gets a row for each step.

    Raises:
        Violation: the first that a check finds; ``call`` says at which step.
        InvalidArgument: a request that does not fit into ``device_tokens``.
    """
    trace = list(requests)[: config.limit]
    counts = Counts(len(trace), progress)
    target = None if config.target is None else resolve(config.target)
    began = time.perf_counter()
    gc.collect()
    gc.freeze()  # what is alive now stays so; collections during the run need not look at it
    collect_at = gc.get_threshold()
    gc.set_threshold(COLLECT_AT)
    lives: list[Life] = []
    moved: Counter[str] = Counter()
    parts = (
        [trace] if config.restart is None else [trace[: config.restart], trace[config.restart :]]
    )
    before = 0
    try:
        for part in parts:
            before = counts.hits
            lives.append(Life(part, trace, config, counts, target))
            lives[-1].run(history)
            moved.update(lives[-1].moved())
    except Exception as error:
        violation = error if isinstance(error, Violation) else _crash(error, target)
        steps = sum(life.steps for life in lives)
        violation.call = f"step {steps} of the replay, {counts.finished} requests finished"
        if violation is error:
            raise
        raise violation from error
    finally:
        gc.set_threshold(*collect_at)
        gc.unfreeze()
    if config.restart is not None:
        moved.update(hits_before=before, hits_after=counts.hits - before)
    return ReplayResult(
        requests=counts.finished,
        prompt_tokens=sum(r.input_length for r in trace),
        hit_tokens=counts.hits,
        computed_tokens=counts.computed,
        output_tokens=counts.outputs,
        evicted_tokens=sum(life.tree.evicted_tokens for life in lives),
        steps=sum(life.steps for life in lives),
        retractions=sum(life.scheduler.num_retracted_reqs for life in lives),
        rows_checked=sum(life.scheduler.model_runner.check.rows_checked for life in lives),
        states_checked=sum(life.state.checked for life in lives),
        seconds=time.perf_counter() - began,
        kv_kept=config.device_tokens is not None,
        trace_seconds=sum(life.feed.clock.now for life in lives if life.feed.clock),
        storage_hit_tokens=counts.storage_hits,
        **moved,
    )


def _crash(error: Exception, target: Target | None) -> Violation:
    """What an exception of the loop over a target's cache stands for; others are raised again."""
    if target is None or isinstance(error, InvalidArgument):
        raise error
    return Violation("crash", f"the loop met {told(error)}")


def _generate(index: int, request: TraceRequest, config: ReplayConfig) -> TokenizedGenerateReqInput:
    outputs = 1 if config.no_decode else request.output_length
    return TokenizedGenerateReqInput(str(index), prompt_of(request), SamplingParams(outputs))
