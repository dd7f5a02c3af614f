"""``NSATokenToKVPool``: latent rows, and the index keys by which a sparse attention picks tokens.

Beside its latent row every token has an index key of 128 bytes (fp8) and a scale of 4. A page keeps
those of its 64 tokens in one row: first all keys, then all scales. So the plane has a row a page,
and travels between the tiers with the pages.

Models SGLang's class of this name; left out: one token a page, as on AMD's cards. Stricter than
0.5.10, where one of four getters waits for its layer: here all do.
"""

from typing import Any

import torch

from refcache.errors import InvalidArgument
from refcache.pool.device import MLATokenToKVPool
from refcache.pool.planes import PlaneSpec
from refcache.runtime import Runtime

PAGE, KEY, SCALE = 64, 128, 4


class NSATokenToKVPool(MLATokenToKVPool):
    """See the module docstring; arguments as :class:`MLATokenToKVPool`, in SGLang's order.

    Attributes:
        index_k_with_scale_buffer: of each layer uint8 ``[pages + 1, 64 * (128 + 4)]``.

    Raises:
        InvalidArgument: another page size or index width; a ``kv_cache_dim`` other than latent and
            rope together.
    """

    index_k_with_scale_buffer_dtype = torch.uint8

    def __init__(
        self,
        size: int,
        page_size: int,
        kv_lora_rank: int,
        dtype: torch.dtype,
        qk_rope_head_dim: int,
        layer_num: int,
        device: str,
        index_head_dim: int,
        enable_memory_saver: bool,
        kv_cache_dim: int,
        start_layer: int | None = None,
        end_layer: int | None = None,
        index_buf_size: None = None,
        runtime: Runtime | None = None,
    ) -> None:
        """``index_buf_size`` must be None: index keys for every slot."""
        seen = page_size, index_head_dim, kv_cache_dim, index_buf_size
        expected = PAGE, KEY, kv_lora_rank + qk_rope_head_dim, None
        if seen != expected:
            raise InvalidArgument(
                f"page_size, index_head_dim, kv_cache_dim, index_buf_size={seen}: expected "
                f"{expected}"
            )
        index = PlaneSpec(
            "index_k_with_scale", 1, PAGE * (KEY + SCALE), torch.uint8, slots_per_row=PAGE
        )
        self.index_head_dim = index_head_dim
        super().__init__(
            size, page_size, dtype, kv_lora_rank, qk_rope_head_dim, layer_num, device,
            enable_memory_saver, start_layer, end_layer, runtime=runtime, extra_planes=[index],
        )  # fmt: skip
        self.index_k_with_scale_buffer = list(self.planes[1].buffer.squeeze(2))

    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor:
        """Keys and scales of a layer, uint8 ``[pages + 1, 64 * 132]``, after waiting for it."""
        return self.get_plane_buffer("index_k_with_scale", layer_id).squeeze(1)

    def get_index_k_continuous(
        self, layer_id: int, seq_len: int, page_indices: torch.Tensor
    ) -> torch.Tensor:
        """Launch a copy of the keys of the first ``seq_len`` tokens of some pages.

        Returns:
            uint8 ``[seq_len, 128]``, after waiting for the layer.
        """
        return self._continuous(layer_id, seq_len, page_indices)[0]

    def get_index_k_scale_continuous(
        self, layer_id: int, seq_len: int, page_indices: torch.Tensor
    ) -> torch.Tensor:
        """As :meth:`get_index_k_continuous`, the scales: uint8 ``[seq_len, 4]``."""
        return self._continuous(layer_id, seq_len, page_indices)[1]

    def get_index_k_scale_buffer(
        self,
        layer_id: int,
        seq_len_tensor: torch.Tensor,
        page_indices: torch.Tensor,
        seq_len_sum: int,
        max_seq_len: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, of several sequences one after another.

        Args:
            seq_len_tensor: integer ``[batch]``.
            page_indices: integer ``[batch, pages]``, padded at the end.
            seq_len_sum: their sum; ``max_seq_len``: the longest, which bounds nothing here.
        """
        rows = [
            self._continuous(layer_id, length, pages)
            for length, pages in zip(seq_len_tensor.tolist(), page_indices, strict=True)
        ]
        keys, scales = (
            torch.empty((seq_len_sum, width), dtype=torch.uint8, device=page_indices.device)
            for width in (KEY, SCALE)
        )

        def run() -> None:
            torch.cat([k for k, _ in rows], out=keys)
            torch.cat([s for _, s in rows], out=scales)

        self.runtime.launch("index of sequences", run)
        return keys, scales

    def set_index_k_scale_buffer(
        self, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor, index_k_scale: torch.Tensor
    ) -> None:
        """Launch a write of keys ``[n, 128]``, one byte each, and scales ``[n]`` of 4 bytes.

        Raises:
            InvalidArgument, InvalidSlot: before anything is launched.
        """
        self.check_resident()
        keys, scales = index_k.reshape(len(loc), -1), index_k_scale.reshape(len(loc), -1)
        sizes = [t.shape[1] * t.element_size() for t in (keys, scales)]
        if sizes != [KEY, SCALE]:
            raise InvalidArgument(f"index keys and scales of {sizes} bytes: expected 128 and 4")
        self._check_slots("loc", loc)
        buffer = self.index_k_with_scale_buffer[self._local(layer_id)]

        def run() -> None:
            page, within = loc // PAGE, loc % PAGE
            parts = self._parts(buffer)
            for part, rows in zip(parts, (keys, scales), strict=True):
                part[page, within] = rows.contiguous().view(torch.uint8)

        self.runtime.launch("set index", run, writes=[self.region(1, layer_id, loc)])

    @staticmethod
    def _parts(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views ``[n, 64, 128]`` and ``[n, 64, 4]`` of some pages."""
        keys, scales = pages[:, : PAGE * KEY], pages[:, PAGE * KEY :]
        return keys.view(-1, PAGE, KEY), scales.view(-1, PAGE, SCALE)

    def _continuous(
        self, layer_id: int, seq_len: int, page_indices: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch the copy of keys and scales; waits for the layer."""
        if not 0 <= seq_len <= len(page_indices) * PAGE:
            raise InvalidArgument(
                f"{seq_len=} on {len(page_indices)} pages: expected 0 to {len(page_indices) * PAGE}"
            )
        pages = page_indices[: -(-seq_len // PAGE)]
        source: Any = self.get_index_k_with_scale_buffer(layer_id)
        out = tuple(source.new_empty((seq_len, width)) for width in (KEY, SCALE))

        def run() -> None:
            for rows, part in zip(out, self._parts(source[pages]), strict=True):
                rows.copy_(part.flatten(0, 1)[:seq_len])

        slots = (pages[:, None] * PAGE + torch.arange(PAGE, device=pages.device)).flatten()[
            :seq_len
        ]
        self.runtime.launch("get index", run, reads=[self.region(1, layer_id, slots)])
        return out[0], out[1]
