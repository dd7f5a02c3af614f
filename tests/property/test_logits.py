"""Logits with any cache are bitwise those of recomputation, and one wrong element of a row shows.

A workload is a small conversation: prompts that share prefixes or go on from what another request
has said so far, steps in between, now and then an abort or a retraction, on pools so small that
most admissions evict. Every logit that a forward computes is compared with
:meth:`~refcache.engine.models.transformer.Transformer.recompute` of that request's tokens.

The control then runs the same workload again and negates one element of one row that the cache gave
to a request (one that was loaded from the host, if any was), just before the request's attention
reads it; some logit of the workload must differ.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from refcache.engine import (
    AbortReq,
    ModelConfig,
    Req,
    SamplingParams,
    ScheduleBatch,
    Scheduler,
    SchedulerObserver,
    TokenizedGenerateReqInput,
)
from refcache.engine.models.attention import AttentionBackend
from refcache.engine.models.transformer import Transformer, make_transformer
from refcache.engine.schedule_batch import ModelWorkerBatch
from refcache.events import MEDIUM_GPU, BlockRemoved
from refcache.reference import LAYOUTS
from refcache.runtime import Runtime
from refcache.runtime.immediate import ImmediateRuntime
from refcache.runtime.simulated.choices import drawn
from refcache.runtime.simulated.machine import SimulatedRuntime
from refcache.runtime.simulated.tracker import Tracker
from refcache.testing.machines.strategies import PAGE_SIZES, namespaces, priorities, prompts
from refcache.tree import RadixCache
from refcache.tree.hiradix_cache import HiRadixCache
from refcache.types import (
    EVICTION_POLICIES,
    HIT_POLICIES,
    SCHEDULE_POLICIES,
    WRITE_POLICIES,
    CacheInitParams,
    InitLoadBackParams,
    ServerArgs,
)

CONTEXT = 40
MODELS = {
    "mha": ModelConfig(2, 2, head_dim=4, v_head_dim=3, vocab_size=24, dtype=torch.float64),
    "mla": ModelConfig(
        2, head_dim=2, kv_lora_rank=4, qk_rope_head_dim=2, vocab_size=24, dtype=torch.float64
    ),
}


@dataclass(frozen=True)
class Turn:
    """Run ``wait`` steps, disturbed (an abort first, or a retraction each), then send a prompt.

    The prompt is the first ``keep`` tokens that request ``after`` has by then, and ``tail``.
    """

    wait: int
    disturb: str | None
    after: int
    keep: int
    tail: tuple[int, ...]
    max_new_tokens: int
    extra_key: str | None
    priority: int


@dataclass(frozen=True)
class Workload:
    """``choices``: what the simulated machine is told, over and over; None: the immediate one."""

    server_args: ServerArgs
    hit_policy: str
    load_back_threshold: int
    choices: tuple[int, ...] | None
    turns: tuple[Turn, ...]
    flip: tuple[int, int, int, int, int]


class Hit(NamedTuple):
    """Request ``index`` of a forward was given ``length`` rows, the last ``loaded`` by a load."""

    forward: int
    index: int
    length: int
    loaded: int


class Flip(NamedTuple):
    forward: int
    index: int
    position: int
    layer: int
    plane: int
    element: int


BASES = [(0, 1, 2, 0, 2, 1, 1, 0, 2, 2, 0, 1, 0, 0), (2, 1) * 7, (2, 1, 2, 1, 0, 0) * 2]
returning = st.builds(
    lambda base, cut, tail: base[:cut] + tail,
    st.sampled_from(BASES),
    st.sampled_from([14, 12, 9, 6]),
    st.sampled_from([(), (), (3,), (0, 4)]),
)
"""Long prompts that come again: what was evicted between is loaded back."""


@st.composite
def turns(draw: st.DrawFn, number: int) -> Turn:
    return Turn(
        wait=draw(st.sampled_from([0, 0, 0, 2, 4, 12])),
        disturb=draw(st.sampled_from([None, None, None, "retract", "retract", "abort"])),
        after=draw(st.integers(0, number)),
        keep=draw(st.sampled_from([0, 0, 0, 6, 20])),
        tail=draw(st.one_of(prompts, returning, returning)),
        max_new_tokens=draw(st.sampled_from([1, 3, 5, 8])),
        extra_key=draw(namespaces),
        priority=draw(priorities),
    )


@st.composite
def workloads(draw: st.DrawFn, hierarchical: bool) -> Workload:
    page_size = draw(st.sampled_from(PAGE_SIZES))
    pages = draw(st.integers(24 // page_size, 48 // page_size))
    chunk = draw(st.sampled_from([None, 1, 2, 3]))
    server_args = ServerArgs(
        page_size=page_size,
        max_running_requests=draw(st.sampled_from([1, 2, 4, 4])),
        max_total_tokens=page_size * pages,
        max_prefill_tokens=draw(st.sampled_from([8, 64])),
        chunked_prefill_size=None if chunk is None else page_size * chunk,
        context_length=CONTEXT,
        schedule_policy=draw(st.sampled_from(SCHEDULE_POLICIES)),
        schedule_conservativeness=draw(st.sampled_from([0.01, 1.0])),
        disable_overlap_schedule=draw(st.booleans()),
        radix_eviction_policy=draw(st.sampled_from(EVICTION_POLICIES)),
        enable_kv_cache_events=True,
        enable_hierarchical_cache=hierarchical,
    )
    if hierarchical:
        server_args.hicache_ratio = draw(st.sampled_from([1.0, 1.0, 1.5, 3.0]))
        server_args.hicache_write_policy = draw(st.sampled_from(WRITE_POLICIES))
        server_args.hicache_mem_layout = draw(st.sampled_from(sorted(LAYOUTS)))
        server_args.hicache_io_backend = draw(st.sampled_from(["kernel", "direct"]))
    choice = st.sampled_from([0, 1, 1, 1, 1, 1, 2, 3, 4, 5])  # mostly: run nothing yet
    choices = st.lists(choice, min_size=1, max_size=24).map(tuple)
    return Workload(
        server_args,
        draw(st.sampled_from(HIT_POLICIES)),
        draw(st.sampled_from([1, 1, 4])),
        draw(st.one_of(st.none(), st.just((1,)), choices, choices)),
        tuple(draw(turns(i)) for i in range(draw(st.integers(4, 9)))),
        draw(st.tuples(*[st.integers(0, 40)] * 5)),
    )


class FlippedTransformer(Transformer):
    """A transformer that negates one element of one row before a forward's attention reads it."""

    flip: Flip | None = None
    forwards = 0

    def forward(self, batch: ModelWorkerBatch, backend: AttentionBackend) -> torch.Tensor:
        self.forwards += 1
        if self.flip is not None and self.flip.forward == self.forwards:
            block = self.blocks[self.flip.layer % len(self.blocks)]
            block.attend = partial(self.spoil, block.attend, batch)  # type: ignore[method-assign]
        return super().forward(batch, backend)

    def spoil(self, attend: Callable[..., None], target: ModelWorkerBatch, *args: Any) -> None:
        _, buffers, metadata, batch, *_ = args
        if batch is target:
            assert self.flip is not None
            slot = int(metadata.pages[self.flip.index][self.flip.position])
            row = buffers[self.flip.plane % len(buffers)][slot]
            heads, dim = row.shape
            row[self.flip.element % heads, self.flip.element // heads % dim] *= -1
        attend(*args)


class Watched(HiRadixCache):
    """A two-tier tree that remembers how many tokens it loaded last for each request."""

    def init_load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, Any]:
        slots, node = super().init_load_back(params)
        params.req.loaded_tokens = len(slots)
        return slots, node


class Run(SchedulerObserver):
    """One run of a workload.

    Attributes:
        logits: (rid, tokens the request has, logits after the last of them), one a forward.
        hits: what the cache gave at admission.
        seen: how often what happened.
    """

    def __init__(self, family: str, workload: Workload, flip: Flip | None = None) -> None:
        self.logits: list[tuple[str, int, torch.Tensor]] = []
        self.hits: list[Hit] = []
        self.seen: Counter[str] = Counter()
        self.workload = workload
        runtime: Runtime = ImmediateRuntime()
        if workload.choices is not None:
            # All is run now and then: a machine that never gets on would let the loop spin forever.
            rounds = workload.choices * (100 // len(workload.choices))
            runtime = SimulatedRuntime(drawn(cycle((*rounds, 0))), Tracker())
        self.scheduler = Scheduler(
            workload.server_args,
            MODELS[family],
            runtime=runtime,
            make_tree=self.make_tree,
            make_model=self.make_model,
            observer=self,
        )
        self.model = self.scheduler.model_runner.model
        assert isinstance(self.model, FlippedTransformer)
        self.model.flip = flip
        self.play()
        runtime.synchronize()
        for event in self.scheduler.tree_cache.take_events():
            if isinstance(event, BlockRemoved):
                self.seen["evictions" if event.medium == MEDIUM_GPU else "host evictions"] += 1

    def make_model(self, runner: Any) -> Transformer:
        return make_transformer(runner, 4, on_logits=self.on_logits, kind=FlippedTransformer)

    def make_tree(self, params: CacheInitParams, server_args: ServerArgs) -> Any:
        params.hit_policy = self.workload.hit_policy
        if not server_args.enable_hierarchical_cache:
            return RadixCache(params)
        tree = Watched(params, server_args)
        tree.load_back_threshold = self.workload.load_back_threshold
        return tree

    def on_logits(self, batch: ModelWorkerBatch, logits: torch.Tensor) -> None:
        self.logits += zip(batch.rids, batch.seq_lens_cpu.tolist(), logits.clone(), strict=True)

    def on_batch(self, batch: ScheduleBatch) -> None:
        self.seen["forwards"] += 1
        if not batch.forward_mode.is_extend():
            return
        for index, (req, ids) in enumerate(zip(batch.reqs, batch.cached_prefix_ids, strict=True)):
            loaded = req.__dict__.pop("loaded_tokens", 0)
            self.seen["chunks"] += ids is None
            self.seen["loads"] += loaded > 0
            if ids:
                self.hits.append(Hit(self.scheduler.forward_ct + 1, index, len(ids), loaded))

    def on_retract(self, req: Req) -> None:
        self.seen["retractions"] += 1

    def play(self) -> None:
        """Send every turn, then run until nothing is left to do."""
        scheduler = self.scheduler
        sent: list[TokenizedGenerateReqInput] = []
        for number, turn in enumerate(self.workload.turns):
            if turn.disturb == "abort" and sent:
                scheduler.submit(AbortReq(sent[turn.after % len(sent)].rid))
            for _ in range(turn.wait):
                if turn.disturb == "retract":
                    scheduler.force_retraction()
                scheduler.step()
            said: list[int] = []
            if sent and turn.keep:
                said = self.tokens(sent[turn.after % len(sent)])
            request = TokenizedGenerateReqInput(
                f"r{number}",
                (*said[: turn.keep], *turn.tail),
                SamplingParams(turn.max_new_tokens, stop_token_ids=[7]),
                turn.extra_key,
                turn.priority,
            )
            sent.append(request)
            scheduler.submit(request)
        scheduler.dispatch_event_loop()
        assert len(scheduler.finished_reqs) == len(sent)

    def tokens(self, request: TokenizedGenerateReqInput) -> list[int]:
        """The prompt of a request and what it has said so far."""
        reqs = [*self.scheduler.finished_reqs, *self.scheduler.live_reqs.values()]
        outputs = [r.output_ids for r in reqs if r.rid == request.rid]
        return [*request.input_ids, *(outputs[0] if outputs else ())]

    def wrong(self) -> list[tuple[str, int]]:
        """The logits that differ in any bit, as (rid, tokens)."""
        reqs = {req.rid: req for req in self.scheduler.finished_reqs}
        expected = {
            rid: self.model.recompute([*req.origin_input_ids, *req.output_ids], req.extra_key)
            for rid, req in reqs.items()
            if req.req_pool_idx is None and any(rid == r for r, _, _ in self.logits)
        }
        seen = {(rid, count) for rid, count, _ in self.logits}
        for rid, req in reqs.items():
            first = len(req.origin_input_ids)
            missed = {(rid, first + i) for i in range(len(req.output_ids))} - seen
            assert not missed, f"no logits for {missed}"
        return [
            (rid, count)
            for rid, count, logits in self.logits
            if not torch.equal(logits.view(torch.int64), expected[rid][count - 1].view(torch.int64))
        ]


def flip_of(run: Run) -> Flip:
    """One element of one row of one hit; a loaded row if the run has one."""
    which, position, layer, plane, element = run.workload.flip
    hits = [hit for hit in run.hits if hit.loaded] or run.hits
    hit = hits[which % len(hits)]
    rows = hit.loaded or hit.length
    return Flip(hit.forward, hit.index, hit.length - rows + position % rows, layer, plane, element)


def campaign(family: str, hierarchical: bool, examples: int, part: int = 0) -> Counter[str]:
    """Check ``examples`` workloads and the control of each that has a hit; what was seen."""
    total: Counter[str] = Counter()

    @seed(2 * part + (family == "mla"))
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(workload=workloads(hierarchical))
    def check(workload: Workload) -> None:
        run = Run(family, workload)
        assert run.wrong() == []
        total.update(run.seen, workloads=1, logits=len(run.logits), hits=len(run.hits))
        if run.hits:
            flip = flip_of(run)
            assert Run(family, workload, flip).wrong(), f"{flip} is not seen"
            total["controls"] += 1

    check()
    return total


def assert_met(total: Counter[str], hierarchical: bool, examples: int) -> None:
    """A campaign in which nothing happened proves nothing."""
    expected = ["controls", "chunks", "retractions", "evictions"]
    if hierarchical:
        expected += ["loads", "host evictions"]
    assert total["workloads"] >= examples
    for what in expected:
        assert total[what] >= examples // 10, f"{what}: {total}"


TIERS = pytest.mark.parametrize("hierarchical", [False, True], ids=["one tier", "two tiers"])
FAMILIES = pytest.mark.parametrize("family", MODELS)


@TIERS
@FAMILIES
def test_logits_do_not_depend_on_the_cache(family: str, hierarchical: bool) -> None:
    examples = 50 if hierarchical else 25
    assert_met(campaign(family, hierarchical, examples), hierarchical, examples)


@pytest.mark.nightly
@TIERS
@FAMILIES
@pytest.mark.parametrize("part", range(1, 9))
def test_logits_do_not_depend_on_the_cache_long(family: str, hierarchical: bool, part: int) -> None:
    examples = 130 if hierarchical else 40
    assert_met(campaign(family, hierarchical, examples, part), hierarchical, examples)
