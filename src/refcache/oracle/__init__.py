"""The oracle: what is on trial, how it is driven, which rules must hold, what a failure says.

Knows public interfaces only and never imports Hypothesis; :mod:`refcache.testing` adds that.
"""

from refcache.oracle.allocator_driver import AllocatorDriver
from refcache.oracle.catalog import SENTENCES
from refcache.oracle.driver import Driver
from refcache.oracle.hicache_config import HiCacheConfig, HiCacheParts
from refcache.oracle.hicache_driver import HiCacheDriver
from refcache.oracle.invariants import CHECKS, check_state, violations
from refcache.oracle.loop_driver import LoopDriver
from refcache.oracle.state import RequestView, State
from refcache.oracle.streams_driver import StreamsDriver
from refcache.oracle.target import CacheConfig, Target, resolve
from refcache.oracle.tree_driver import TreeDriver
from refcache.oracle.view import NodeView, TreeView, inspect_radix
from refcache.oracle.violation import Violation

__all__ = [
    "CHECKS",
    "SENTENCES",
    "AllocatorDriver",
    "CacheConfig",
    "Driver",
    "HiCacheConfig",
    "HiCacheDriver",
    "HiCacheParts",
    "LoopDriver",
    "NodeView",
    "RequestView",
    "State",
    "StreamsDriver",
    "Target",
    "TreeDriver",
    "TreeView",
    "Violation",
    "check_state",
    "inspect_radix",
    "resolve",
    "violations",
]
