"""``RadixAttention`` and its backend: write the new KV rows of a layer, then read the prefix.

The page table is read from ``req_to_token`` by :meth:`AttentionBackend.init_forward_metadata`,
which the scheduler calls on the stream that writes those rows. (SGLang builds it on the forward
stream: then a row that is reused, or pointed at the tree's slots, while the last forward is still
running may be read too late.)

The "attention" here returns what the newest token's K row holds, and gives every row of the read
plan to the :class:`~refcache.engine.content.RowCheck`.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from refcache.engine.content import Cells, RowCheck, TagLedger
from refcache.engine.schedule_batch import ModelWorkerBatch
from refcache.runtime import Region, Runtime
from refcache.tags import kv_row


def words_of(rows: torch.Tensor) -> torch.Tensor:
    """KV rows ``[n, heads, dim]`` of any dtype as 64-bit words ``[n, width]``, a view."""
    return rows.flatten(1).view(torch.int64)


@dataclass
class ForwardMetadata:
    """The page table of one forward: the slots of the cells it reads, filled by a launch.

    ``newest`` and each of ``pages`` are integer ``[n]``; ``cells[i]`` says whose ``pages[i]`` are.
    """

    cells: list[Cells]
    newest: torch.Tensor
    pages: list[torch.Tensor] = field(default_factory=list)

    def slots(self) -> torch.Tensor:
        return torch.cat([self.newest, *self.pages])


class AttentionBackend:
    """Reads and writes the device pool for every layer."""

    def __init__(
        self,
        req_to_token_pool: Any,
        token_to_kv_pool: Any,
        ledger: TagLedger,
        check: RowCheck,
        runtime: Runtime,
    ) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool = token_to_kv_pool
        self.ledger = ledger
        self.check = check
        self.runtime = runtime
        self.forward_metadata: ForwardMetadata

    def init_forward_metadata(self, batch: ModelWorkerBatch) -> None:
        """Launch the reading of the page table on the current stream."""
        table = self.req_to_token_pool.req_to_token
        metadata = ForwardMetadata(self.check.plan(batch), batch.out_cache_loc)
        self.forward_metadata = metadata
        if not metadata.cells:
            return

        def run() -> None:
            metadata.pages.extend(table[c.rows, c.columns].clone() for c in metadata.cells)

        self.runtime.launch(
            "page_table",
            run,
            reads=[Region(self.req_to_token_pool, 0, 0, batch.req_pool_indices)],
            writes=[Region(metadata, 0, 0, 0)],
        )

    def forward(
        self, k: torch.Tensor, v: torch.Tensor, layer: "RadixAttention", batch: ModelWorkerBatch
    ) -> torch.Tensor:
        """Write the batch's rows of ``layer``, then attend."""
        self.token_to_kv_pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
        if batch.forward_mode.is_decode():
            return self.forward_decode(layer, batch)
        return self.forward_extend(layer, batch)

    def forward_extend(self, layer: "RadixAttention", batch: ModelWorkerBatch) -> torch.Tensor:
        """Several new tokens a request; the newest is the last of each."""
        last = torch.tensor(batch.extend_seq_lens).cumsum(0) - 1
        return self._attend(layer, batch, batch.out_cache_loc[last])

    def forward_decode(self, layer: "RadixAttention", batch: ModelWorkerBatch) -> torch.Tensor:
        """One new token a request."""
        return self._attend(layer, batch, batch.out_cache_loc)

    def _attend(
        self, layer: "RadixAttention", batch: ModelWorkerBatch, newest: torch.Tensor
    ) -> torch.Tensor:
        metadata = self.forward_metadata
        buffers = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)[: len(layer.codes)]
        words = [words_of(buffer) for buffer in buffers]
        out = torch.empty_like(batch.seq_lens)

        def run() -> None:
            torch.sub(words[0][newest, 0], layer.codes[0][0], out=out)
            for cells, slots in zip(metadata.cells, metadata.pages, strict=True):
                for plane, code in enumerate(layer.codes):
                    self.check.compare(
                        self.ledger, batch, cells, slots, words[plane], code, layer.layer_id, plane
                    )

        pool = self.token_to_kv_pool
        self.runtime.launch(
            "attention",
            run,
            reads=[
                Region(metadata, 0, 0, 0),
                *(pool.region(p, layer.layer_id, metadata.slots) for p in range(len(words))),
            ],
        )
        return out


class RadixAttention:
    """One attention layer.

    Attributes:
        codes: for each plane int64 ``[width]``: what its words add to a token's tag.
    """

    def __init__(self, layer_id: int, widths: list[int]) -> None:
        """``widths``: words of a row in each plane."""
        self.layer_id = layer_id
        zero = torch.zeros(1, dtype=torch.int64)
        self.codes = [kv_row(zero, layer_id, p, width)[0] for p, width in enumerate(widths)]

    def forward(
        self, k: torch.Tensor, v: torch.Tensor, batch: ModelWorkerBatch, backend: AttentionBackend
    ) -> torch.Tensor:
        """int64 ``[batch]``: the tag that the newest K row of each request holds."""
        return backend.forward(k, v, self, batch)
