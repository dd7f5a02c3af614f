"""Who holds bytes: rows of requests, device pools, host pools."""

from refcache.pool.device import MHATokenToKVPool, MLATokenToKVPool
from refcache.pool.host import (
    HostKVCache,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    host_pool_for,
)
from refcache.pool.kv_cache import KVCache, Plane
from refcache.pool.pinned import HostTensorAllocator, LoadedCudart, alloc_with_host_register
from refcache.pool.req_to_token import ReqToTokenPool

__all__ = [
    "HostKVCache",
    "HostTensorAllocator",
    "KVCache",
    "LoadedCudart",
    "MHATokenToKVPool",
    "MHATokenToKVPoolHost",
    "MLATokenToKVPool",
    "MLATokenToKVPoolHost",
    "Plane",
    "ReqToTokenPool",
    "alloc_with_host_register",
    "host_pool_for",
]
