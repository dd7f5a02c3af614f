"""The tier below the host: pages under keys that outlive the process."""

from refcache.keys import get_hash_str, hash_str_to_int64
from refcache.storage.backend_factory import StorageBackendFactory
from refcache.storage.base import HiCacheStorage, StoragePool
from refcache.storage.file import HiCacheFile
from refcache.storage.memory import HiCacheMemory
from refcache.storage.transfers import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

__all__ = [
    "HiCacheFile",
    "HiCacheMemory",
    "HiCacheStorage",
    "HiCacheStorageConfig",
    "HiCacheStorageExtraInfo",
    "PoolHitPolicy",
    "PoolName",
    "PoolTransfer",
    "PoolTransferResult",
    "StorageBackendFactory",
    "StoragePool",
    "get_hash_str",
    "hash_str_to_int64",
]
