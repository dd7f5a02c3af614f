"""``TagModel``: the stand-in for a transformer.

Embedding a token gives its tag (:mod:`refcache.engine.models.content`); each layer projects tags to
K and V rows, writes them, and attends; the next token is a function of what the last layer read. So
greedy decoding is deterministic, and a wrong KV row changes the output as it would in a real model.

What is real: which rows are written and read, when, and through which calls. What is not: the
arithmetic. A model with arithmetic is :class:`refcache.engine.models.transformer.Transformer`.
"""

from collections.abc import Sequence

import torch

from refcache.engine.model_config import ModelConfig
from refcache.engine.models.attention import AttentionBackend, ForwardMetadata, RadixAttention
from refcache.engine.models.content import RowCheck, TagLedger
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
        self, layer_id: int, widths: list[int], kv_planes: int, ledger: TagLedger, check: RowCheck
    ) -> None:
        """``widths``: words of a slot in each plane; ``kv_planes``: the first so many are KV."""
        super().__init__(layer_id)
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
        torch.sub(words[0][metadata.last, 0], self.codes[0][0], out=out)
        for cells, slots in zip(metadata.cells, metadata.pages, strict=True):
            self.check.compare(self.ledger, batch, cells, slots, words, self.codes, self.layer_id)


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
        pool: KVCache | None,
        runtime: Runtime,
    ) -> None:
        self.config = config
        self.ledger = ledger
        self.plan = check.plan
        self.pool = pool
        self.runtime = runtime
        self.layers: list[TagAttention] = []
        if pool is None:
            return
        widths = []
        for plane in pool.planes:
            if plane.slot_bytes % 8:
                raise InvalidArgument(
                    f"{plane.name} rows of {plane.slot_bytes} bytes: expected a multiple of 8"
                )
            widths.append(plane.slot_bytes // 8)
        self.layers = [
            TagAttention(layer, widths, pool.kv_planes, ledger, check)
            for layer in range(pool.start_layer, pool.end_layer)
        ]

    def forward(self, batch: ModelWorkerBatch, backend: AttentionBackend) -> torch.Tensor:
        """Run every layer and pick the next tokens, int64 ``[batch]``."""
        hidden, out = self._embed(batch)
        for layer in self.layers:
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
        assert self.pool is not None
        rows = [
            torch.empty(
                (hidden.numel(), p.head_num, p.head_dim // p.slots_per_row),
                dtype=p.dtype or p.buffer.dtype,
            )
            for p in self.pool.planes
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
        assert self.pool is not None
        extra = list(zip(self.pool.planes, rows, strict=True))[layer.kv_planes :]
        for plane, row in extra:
            self.pool.set_plane_buffer(plane.name, layer, batch.out_cache_loc, row)

    def _sample(self, out: torch.Tensor) -> torch.Tensor:
        next_token_ids = torch.empty_like(out)
        self.runtime.launch(
            "sample",
            lambda: torch.remainder(out, self.config.vocab_size, out=next_token_ids),
            writes=[Region(next_token_ids, 0, 0, range(out.numel()))],
        )
        return next_token_ids
