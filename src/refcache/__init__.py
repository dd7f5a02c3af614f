"""refcache: an executable specification of the hierarchical KV cache of LLM engines.

Three products on one code base: a readable reference in plain PyTorch (``refcache.tree``,
``refcache.allocator``, ``refcache.pool``, ``refcache.engine``), a correctness oracle for other
people's caches (``refcache.oracle``, ``refcache.testing``, the ``refcache`` command), and custom
ops (``refcache_ops``). Start with ``docs/``.
"""

__version__ = "0.1.0"
