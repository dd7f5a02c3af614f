"""Caches of other engines, unmodified, as targets: ``vllm:NAME``, ``lmcache:NAME``."""
