"""Pure functions that define what the ops do: no state, PyTorch only, checkable by hand."""

from typing import TYPE_CHECKING

from refcache.lazy import lazy_names

if TYPE_CHECKING:
    from refcache.reference.alloc import alloc_decode, alloc_extend, new_pages_needed
    from refcache.reference.layout import LAYOUTS, Layout
    from refcache.reference.transfer import (
        FLAG_EPOCH,
        backup_all_layer,
        load_layers,
        load_per_layer,
    )

__all__ = [
    "FLAG_EPOCH",
    "LAYOUTS",
    "Layout",
    "alloc_decode",
    "alloc_extend",
    "backup_all_layer",
    "load_layers",
    "load_per_layer",
    "new_pages_needed",
]

__getattr__ = lazy_names(__name__)
