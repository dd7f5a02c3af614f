"""``FutureMap``: tokens that the next batch takes as input before the host has seen them.

In the overlap loop a decode step is prepared while the forward that makes its input tokens is still
running. Its ``input_ids`` then hold *futures*: ``-i`` stands for entry ``i`` of a buffer on the
device. The forward that makes a token stores it there; the next forward, later on the same stream,
resolves the future.

Entry ``row + 1`` belongs to the request in that row of ``req_to_token``: a request needs only its
newest token. (SGLang uses a ring, which overwrites the future of a running request when enough
short requests are prefilled before its next decode.)
"""

from dataclasses import dataclass

import torch

from refcache.engine.schedule_batch import ModelWorkerBatch
from refcache.engine.tp_worker import GenerationBatchResult
from refcache.runtime import Region, Runtime


@dataclass(frozen=True)
class FutureIndices:
    """``indices``: int64 ``[bs]``, 1 or more: the entries of a batch's next tokens."""

    indices: torch.Tensor


class FutureMap:
    """See the module docstring. ``token_ids_buf``: int64 ``[max_running_requests + 1]``."""

    def __init__(self, max_running_requests: int, device: str, runtime: Runtime) -> None:
        self.runtime = runtime
        self.token_ids_buf = torch.zeros(max_running_requests + 1, dtype=torch.int64, device=device)

    def future_indices(self, req_pool_indices: torch.Tensor) -> FutureIndices:
        """The entries of the requests in these rows; their negatives are the futures."""
        return FutureIndices(req_pool_indices + 1)

    def store_to_map(
        self, future_indices: FutureIndices, batch_result: GenerationBatchResult
    ) -> None:
        """Launch the store of the tokens that a forward makes."""
        entries, next_token_ids = future_indices.indices, batch_result.sampled()

        def run() -> None:
            self.token_ids_buf[entries] = next_token_ids

        self.runtime.launch(
            "store_to_map",
            run,
            reads=[Region(next_token_ids, 0, 0, range(entries.numel()))],
            writes=[Region(self.token_ids_buf, 0, 0, entries)],
        )

    def resolve_future(self, model_worker_batch: ModelWorkerBatch) -> None:
        """Launch the replacement of the batch's futures; its ``input_ids`` is a new tensor then.

        An extend has none. Every input of a decode in the overlap loop is one.
        """
        if not model_worker_batch.forward_mode.is_decode():
            return
        entries = -model_worker_batch.input_ids
        resolved = torch.empty_like(entries)

        def run() -> None:
            torch.index_select(self.token_ids_buf, 0, entries, out=resolved)

        self.runtime.launch(
            "resolve_future",
            run,
            reads=[Region(self.token_ids_buf, 0, 0, entries)],
            writes=[Region(resolved, 0, 0, range(resolved.numel()))],
        )
        model_worker_batch.input_ids = resolved
