"""The storage interface, its parts, the backends by name, and the store in memory."""

import pytest
import torch

from refcache.errors import InvalidArgument, UnknownName
from refcache.storage import (
    HiCacheMemory,
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolTransfer,
    PoolTransferResult,
    StorageBackendFactory,
)

CONFIG = HiCacheStorageConfig()


class FlatPool:
    """A host pool of ``pages`` pages of two slots; a slot is four bytes."""

    page_size = 2

    def __init__(self, pages=4):
        self.rows = torch.arange(pages * 8, dtype=torch.uint8).view(pages * 2, 4)

    def get_data_page(self, index, flat=True):
        return self.rows[index : index + 2].reshape(-1)

    def get_dummy_flat_data_page(self):
        return torch.zeros(8, dtype=torch.uint8)

    def set_from_flat_data_page(self, index, data_page):
        self.rows[index : index + 2] = data_page.view(2, 4)


class Refuses(HiCacheMemory):
    """Stores nothing under a key with an ``x``."""

    def set(self, key, value=None, target_location=None, target_sizes=None):
        return "x" not in key and super().set(key, value)


def page(value):
    return torch.full((8,), value, dtype=torch.uint8)


def test_a_second_set_keeps_the_first_page():
    store = HiCacheMemory()
    assert store.set("k", page(1))
    assert store.set("k", page(2))
    assert store.get("k", page(0)).tolist() == page(1).tolist()


def test_the_store_keeps_copies():
    store, mine = HiCacheMemory(), page(1)
    store.set("k", mine)
    mine.fill_(9)
    found = store.get("k")
    found.fill_(9)
    assert store.get("k", page(0)).tolist() == page(1).tolist()


def test_a_page_of_another_size_is_a_miss():
    store = HiCacheMemory()
    store.set("k", page(1))
    assert store.get("k", torch.zeros(7, dtype=torch.uint8)) is None
    assert store.get("k", torch.zeros(9, dtype=torch.uint8)) is None
    assert store.get("k", torch.zeros(2, 2, dtype=torch.int16)).shape == (2, 2)


def test_leading_keys_are_counted_and_gets_answer_each():
    store = HiCacheMemory()
    store.set("k", page(1))
    assert store.batch_exists(["k", "missing", "k"]) == 1
    assert store.batch_exists(["k", "k"]) == 2
    assert store.batch_exists([]) == 0
    found = store.batch_get(["k", "missing", "k"], [page(0) for _ in range(3)])
    assert [p is not None for p in found] == [True, False, True]


def test_nothing_is_stored_behind_a_page_that_failed():
    store = Refuses()
    assert store.set_pages(["a", "x", "b"], [page(1)] * 3) == [True, False, False]
    assert store.get_stats() == {"pages": 1, "bytes": 8}
    assert not store.batch_set(["a", "x"], [page(1)] * 2)
    assert store.batch_set(["a", "b"], [page(1)] * 2)


def test_pages_go_from_the_pool_and_back():
    store, pool = HiCacheMemory(), FlatPool()
    store.register_mem_pool_host(pool)
    assert store.batch_set_v1(["a", "b"], torch.tensor([2, 3, 6, 7])) == [True, True]
    before = pool.rows.clone()
    assert store.batch_get_v1(["b", "no", "a"], torch.tensor([0, 1, 2, 3, 4, 5])) == [
        True,
        False,
        True,
    ]
    assert pool.rows[:2].equal(before[6:8])
    assert pool.rows[2:4].equal(before[2:4])  # a miss leaves the slots
    assert pool.rows[4:6].equal(before[2:4])


def test_indices_that_are_not_the_pages_slots_are_refused():
    store = HiCacheMemory()
    with pytest.raises(InvalidArgument, match="no host pool is registered"):
        store.batch_get_v1(["a"], torch.tensor([0, 1]))
    store.register_mem_pool_host(FlatPool())
    with pytest.raises(InvalidArgument, match="3 slots for 2 pages of 2; expected 4"):
        store.batch_set_v1(["a", "b"], torch.tensor([0, 1, 2]))
    assert store.get_stats()["pages"] == 0


@pytest.mark.parametrize(
    ("policy", "usable", "hits"),
    [
        (PoolHitPolicy.TRAILING_PAGES, 2, {"kv": 4, "mamba": 2}),
        (PoolHitPolicy.ALL_PAGES, 0, {"kv": 4}),
    ],
)
def test_a_state_in_the_middle(policy, usable, hits):
    store, kv, state = HiCacheMemory(), FlatPool(), FlatPool()
    store.register_mem_host_pool_v2(kv, "kv")
    store.register_mem_host_pool_v2(state, "mamba")
    written = store.batch_set_v2(
        [
            PoolTransfer("kv", torch.arange(8), keys=["a", "b", "c", "d"]),
            PoolTransfer("mamba", torch.arange(2), keys=["b"]),
        ]
    )
    assert written == {"kv": [True] * 4, "mamba": [True]}
    asked = PoolTransfer("mamba", keys=["d"], hit_policy=policy)
    assert store.batch_exists_v2(["a", "b", "c", "d", "e"], [asked]) == PoolTransferResult(
        usable, hits
    )
    state.rows.zero_()
    read = store.batch_get_v2([PoolTransfer("mamba", torch.arange(4), keys=["b", "a"])])
    assert read == {"mamba": [True, False]}
    assert state.rows[:2].equal(kv.rows[:2])  # both pools began with the same bytes
    with pytest.raises(UnknownName, match="pool of this storage backend 'swa'"):
        store.batch_get_v2([PoolTransfer("swa", torch.arange(2), keys=["b"])])


def test_backends_by_name():
    assert isinstance(StorageBackendFactory.create_backend("memory", CONFIG), HiCacheMemory)
    with pytest.raises(UnknownName, match="unknown storage backend 'memroy': did you mean"):
        StorageBackendFactory.create_backend("memroy", CONFIG)


def dynamic(**options):
    config = HiCacheStorageConfig(extra_config={"backend_name": "mine", **options})
    return StorageBackendFactory.create_backend("dynamic", config, FlatPool())


def test_a_dynamic_backend_is_made_by_its_class():
    made = dynamic(module_path="refcache.storage.memory", class_name="HiCacheMemory")
    assert isinstance(made, HiCacheStorage)
    assert made.batch_set_v1(["a"], torch.arange(2)) == [True]
    with pytest.raises(InvalidArgument, match="no module_path, class_name; expected backend_name"):
        dynamic()
    with pytest.raises(InvalidArgument, match="cannot be imported: No module named 'nowhere'"):
        dynamic(module_path="nowhere", class_name="Store")
    with pytest.raises(InvalidArgument, match="expected a subclass of HiCacheStorage"):
        dynamic(module_path="refcache.keys", class_name="RadixKey")
