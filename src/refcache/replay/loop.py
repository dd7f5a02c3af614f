"""Replay a request trace through the serving loop, with checks.

:func:`replay` feeds a trace to :class:`refcache.engine.Scheduler` in order, as fast as it admits
requests (times of arrival are ignored), and raises the first
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
from refcache.oracle.rules.violation import Violation
from refcache.readers import TraceRequest
from refcache.replay.config import ReplayConfig, ReplayResult
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
QUEUE = 16  # requests kept waiting, so that a batch never lacks candidates


@torch.inference_mode()  # no autograd beside many small operations: a fifth less time
def replay(
    requests: Iterable[TraceRequest], config: ReplayConfig, progress: Progress | None = None
) -> ReplayResult:
    """Replay a trace; see the module docstring.

    Raises:
        Violation: the first that a check finds; ``call`` says at which step.
        InvalidArgument: a request that does not fit into ``device_tokens``.
    """
    trace = list(requests)[: config.limit]
    counts = Counts(len(trace), progress)
    scheduler = make_scheduler(trace, config, counts)
    state = StateCheck(scheduler, config.check)
    began = time.perf_counter()
    steps = idle = submitted = 0
    keep = 1 if config.serial else QUEUE
    gc.collect()
    gc.freeze()  # what is alive now stays so; collections during the run need not look at it
    collect_at = gc.get_threshold()
    gc.set_threshold(COLLECT_AT)
    try:
        while True:
            waiting = len(scheduler.live_reqs) if config.serial else len(scheduler.waiting_queue)
            for request in trace[submitted : submitted + max(0, keep - waiting)]:
                scheduler.submit(_generate(submitted, request, config))
                submitted += 1
            if scheduler.is_idle():
                break
            idle = 0 if scheduler.step() is not None else idle + 1
            steps += 1
            scheduler.finished_reqs.clear()
            if idle > STUCK:
                raise Violation("PROGRESS", f"{idle} steps in a row launched nothing")
            state.after_step()
        state.every_rule()
    except Violation as violation:
        violation.call = f"step {steps} of the replay, {counts.finished} requests finished"
        raise
    finally:
        gc.set_threshold(*collect_at)
        gc.unfreeze()
    tree = scheduler.tree_cache
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
        **moved,
    )


def _generate(index: int, request: TraceRequest, config: ReplayConfig) -> TokenizedGenerateReqInput:
    outputs = 1 if config.no_decode else request.output_length
    return TokenizedGenerateReqInput(str(index), prompt_of(request), SamplingParams(outputs))
