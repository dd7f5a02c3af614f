"""Digests of pages: one int64 a page over all rows, layers and planes, computed where the KV is.

A page's digest is a weighted sum of its 32-bit words, modulo 2**64: each word of a page and each
plane has a weight of its own, so a word that changed, rows that were swapped and layers that were
swapped all show. It is never 0, which stands for "none".
"""

from collections.abc import Sequence
from typing import Any

import torch

from refcache.errors import InvalidArgument


def planes_of(pool: Any) -> list[torch.Tensor]:
    """The KV buffers of a device pool with SGLang's names, one a layer and plane.

    Raises:
        InvalidArgument: the pool has none.
    """
    found: list[torch.Tensor] = []
    for name in ("k_buffer", "v_buffer", "kv_buffer"):
        found += getattr(pool, name, None) or []
    if not found:
        raise InvalidArgument(f"canary: {type(pool).__name__} has no k_buffer, v_buffer, kv_buffer")
    return found


class Digest:
    """Digests of a pool's pages; ``pages``: how many it has, page 0 included."""

    def __init__(self, planes: Sequence[torch.Tensor], page_size: int) -> None:
        """``planes``: each ``[slots, ...]``, contiguous."""
        self.device = planes[0].device
        self.pages = len(planes[0]) // page_size
        self._words = [
            plane[: self.pages * page_size].view(torch.uint8).view(self.pages, -1).view(torch.int32)
            for plane in planes
        ]
        longest = max(words.shape[1] for words in self._words)
        self._of_word = self._weights(longest)
        self._of_plane = self._weights(len(planes)).tolist()

    def _weights(self, count: int) -> torch.Tensor:
        """Odd and different, spread over 64 bits: multiples of an odd constant."""
        steps = torch.arange(count, device=self.device, dtype=torch.int64)
        return (2 * steps + 1) * 0x1E3779B97F4A7C15

    def __call__(self, pages: torch.Tensor) -> torch.Tensor:
        """int64 digests ``[n]`` of int64 pages ``[n]``; nothing is waited for."""
        total = torch.zeros(len(pages), dtype=torch.int64, device=self.device)
        for words, weight in zip(self._words, self._of_plane, strict=True):
            rows = words.index_select(0, pages)
            total += (rows * self._of_word[: rows.shape[1]]).sum(1) * weight
        return total | 1
