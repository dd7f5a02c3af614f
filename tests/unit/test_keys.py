"""Keys and page hashes: what they must tell apart, and what must not change them."""

import hashlib
from array import array

import pytest
import torch

from refcache.errors import InvalidArgument
from refcache.keys import RadixKey, compose_extra_key, get_hash_str, hash_str_to_int64, page_hashes
from refcache.tree import RadixCache
from refcache.types import InsertParams, MatchPrefixParams


def test_match_finds_the_first_difference_wherever_it_is():
    base = list(range(100, 133))
    for at in range(33):
        other = [*base[:at], 7, *base[at + 1 :]]
        assert RadixKey(base).match(RadixKey(other)) == at
        assert RadixKey(base).match(RadixKey(other), page_size=4) == at // 4 * 4
    assert RadixKey(base).match(RadixKey(base[:20])) == 20
    assert RadixKey([]).match(RadixKey(base)) == 0


def test_bigram_keys_match_pairs():
    a = RadixKey([1, 2, 3, 4], is_bigram=True)
    assert len(a) == 3
    assert a.match(RadixKey([1, 2, 3, 9], is_bigram=True)) == 2
    assert a.match(RadixKey([1, 9], is_bigram=True)) == 0
    assert a.match(RadixKey([1, 2, 3, 4])) == 0
    assert a == RadixKey([(1, 2), (2, 3), (3, 4)], is_bigram=True)
    assert list(a[1:3]) == [(2, 3), (3, 4)]
    assert a.token_ids == [(1, 2), (2, 3), (3, 4)]
    assert a.raw_token_ids().tolist() == [1, 2, 3, 4]
    assert len(a[2:2]) == 0
    assert len(RadixKey([5], is_bigram=True)) == 0
    with pytest.raises(InvalidArgument, match="pair"):
        RadixKey([(1, 2), (3, 4)], is_bigram=True)


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], ["a"], [None]])
def test_tokens_out_of_range_are_refused(tokens):
    with pytest.raises(InvalidArgument, match="token_ids"):
        RadixKey(tokens)


def test_page_hashes_are_the_published_encoding():
    first = hashlib.sha256(b"\1\0\0\0\2\0\0\0").digest()
    second = hashlib.sha256(first + b"\3\0\0\0\4\0\0\0").digest()
    assert page_hashes(RadixKey([1, 2, 3, 4, 5]), 2) == [first.hex(), second.hex()]
    assert get_hash_str([3, 4], first.hex()) == second.hex()
    assert hash_str_to_int64(first.hex()) == int.from_bytes(first[:8], "big", signed=True)
    assert hash_str_to_int64("ff" * 32) == -1
    pairs = hashlib.sha256(b"\1\0\0\0\2\0\0\0\2\0\0\0\3\0\0\0").digest()
    assert page_hashes(RadixKey([1, 2, 3], is_bigram=True), 2) == [pairs.hex()]
    assert get_hash_str([(1, 2), (2, 3)]) == pairs.hex()


def test_page_hashes_differ_by_namespace_and_history():
    seen = {
        page_hashes(RadixKey(tokens, space), 2)[-1]
        for tokens in ([1, 2, 3, 4], [9, 9, 3, 4])
        for space in (None, "", "a", "b")
    }
    assert len(seen) == 8


def test_hashes_survive_splits():
    whole = page_hashes(RadixKey([1, 2, 3, 4, 5, 6], "ns"), 2)
    cache = RadixCache.create_simulated(page_size=2, enable_kv_cache_events=True)
    cache.take_events()
    cache.insert(InsertParams(RadixKey([1, 2, 3, 4, 5, 6], "ns"), torch.arange(2, 8)))
    cache.match_prefix(MatchPrefixParams(RadixKey([1, 2, 9, 9], "ns")))
    cache.insert(InsertParams(RadixKey([1, 2, 3, 4, 5, 6, 7, 8], "ns"), torch.arange(2, 10)))
    stored = [(e.block_hashes[0], e.parent_block_hash) for e in cache.take_events()]
    chain = [hash_str_to_int64(h) for h in page_hashes(RadixKey(list(range(1, 9)), "ns"), 2)]
    assert chain[:3] == [hash_str_to_int64(h) for h in whole]
    assert stored == list(zip(chain, [None, *chain[:-1]], strict=True))


def test_composed_namespaces_are_injective():
    parts = [None, "", "x", "1:x", "lora=1:x", "x;salt=1:y"]
    composed = {compose_extra_key(lora, salt) for lora in parts for salt in parts}
    assert len(composed) == len(parts) ** 2


def test_slices_and_hashing():
    key = RadixKey(array("I", [1, 2, 3]), "a")
    assert key[-1].token_ids == [3]
    assert {key: 1}[RadixKey([1, 2, 3], "a")] == 1
    assert key != RadixKey([1, 2, 3])
    assert key[5:].token_ids == []
    with pytest.raises(InvalidArgument, match="step"):
        key[::2]
