"""Who moves rows between the tiers: the HiCache controller, its queues, and layer-wise waiting."""

from refcache.controller.hicache_controller import HiCacheController
from refcache.controller.layer_events import LayerDoneCounter, LayerLoadingEvent
from refcache.controller.operation import CacheOperation, HiCacheAck, TransferBuffer
from refcache.controller.storage_controller import StorageController
from refcache.controller.storage_operation import PrefetchOperation, StorageOperation

__all__ = [
    "CacheOperation",
    "HiCacheAck",
    "HiCacheController",
    "LayerDoneCounter",
    "LayerLoadingEvent",
    "PrefetchOperation",
    "StorageController",
    "StorageOperation",
    "TransferBuffer",
]
