"""``TpModelWorker``: what the scheduler talks to; one rank's runner and the result of a forward."""

from typing import Any

import torch

from refcache.engine.model_runner import ModelRunner
from refcache.engine.schedule_batch import ModelWorkerBatch
from refcache.runtime import Event, Region, Runtime


class GenerationBatchResult:
    """The next tokens, int64 ``[batch]``: on the device, and on the host after ``copy_done``."""

    def __init__(self, next_token_ids: torch.Tensor) -> None:
        self.next_token_ids = next_token_ids
        self.copy_done: Event | None = None

    def copy_to_cpu(self, runtime: Runtime) -> None:
        """Launch the copy to the host on the current stream, and record ``copy_done`` after it."""
        on_host = torch.empty_like(self.next_token_ids, device="cpu")
        runtime.d2h(on_host, self.next_token_ids, pinned=True)
        self.next_token_ids = on_host
        self.copy_done = runtime.Event()
        self.copy_done.record()

    def tokens(self, runtime: Runtime) -> list[int]:
        """The tokens; the host waits for them."""
        if self.copy_done is not None:
            self.copy_done.synchronize()
        else:
            runtime.host_sync()
        tokens: list[int] = []
        runtime.host_access(
            "read_tokens",
            lambda: tokens.extend(self.next_token_ids.tolist()),
            reads=[Region(self.next_token_ids, 0, 0, range(self.next_token_ids.numel()))],
        )
        return tokens


class TpModelWorker:
    """Runs batches on one rank's :class:`ModelRunner`."""

    def __init__(self, model_runner: ModelRunner) -> None:
        self.model_runner = model_runner
        self.hicache_layer_transfer_counter: Any = None

    def register_hicache_layer_transfer_counter(self, counter: Any) -> None:
        """``counter`` is told which load each batch consumes (``set_consumer``)."""
        self.hicache_layer_transfer_counter = counter

    def set_hicache_consumer(self, consumer_index: int) -> None:
        """The batch about to run reads what load ``consumer_index`` brings (-1: nothing)."""
        if self.hicache_layer_transfer_counter is not None:
            self.hicache_layer_transfer_counter.set_consumer(consumer_index)

    def forward_batch_generation(self, batch: ModelWorkerBatch) -> GenerationBatchResult:
        """Issue the forward of ``batch`` on the current stream."""
        self.set_hicache_consumer(batch.hicache_consumer_index)
        return GenerationBatchResult(self.model_runner.forward(batch))
