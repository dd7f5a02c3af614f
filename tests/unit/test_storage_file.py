"""Pages in files: damage at every byte, foreign files, bounds, restarts, errors of the medium."""

import errno
import os
import shutil
from types import SimpleNamespace

import pytest
import torch

from refcache.errors import InvalidArgument
from refcache.storage import (
    HiCacheFile,
    HiCacheStorageConfig,
    PoolTransfer,
    StorageBackendFactory,
)
from refcache.storage.disk import OsDisk
from refcache.storage.page_format import HEADER_BYTES, sglang_suffix

KEY = "34fb5c825de7ca4aea6e712f19d439c1da0c92c37b423936c5f618545ca4fa1f"
BYTES = 24
CONFIG = HiCacheStorageConfig(model_name="org/m")


def page(value=1, size=BYTES):
    return (torch.arange(size) * 7 + value).to(torch.uint8)


def empty(size=BYTES):
    return torch.zeros(size, dtype=torch.uint8)


def same(found, value, size=BYTES):
    return found is not None and found.equal(page(value, size))


class UnsyncedDisk(OsDisk):
    """For tests that write hundreds of files and lose no power."""

    def sync(self, handle):
        pass

    def sync_directory(self):
        pass


@pytest.fixture
def store(tmp_path):
    return HiCacheFile(CONFIG, disk=UnsyncedDisk(tmp_path))


def only_file(folder):
    [file] = folder.iterdir()
    return file


def test_a_page_outlives_the_store(store, tmp_path):
    assert store.set(KEY, page())
    assert only_file(tmp_path).stat().st_size == HEADER_BYTES + BYTES
    again = HiCacheFile(CONFIG, tmp_path)
    assert again.exists(KEY)
    assert same(again.get(KEY, empty()), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_target_with_gaps_is_filled_and_the_gaps_are_not(store, dtype):
    value = torch.arange(12).view(3, 4).to(dtype)
    store.set(KEY, value.t())
    room = torch.zeros(4, 6, dtype=dtype)
    assert store.get(KEY, room[:, ::2]).equal(value.t())
    assert not room[:, 1::2].any()


def test_a_file_cut_at_every_byte_is_a_miss_and_can_be_stored_again(store, tmp_path):
    store.set(KEY, page())
    whole = only_file(tmp_path).read_bytes()
    for length in range(len(whole)):
        only_file(tmp_path).write_bytes(whole[:length])
        assert store.get(KEY, empty()) is None
        assert store.get(KEY) is None
        assert not store.exists(KEY)
        assert store.set(KEY, page())
        assert same(store.get(KEY, empty()), 1)


def test_a_bit_flipped_in_every_byte_is_a_miss_and_can_be_stored_again(store, tmp_path):
    store.set(KEY, page())
    whole = only_file(tmp_path).read_bytes()
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        only_file(tmp_path).write_bytes(damaged)
        assert store.get(KEY, empty()) is None
        assert not store.exists(KEY)
        assert store.set(KEY, page())
        assert same(store.get(KEY, empty()), 1)


@pytest.mark.parametrize("more", [1, BYTES, 4096])
def test_a_longer_file_is_a_miss(store, tmp_path, more):
    store.set(KEY, page())
    with open(only_file(tmp_path), "ab") as file:
        file.write(bytes(more))
    assert not store.exists(KEY)
    assert store.get(KEY, empty()) is None
    assert store.get(KEY) is None


def test_a_page_under_another_key_s_name_is_a_miss(store, tmp_path):
    store.set(KEY, page())
    file = only_file(tmp_path)
    shutil.copy(file, tmp_path / file.name.replace("34fb", "35fb"))
    assert not store.exists(KEY.replace("34fb", "35fb"))
    assert store.get(KEY.replace("34fb", "35fb"), empty()) is None
    assert same(store.get(KEY, empty()), 1)


def test_what_is_no_file_is_a_miss(store, tmp_path):
    name = store.format.name
    (tmp_path / name("folder")).mkdir()
    os.mkfifo(tmp_path / name("pipe"))
    store.set("there", page())
    (tmp_path / name("link")).symlink_to(tmp_path / name("there"))
    for key in ("folder", "pipe", "link"):
        assert not store.exists(key)
        assert store.get(key, empty()) is None
    assert not store.set("folder", page())
    assert store.set("pipe", page())
    assert store.set("link", page(2))
    assert same(store.get("link", empty()), 2)
    assert same(store.get("there", empty()), 1)
    assert store.clear()
    assert [file.name for file in tmp_path.iterdir()] == [name("folder")]


@pytest.mark.parametrize(
    "key", ["", "..", "../up", "a/b", "/tmp/x", "K", "k" * 300, "\0", "a b", "ключ", "\udc80"]
)
def test_every_key_stays_in_the_directory(store, tmp_path, key):
    before = sorted(tmp_path.parent.iterdir())
    assert store.set(key, page())
    assert store.set("k", page(2))
    assert store.exists(key)
    assert same(store.get(key, empty()), 1)
    assert sorted(tmp_path.parent.iterdir()) == before
    assert len(list(tmp_path.iterdir())) == 2


CHANGED = {
    "model": {"model_name": "org/n"},
    "rank": {"tp_rank": 1, "tp_size": 2},
    "ranks": {"tp_size": 2},
    "stage": {"pp_size": 2},
}


@pytest.mark.parametrize("changed", CHANGED.values(), ids=CHANGED)
def test_another_engine_s_pages_are_misses(store, tmp_path, changed):
    store.set(KEY, page())
    other = HiCacheFile(HiCacheStorageConfig(**{"model_name": "org/m", **changed}), tmp_path)
    assert not other.exists(KEY)
    assert other.set(KEY, page(2))
    assert same(store.get(KEY, empty()), 1)
    assert same(other.get(KEY, empty()), 2)
    assert other.clear()
    assert same(store.get(KEY, empty()), 1)


@pytest.mark.parametrize("field", ["dtype", "layout", "page_size", "layer_num", "head_num"])
def test_another_layout_s_pages_are_misses(store, tmp_path, field):
    pool = {"dtype": torch.int8, "layout": "page_first", "page_size": 2}
    pool |= {"layer_num": 2, "head_num": 4}
    store.register_mem_pool_host(SimpleNamespace(**pool))
    store.set(KEY, page())
    other = HiCacheFile(CONFIG, tmp_path)
    other.register_mem_pool_host(SimpleNamespace(**pool))
    assert other.exists(KEY)
    other.register_mem_pool_host(SimpleNamespace(**pool | {field: 8}))
    assert not other.exists(KEY)


def test_an_mla_page_is_every_rank_s(tmp_path):
    ranks = [
        HiCacheFile(HiCacheStorageConfig(tp_rank=r, tp_size=2, is_mla_model=True), tmp_path)
        for r in range(2)
    ]
    assert ranks[0].set(KEY, page())
    assert same(ranks[1].get(KEY, empty()), 1)


def test_clear_removes_its_own_only(store, tmp_path):
    foreign = ["notes.txt", f"{KEY}_org-m_0_1.bin", f"{KEY}.page", ".x.page.1.tmp", "x.tmp"]
    foreign.append(f"{KEY}.0123456789abcdef.page")
    for name in foreign:
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / "folder").mkdir()
    for i in range(3):
        store.set(f"k{i}", page(i))
    assert store.clear()
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([*foreign, "folder"])
    assert store.get_stats()["pages"] == 0
    assert not store.exists("k0")


def test_a_restart_removes_what_a_dead_writer_left_and_no_other(store, tmp_path):
    dead = store.format.temporary(store.format.name("dead"), "1")
    alive = store.format.temporary(store.format.name("alive"), "2")
    foreign = "." + "x.0123456789abcdef.page.1.tmp"
    for name in (dead, alive, foreign):
        (tmp_path / name).write_bytes(b"half")
    handle = store.disk.open(alive)
    assert store.disk.lock(handle)
    HiCacheFile(CONFIG, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([alive, foreign])
    store.disk.close(handle)
    HiCacheFile(CONFIG, tmp_path)
    assert only_file(tmp_path).name == foreign


def test_the_bound_holds_and_what_was_used_last_stays(tmp_path):
    store = HiCacheFile(CONFIG, tmp_path, max_bytes=4 * (HEADER_BYTES + BYTES))
    for i in range(4):
        assert store.set(f"k{i}", page(i))
    assert same(store.get("k0", empty()), 0)
    for i in range(4, 6):
        assert store.set(f"k{i}", page(i))
        assert store.get_stats()["bytes"] <= store.max_bytes
    assert store.exists("k0")
    assert store.exists("k5")
    assert not store.exists("k1")
    again = HiCacheFile(CONFIG, tmp_path, max_bytes=2 * (HEADER_BYTES + BYTES))
    assert again.get_stats()["pages"] <= 2
    assert again.exists("k5")


def test_a_batch_evicts_none_of_its_own(tmp_path):
    store = HiCacheFile(CONFIG, tmp_path, max_bytes=2 * (HEADER_BYTES + BYTES))
    assert store.set_pages(["a", "b", "c"], [page(i) for i in range(3)]) == [True, True, False]
    assert store.batch_exists(["a", "b", "c"]) == 2
    assert store.set_pages(["a", "c"], [page(0), page(2)]) == [True, True]
    assert not store.set("large", page(size=400))
    assert store.batch_exists(["a", "c"]) == 2


@pytest.mark.parametrize("bound", [0, -1, True])
def test_a_bound_that_is_none_is_refused(tmp_path, bound):
    with pytest.raises(InvalidArgument, match="expected a number above 0, or None"):
        HiCacheFile(CONFIG, tmp_path, max_bytes=bound)


class FailingDisk(OsDisk):
    """One operation fails, at its n-th call."""

    def __init__(self, path, operation, at, error):
        super().__init__(path)
        self.left = at
        real = getattr(self, operation)

        def fails(*args):
            self.left -= 1
            if self.left < 0:
                raise OSError(error, os.strerror(error))
            return real(*args)

        setattr(self, operation, fails)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("operation", ["create", "write", "sync", "rename", "sync_directory"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_write_that_fails_is_false_and_leaves_nothing(tmp_path, operation, at, error):
    disk = FailingDisk(tmp_path, operation, at, error)
    store = HiCacheFile(CONFIG, disk=disk)
    handles = len(os.listdir("/proc/self/fd"))
    done = store.set_pages(["a", "b"], [page(0), page(1)])
    late = at and operation == "sync_directory"  # one call a batch
    assert all(done) == bool(late)
    assert store.batch_exists(["a", "b"]) == sum(done)
    assert len(list(tmp_path.iterdir())) == sum(done)
    assert len(os.listdir("/proc/self/fd")) == handles


@pytest.mark.parametrize("operation", ["open", "read", "size"])
def test_a_read_that_fails_is_a_miss_and_removes_nothing(tmp_path, operation):
    HiCacheFile(CONFIG, tmp_path).set(KEY, page())
    store = HiCacheFile(CONFIG, disk=FailingDisk(tmp_path, operation, 0, errno.EIO))
    handles = len(os.listdir("/proc/self/fd"))
    assert store.get(KEY, empty()) is None
    assert not store.exists(KEY)
    assert len(os.listdir("/proc/self/fd")) == handles
    assert same(HiCacheFile(CONFIG, tmp_path).get(KEY, empty()), 1)


SUFFIXES = {
    "_org-m_0_1": {},
    "_org-m_1_2": {"tp_rank": 1, "tp_size": 2},
    "_org-m": {"tp_rank": 1, "tp_size": 2, "is_mla_model": True},
    "_org-m_0_2_2_1": {"tp_size": 2, "pp_rank": 1, "pp_size": 2},
    "__0_1": {"model_name": None},
}


@pytest.mark.parametrize(("suffix", "config"), SUFFIXES.items(), ids=SUFFIXES)
def test_sglang_s_files_are_read_on_request(tmp_path, suffix, config):
    config = HiCacheStorageConfig(**{"model_name": "org/m", **config})
    assert sglang_suffix(config) == suffix
    (tmp_path / f"{KEY}{suffix}.bin").write_bytes(bytes(page()))
    plain = HiCacheFile(config, tmp_path)
    assert not plain.exists(KEY)
    assert plain.get(KEY, empty()) is None
    both = HiCacheFile(config, tmp_path, read_sglang_files=True)
    assert both.batch_exists([KEY, "no"]) == 1
    assert same(both.get(KEY, empty()), 1)
    assert same(both.get(KEY), 1)
    assert both.get(KEY, empty(BYTES - 1)) is None
    assert both.get(KEY, empty(BYTES + 1)) is None
    assert both.get("../" + KEY, empty()) is None
    assert both.clear()
    assert only_file(tmp_path).name == f"{KEY}{suffix}.bin"


def test_made_by_name_and_with_a_pool_of_states(tmp_path):
    config = HiCacheStorageConfig(extra_config={"file_path": str(tmp_path), "max_bytes": 10_000})
    store = StorageBackendFactory.create_backend("file", config)
    assert isinstance(store, HiCacheFile)
    assert store.max_bytes == 10_000
    rows = torch.arange(16, dtype=torch.uint8).view(4, 4)
    pool = SimpleNamespace(
        page_size=2,
        get_data_page=lambda i, flat: rows[i : i + 2].reshape(-1),
        get_dummy_flat_data_page=lambda: empty(8),
        set_from_flat_data_page=lambda i, page: rows[i : i + 2].copy_(page.view(2, 4)),
    )
    store.register_mem_host_pool_v2(pool, "mamba")
    state = PoolTransfer("mamba", torch.arange(2), keys=["a"])
    assert store.batch_set_v2([state]) == {"mamba": [True]}
    assert [file.name.split(".")[:2] for file in tmp_path.iterdir()] == [["a", "mamba"]]
    rows.zero_()
    assert store.batch_get_v2([state]) == {"mamba": [True]}
    assert rows[:2].flatten().tolist() == list(range(8))


def test_a_directory_that_cannot_be_made_is_a_named_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="expected a directory"):
        HiCacheFile(CONFIG, tmp_path / "file" / "below")
    with pytest.raises(InvalidArgument, match="expected a directory"):
        HiCacheFile(CONFIG, tmp_path / "file")
    assert HiCacheFile(CONFIG, tmp_path / "a" / "b").set(KEY, page())


def test_a_page_must_be_a_tensor_on_the_host(store):
    with pytest.raises(InvalidArgument, match="NoneType; expected a tensor on the CPU"):
        store.set(KEY)
    with pytest.raises(InvalidArgument, match="meta; expected a tensor on the CPU"):
        store.set(KEY, page().to("meta"))


def test_two_stores_of_one_process_write_one_page(tmp_path):
    """As the ranks of an MLA model do: each has a temporary file of its own."""
    one, two = (HiCacheFile(CONFIG, tmp_path) for _ in range(2))
    assert one._writer != two._writer
    assert one.set(KEY, page())
    assert two.set(KEY, page())
    assert same(two.get(KEY, empty()), 1)


def test_a_page_that_was_there_is_acknowledged_after_a_sync(tmp_path):
    """The process that renamed it may have died before its own sync of the directory."""
    HiCacheFile(CONFIG, tmp_path).set(KEY, page())
    disk = FailingDisk(tmp_path, "sync_directory", 0, errno.EIO)
    assert not HiCacheFile(CONFIG, disk=disk).set(KEY, page())


def test_a_file_of_sglang_s_name_does_not_count_as_stored(tmp_path):
    (tmp_path / f"{KEY}_org-m_0_1.bin").write_bytes(bytes(page(2)))
    store = HiCacheFile(CONFIG, tmp_path, read_sglang_files=True)
    assert store.set(KEY, page())
    assert same(store.get(KEY, empty()), 1)
