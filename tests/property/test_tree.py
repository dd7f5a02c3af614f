"""The reference's tree and the naive one agree where the contract leaves no choice."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from refcache.oracle import TreeDriver, resolve
from refcache.testing.machines.strategies import PAGE_SIZES, index, namespaces, prompts, token

calls = st.one_of(
    st.tuples(st.just("admit"), prompts, namespaces),
    st.tuples(st.just("insert"), prompts, namespaces),
    st.tuples(st.just("match"), prompts, namespaces),
    st.tuples(st.just("hold"), prompts, namespaces),
    st.tuples(st.just("decode"), index, token),
    st.tuples(st.just("cache"), index),
    st.tuples(st.just("finish"), index),
    st.tuples(st.just("abort"), index),
    st.tuples(st.just("unhold"), index),
)


@given(page_size=st.sampled_from(PAGE_SIZES), is_eagle=st.booleans(), program=st.lists(calls))
def test_radix_and_naive_tree_agree_while_nothing_is_evicted(
    page_size: int, is_eagle: bool, program: list[tuple[Any, ...]]
) -> None:
    """With room for everything no choice is left: same sizes, and the same prefixes cached."""
    radix, naive = (
        TreeDriver(resolve(t), page_size=page_size, size=2048, is_eagle=is_eagle)
        for t in ("refcache", "naive")
    )
    for name, *args in program:
        for driver in (radix, naive):
            getattr(driver, name)(*args)
        assert radix.tree.total_size() == naive.tree.total_size()
        assert radix.tree.protected_size() == naive.tree.protected_size()
        assert radix.allocator.available_size() == naive.allocator.available_size()
        assert radix.ledger.cached.keys() == naive.ledger.cached.keys()
