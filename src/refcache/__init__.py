"""refcache: an executable specification of the hierarchical KV cache of LLM engines.

Three products on one code base: a readable reference in plain PyTorch (``refcache.tree``,
``refcache.allocator``, ``refcache.pool``, ``refcache.engine``), a correctness oracle for other
people's caches (``refcache.oracle``, ``refcache.testing``, the ``refcache`` command), and custom
ops (``refcache_ops``). Start with ``docs/``.
"""

import importlib
from typing import Any

__version__ = "0.1.0"


HOMES = {"record": "refcache.trace.record", "canary": "refcache.trace.live.canary"}


def __getattr__(name: str) -> Any:
    """``refcache.record`` and ``refcache.canary``, imported at first use."""
    if name in HOMES:
        return getattr(importlib.import_module(HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
