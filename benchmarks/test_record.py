"""What recording a trace adds to a call; the trace is judged in the same run."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import refcache
from refcache.keys import RadixKey
from refcache.oracle import CacheConfig, resolve
from refcache.trace import judge_trace
from refcache.types import InsertParams, MatchPrefixParams


@pytest.mark.parametrize("recorded", [False, True], ids=["bare", "recorded"])
@pytest.mark.parametrize(("tokens", "page_size"), [(512, 16), (4096, 64)])
def test_match_alloc_insert(
    benchmark: Any, tokens: int, page_size: int, recorded: bool, tmp_path: Path
) -> None:
    """One round is a match, an allocation and an insert of a prompt whose first half is cached."""
    draw = random.Random(0)
    config = CacheConfig(page_size=page_size, size=page_size * (40 * tokens // page_size))
    target = resolve("refcache")
    allocator = target.allocator(config)
    tree = target.tree(config, allocator, target.req_to_token_pool(config))
    recorder = refcache.record(tree, tmp_path / "t.jsonl") if recorded else None
    half = [draw.randrange(32000) for _ in range(tokens // 2)]

    def prompt() -> tuple[tuple[RadixKey], dict[str, Any]]:
        return (RadixKey(half + [draw.randrange(32000) for _ in half]),), {}

    def serve(key: RadixKey) -> None:
        found = tree.match_prefix(MatchPrefixParams(key)).device_indices
        slots = allocator.alloc(len(key) - len(found))
        tree.insert(InsertParams(key, torch.cat([found, slots])))

    benchmark.pedantic(serve, setup=prompt, rounds=30)
    if recorder is not None:
        recorder.close()
        assert judge_trace(tmp_path / "t.jsonl").verdict == "ok"
