"""``TagModel``: the stand-in for a transformer.

Embedding a token gives its tag (:mod:`refcache.engine.models.content`); each layer projects tags to
K and V rows, writes them, and attends; the next token is a function of what the last layer read. So
greedy decoding is deterministic, and a wrong KV row changes the output as it would in a real model.

What is real: which rows are written and read, when, and through which calls. What is not: the
arithmetic. A model with arithmetic is :class:`refcache.engine.models.transformer.Transformer`.
"""

from collections.abc import Sequence
from typing import Any

import torch

from refcache.engine.model_config import ModelConfig
from refcache.engine.models.attention import AttentionBackend, ForwardMetadata, RadixAttention
from refcache.engine.models.content import Cells, RowCheck, TagLedger
from refcache.engine.models.state_tags import StateTags
from refcache.engine.schedule_batch import ModelWorkerBatch
from refcache.errors import InvalidArgument
from refcache.pool import KVCache
from refcache.runtime import Region, Runtime
from refcache.tags import kv_row


def words_of(rows: torch.Tensor) -> torch.Tensor:
    """KV rows ``[n, heads, dim]`` of any dtype as 64-bit words ``[n, width]``, a view."""
    return rows.flatten(1).view(torch.int64)


class TagAttention(RadixAttention):
    """Gives what the newest K row of each request holds, and every row of the plan to the check.

    Attributes:
        codes: for each plane int64 ``[width]``: what its words add to a token's tag.
    """

    def __init__(
        self,
        layer_id: int,
        widths: list[int],
        kv_planes: int,
        ledger: TagLedger,
        check: RowCheck,
        window: int | None = None,
    ) -> None:
        """``widths``: words of a slot in each plane; ``kv_planes``: the first so many are KV."""
        super().__init__(layer_id, window)
        self.kv_planes = kv_planes
        zero = torch.zeros(1, dtype=torch.int64)
        self.codes = [kv_row(zero, layer_id, p, width)[0] for p, width in enumerate(widths)]
        self.ledger = ledger
        self.check = check

    def empty_output(self, batch: ModelWorkerBatch) -> torch.Tensor:
        """int64 ``[batch]``: the tag that the newest K row of each request holds."""
        return torch.empty_like(batch.seq_lens)

    def attend(
        self,
        q: torch.Tensor,
        buffers: Sequence[torch.Tensor],
        metadata: ForwardMetadata,
        batch: ModelWorkerBatch,
        new: list[int],
        out: torch.Tensor,
    ) -> None:
        """See the class; the value of MLA is part of its key, so one of both is read."""
        words = [words_of(buffer) for buffer in (*buffers[: self.kv_planes], *buffers[2:])]
        if self.window is None:
            torch.sub(words[0][metadata.last, 0], self.codes[0][0], out=out)
        else:
            out.zero_()  # a layer with full attention has the last word
        for i, (cells, slots) in enumerate(
            zip(metadata.cells, metadata.pages_of(self), strict=True)
        ):
            if self.window is not None:
                cells, slots = within_window(cells, slots, batch, new, i, self.window)
            self.check.compare(self.ledger, batch, cells, slots, words, self.codes, self.layer_id)


def within_window(
    cells: Cells,
    slots: torch.Tensor,
    batch: ModelWorkerBatch,
    new: list[int],
    index: int,
    window: int,
) -> tuple[Cells, torch.Tensor]:
    """Of some cells those that new tokens look at; a slice is of request ``index`` of the batch."""
    if isinstance(cells.columns, slice):
        first = max(0, len(slots) - new[index] - window + 1)
        return Cells(cells.rows, slice(first, len(slots))), slots[first:]
    assert isinstance(cells.rows, torch.Tensor)
    lengths = torch.zeros(int(cells.rows.max()) + 1, dtype=torch.int64)
    lengths[batch.req_pool_indices.cpu()] = batch.seq_lens_cpu
    kept = cells.columns >= lengths[cells.rows] - window
    return Cells(cells.rows[kept], cells.columns[kept]), slots[kept]


class TagModel:
    """See the module docstring.

    Args:
        check: which KV rows a forward reads and compares.
        pool: the device pool; None keeps no KV, and nothing is written, read or checked.

    Raises:
        InvalidArgument: a KV row that is not a whole number of 8 bytes.
    """

    def __init__(
        self,
        config: ModelConfig,
        ledger: TagLedger,
        check: RowCheck,
        pool: Any,
        runtime: Runtime,
        rows: Any = None,
    ) -> None:
        """``rows``: of a model with states the pool of request rows."""
        self.config = config
        self.ledger = ledger
        self.plan = check.plan
        self.pool = pool
        self.runtime = runtime
        self.layers: list[TagAttention | StateTags] = []
        if pool is None:
            return
        end = pool.end_layer if isinstance(pool, KVCache) else config.num_hidden_layers
        for layer in range(pool.start_layer, end):
            if layer in config.mamba_layer_ids:
                self.layers.append(StateTags(layer, rows, ledger, check))
                continue
            inner, _ = pool.pool_of(layer)
            window = config.sliding_window_size if layer in config.swa_attention_layer_ids else None
            widths = self._widths(inner)
            self.layers.append(TagAttention(layer, widths, inner.kv_planes, ledger, check, window))

    @staticmethod
    def _widths(pool: KVCache) -> list[int]:
        for plane in pool.planes:
            if plane.slot_bytes % 8:
                raise InvalidArgument(
                    f"{plane.name} rows of {plane.slot_bytes} bytes: expected a multiple of 8"
                )
        return [plane.slot_bytes // 8 for plane in pool.planes]

    def forward(self, batch: ModelWorkerBatch, backend: AttentionBackend) -> torch.Tensor:
        """Run every layer and pick the next tokens, int64 ``[batch]``."""
        hidden, out = self._embed(batch)
        for layer in self.layers:
            if isinstance(layer, StateTags):
                layer.run(batch, self.runtime)
                continue
            rows = self._project(layer, hidden)
            self._set_extra_planes(layer, rows, batch)
            # MLA has one KV row, and V is part of it
            out = layer.forward(hidden, rows[0], rows[layer.kv_planes - 1], batch, backend)
        return self._sample(out)

    def _embed(self, batch: ModelWorkerBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The tags of the batch's tokens, and of the last one of each request."""
        hidden = torch.empty_like(batch.input_ids)
        last = torch.empty_like(batch.seq_lens) if batch.forward_mode.is_extend() else hidden
        embed = self._extend if batch.forward_mode.is_extend() else self._decode
        self.runtime.launch(
            "embed",
            lambda: embed(batch, hidden, last),
            reads=[Region(batch.input_ids, 0, 0, range(hidden.numel()))],
        )
        return hidden, last

    def _extend(self, batch: ModelWorkerBatch, hidden: torch.Tensor, last: torch.Tensor) -> None:
        end = 0
        for i, row in enumerate(batch.rows):
            prefix_ids, length = batch.cached_prefix_ids[i], batch.extend_seq_lens[i]
            if prefix_ids is not None:
                self.ledger.open(row, prefix_ids, batch.extra_keys[i])
            end += length
            input_ids = batch.input_ids[end - length : end]
            tags = self.ledger.extend(row, batch.extend_prefix_lens[i], input_ids)
            hidden[end - length : end] = tags
            last[i] = tags[-1]

    def _decode(self, batch: ModelWorkerBatch, hidden: torch.Tensor, last: torch.Tensor) -> None:
        positions = batch.seq_lens - 1
        self.ledger.decode(batch.req_pool_indices, positions, batch.input_ids, out=hidden)

    def _project(self, layer: TagAttention, hidden: torch.Tensor) -> list[torch.Tensor]:
        """The rows of these tags in every plane, ``[n, heads, dim]`` each."""
        rows = [
            torch.empty(
                (hidden.numel(), p.head_num, p.head_dim // p.slots_per_row),
                dtype=p.dtype or p.buffer.dtype,
            )
            for p in self.pool.pool_of(layer.layer_id)[0].planes
        ]

        def run() -> None:
            for row, code in zip(rows, layer.codes, strict=True):
                torch.add(hidden[:, None], code, out=words_of(row))

        self.runtime.launch("qkv", run)
        return rows

    def _set_extra_planes(
        self, layer: TagAttention, rows: list[torch.Tensor], batch: ModelWorkerBatch
    ) -> None:
        """Write what the pool declares besides KV."""
        inner, layer_id = self.pool.pool_of(layer.layer_id)
        extra = list(zip(inner.planes, rows, strict=True))[layer.kv_planes :]
        for plane, row in extra:
            inner.set_plane_buffer(plane.name, layer_id, batch.out_cache_loc, row)

    def _sample(self, out: torch.Tensor) -> torch.Tensor:
        next_token_ids = torch.empty_like(out)
        self.runtime.launch(
            "sample",
            lambda: torch.remainder(out, self.config.vocab_size, out=next_token_ids),
            writes=[Region(next_token_ids, 0, 0, range(out.numel()))],
        )
        return next_token_ids
