"""``RadixCache`` alone over the public conversation trace: match, insert, evict to 3 M tokens.

A round is one request, so the sum of the rounds is the time of the trace. The hits and evictions of
the run are compared with the known figures; a published engine's own tree, where its release is
unpacked (``make peers``), does the same work in the same way.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from refcache.oracle import CacheConfig, resolve
from refcache.readers import read_requests
from refcache.replay.parts import prompt_of

PAGE, CAPACITY = 64, 3_000_000
HITS, EVICTED = 20_257_216, 121_177_472
PEER = "sglang:0.5.10"


class NoAllocator:
    """Takes back slots that nobody hands out."""

    device = "cpu"
    page_size = PAGE

    def free(self, free_index: torch.Tensor) -> None: ...


def trace_path() -> Path:
    default = Path(__file__).parents[2] / "shared" / "traces" / "conversation_trace.jsonl"
    path = Path(os.environ.get("REFCACHE_TRACE", default))
    if not path.is_file():
        pytest.skip(f"no trace at {path}; set REFCACHE_TRACE to Mooncake's conversation trace")
    return path


def target_of(name: str) -> Any:
    if name == "refcache":
        return resolve(name)
    from refcache.peers import peer_target, unpacked

    if name.partition(":")[2] not in unpacked():
        pytest.skip(f"{name} is not unpacked here; `make peers` does")
    return peer_target(name)


@pytest.mark.parametrize("name", ["refcache", PEER])
def test_tree_alone(benchmark: Any, name: str) -> None:
    target = target_of(name)
    tree = target.tree(CacheConfig(page_size=PAGE, size=PAGE), NoAllocator(), None)
    requests = list(read_requests(trace_path()).requests)
    following = iter(requests)
    hits = evicted = 0

    def request() -> tuple[tuple[Any, torch.Tensor], dict[str, Any]]:
        tokens = prompt_of(next(following))
        tokens = tokens[: len(tokens) // PAGE * PAGE]
        as_engine = tokens if name == "refcache" else tokens.tolist()
        return (target.RadixKey(as_engine), torch.zeros(len(tokens), dtype=torch.int64)), {}

    def serve(key: Any, slots: torch.Tensor) -> None:
        nonlocal hits, evicted
        hits += len(tree.match_prefix(target.MatchPrefixParams(key=key)).device_indices)
        tree.insert(target.InsertParams(key=key, value=slots))
        excess = tree.evictable_size() - CAPACITY
        if excess > 0:
            result = tree.evict(target.EvictParams(num_tokens=excess))
            evicted += result.num_tokens_evicted

    benchmark.pedantic(serve, setup=request, rounds=len(requests))
    assert (hits, evicted) == (HITS, EVICTED)
    benchmark.extra_info["trace_seconds"] = round(benchmark.stats.stats.total, 2)
