"""How a two-tier cache under test is built, and the parts that a target makes."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from refcache.errors import InvalidArgument
from refcache.oracle.target.base import CacheConfig


@dataclass(frozen=True)
class HiCacheConfig(CacheConfig):
    """How a two-tier cache under test is built.

    ``host_size`` in tokens, whole pages, more than ``size``; 0 means one page more. ``delay``:
    launches wait until the program or the cache makes them run; else they run at once.
    ``reentrant``: every allocation, on either tier, first evicts all that can be evicted there.
    ``small_loads``: with the I/O backend "kernel", a load of small layers may be one launch for all
    of them; False asks for one launch a layer. It is for the reference; other targets ignore it.
    """

    host_size: int = 0
    write_policy: str = "write_through"
    layout: str = "layer_first"
    io_backend: str = "kernel"
    load_back_threshold: int = 1
    hit_policy: str = "per_visit"
    mla: bool = False
    tp_group: Any = None
    delay: bool = True
    reentrant: bool = False
    small_loads: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.host_size == 0:
            object.__setattr__(self, "host_size", self.size + self.page_size)
        if self.host_size <= self.size or self.host_size % self.page_size:
            raise InvalidArgument(
                f"host_size={self.host_size}: expected whole pages, more than size={self.size}"
            )


class HiCacheParts(NamedTuple):
    """What a target makes: a tree over ``allocator`` and ``rows``, whose KV is in ``pool``.

    ``counter``: the layer counter whose ``set_consumer`` the worker calls before a forward.
    ``host_pool``: its ``alloc`` is watched for refusals; ``host_planes``: its buffers, one a plane.
    """

    tree: Any
    allocator: Any
    rows: Any
    pool: Any
    host_pool: Any
    host_planes: Any
    counter: Any
