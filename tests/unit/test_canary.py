"""The canary: digests of cached pages, compared when they are reused."""

import warnings
from typing import Any

import pytest
import torch

import refcache
from refcache.engine import ModelConfig, SamplingParams, Scheduler, TokenizedGenerateReqInput
from refcache.engine.models.content import ContentViolation
from refcache.errors import InvalidArgument
from refcache.trace.live.digest import Digest, planes_of
from refcache.types import ServerArgs

MODEL = ModelConfig(num_hidden_layers=2, head_dim=2, v_head_dim=3, vocab_size=5)


def make(page: int = 4, **more: Any) -> Scheduler:
    args = ServerArgs(
        page_size=page, max_total_tokens=64, max_running_requests=4, context_length=64,
        chunked_prefill_size=8, disable_overlap_schedule=True, **more,
    )  # fmt: skip
    return Scheduler(args, MODEL)


def serve(scheduler: Scheduler, name: str, tokens: list[int]) -> None:
    scheduler.submit(TokenizedGenerateReqInput(name, tokens, SamplingParams(2)))
    while not scheduler.is_idle():
        scheduler.step()


def spoil(scheduler: Scheduler, page: int, plane: int = 0) -> None:
    """Somebody writes a row of a cached page."""
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    size = scheduler.tree_cache.page_size
    planes_of(pool)[plane][page * size + size - 1] += 1


PROMPT = [i % 5 for i in range(17)]


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("plane", range(4))
def test_a_row_that_changed_is_seen_when_it_is_reused(page: int, plane: int) -> None:
    scheduler = make(page)
    seen: list[int] = []
    with refcache.canary(scheduler, "always", on_damage=seen.append) as canary:
        serve(scheduler, "a", PROMPT)
        serve(scheduler, "b", PROMPT)
        assert canary.damaged() == []
        assert canary.looked > 0
        found = scheduler.tree_cache.match_prefix(match(scheduler, PROMPT))
        spoiled = int(found.device_indices[page]) // page
        spoil(scheduler, spoiled, plane)
        with pytest.raises(ContentViolation):  # the model of the tests reads what it is given
            serve(scheduler, "c", PROMPT)
        assert canary.damaged() == [spoiled]
        assert seen == [1]


def match(scheduler: Scheduler, tokens: list[int]) -> Any:
    from refcache.keys import RadixKey
    from refcache.types import MatchPrefixParams

    return MatchPrefixParams(key=RadixKey(tokens))


def test_pages_that_were_freed_may_be_written() -> None:
    scheduler = make(hicache_ratio=2.0, enable_hierarchical_cache=True)
    with refcache.canary(scheduler, "always") as canary, warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(12):  # evictions, loads, duplicates, chunks
            serve(scheduler, str(number), [(number // 2 % 4 + i * i) % 5 for i in range(21)])
        assert canary.damaged() == []
        assert canary.looked >= 40


def test_a_flush_forgets_every_page() -> None:
    scheduler = make()
    with refcache.canary(scheduler, "always") as canary:
        serve(scheduler, "a", PROMPT)
        scheduler.tree_cache.reset()
        scheduler.token_to_kv_pool_allocator.clear()
        scheduler.req_to_token_pool.clear()
        other = [4 - token for token in PROMPT]
        serve(scheduler, "b", other)
        serve(scheduler, "c", other)
        assert canary.damaged() == []


def test_off_wraps_nothing_and_close_takes_the_wrappers_off() -> None:
    scheduler = make()
    tree, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
    before = dict(vars(tree)), dict(vars(allocator))
    canary = refcache.canary(scheduler, "off")
    assert (vars(tree).keys(), vars(allocator).keys()) == (before[0].keys(), before[1].keys())
    assert canary.damaged() == []
    refcache.canary(tree, "always").close()
    assert (vars(tree).keys(), vars(allocator).keys()) == (before[0].keys(), before[1].keys())


def test_a_sample_is_the_same_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refcache.trace.live.canary.HEAD", 8)
    chosen = []
    for seed in range(200):
        scheduler = make()
        canary = refcache.canary(scheduler.tree_cache, every=8, seed=seed)
        serve(scheduler, "a", PROMPT)
        kept = canary.looked
        serve(scheduler, "b", PROMPT)
        assert (canary.looked > kept) == (kept > 0)
        chosen.append(kept > 0)
        if seed > 20 and any(chosen):
            break
    assert 0 < sum(chosen) < len(chosen)


def test_what_is_no_cache_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="mode='often'"):
        refcache.canary(make(), "often")
    with pytest.raises(InvalidArgument, match="every=0"):
        refcache.canary(make(), every=0)
    with pytest.raises(InvalidArgument, match="no tree cache"):
        refcache.canary(object())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_a_digest_tells_words_rows_pages_and_planes_apart(dtype: torch.dtype) -> None:
    size = (12, 2, 4)
    planes = [torch.randint(1, 100, size).to(dtype) for _ in range(3)]
    digest, every = Digest(planes, 4), torch.arange(3)
    first = digest(every)
    assert len(set(first.tolist())) == 3
    assert 0 not in first.tolist()
    planes[0][5], planes[0][6] = planes[0][6].clone(), planes[0][5].clone()
    second = digest(every)
    assert (second != first).tolist() == [False, True, False]
    planes[1][:4], planes[2][:4] = planes[2][:4].clone(), planes[1][:4].clone()
    assert (digest(every) != second).tolist() == [True, False, False]
