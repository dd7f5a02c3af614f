"""What the suites draw: few tokens, short prompts, tight pools.

Corruption needs collisions. Two or three tokens make prompts share prefixes and decoded tokens
follow paths that exist; a pool a few pages larger than one prompt makes every admission evict;
chunks, prompts and pages of different sizes make every boundary fall everywhere.
"""

from typing import Any

from hypothesis import strategies as st

from refcache.oracle.target.traits import Traits
from refcache.reference import LAYOUTS
from refcache.types import EVICTION_POLICIES, PREFETCH_STOP_POLICIES, WRITE_POLICIES

PAGE_SIZES = (1, 2, 4)

token = st.integers(0, 2)
_fresh = st.lists(token, min_size=2, max_size=15).map(tuple)
_shared = st.builds(
    lambda prompt, cut, tail: prompt[:cut] + tuple(tail),
    st.sampled_from([(0,) * 12, (0, 1) * 6, (0, 0, 1, 2) * 3]),
    st.integers(2, 12),
    st.lists(token, max_size=3),
)
prompts = st.one_of(_fresh, _shared)
"""Prompts of 2 to 15 tokens; half of them start like one of three system prompts."""
long_prompts = st.lists(token, min_size=8, max_size=15).map(tuple)
namespaces = st.sampled_from([None, None, "a", "b"])
chunks = st.sampled_from([None, None, 1, 2, 3, 4, 6])
priorities = st.integers(0, 2)
index = st.integers(0, 3)
indices = st.lists(index, min_size=1, max_size=3).map(tuple)
strides = st.integers(1, 7)


@st.composite
def allocator_configs(draw: st.DrawFn) -> dict[str, Any]:
    """Keywords of an allocator under test: 1 to 8 pages."""
    page_size = draw(st.sampled_from(PAGE_SIZES))
    return {
        "page_size": page_size,
        "size": page_size * draw(st.integers(1, 8)),
        "need_sort": draw(st.booleans()),
    }


@st.composite
def offload_configs(draw: st.DrawFn) -> dict[str, Any]:
    """Keywords of an offloading manager under test: 2 to 6 blocks of 1 to 4 tokens."""
    page_size = draw(st.sampled_from(PAGE_SIZES))
    return {"page_size": page_size, "size": page_size * draw(st.integers(2, 6))}


@st.composite
def tree_configs(draw: st.DrawFn) -> dict[str, Any]:
    """Keywords of a tree under test: 8 to 32 tokens, so that few prompts fit."""
    page_size = draw(st.sampled_from(PAGE_SIZES))
    low, high = 8 // page_size, 32 // page_size
    return {
        "page_size": page_size,
        "size": page_size * draw(st.integers(low, high)),
        "need_sort": draw(st.booleans()),
        "eviction_policy": draw(st.sampled_from(EVICTION_POLICIES)),
        "is_eagle": draw(st.booleans()),
        "enable_kv_cache_events": draw(st.booleans()),
    }


@st.composite
def sequences_configs(draw: st.DrawFn, traits: Traits) -> dict[str, Any]:
    """Keywords of a cache of sequences under test: 4 to 24 tokens, within the target's traits."""
    page_size = draw(st.sampled_from(traits.page_sizes))
    pages = draw(st.integers(max(2, 4 // page_size), max(4, 24 // page_size)))
    size = page_size * pages
    config: dict[str, Any] = {
        "page_size": page_size,
        "size": size,
        "is_eagle": draw(st.booleans()) if traits.eagle else False,
        "enable_kv_cache_events": draw(st.booleans()),
        "context_length": max(64, size),
    }
    if traits.host_tier and draw(st.booleans()):
        config["host_size"] = size + page_size * draw(st.sampled_from([1, 1, 20]))
        config["write_policy"] = draw(st.sampled_from(WRITE_POLICIES))
    return config


@st.composite
def mamba_configs(draw: st.DrawFn) -> dict[str, Any]:
    """Keywords of a tree of tokens and states: 2 to 4 tokens a chunk, as few states as requests
    need or a few more, a pool that some prompts fill to the last page."""
    extra = draw(st.booleans())
    page_size = draw(st.sampled_from((1, 2))) if extra else 1
    chunk = draw(st.sampled_from([2, 4] if page_size == 2 else [2, 3, 4]))
    overlap = draw(st.booleans())
    a_request = 1 + (1 + overlap if extra else 0)
    return {
        "page_size": page_size,
        "size": page_size * draw(st.integers(8 // page_size, 28 // page_size)),
        "need_sort": draw(st.booleans()),
        "max_requests": 2,
        "states": draw(st.integers(max(2, a_request), 3 + a_request)),
        "extra_buffer": extra,
        "overlap": overlap,
        "chunk": chunk,
    }


@st.composite
def swa_configs(draw: st.DrawFn) -> dict[str, Any]:
    """Keywords of a tree of two pools: windows of 2 to 4 tokens, a window pool that is smaller, or
    as large, and may be a page from exhaustion; pages of more tokens than a window."""
    page_size = draw(st.sampled_from((1, 1, 2, 4)))
    size = page_size * draw(st.integers(8 // page_size, 28 // page_size))
    pages = size // page_size
    return {
        "page_size": page_size,
        "size": size,
        "swa_size": page_size * draw(st.integers(max(1, min(pages, 8 // page_size)), pages)),
        "window": draw(st.integers(2, 4)),
        "max_requests": 3,
        "is_eagle": draw(st.sampled_from([False, False, True])),
    }


@st.composite
def hicache_configs(draw: st.DrawFn) -> dict[str, Any]:
    """Keywords of a two-tier cache under test: a host pool that is one to a few pages larger.

    ``write_back`` bugs nearly vanish with a large host pool, so most are tight; and it is half of
    the draws, because it shares the least with the others.
    """
    config = draw(tree_configs())
    page_size = config["page_size"]
    return config | {
        "host_size": config["size"] + page_size * draw(st.sampled_from([1, 1, 1, 1, 2, 20])),
        "write_policy": draw(st.sampled_from([*WRITE_POLICIES, "write_back"])),
        "layout": draw(st.sampled_from(sorted(LAYOUTS))),
        "io_backend": draw(st.sampled_from(["kernel", "direct"])),
        "load_back_threshold": draw(st.sampled_from([1, 1, 1, 3])),
        "mla": draw(st.booleans()),
        "delay": draw(st.sampled_from([True, True, True, False])),
        "reentrant": draw(st.sampled_from([False, False, True])),
        "small_loads": draw(st.booleans()),
        "hit_policy": draw(st.sampled_from(["per_visit", "per_visit", "per_request"])),
    }


@st.composite
def tier_configs(draw: st.DrawFn) -> dict[str, Any]:
    """Keywords of a cache of three tiers: prefetches have room on the host."""
    config = draw(hicache_configs())
    page_size = config["page_size"]
    return config | {
        "host_size": config["size"] + page_size * draw(st.sampled_from([4, 12, 40])),
        "write_policy": draw(st.sampled_from(["write_through", *WRITE_POLICIES])),
        "delay": True,
        "stop_policy": draw(st.sampled_from(PREFETCH_STOP_POLICIES)),
        "prefetch_threshold": draw(st.sampled_from([1, 1, 4])),
        "batch": draw(st.sampled_from([1, 2, None])),
    }


@st.composite
def loop_configs(draw: st.DrawFn) -> dict[str, Any]:
    """Keywords of a serving loop under test: 16 to 40 tokens, both loops, chunks of 1 to 3."""
    config = draw(tree_configs())
    page_size = config["page_size"]
    del config["enable_kv_cache_events"]
    return config | {
        "size": page_size * draw(st.integers(16 // page_size, 40 // page_size)),
        "max_requests": draw(st.integers(1, 4)),
        "overlap": draw(st.booleans()),
        "chunk_pages": draw(st.sampled_from([None, 1, 2, 3])),
        "max_prefill_tokens": draw(st.sampled_from([8, 64])),
        "schedule_policy": draw(st.sampled_from(["fcfs", "lpm"])),
    }


def unsorted(config: dict[str, Any]) -> dict[str, Any]:
    """Without ``need_sort``: SGLang merges its lists by an estimate, refcache when one is short."""
    return {**config, "need_sort": False}
