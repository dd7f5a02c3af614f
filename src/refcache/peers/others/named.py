"""The targets of other engines by name."""

import importlib

from refcache.errors import UnknownName
from refcache.oracle.target.base import Target

TARGETS = {
    "vllm:offload-lru": "vllm_offload:LruOffload",
    "vllm:offload-arc": "vllm_offload:ArcOffload",
    "vllm:offload-tiers": "vllm_offload:TieredOffload",
    "lmcache:tensor": "lmcache_pages:TensorPages",
    "lmcache:paged": "lmcache_pages:PagedPages",
    "nanovllm:blocks": "nano_vllm:NanoVllm",
    "lmcache:backend": "lmcache_backend:Backend",
    "lmcache:backend+partial": "lmcache_backend:Partial",
    "lmcache:backend-paged": "lmcache_backend:PagedBackend",
    "lmcache:backend-paged+partial": "lmcache_backend:PagedPartial",
}
"""Name: where its target is, ``module:class`` below this folder."""


def other_target(spec: str) -> Target:
    """The target of that name.

    Raises:
        UnknownName: there is none.
        MissingExtra: its sources are not there.
    """
    if spec not in TARGETS:
        raise UnknownName("target", spec, TARGETS)
    module, _, name = TARGETS[spec].partition(":")
    found = getattr(importlib.import_module(f"refcache.peers.others.{module}"), name)
    target: Target = found()
    return target
