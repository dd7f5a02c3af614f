"""The oracle: what is on trial, how it is driven, which rules must hold, what a failure says.

Everything a printed program needs is imported from here, whatever module it lives in, at first use.
Knows public interfaces only and never imports Hypothesis; :mod:`refcache.testing` adds that.
"""

from typing import TYPE_CHECKING

from refcache.lazy import lazy_names

if TYPE_CHECKING:
    from refcache.oracle.drivers.allocator import AllocatorDriver
    from refcache.oracle.drivers.backend.crash import CrashDriver
    from refcache.oracle.drivers.backend.damage import DamageDriver
    from refcache.oracle.drivers.backend.driver import BackendDriver
    from refcache.oracle.drivers.hicache.driver import HiCacheDriver
    from refcache.oracle.drivers.loop import LoopDriver
    from refcache.oracle.drivers.mamba.driver import MambaDriver
    from refcache.oracle.drivers.misuse import AllocatorMisuseDriver, TreeMisuseDriver
    from refcache.oracle.drivers.offload.driver import OffloadDriver
    from refcache.oracle.drivers.ops import OpsDriver
    from refcache.oracle.drivers.ranks.driver import RanksDriver
    from refcache.oracle.drivers.sequences.driver import SequencesDriver
    from refcache.oracle.drivers.streams.driver import StreamsDriver
    from refcache.oracle.drivers.swa.driver import SWADriver
    from refcache.oracle.drivers.tier.driver import TierDriver
    from refcache.oracle.drivers.tree.driver import TreeDriver
    from refcache.oracle.program.driver import Driver
    from refcache.oracle.rules.catalog import SENTENCES
    from refcache.oracle.rules.check import CHECKS, check_state, violations
    from refcache.oracle.rules.violation import Violation
    from refcache.oracle.target.base import Target
    from refcache.oracle.target.config import (
        CacheConfig,
        HiCacheConfig,
        HiCacheParts,
        MambaConfig,
        MambaParts,
        SequencesConfig,
        SWAConfig,
    )
    from refcache.oracle.target.naive import NaiveTarget, NaiveTree
    from refcache.oracle.target.naive_allocator import NaiveAllocator
    from refcache.oracle.target.offload.contract import OffloadManager, OffloadTraits
    from refcache.oracle.target.paged import PagedAdapter
    from refcache.oracle.target.resolve import resolve
    from refcache.oracle.target.sequences.blocks import RequestCache
    from refcache.oracle.target.sequences.contract import Sequences
    from refcache.oracle.target.sequences.naive import NaiveSequences
    from refcache.oracle.target.storage.contract import StorageConfig, StorageTraits
    from refcache.oracle.target.traits import Traits
    from refcache.oracle.view.state import RequestView, State
    from refcache.oracle.view.tree import NodeView, TreeView, inspect_radix
    from refcache.reference.alloc_cases import AllocCase
    from refcache.reference.cases import TransferCase

__all__ = [
    "CHECKS",
    "SENTENCES",
    "AllocCase",
    "AllocatorDriver",
    "AllocatorMisuseDriver",
    "BackendDriver",
    "CacheConfig",
    "CrashDriver",
    "DamageDriver",
    "Driver",
    "HiCacheConfig",
    "HiCacheDriver",
    "HiCacheParts",
    "LoopDriver",
    "MambaConfig",
    "MambaDriver",
    "MambaParts",
    "NaiveAllocator",
    "NaiveSequences",
    "NaiveTarget",
    "NaiveTree",
    "NodeView",
    "OffloadDriver",
    "OffloadManager",
    "OffloadTraits",
    "OpsDriver",
    "PagedAdapter",
    "RanksDriver",
    "RequestCache",
    "RequestView",
    "SWAConfig",
    "SWADriver",
    "Sequences",
    "SequencesConfig",
    "SequencesDriver",
    "State",
    "StorageConfig",
    "StorageTraits",
    "StreamsDriver",
    "Target",
    "TierDriver",
    "Traits",
    "TransferCase",
    "TreeDriver",
    "TreeMisuseDriver",
    "TreeView",
    "Violation",
    "check_state",
    "inspect_radix",
    "resolve",
    "violations",
]

__getattr__ = lazy_names(__name__)
