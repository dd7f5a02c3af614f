"""``StateTags``: a recurrent layer of the stand-in model; its states say which tokens they are of.

Every word of a state is the tag of the last token that was folded into it, plus a constant of
(layer, tensor, word), so a state is of exactly one prefix of one namespace. A forward compares the
running state of each request with the token before its new ones (a new request's is all zero),
writes it, and leaves snapshots where the batch asks for them.
"""

from typing import Any

import torch

from refcache.engine.models.content import RowCheck, TagLedger, WrongContent
from refcache.engine.schedule_batch import ModelWorkerBatch
from refcache.runtime import Region, Runtime
from refcache.tags import kv_row


class StateTags:
    """See the module docstring. ``rows``: the :class:`~refcache.pool.HybridReqToTokenPool`, whose
    states are int64."""

    def __init__(self, layer_id: int, rows: Any, ledger: TagLedger, check: RowCheck) -> None:
        self.layer_id, self.rows, self.ledger, self.check = layer_id, rows, ledger, check
        self.index = rows.mamba_map[layer_id]
        zero = torch.zeros(1, dtype=torch.int64)
        self.codes = [
            kv_row(zero, layer_id, plane, each.buffer[0, 0].numel())[0]
            for plane, each in enumerate(rows.mamba_pool.planes)
        ]

    def run(self, batch: ModelWorkerBatch, runtime: Runtime) -> None:
        """Launch the layer."""
        self.rows.mamba2_layer_cache(self.layer_id)  # waits
        pool = self.rows.mamba_pool
        assert batch.mamba_indices is not None
        slots, tracks = batch.mamba_indices, list(batch.mamba_track)
        news = [(i, *track) for i, track in enumerate(tracks) if track is not None]
        touched = torch.cat([slots, torch.tensor([slot for *_, slot in news], dtype=torch.int64)])

        def run() -> None:
            rows, ends = batch.req_pool_indices, batch.seq_lens_cpu
            counts = torch.tensor(batch.extend_seq_lens or [1] * len(rows))
            before = ends - counts
            tags = self.ledger.tags[rows, (before - 1).clamp(min=0)]
            for number, code in enumerate(self.codes):
                states = pool.planes[number].buffer[self.index].flatten(1)
                found = states[slots]
                expected = torch.where((before > 0)[:, None], tags[:, None] + code, 0)
                self.check.rows_checked += len(slots)
                if not torch.equal(found, expected):
                    self._report(batch, number, found, expected, before)
                states[slots] = self.ledger.tags[rows, ends - 1][:, None] + code
                for i, seqlen, slot in news:
                    states[slot] = self.ledger.tags[rows[i], seqlen - 1] + code

        regions = [Region(pool, plane, self.index, touched) for plane in range(len(pool.planes))]
        runtime.launch("state tags", run, reads=regions, writes=regions)

    def _report(
        self,
        batch: ModelWorkerBatch,
        plane: int,
        found: torch.Tensor,
        expected: torch.Tensor,
        before: torch.Tensor,
    ) -> None:
        """Say of how many tokens the first wrong state is."""
        i, column = (found != expected).nonzero()[0].tolist()
        tokens, row, seen = int(before[i]), batch.rows[i], int(found[i, column])
        tags = self.ledger.tags[row, : int(batch.seq_lens_cpu[i])] + self.codes[plane][column]
        of = (tags == seen).nonzero().flatten().tolist()
        text = f"a state of {of[0] + 1} tokens" if of else "a state of another prefix"
        if seen == 0:
            text = "an empty state"
        assert batch.mamba_indices is not None
        self.check.on_wrong(
            WrongContent(
                rid=batch.rids[i],
                row=row,
                position=tokens - 1,
                slot=int(batch.mamba_indices[i]),
                layer=self.layer_id,
                plane=plane,
                column=column,
                found=seen,
                expected=int(expected[i, column]),
                explanation=f"{text}, beside KV of {tokens}",
            )
        )
