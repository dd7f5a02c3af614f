"""The reference's ``HiRadixCache`` as sequences see it: a prefix may come back from the host.

Copies run on a simulated machine, at once; every call ends when they are done. The bytes are real:
what was written to the host and loaded back is compared, row by row.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from refcache.keys import RadixKey
from refcache.oracle.target.config import HiCacheConfig, HiCacheParts
from refcache.oracle.target.sequences.radix import RadixSequences
from refcache.runtime import SimulatedRuntime, eager
from refcache.types import InitLoadBackParams, MatchPrefixParams


class TieredSequences(RadixSequences):
    """``parts`` makes the two-tier cache: :meth:`refcache.oracle.Target.hicache`."""

    def __init__(self, config: HiCacheConfig, parts: Callable[..., HiCacheParts]) -> None:
        self.machine = SimulatedRuntime(eager)
        made = parts(config, self.machine, self.machine.Stream(), lambda allocator: allocator)
        super().__init__(config, made.tree, made.allocator, made.rows)
        self.pool = made.pool

    def settle(self) -> None:
        """Every copy is done, and the tree knows."""
        self.machine.synchronize()
        self.tree.check_hicache_events()

    def _found(self, tokens: Sequence[int], space: str | None) -> tuple[torch.Tensor, Any]:
        key = RadixKey(list(tokens[:-1]), space)
        found = self.tree.match_prefix(MatchPrefixParams(key))
        slots, node = found.device_indices, found.last_device_node
        if found.host_hit_length:
            asked = InitLoadBackParams(found.last_host_node, found.host_hit_length)
            self.tree.inc_lock_ref(found.last_device_node)
            loaded, node = self.tree.init_load_back(asked)
            self.tree.dec_lock_ref(found.last_device_node)
            self.tree.ready_to_load_host_cache()
            self.settle()
            slots = torch.cat([slots, loaded])
        return slots, node

    def kv(self, page: int, offset: int) -> list[torch.Tensor]:
        """The rows of one slot: every layer's, every plane's."""
        slot = page * self.size + offset
        layers = map(self.pool.get_kv_buffer, range(self.pool.layer_num))
        return [plane[slot] for planes in layers for plane in planes]
