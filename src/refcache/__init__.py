"""refcache: an executable specification of the hierarchical KV cache of LLM engines.

Three products on one code base: a readable reference in plain PyTorch (``refcache.tree``,
``refcache.allocator``, ``refcache.pool``, ``refcache.engine``), a correctness oracle for other
people's caches (``refcache.oracle``, ``refcache.testing``, the ``refcache`` command), and custom
ops (``refcache_ops``). Start with ``docs/``.
"""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``refcache.record`` is :func:`refcache.trace.record.record`, imported at first use."""
    if name == "record":
        return importlib.import_module("refcache.trace.record").record
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
