"""Pages in a dictionary of this process: a storage tier without a medium.

For tests, for replays, and as the shortest backend to read. It keeps copies, so what the caller
does with its tensors afterwards changes nothing. Thread-safe.
"""

from collections.abc import Mapping
from threading import Lock
from typing import Any

import torch

from refcache.storage.base import HiCacheStorage, page_bytes
from refcache.storage.transfers import HiCacheStorageConfig


class HiCacheMemory(HiCacheStorage):
    """Backend ``memory``: lives as long as the object; no bound.

    >>> store = HiCacheMemory()
    >>> store.set("k", torch.tensor([1.0, 2.0]))
    True
    >>> store.get("k", torch.zeros(2))
    tensor([1., 2.])
    >>> store.get("k", torch.zeros(3)) is None  # another size is a miss
    True
    """

    def __init__(
        self,
        storage_config: HiCacheStorageConfig | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._pages: dict[str, torch.Tensor] = {}
        self._lock = Lock()

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        with self._lock:
            page = self._pages.get(key)
        if page is None or target_location is None:
            return None if page is None else page.clone()
        if target_location.numel() * target_location.element_size() != page.numel():
            return None
        return target_location.copy_(page.view(target_location.dtype).view_as(target_location))

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        page = page_bytes(value).clone()
        with self._lock:
            self._pages.setdefault(key, page)
        return True

    def exists(self, key: str) -> bool:
        with self._lock:
            return key in self._pages

    def clear(self) -> bool:
        with self._lock:
            self._pages.clear()
        return True

    def get_stats(self) -> dict[str, int]:
        """``pages`` and ``bytes`` that are stored."""
        with self._lock:
            return {
                "pages": len(self._pages),
                "bytes": sum(page.numel() for page in self._pages.values()),
            }
