"""Who holds bytes: rows of requests, device pools, states, host pools."""

from refcache.pool.device import MHATokenToKVPool, MLATokenToKVPool
from refcache.pool.host import (
    HostKVCache,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    host_pool_for,
)
from refcache.pool.hybrid_req_to_token import HybridReqToTokenPool
from refcache.pool.kv_cache import KVCache
from refcache.pool.mamba import BaseLinearStateParams, Mamba2StateDType, MambaPool, StateShape
from refcache.pool.nsa import NSATokenToKVPool
from refcache.pool.pinned import HostTensorAllocator, LoadedCudart, alloc_with_host_register
from refcache.pool.planes import Plane, PlaneSpec
from refcache.pool.req_to_token import ReqToTokenPool
from refcache.pool.routed import HybridLinearKVPool, LayerRoutedKVPool, SWAKVPool

__all__ = [
    "BaseLinearStateParams",
    "HostKVCache",
    "HostTensorAllocator",
    "HybridLinearKVPool",
    "HybridReqToTokenPool",
    "KVCache",
    "LayerRoutedKVPool",
    "LoadedCudart",
    "MHATokenToKVPool",
    "MHATokenToKVPoolHost",
    "MLATokenToKVPool",
    "MLATokenToKVPoolHost",
    "Mamba2StateDType",
    "MambaPool",
    "NSATokenToKVPool",
    "Plane",
    "PlaneSpec",
    "ReqToTokenPool",
    "SWAKVPool",
    "StateShape",
    "alloc_with_host_register",
    "host_pool_for",
]
