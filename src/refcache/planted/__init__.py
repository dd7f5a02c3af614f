"""The planted bugs by name. See :mod:`refcache.planted.bug`.

What they are called takes no tensor to know: these modules import PyTorch where a bug is planted.
"""

import atexit
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from refcache.errors import UnknownName
from refcache.planted import (
    allocator,
    faults,
    hicache_copies,
    hicache_loads,
    hicache_writes,
    kernels,
    loop,
    radix_cache,
    radix_tree,
    ranks,
    streams,
)
from refcache.planted.bug import PlantedBug, Use, active_bugs
from refcache.planted.contracts import offload, sequences
from refcache.planted.hybrid import mamba, swa
from refcache.planted.storage import files, tier

__all__ = ["PlantedBug", "Use", "active_bugs", "all_bugs", "find", "plant", "taken_back"]

PARTS = (
    allocator,
    radix_cache,
    radix_tree,
    loop,
    mamba,
    swa,
    hicache_loads,
    hicache_writes,
    hicache_copies,
    streams,
    ranks,
    faults,
    tier,
    offload,
    sequences,
    kernels,
    files,
)
_PLANTED = ExitStack()
atexit.register(_PLANTED.close)  # while modules can still be imported


def all_bugs() -> tuple[PlantedBug, ...]:
    """Every planted bug, part by part."""
    return sum((part.BUGS for part in PARTS), ())


def find(name: str) -> PlantedBug:
    """The bug of that name.

    Raises:
        UnknownName: there is none.
    """
    by_name = {bug.name: bug for bug in all_bugs()}
    if name not in by_name:
        raise UnknownName("planted bug", name, by_name)
    return by_name[name]


def plant(name: str) -> None:
    """Patch a bug in for the rest of the process: the first line of a printed reproduction."""
    _PLANTED.enter_context(find(name).active())


@contextmanager
def taken_back() -> Iterator[None]:
    """What is planted in the block is taken back at its end."""
    before = _PLANTED.pop_all()
    try:
        yield
    finally:
        _PLANTED.close()
        _PLANTED.enter_context(before)
