"""Who holds bytes: rows of requests, device pools, host pools."""

from refcache.pool.device import KVCache, MHATokenToKVPool, MLATokenToKVPool, Plane
from refcache.pool.req_to_token import ReqToTokenPool

__all__ = ["KVCache", "MHATokenToKVPool", "MLATokenToKVPool", "Plane", "ReqToTokenPool"]
