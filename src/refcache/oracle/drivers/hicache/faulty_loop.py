"""The serving loop over a target's allocator and tree, with inner steps of iterations raising.

An iteration that raises leaves nothing: every slot and row is free, no lock is held, every request
that ran waits again. The loop then goes on, and each request gets the tokens that it gets without a
fault; every forward compares every KV row that it reads (C-READ).
"""

from collections.abc import Sequence
from typing import Any

from refcache.engine.io_struct import SamplingParams, TokenizedGenerateReqInput
from refcache.engine.model_config import ModelConfig
from refcache.engine.models.content import RowCheck
from refcache.engine.scheduling.scheduler import Scheduler
from refcache.oracle.drivers.hicache.faults import InjectedFault, InnerSteps, watch_machine
from refcache.oracle.program.crash import told
from refcache.oracle.program.trial import Trial
from refcache.oracle.rules.violation import Violation
from refcache.oracle.target.config import CacheConfig
from refcache.runtime import SimulatedRuntime, eager
from refcache.tags import greedy
from refcache.types import ServerArgs

VOCABULARY = 3
OUTPUTS = 2
MOST_FAULTS = 40
"""In one program; more would be the same again."""


class FaultyLoop:
    """See the module docstring.

    Attributes:
        pairs: (call, inner step, its number) of each fault that came up.
    """

    def __init__(self, trial: Trial, config: Any, overlap: bool) -> None:
        self.trial, self.config = trial, config
        self.pairs: list[tuple[str, str, int]] = []
        self.steps = InnerSteps(trial.target.inner_steps, tensors=False)
        machine = SimulatedRuntime(eager)
        size, page_size = max(config.size, 16), config.page_size
        self.size = size
        one_tier = CacheConfig(page_size=page_size, size=size, eviction_policy="lru")
        self.scheduler = trial.call(
            Scheduler,
            ServerArgs(
                page_size=page_size,
                max_running_requests=3,
                max_total_tokens=size,
                chunked_prefill_size=page_size * 2,
                context_length=size,
                disable_overlap_schedule=not overlap,
            ),
            ModelConfig(num_hidden_layers=2, vocab_size=VOCABULARY),
            runtime=machine,
            make_allocator=lambda runner: trial.target.allocator(one_tier),
            make_tree=lambda params, args: trial.target.tree(
                one_tier, params.token_to_kv_pool_allocator, params.req_to_token_pool
            ),
            check=RowCheck(on_wrong=lambda wrong: trial.note("C-READ", str(wrong))),
        )
        watch_machine(self.steps, machine)
        allocator = self.scheduler.token_to_kv_pool_allocator
        for name in ("alloc", "alloc_extend", "alloc_decode"):
            if hasattr(allocator, name):
                self.steps.watch(allocator, name, "device slots")
        for name in ("free", "free_each", "free_group_end"):
            if hasattr(allocator, name):
                self.steps.watch(allocator, name, "device slots back")
        self.steps.watch(self.scheduler.req_to_token_pool, "alloc", "row")
        self.steps.watch(self.scheduler.req_to_token_pool, "free", "row back")

    def serve(self, prompts: Sequence[Sequence[int]], first: int) -> None:
        """Serve these prompts; the inner steps from ``first`` on of each iteration raise."""
        scheduler, require = self.scheduler, self.trial.require
        room = scheduler.max_req_len - 1
        served = {f"p{i}": list(tokens)[:room] for i, tokens in enumerate(prompts) if tokens}
        for rid, tokens in served.items():
            scheduler.submit(TokenizedGenerateReqInput(rid, tokens, SamplingParams(OUTPUTS)))
        number, idle = first, 0
        while not scheduler.is_idle() and idle < 200:
            idle += 1
            if self._step(number if len(self.pairs) < MOST_FAULTS else 0):
                number += 1
            else:
                number = first
        require(scheduler.is_idle(), "PROGRESS", f"still live: {list(scheduler.live_reqs)}")
        for req in scheduler.finished_reqs:
            tokens = served[req.rid]
            expected = greedy(tokens, len(req.output_ids), VOCABULARY)
            require(
                list(req.output_ids) == expected,
                "C-READ",
                f"request {req.rid} of {tokens} got {list(req.output_ids)}, expected {expected}",
            )
        require(len(scheduler.finished_reqs) == len(served), "PROGRESS", "a request was lost")
        self._nothing_held("serving everything", cached=True)

    def _step(self, number: int) -> bool:
        """One iteration; whether it raised."""
        try:
            with self.steps.armed(number):
                self.scheduler.step()
        except InjectedFault:
            self.pairs.append(("step", self.steps.at, number))
            self.trial.raise_noted()
            self._nothing_held("an iteration that raised", cached=False)
            lost = set(self.scheduler.live_reqs.values()) - set(self.scheduler.waiting_queue)
            self.trial.require(not lost, "PROGRESS", f"an iteration that raised lost {lost}")
            return True
        except Exception as error:
            raise Violation("crash", f"Scheduler.step raised {told(error)}") from error
        self.trial.raise_noted()
        return False

    def _nothing_held(self, after: str, cached: bool) -> None:
        """P1, L1 and R3: when nothing runs, nobody holds pages, rows or locks."""
        scheduler, require = self.scheduler, self.trial.require
        tree, rows = scheduler.tree_cache, scheduler.req_to_token_pool
        free = int(scheduler.token_to_kv_pool_allocator.available_size())
        kept = int(tree.evictable_size()) if cached else 0
        require(
            free + kept == self.size,
            "P1",
            f"after {after} {free} tokens are free and {kept} cached, of {self.size}",
        )
        require(tree.protected_size() == 0, "L1", f"after {after} something is locked")
        require(
            rows.available_size() == rows.size,
            "R3",
            f"after {after} {rows.available_size()} of {rows.size} rows are free",
        )
