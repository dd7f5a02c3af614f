"""The oracle: what is on trial, how it is driven, which rules must hold, what a failure says.

Everything a printed program needs is imported from here, whatever module it lives in. Knows public
interfaces only and never imports Hypothesis; :mod:`refcache.testing` adds that.
"""

from refcache.oracle.allocator_driver import AllocatorDriver
from refcache.oracle.catalog import SENTENCES
from refcache.oracle.driver import Driver
from refcache.oracle.hicache_config import HiCacheConfig, HiCacheParts
from refcache.oracle.hicache_driver import HiCacheDriver
from refcache.oracle.invariants import CHECKS, check_state, violations
from refcache.oracle.loop_driver import LoopDriver
from refcache.oracle.misuse import AllocatorMisuseDriver, TreeMisuseDriver
from refcache.oracle.naive import NaiveTarget, NaiveTree
from refcache.oracle.naive_allocator import NaiveAllocator
from refcache.oracle.ops_driver import OpsDriver
from refcache.oracle.planted import plant
from refcache.oracle.ranks_driver import RanksDriver
from refcache.oracle.state import RequestView, State
from refcache.oracle.streams_driver import StreamsDriver
from refcache.oracle.target import CacheConfig, Target, resolve
from refcache.oracle.tree_driver import TreeDriver
from refcache.oracle.view import NodeView, TreeView, inspect_radix
from refcache.oracle.violation import Violation
from refcache.reference.alloc_cases import AllocCase
from refcache.reference.cases import TransferCase

__all__ = [
    "CHECKS",
    "SENTENCES",
    "AllocCase",
    "AllocatorDriver",
    "AllocatorMisuseDriver",
    "CacheConfig",
    "Driver",
    "HiCacheConfig",
    "HiCacheDriver",
    "HiCacheParts",
    "LoopDriver",
    "NaiveAllocator",
    "NaiveTarget",
    "NaiveTree",
    "NodeView",
    "OpsDriver",
    "RanksDriver",
    "RequestView",
    "State",
    "StreamsDriver",
    "Target",
    "TransferCase",
    "TreeDriver",
    "TreeMisuseDriver",
    "TreeView",
    "Violation",
    "check_state",
    "inspect_radix",
    "plant",
    "resolve",
    "violations",
]
