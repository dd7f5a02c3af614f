"""What the suites draw: few tokens, short prompts, tight pools.

Corruption needs collisions. Two or three tokens make prompts share prefixes and decoded tokens
follow paths that exist; a pool a few pages larger than one prompt makes every admission evict;
chunks, prompts and pages of different sizes make every boundary fall everywhere.
"""

from typing import Any

from hypothesis import strategies as st

from refcache.types import EVICTION_POLICIES

PAGE_SIZES = (1, 2, 4)

token = st.integers(0, 2)
prompts = st.lists(token, min_size=2, max_size=15).map(tuple)
namespaces = st.sampled_from([None, None, "a"])
chunks = st.sampled_from([None, None, 1, 2, 3, 4, 6])
priorities = st.integers(0, 2)
index = st.integers(0, 3)
indices = st.lists(index, min_size=1, max_size=3).map(tuple)


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
def tree_configs(draw: st.DrawFn) -> dict[str, Any]:
    """Keywords of a tree under test: 6 to 24 tokens, so that few prompts fit."""
    page_size = draw(st.sampled_from(PAGE_SIZES))
    low, high = -(-6 // page_size), 24 // page_size
    return {
        "page_size": page_size,
        "size": page_size * draw(st.integers(low, high)),
        "need_sort": draw(st.booleans()),
        "eviction_policy": draw(st.sampled_from(EVICTION_POLICIES)),
        "is_eagle": draw(st.booleans()),
        "enable_kv_cache_events": draw(st.booleans()),
    }
