"""Logits of hybrid models do not depend on the cache, and one wrong element of a state shows.

As ``test_logits.py``, for models that mix full attention with recurrent layers or with layers that
have a sliding window, on pools of so few states and window slots that most admissions evict. The
control runs the workload again and negates one element of what the cache gave to a request: of the
state that was copied for it, or of a row in its window.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

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
from refcache.engine.models.linear_attention import state_params
from refcache.engine.models.transformer import Transformer, make_transformer
from refcache.engine.schedule_batch import ModelWorkerBatch
from refcache.types import ServerArgs

HEADS, CONTEXT = 2, 40
BASES = [(0, 1, 2, 0, 2, 1, 1, 0, 2, 2, 0, 1, 0, 0), (2, 1) * 7, (2, 1, 2, 1, 0, 0) * 2]


@dataclass(frozen=True)
class Turn:
    """Run ``wait`` steps, disturbed, then send ``tail`` behind what request ``after`` has said."""

    wait: int
    disturb: str | None
    after: int
    keep: int
    tail: tuple[int, ...]
    max_new_tokens: int
    extra_key: str | None
    priority: int | None


@dataclass(frozen=True)
class Workload:
    config: ModelConfig
    server_args: ServerArgs
    turns: tuple[Turn, ...]
    flip: tuple[int, int, int]


prompts = st.builds(
    lambda base, cut, tail: base[:cut] + tail,
    st.sampled_from(BASES),
    st.sampled_from([14, 12, 9, 6, 4]),
    st.sampled_from([(), (), (3,), (0, 4)]),
)
turns = st.builds(
    Turn,
    wait=st.sampled_from([0, 0, 0, 2, 4, 12]),
    disturb=st.sampled_from([None, None, None, "retract", "abort"]),
    after=st.integers(0, 8),
    keep=st.sampled_from([0, 0, 6, 20]),
    tail=prompts,
    max_new_tokens=st.sampled_from([1, 3, 5, 8]),
    extra_key=st.sampled_from([None, None, None, "a"]),
    priority=st.sampled_from([None, 0, 20]),
)


@st.composite
def workloads(draw: st.DrawFn, kind: str) -> Workload:
    layers = draw(st.integers(2, 3))
    other = tuple(
        sorted(draw(st.sets(st.integers(0, layers - 1), min_size=1, max_size=layers - 1)))
    )
    shape: dict[str, Any] = {"vocab_size": 24, "dtype": torch.float64}
    shape |= {"num_hidden_layers": layers, "num_key_value_heads": HEADS, "head_dim": 2}
    window = kind.startswith("windows")
    extra = kind == "states, extra buffer"
    if window:
        span = draw(st.integers(1, 5))
        config = ModelConfig(**shape, swa_attention_layer_ids=other, sliding_window_size=span)
    else:
        config = ModelConfig(**shape, mamba2_cache_params=state_params(other, HEADS, 2))
    page = draw(st.sampled_from([1, 1, 2, 4])) if window or extra else 1
    chunk = draw(st.sampled_from([None, 1, 2, 3, 5]))
    return Workload(
        config,
        ServerArgs(
            page_size=page,
            max_running_requests=draw(st.sampled_from([1, 2, 4])),
            max_total_tokens=page * draw(st.integers(28 // page, 56 // page)),
            max_prefill_tokens=draw(st.sampled_from([8, 64])),
            chunked_prefill_size=None if chunk is None else page * chunk,
            context_length=CONTEXT,
            schedule_policy=draw(st.sampled_from(["fcfs", "lpm"])),
            schedule_conservativeness=draw(st.sampled_from([0.01, 1.0])),
            disable_overlap_schedule=draw(st.booleans()),
            disable_radix_cache=kind.endswith("no tree"),
            enable_priority_scheduling=draw(st.booleans()),
            swa_full_tokens_ratio=draw(st.sampled_from([0.9, 1.0])),
            max_mamba_cache_size=draw(st.integers(4, 9)),
            mamba_scheduler_strategy="extra_buffer" if extra else "no_buffer",
            mamba_track_interval=draw(st.sampled_from([4, 8])),
            mamba_cache_chunk_size=draw(st.sampled_from([4, 4, 8])),
        ),
        tuple(draw(st.lists(turns, min_size=4, max_size=8))),
        draw(st.tuples(*[st.integers(0, 40)] * 3)),
    )


class Flipped(Transformer):
    """Negates one element before a forward reads it. ``flip``: (forward, request, element)."""

    flip: tuple[int, int, int] | None = None
    forwards = 0
    backend: AttentionBackend

    def forward(self, batch: ModelWorkerBatch, backend: AttentionBackend) -> torch.Tensor:
        self.forwards += 1
        if self.flip is not None and self.flip[0] == self.forwards:
            self.spoil(batch, backend, *self.flip[1:])
        return super().forward(batch, backend)

    def spoil(
        self, batch: ModelWorkerBatch, backend: AttentionBackend, index: int, element: int
    ) -> None:
        rows, pool = backend.req_to_token_pool, backend.token_to_kv_pool
        if batch.mamba_indices is not None:
            slot, planes = batch.mamba_indices[index], rows.mamba_pool.planes
            if batch.extend_seq_lens[index] > 1:  # its last token need not see the convolution's
                planes = planes[-1:]
        else:  # of the last token of the prefix, where the last new token looks at it
            span = self.config.sliding_window_size or 0
            own = batch.extend_seq_lens[index] >= span
            inner = pool.full_kv_pool if own else pool.swa_kv_pool
            slot = rows.req_to_token[batch.rows[index], batch.extend_prefix_lens[index] - 1]
            planes = inner.planes
            slot = slot if own else pool.full_to_swa_index_mapping[slot]
        plane = planes[element % len(planes)].buffer
        row = plane[element % len(plane), slot].flatten(0)
        plane.view(*plane.shape[:2], -1)[element % len(plane), slot, element % len(row)] *= -1


class Run(SchedulerObserver):
    """One run of a workload; ``hits``: (forward, request) that was given a prefix."""

    def __init__(self, workload: Workload, flip: tuple[int, int, int] | None = None) -> None:
        self.logits: list[tuple[str, int, torch.Tensor]] = []
        self.hits: list[tuple[int, int]] = []
        self.seen: Counter[str] = Counter()
        self.workload = workload
        self.scheduler = Scheduler(
            workload.server_args, workload.config, make_model=self.make_model, observer=self
        )
        model = self.scheduler.model_runner.model
        assert isinstance(model, Flipped)
        self.model = model
        self.model.flip = flip
        self.tree = self.scheduler.tree_cache
        self.play()

    def make_model(self, runner: Any) -> Transformer:
        return make_transformer(runner, HEADS, on_logits=self.on_logits, kind=Flipped)

    def on_logits(self, batch: ModelWorkerBatch, logits: torch.Tensor) -> None:
        self.logits += zip(batch.rids, batch.seq_lens_cpu.tolist(), logits.clone(), strict=True)

    def on_batch(self, batch: ScheduleBatch) -> None:
        self.seen["snapshots"] += sum(track is not None for track in batch.mamba_track)
        self.seen["given back"] += sum(req.swa_evicted_seqlen > 0 for req in batch.reqs)
        if not batch.forward_mode.is_extend():
            return
        for index, (req, ids) in enumerate(zip(batch.reqs, batch.cached_prefix_ids, strict=True)):
            self.seen["chunks"] += ids is None
            self.seen["branching points"] += req.mamba_branching_seqlen is not None
            if ids:
                self.hits.append((self.scheduler.forward_ct + 1, index))

    def on_retract(self, req: Req) -> None:
        self.seen["retractions"] += 1

    def play(self) -> None:
        scheduler, sent = self.scheduler, []
        for number, turn in enumerate(self.workload.turns):
            if turn.disturb == "abort" and sent:
                scheduler.submit(AbortReq(sent[turn.after % len(sent)].rid))
            for _ in range(turn.wait):
                if turn.disturb == "retract":
                    scheduler.force_retraction()
                scheduler.step()
                self.check_owners()
            said: tuple[int, ...] = ()
            if sent and turn.keep:
                said = self.tokens(sent[turn.after % len(sent)])[: turn.keep]
            params = SamplingParams(turn.max_new_tokens, stop_token_ids=[7])
            request = TokenizedGenerateReqInput(
                f"r{number}", (*said, *turn.tail), params, turn.extra_key, turn.priority
            )
            sent.append(request)
            scheduler.submit(request)
        for _ in range(600):
            if scheduler.is_idle():
                break
            scheduler.step()
            self.check_owners()
        assert scheduler.is_idle(), "no progress"
        assert len(scheduler.finished_reqs) == len(sent)

    def check_owners(self) -> None:
        """Every state, and every window slot, has one owner."""
        reqs = list(self.scheduler.live_reqs.values())
        rows = self.scheduler.req_to_token_pool
        if hasattr(rows, "mamba_pool"):
            owned = [
                rows.mamba_pool.free_slots,
                *([] if self.tree.disable else [self.tree.all_mamba_values_flatten()]),
            ]
            for req in reqs:
                for held in (req.mamba_pool_idx, req.mamba_ping_pong_track_buffer):
                    owned += [] if held is None else [held.reshape(-1)]
            slots = torch.cat(owned).tolist()
            assert sorted(slots) == list(range(1, rows.mamba_pool.size + 1))
        else:
            allocator = self.scheduler.token_to_kv_pool_allocator
            mapped = allocator.full_to_swa_index_mapping[:-1]
            mapped = mapped[mapped > 0].tolist()
            assert len(set(mapped)) == len(mapped)
            free = allocator.swa_available_size()
            page = self.tree.page_size
            pages = {slot // page for slot in mapped}
            assert free + page * len(pages) == allocator.size_swa

    def tokens(self, request: TokenizedGenerateReqInput) -> tuple[int, ...]:
        reqs = [*self.scheduler.finished_reqs, *self.scheduler.live_reqs.values()]
        outputs = [r.output_ids for r in reqs if r.rid == request.rid]
        return (*request.input_ids, *(outputs[0] if outputs else ()))

    def wrong(self) -> list[tuple[str, int]]:
        """The logits that differ in any bit, as (rid, tokens)."""
        seen = {rid for rid, _, _ in self.logits}
        expected = {
            req.rid: self.model.recompute([*req.origin_input_ids, *req.output_ids], req.extra_key)
            for req in self.scheduler.finished_reqs
            if req.rid in seen
        }
        return [
            (rid, count)
            for rid, count, logits in self.logits
            if not torch.equal(logits.view(torch.int64), expected[rid][count - 1].view(torch.int64))
        ]


def campaign(kind: str, examples: int, part: int = 0) -> Counter[str]:
    """Check ``examples`` workloads and the control of each that has a hit; what was seen."""
    total: Counter[str] = Counter()

    @seed(part)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(workload=workloads(kind))
    def check(workload: Workload) -> None:
        run = Run(workload)
        assert run.wrong() == []
        total.update(run.seen, workloads=1, hits=len(run.hits))
        if run.hits:
            which, element, _ = workload.flip
            forward, index = run.hits[which % len(run.hits)]
            assert Run(workload, (forward, index, element)).wrong(), "the flip is not seen"
            total["controls"] += 1

    check()
    return total


KINDS = {
    "states, no buffer": ["controls", "chunks", "retractions"],
    "states, extra buffer": ["controls", "chunks", "retractions", "snapshots"],
    "windows": ["controls", "chunks", "retractions", "given back"],
    "states, no tree": ["chunks", "retractions"],
    "windows, no tree": ["chunks", "retractions", "given back"],
}


def assert_met(total: Counter[str], kind: str, examples: int) -> None:
    """A campaign in which nothing happened proves nothing."""
    for what in KINDS[kind]:
        assert total[what] >= examples // 10, f"{what}: {total}"


@pytest.mark.parametrize("kind", KINDS)
def test_logits_do_not_depend_on_states_and_windows(kind: str) -> None:
    examples = 5 if kind.endswith("no tree") else 14
    assert_met(campaign(kind, examples), kind, examples)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(1, 11))
@pytest.mark.parametrize("kind", KINDS)
def test_logits_do_not_depend_on_states_and_windows_long(kind: str, part: int) -> None:
    assert_met(campaign(kind, 20, part), kind, 20)
