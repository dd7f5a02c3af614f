"""Pages in files that survive: a crash, another process, another layout, a damaged medium.

A page is written under a temporary name in the same directory, synced, renamed to its name, and the
directory synced (:mod:`refcache.storage.file_batch`); ``set`` says True when all that is done. A
reader compares every byte of the header and the checksum, so a torn, flipped, foreign or shortened
file is a miss; one that is found damaged is removed, so that the page can be stored again.

Several processes may share a directory. Ranks and layouts have names of their own; two writers of
one page each write a file of their own, and the last rename wins, with the same bytes. A temporary
file is locked while it is written, so a restart removes what a dead writer left and nothing else.

SGLang 0.5.10's ``HiCacheFile`` writes in place, without a header and without a sync;
``docs/storage_backends.md`` compares.
"""

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any

import torch

from refcache.errors import InvalidArgument
from refcache.storage.base import HiCacheStorage, page_bytes
from refcache.storage.disk import Disk, OsDisk, discard
from refcache.storage.file_batch import FileBatch
from refcache.storage.file_room import FileRoom
from refcache.storage.page_format import HEADER_BYTES, PageFormat, memory_of, sglang_suffix
from refcache.storage.transfers import HiCacheStorageConfig, PoolName, leading

DIRECTORY = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
_WRITERS = itertools.count()


class HiCacheFile(HiCacheStorage):
    """Backend ``file``; see the module.

    Args:
        storage_config: the rank and the model; they go into names and headers.
        file_path: the directory, made if need be; the environment variable of SGLang's backend goes
            first, as there.
        max_bytes: of the files of this rank, headers included; the files used longest ago go.
            Processes that share a directory *and* a shape each count their own writes between two
            listings, and may pass the bound by that much together.
        read_sglang_files: look for a missing page in a file of SGLang's name and of exactly the
            page's size, too. Nothing in such a file can be verified.
        disk: the file operations; by default the operating system's.

    Attributes:
        config_suffix: what SGLang's backend puts behind a key; only ``read_sglang_files`` uses it.
        format: names and headers of the pages of the pools that are registered.
    """

    def __init__(
        self,
        storage_config: HiCacheStorageConfig | None = None,
        file_path: str | os.PathLike[str] = "/tmp/hicache",
        *,
        max_bytes: int | None = None,
        read_sglang_files: bool = False,
        disk: Disk | None = None,
    ) -> None:
        super().__init__()
        if max_bytes is not None and (isinstance(max_bytes, bool) or max_bytes <= 0):
            raise InvalidArgument(f"max_bytes={max_bytes!r}: expected a number above 0, or None")
        self.storage_config = storage_config or HiCacheStorageConfig()
        self.config_suffix = sglang_suffix(self.storage_config)
        self.max_bytes = max_bytes
        self.read_sglang_files = read_sglang_files
        path = os.environ.get(DIRECTORY) or file_path
        try:
            self.disk: Disk = disk or OsDisk(path)
        except OSError as error:
            raise InvalidArgument(
                f"file_path {str(path)!r}: {error.strerror}; expected a directory"
            ) from error
        self.counts: Counter[str] = Counter()
        self._lock = Lock()
        self._writer = f"{os.getpid()}-{next(_WRITERS)}"
        self._shape_changed()

    @classmethod
    def from_options(
        cls, storage_config: HiCacheStorageConfig, options: dict[str, Any]
    ) -> "HiCacheFile":
        """As the factory makes it: ``file_path``, ``max_bytes``, ``read_sglang_files``."""
        known = ("file_path", "max_bytes", "read_sglang_files")
        return cls(storage_config, **{name: options[name] for name in known if name in options})

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """From now on pages are this pool's: its layout and sizes enter names and headers."""
        super().register_mem_pool_host(mem_pool_host)
        self._shape_changed()

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._shape_changed()

    def _shape_changed(self) -> None:
        """Names and headers for the pools that are registered now; then what a restart cleans."""
        pools = {PoolName.KV.value: self.mem_pool_host, **self.registered_pools}
        given = {name: pool for name, pool in pools.items() if pool is not None}
        self.format = PageFormat(self.storage_config, given)
        with self._lock:
            for entry in self.disk.entries():
                if self.format.owns_temporary(entry.name):
                    self._remove_abandoned(entry.name)
            self.room = FileRoom(self.disk, self.format, self.max_bytes, self.counts)

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        found = None
        for read in (self._read_own, self._read_sglang):
            if found is None:
                with suppress(OSError):
                    found = read(key, target_location)
        self.counts["misses" if found is None else "hits"] += 1
        return found

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return self.set_pages([key], [page_bytes(value)])[0]

    def exists(self, key: str) -> bool:
        """Whether a file of the right header and size is there; its bytes are not read."""
        if self._is_there(key):
            return True
        with suppress(OSError), self._opened(self._sglang_name(key)):
            return True
        return False

    def _is_there(self, key: str) -> bool:
        """:meth:`exists`, in a file of our own."""
        with suppress(OSError), self._opened(self.format.name(key)) as handle:
            header = bytearray(HEADER_BYTES)
            self.disk.read(handle, [header])
            return self.format.announces(key, header, self.disk.size(handle) - HEADER_BYTES)
        return False

    def set_pages(self, keys: Sequence[str], values: Sequence[torch.Tensor]) -> list[bool]:
        """As the base says; a page is True only once its name is on the medium too."""
        pages = [page_bytes(value) for value in values]
        with self._lock:
            return self._put(list(zip(keys, pages, strict=True)))

    def _put(self, pages: list[tuple[str, torch.Tensor]]) -> list[bool]:
        names = [self.format.name(key) for key, _ in pages]
        found: set[str] = set()
        tried = 0
        with FileBatch(self.disk, self.format, self._writer) as batch:
            for name, (key, page) in zip(names, pages, strict=True):
                if self._is_there(key):
                    found.add(name)
                elif name not in batch.written:
                    room = self.room.take(HEADER_BYTES + page.numel(), frozenset(names))
                    if not room or not batch.add(name, key, page):
                        break
                tried += 1
            lasting = batch.publish(found)
        good = leading(names[:tried], lasting.__contains__)
        self.counts["failed"] += len(pages) - good
        return [i < good for i in range(len(pages))]

    def clear(self) -> bool:
        """Remove this shape's pages and what dead writers left of them; whether all went."""
        gone = True
        with self._lock:
            try:
                for entry in self.disk.entries():
                    if self.format.owns(entry.name):
                        gone &= discard(self.disk, entry.name)
                    elif self.format.owns_temporary(entry.name):
                        self._remove_abandoned(entry.name)
                self.disk.sync_directory()
            except OSError:
                return False
            self.room.used = 0
        return gone

    def get_stats(self) -> dict[str, int]:
        """``pages`` and ``bytes`` of this shape on the medium, and what was counted since the
        start: ``hits``, ``misses``, ``damaged``, ``evicted``, ``failed``."""
        sizes = [entry.size for entry in self.disk.entries() if self.format.owns(entry.name)]
        counted = {n: self.counts[n] for n in ("hits", "misses", "damaged", "evicted", "failed")}
        return {"pages": len(sizes), "bytes": sum(sizes), **counted}

    def _remove_abandoned(self, temporary: str) -> None:
        """Remove a temporary file that nobody writes any more."""
        with suppress(OSError), self._opened(temporary) as handle:
            if self.disk.lock(handle):
                self.disk.remove(temporary)

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        handle = self.disk.open(name)
        try:
            yield handle
        finally:
            self.disk.close(handle)

    def _read_own(self, key: str, target: torch.Tensor | None) -> torch.Tensor | None:
        """The page of ``key`` in its file, verified; None for a miss. Raises OSError."""
        name = self.format.name(key)
        with self._opened(name) as handle:
            length = self.disk.size(handle) - HEADER_BYTES
            if target is None:
                target = torch.empty(max(0, length), dtype=torch.uint8)
            page = page_bytes(target)
            if page.numel() != length:
                return None
            header, memory = bytearray(HEADER_BYTES), memory_of(page)
            self.disk.read(handle, [header, memory])
            if header != self.format.header(key, memory):
                self.counts["damaged"] += 1
                discard(self.disk, name)
                return None
            if self.max_bytes is not None:
                self.disk.touch(handle)
        return _arrived(page, target)

    def _sglang_name(self, key: str) -> str:
        """SGLang's file of ``key``; OSError if those are not read, or the key is no name."""
        if not self.read_sglang_files or "/" in key or "\0" in key:
            raise FileNotFoundError(key)
        return f"{key}{self.config_suffix}.bin"

    def _read_sglang(self, key: str, target: torch.Tensor | None) -> torch.Tensor | None:
        """The page of ``key`` in a file of SGLang's name, of exactly the target's size."""
        with self._opened(self._sglang_name(key)) as handle:
            length = self.disk.size(handle)
            if target is None:
                target = torch.empty(length, dtype=torch.uint8)
            page = page_bytes(target)
            if page.numel() != length or self.disk.read(handle, [memory_of(page)]) != length:
                return None
        return _arrived(page, target)


def _arrived(page: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """``target`` with the bytes of ``page``, which is its memory unless that has gaps."""
    if page.data_ptr() != target.data_ptr():
        target.copy_(page.view(target.dtype).view_as(target))
    return target
