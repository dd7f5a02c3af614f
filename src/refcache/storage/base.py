"""The interface of a storage backend: pages under keys, below the host.

A *page* is a flat piece of bytes, a *key* the page hash of :mod:`refcache.keys` (namespace and the
whole prefix are in it, so equal keys mean equal bytes). A backend says what it has and nothing
else: whatever is absent, damaged, of another size or unreadable is a **miss** (None, False, or a
shorter count), never an exception; an error means that the *caller* was wrong.

Three paths, as in SGLang 0.5.10: single and batched calls on tensors ("generic"); *v1*, straight
between storage and the registered host pool; *v2*, the same for several pools. A backend needs
``get``, ``set`` and ``exists``; the others are made of these, and it overrides what it can do
better (:class:`~refcache.storage.file.HiCacheFile` writes a batch at once). SGLang's base class
leaves v1 (None) and v2 (NotImplementedError) to each backend instead.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from refcache.errors import InvalidArgument, UnknownName
from refcache.storage.transfers import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolTransfer,
    PoolTransferResult,
    component_key,
    leading,
    pool_name,
    usable_prefix,
)


class StoragePool(Protocol):
    """What a backend asks of a host pool; ``index`` is the first slot of a page."""

    page_size: int

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """The page at ``index``, flat: contiguous, in the order that the layout stores."""

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """A flat page that belongs to nobody, to read into."""

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """Overwrite the page at ``index``."""


class HiCacheStorage(ABC):
    """Base of the storage backends; see the module.

    Attributes:
        mem_pool_host: the pool of the v1 calls; None until one is registered.
        registered_pools: the pools of the v2 calls, by name.
    """

    def __init__(self) -> None:
        self.mem_pool_host: Any = None
        self.registered_pools: dict[str, Any] = {}

    @classmethod
    def from_options(
        cls, storage_config: HiCacheStorageConfig, options: dict[str, Any]
    ) -> "HiCacheStorage":
        """A backend as the factory makes it; by default ``cls(storage_config, options)``."""
        made: HiCacheStorage = cls(storage_config, options)  # type: ignore[call-arg]
        return made

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The v1 calls move pages of this pool (a :class:`StoragePool`)."""
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """The v2 calls move pages of this pool under that name."""
        self.registered_pools[pool_name(host_pool_name)] = host_pool

    @abstractmethod
    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """The page of ``key``, read into ``target_location`` and returned as that tensor.

        Without a target a new uint8 tensor. None for a miss; the target's content is undefined
        then. A page of another size than the target is a miss.
        """

    @abstractmethod
    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store the bytes of ``value``; whether the page is stored now.

        A key that exists stays as it is (True): equal keys mean equal bytes.
        """

    @abstractmethod
    def exists(self, key: str) -> bool:
        """Whether a page is stored under ``key``; what was damaged later may still be a miss."""

    def batch_get(
        self,
        keys: Sequence[str],
        target_locations: Sequence[torch.Tensor] | None = None,
        target_sizes: Any = None,
    ) -> list[torch.Tensor | None]:
        """:meth:`get` of each key."""
        if target_locations is None:
            return [self.get(key) for key in keys]
        return [self.get(k, t) for k, t in zip(keys, target_locations, strict=True)]

    def batch_set(
        self,
        keys: Sequence[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Whether all pages are stored now; none is tried after the first that is not."""
        return all(self.set_pages(keys, _given(values, "values")))

    def batch_exists(
        self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """How many leading keys exist."""
        return leading(keys, self.exists)

    def set_pages(self, keys: Sequence[str], values: Sequence[torch.Tensor]) -> list[bool]:
        """:meth:`set` of each key, until one fails: a page whose predecessor is missing can never
        be hit, so the rest is False untried."""
        done: list[bool] = []
        for key, value in zip(keys, values, strict=True):
            done.append(all(done[-1:]) and self.set(key, value))
        return done

    def batch_get_v1(
        self,
        keys: Sequence[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Read pages into the registered pool: page i into slots ``host_indices[i * page_size:]``.

        Slots of a miss are as they were.
        """
        return self._read(self._pool(None), keys, host_indices)

    def batch_set_v1(
        self,
        keys: Sequence[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store pages of the registered pool, until one fails."""
        return self._write(self._pool(None), keys, host_indices)

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """See :func:`~refcache.storage.transfers.usable_prefix`."""
        return usable_prefix(keys, pool_transfers or (), self.exists)

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Read pages into the pools that the transfers name; for each pool, which were hits."""
        return self._each(transfers, self._read)

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of the pools that the transfers name; for each pool, which are stored."""
        return self._each(transfers, self._write)

    def clear(self) -> bool | None:
        """Remove every page that this store wrote, and nothing else; False if some stayed."""
        return None

    def get_stats(self) -> Any:
        """Figures of the backend; None if it keeps none."""
        return None

    def close(self) -> None:  # noqa: B027  (optional)
        """Give back what the backend holds open. Idempotent."""

    def _pool(self, name: str | None) -> Any:
        pools = self.registered_pools
        if name is not None and name not in pools:
            raise UnknownName("pool of this storage backend", name, pools)
        pool = self.mem_pool_host if name is None else pools[name]
        if pool is None:
            raise InvalidArgument("no host pool is registered: expected register_mem_pool_host")
        return pool

    def _each(
        self,
        transfers: Sequence[PoolTransfer],
        move: Callable[[Any, Sequence[str], torch.Tensor], list[bool]],
    ) -> dict[str, list[bool]]:
        done = {}
        for transfer in transfers:
            name = pool_name(transfer.name)
            keys = [component_key(key, name) for key in transfer.keys or ()]
            slots = _given(transfer.host_indices, f"host_indices of pool {name!r}")
            done[name] = move(self._pool(name), keys, slots)
        return done

    def _read(self, pool: Any, keys: Sequence[str], host_indices: torch.Tensor) -> list[bool]:
        starts = _page_starts(pool, keys, host_indices)
        pages = self.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
        for start, page in zip(starts, pages, strict=True):
            if page is not None:
                pool.set_from_flat_data_page(start, page)
        return [page is not None for page in pages]

    def _write(self, pool: Any, keys: Sequence[str], host_indices: torch.Tensor) -> list[bool]:
        starts = _page_starts(pool, keys, host_indices)
        return self.set_pages(keys, [pool.get_data_page(start, flat=True) for start in starts])


def page_bytes(value: torch.Tensor | None) -> torch.Tensor:
    """A page as a flat, contiguous uint8 tensor on the CPU; a view where that is possible.

    Raises:
        InvalidArgument: not a tensor, or not on the CPU.
    """
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        seen = str(value.device) if isinstance(value, torch.Tensor) else type(value).__name__
        raise InvalidArgument(f"page: {seen}; expected a tensor on the CPU")
    if value.dtype == torch.uint8 and value.dim() == 1 and value.is_contiguous():
        return value
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


def _given(value: Any, name: str) -> Any:
    if value is None:
        raise InvalidArgument(f"{name}: None; expected one page for each key")
    return value


def _page_starts(pool: Any, keys: Sequence[str], host_indices: torch.Tensor) -> list[int]:
    """The first slot of each page.

    Raises:
        InvalidArgument: not ``len(keys)`` pages of slots.
    """
    expected = len(keys) * pool.page_size
    if host_indices.numel() != expected:
        raise InvalidArgument(
            f"host_indices: {host_indices.numel()} slots for {len(keys)} pages of "
            f"{pool.page_size}; expected {expected}"
        )
    starts: list[int] = host_indices[:: pool.page_size].tolist()
    return starts
