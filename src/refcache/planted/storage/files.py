"""Bugs planted in the file backend and in the interface's own calls."""

from collections.abc import Callable
from typing import Any

from refcache.planted.bug import PlantedBug

BASE = "refcache.storage.base"
FILE = "refcache.storage.file"
BATCH = "refcache.storage.file_batch:FileBatch"
DISK = "refcache.storage.disk:OsDisk"
FORMAT = "refcache.storage.page_format"
CALLS, DAMAGE, CRASH = "storage.backend", "storage.damage", "storage.crash"
Function = Callable[..., Any]


def _nothing(original: Function) -> Function:
    return lambda *args, **kwargs: None


def _rename_first(original: Function) -> Function:
    def publish(self: Any, found: Any) -> Any:
        disk, kept = self.disk, self.written
        if len(kept) < 2:
            return original(self, found)
        for name, (temporary, _) in kept.items():
            disk.rename(temporary, name)
        for _, handle in kept.values():
            disk.sync(handle)
        disk.sync_directory()
        return frozenset(kept) | found

    return publish


def _in_place(original: Function) -> Function:
    return lambda self, name, writer: name


def _found_is_stored(original: Function) -> Function:
    def publish(self: Any, found: Any) -> Any:
        return original(self, frozenset()) | found

    return publish


def _clear_unsynced(original: Function) -> Function:
    def clear(self: Any) -> Any:
        disk, self.disk = self.disk, _Unsynced(self.disk)
        try:
            return original(self)
        finally:
            self.disk = disk

    return clear


class _Unsynced:
    def __init__(self, disk: Any) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    def sync_directory(self) -> None:
        pass


def _bound_forgotten(original: Function) -> Function:
    def evict(self: Any, need: int, keep: Any) -> None:
        if need or self.used:  # a start does not look
            original(self, need, keep)

    return evict


def _checksum_unread(original: Function) -> Function:
    """The checksum is that of the first bytes only."""
    return lambda self, key, page: (
        original(self, key, page[:8])[:32]
        + original(self, key, page)[32:60]
        + original(self, key, page[:8])[60:]
    )


def _key_unread(original: Function) -> Function:
    return lambda self, key, length: original(self, "", length)


def _rank_forgotten(original: Function) -> Function:
    def shape(config: Any, pools: Any) -> Any:
        return original(config, pools) | {"tp": None}

    return shape


def _layout_forgotten(original: Function) -> Function:
    def shape(config: Any, pools: Any) -> Any:
        return original(config, pools) | {"pools": sorted(pools)}

    return shape


def _owns_all(original: Function) -> Function:
    return lambda self, name: name != "0123.tmp"


def _owns_every_engine(original: Function) -> Function:
    return lambda self, name: name.endswith(".page") and not name.startswith(".")


def _counts_all(original: Function) -> Function:
    return lambda self, keys, extra_info=None: sum(map(self.exists, keys))


def _component_forgotten(original: Function) -> Function:
    return lambda key, pool: key


def _trailing_is_one(original: Function) -> Function:
    """A state at the end of the KV hit is looked for, no shorter prefix is tried."""

    def usable(keys: Any, transfers: Any, exists: Any) -> Any:
        found = original(keys, transfers, exists)
        whole = found.extra_pool_hit_pages.get("kv", 0)
        if found.kv_hit_pages < whole:
            found.kv_hit_pages = 0
        return found

    return usable


def _gaps_unfilled(original: Function) -> Function:
    return lambda page, target: target


def _slots_in_order(original: Function) -> Function:
    def starts(pool: Any, keys: Any, host_indices: Any) -> Any:
        return sorted(original(pool, keys, host_indices))

    return starts


def _miss_is_written(original: Function) -> Function:
    def read(self: Any, pool: Any, keys: Any, host_indices: Any) -> Any:
        found = original(self, pool, keys, host_indices)
        for hit, start in zip(found, host_indices[:: pool.page_size].tolist(), strict=True):
            if not hit and any(found):
                pool.set_from_flat_data_page(start, pool.get_dummy_flat_data_page())
        return found

    return read


BUGS = (
    PlantedBug(
        "file-not-synced",
        "sglang 0.5.10, 0.5.23; LMCache 0.5.6",
        "a page gets its name before its bytes are on the medium: no fsync of the file",
        f"{DISK}.sync",
        _nothing,
        CRASH,
    ),
    PlantedBug(
        "directory-not-synced",
        "sglang 0.5.10, 0.5.23; LMCache 0.5.6",
        "a page is acknowledged before its name is on the medium: no fsync of the directory",
        f"{DISK}.sync_directory",
        _nothing,
        CRASH,
    ),
    PlantedBug(
        "renamed-before-synced",
        "slip",
        "the files of a batch are renamed first and synced then",
        f"{BATCH}.publish",
        _rename_first,
        CRASH,
    ),
    PlantedBug(
        "written-in-place",
        "sglang 0.5.10",
        "a page is written under its own name, so a crash leaves a torn file there",
        f"{FORMAT}:PageFormat.temporary",
        _in_place,
        CRASH,
    ),
    PlantedBug(
        "found-is-stored",
        "slip",
        "a page that was there is acknowledged, though its name may not be on the medium yet",
        f"{BATCH}.publish",
        _found_is_stored,
        CRASH,
    ),
    PlantedBug(
        "clear-not-synced",
        "slip",
        "a crash brings back what was cleared",
        f"{FILE}:HiCacheFile.clear",
        _clear_unsynced,
        CRASH,
    ),
    PlantedBug(
        "half-written-stays",
        "sglang 0.5.23",
        "what a dead writer left under a temporary name is never removed",
        f"{FILE}:HiCacheFile._remove_abandoned",
        _nothing,
        CRASH,
    ),
    PlantedBug(
        "bound-after-restart",
        "slip",
        "a store that starts over a directory does not look how full it is",
        "refcache.storage.file_room:FileRoom.evict",
        _bound_forgotten,
        CRASH,
    ),
    PlantedBug(
        "checksum-of-the-beginning",
        "LMCache#4558",
        "a bit that flips late in a page is not seen",
        f"{FORMAT}:PageFormat.header",
        _checksum_unread,
        DAMAGE,
    ),
    PlantedBug(
        "key-not-in-the-file",
        "slip",
        "a file under another key's name is served",
        f"{FORMAT}:PageFormat._head",
        _key_unread,
        DAMAGE,
    ),
    PlantedBug(
        "layout-not-in-the-name",
        "sglang 0.5.10, 0.5.23",
        "an engine reads pages that were stored in another layout",
        f"{FORMAT}:_shape",
        _layout_forgotten,
        DAMAGE,
    ),
    PlantedBug(
        "rank-not-in-the-name",
        "slip",
        "two ranks read and keep each other's pages",
        f"{FORMAT}:_shape",
        _rank_forgotten,
        CALLS,
    ),
    PlantedBug(
        "clear-removes-all",
        "sglang 0.5.10, 0.5.23",
        "clear removes files that no store wrote",
        f"{FORMAT}:PageFormat.owns",
        _owns_all,
        CALLS,
    ),
    PlantedBug(
        "clear-removes-every-engine",
        "sglang 0.5.10, 0.5.23",
        "clear removes the pages of other ranks and models too",
        f"{FORMAT}:PageFormat.owns",
        _owns_every_engine,
        CALLS,
    ),
    PlantedBug(
        "hits-behind-a-hole",
        "slip",
        "batch_exists counts keys behind the first that is missing",
        f"{BASE}:HiCacheStorage.batch_exists",
        _counts_all,
        CALLS,
    ),
    PlantedBug(
        "state-under-the-page-s-key",
        "slip",
        "the pages of a second pool are stored under the keys of the first",
        f"{BASE}:component_key",
        _component_forgotten,
        CALLS,
    ),
    PlantedBug(
        "trailing-state-at-the-end-only",
        "slip",
        "with a state before the end of the KV hit the whole hit is dropped",
        f"{BASE}:usable_prefix",
        _trailing_is_one,
        CALLS,
    ),
    PlantedBug(
        "target-with-gaps",
        "sglang 0.5.10, 0.5.23",
        "a target that is not contiguous is answered as filled and is not",
        f"{FILE}:_arrived",
        _gaps_unfilled,
        CALLS,
    ),
    PlantedBug(
        "slots-of-pages-sorted",
        "slip",
        "a batch uses its slots in ascending order, not in that of the keys",
        f"{BASE}:_page_starts",
        _slots_in_order,
        CALLS,
    ),
    PlantedBug(
        "miss-overwrites-its-slots",
        "slip",
        "beside a hit, the slots of a page that was missed are overwritten",
        f"{BASE}:HiCacheStorage._read",
        _miss_is_written,
        CALLS,
    ),
)
