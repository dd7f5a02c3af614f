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
from collections.abc import Iterable

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
    feed = feed_of(trace, config)
    target = None if config.target is None else resolve(config.target)
    scheduler = make_scheduler(trace, config, counts, target, feed.clock)
    state = StateCheck(scheduler, config.check, target)
    tree = scheduler.tree_cache
    strategy = getattr(tree, "eviction_strategy", None)
    began = time.perf_counter()
    steps = idle = 0
    gc.collect()
    gc.freeze()  # what is alive now stays so; collections during the run need not look at it
    collect_at = gc.get_threshold()
    gc.set_threshold(COLLECT_AT)
    try:
        while True:
            if isinstance(strategy, TTLStrategy):
                strategy.expire(tree)
            for index in feed.due(scheduler):
                scheduler.submit(_generate(index, trace[index], config))
            if scheduler.is_idle():
                if not feed.more():
                    break
                continue
            computed, counts.batch = counts.computed, None
            idle = 0 if scheduler.step() is not None else idle + 1
            feed.passed(counts.computed - computed)
            steps += 1
            if history is not None:
                now = feed.clock.now if feed.clock else steps
                history += filter(None, [step_of(scheduler, counts, now)])
            scheduler.finished_reqs.clear()
            if idle > STUCK:
                raise Violation("PROGRESS", f"{idle} steps in a row launched nothing")
            state.after_step()
        state.every_rule()
    except Exception as error:
        violation = error if isinstance(error, Violation) else _crash(error, target)
        violation.call = f"step {steps} of the replay, {counts.finished} requests finished"
        if violation is error:
            raise
        raise violation from error
    finally:
        gc.set_threshold(*collect_at)
        gc.unfreeze()
    moved: dict[str, int] = {}
    if isinstance(tree, CountingHiRadixCache):
        row = tree.token_to_kv_pool_host.get_size_per_token()
        moved = {
            "host_hit_tokens": tree.host_hit_tokens,
            "bytes_to_host": tree.written_tokens * row,
            "bytes_to_device": tree.loaded_tokens * row,
        }
    return ReplayResult(
        requests=counts.finished,
        prompt_tokens=sum(r.input_length for r in trace),
        hit_tokens=counts.hits,
        computed_tokens=counts.computed,
        output_tokens=counts.outputs,
        evicted_tokens=tree.evicted_tokens,
        steps=steps,
        retractions=scheduler.num_retracted_reqs,
        rows_checked=scheduler.model_runner.check.rows_checked,
        states_checked=state.checked,
        seconds=time.perf_counter() - began,
        kv_kept=config.device_tokens is not None,
        trace_seconds=feed.clock.now if feed.clock else 0,
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
