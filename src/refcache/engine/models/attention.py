"""``RadixAttention`` and its backend: write the new KV rows of a layer, then read the prefix.

The page table is read from ``req_to_token`` by :meth:`AttentionBackend.init_forward_metadata`, on
the stream of the forward, before its first layer. Rows are written on the schedule stream, which
therefore waits for :attr:`ForwardMetadata.rows_read`. (SGLang has no such wait: a row that is
reused, or pointed at the tree's slots, before the forward gets to it is read too late.)

What a layer computes from the rows is the model's: it subclasses :class:`RadixAttention`. Which
rows it reads beside the new ones is the model's read plan.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from refcache.engine.models.content import Cells, ReadPlan
from refcache.engine.schedule_batch import ModelWorkerBatch
from refcache.errors import InvalidArgument
from refcache.runtime import Event, Region, Runtime


@dataclass
class ForwardMetadata:
    """The page table of one forward: the slots of the cells it reads, filled by a launch.

    Attributes:
        batch: whose it is.
        pages: integer ``[n]`` each; ``cells[i]`` says whose ``pages[i]`` are.
        newest: the slots of the batch's new tokens; ``last``: int64 ``[batch]``, the last of each
            request's.
        swa_pages: the same slots as slots of the window's pool (0: none any more), of a pool with
            layers that have a window.
        rows_read: behind the reading of request rows; None when none are read.
    """

    batch: ModelWorkerBatch
    cells: list[Cells]
    newest: torch.Tensor
    last: torch.Tensor
    pages: list[torch.Tensor] = field(default_factory=list)
    swa_pages: list[torch.Tensor] = field(default_factory=list)
    rows_read: Event | None = None

    def slots(self) -> torch.Tensor:
        return torch.cat([self.newest, *self.pages])

    def swa_slots(self) -> torch.Tensor:
        return torch.cat(self.swa_pages)

    def pages_of(self, layer: "RadixAttention") -> list[torch.Tensor]:
        """The slots in the pool that has this layer."""
        return self.pages if layer.window is None else self.swa_pages


class AttentionBackend:
    """Reads and writes the device pool for every layer; ``plan``: which rows a forward reads."""

    def __init__(
        self, req_to_token_pool: Any, token_to_kv_pool: Any, plan: ReadPlan, runtime: Runtime
    ) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool = token_to_kv_pool
        self.plan = plan
        self.runtime = runtime
        self.forward_metadata: ForwardMetadata | None = None

    def init_forward_metadata(self, forward_batch: ModelWorkerBatch) -> None:
        """Launch the reading of the page table on the current stream."""
        table = self.req_to_token_pool.req_to_token
        last = forward_batch.out_cache_loc
        if forward_batch.forward_mode.is_extend():
            last = last[torch.tensor(forward_batch.extend_seq_lens).cumsum(0) - 1]
        metadata = ForwardMetadata(
            forward_batch, self.plan(forward_batch), forward_batch.out_cache_loc, last
        )
        self.forward_metadata = metadata
        if not metadata.cells:
            return
        to_swa = getattr(self.token_to_kv_pool, "full_to_swa_index_mapping", None)

        def run() -> None:
            for rows, columns in metadata.cells:
                slots = table[rows, columns]
                metadata.pages.append(slots if isinstance(rows, torch.Tensor) else slots.clone())
            if to_swa is not None:
                metadata.swa_pages.extend(to_swa[slots] for slots in metadata.pages)

        self.runtime.launch(
            "page_table",
            run,
            reads=[Region(self.req_to_token_pool, 0, 0, forward_batch.req_pool_indices)],
            writes=[Region(metadata, 0, 0, 0)],
        )
        metadata.rows_read = self.runtime.current_stream().record_event()

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: "RadixAttention",
        forward_batch: ModelWorkerBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Write the batch's rows of ``layer`` (unless ``save_kv_cache`` is False), then attend.

        Raises:
            InvalidArgument: :meth:`init_forward_metadata` was not called for this batch.
        """
        self._metadata_of(forward_batch)
        if save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        if forward_batch.forward_mode.is_decode():
            return self.forward_decode(q, layer, forward_batch)
        return self.forward_extend(q, layer, forward_batch)

    def forward_extend(
        self, q: torch.Tensor, layer: "RadixAttention", forward_batch: ModelWorkerBatch
    ) -> torch.Tensor:
        """Several new tokens a request."""
        return self._attend(q, layer, forward_batch, forward_batch.extend_seq_lens)

    def forward_decode(
        self, q: torch.Tensor, layer: "RadixAttention", forward_batch: ModelWorkerBatch
    ) -> torch.Tensor:
        """One new token a request."""
        return self._attend(q, layer, forward_batch, [1] * len(forward_batch.reqs))

    def _metadata_of(self, batch: ModelWorkerBatch) -> ForwardMetadata:
        metadata = self.forward_metadata
        if metadata is None or metadata.batch is not batch:
            seen = "no" if metadata is None else "another batch's"
            raise InvalidArgument(
                f"{seen} forward metadata for a batch of {batch.rids}: expected "
                "init_forward_metadata to be called for it first"
            )
        return metadata

    def _attend(
        self, q: torch.Tensor, layer: "RadixAttention", batch: ModelWorkerBatch, new: list[int]
    ) -> torch.Tensor:
        pool, metadata = self.token_to_kv_pool, self._metadata_of(batch)
        kv = pool.get_kv_buffer(layer.layer_id)
        inner, layer_id = pool.pool_of(layer.layer_id)
        buffers = (*kv, *inner.extra_buffers(layer_id))
        out = layer.empty_output(batch)
        self.runtime.launch(
            "attention",
            lambda: layer.attend(q, buffers, metadata, batch, new, out),
            reads=[
                Region(metadata, 0, 0, 0),
                *inner.regions_of(
                    layer_id, metadata.slots if layer.window is None else metadata.swa_slots
                ),
            ],
        )
        return out


class RadixAttention(ABC):
    """One attention layer of a model. ``window``: how many tokens it sees; None: all."""

    def __init__(self, layer_id: int, window: int | None = None) -> None:
        self.layer_id = layer_id
        self.window = window

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        forward_batch: ModelWorkerBatch,
        backend: AttentionBackend,
    ) -> torch.Tensor:
        """Write K and V rows ``[tokens, heads, dim]`` and attend; see :meth:`empty_output`.

        All tensors, the result too, are filled by launches on the current stream.
        """
        return backend.forward(q, k, v, self, forward_batch)

    @abstractmethod
    def empty_output(self, batch: ModelWorkerBatch) -> torch.Tensor:
        """What :meth:`attend` fills."""

    @abstractmethod
    def attend(
        self,
        q: torch.Tensor,
        buffers: Sequence[torch.Tensor],
        metadata: ForwardMetadata,
        batch: ModelWorkerBatch,
        new: list[int],
        out: torch.Tensor,
    ) -> None:
        """Read the rows and fill ``out``. Runs inside a launch.

        Args:
            q: what the model passed to :meth:`forward`.
            buffers: what the pool's K and V getters gave, ``[slots, heads, dim]`` each, and its
                other planes.
            metadata: the page table, filled.
            new: how many tokens of each request are new in this forward.
        """
