"""A request as a tree cache sees it, played by the oracle."""

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from refcache.keys import TOKEN


class Request:
    """Implements :class:`refcache.types.CacheReq`, with the lengths an engine keeps beside it.

    Attributes:
        computed: tokens whose KV exists; their slots are in the row.
        allocated: slots in the row; more than ``computed`` after a reservation for draft tokens.
        pending: KV was computed since the tree last saw the request.
    """

    def __init__(
        self, name: str, tokens: Sequence[int], extra_key: str | None, priority: int
    ) -> None:
        self.rid = name
        self.origin_input_ids = array(TOKEN, tokens)
        self.output_ids = array(TOKEN)
        self.fill_ids = array(TOKEN)
        self.extra_key = extra_key
        self.priority = priority
        self.req_pool_idx: int | None = None
        self.prefix_indices = torch.zeros(0, dtype=torch.int64)
        self.cache_protected_len = 0
        self.last_node: Any = None
        self.computed = 0
        self.allocated = 0
        self.pending = False
        self._asked = False

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.origin_input_ids, *self.output_ids)

    @property
    def prefilled(self) -> bool:
        return self.computed >= len(self.origin_input_ids)

    @property
    def kv_committed_len(self) -> int:
        return self.computed

    @property
    def kv_committed_freed(self) -> bool:
        return self._asked

    def pop_committed_kv_cache(self) -> int:
        """Tokens with KV; may be asked once."""
        if self._asked:
            raise RuntimeError(f"{self.rid}: the committed length was asked for twice")
        self._asked = True
        return self.computed
