"""``TpModelWorker``: what the scheduler talks to; one rank's runner and the result of a forward."""

from collections.abc import Callable
from typing import Any

import torch

from refcache.engine.model_runner import ModelRunner, NextTokens
from refcache.engine.schedule_batch import ModelWorkerBatch
from refcache.errors import InvalidArgument
from refcache.runtime import Event, Region, Runtime


class GenerationBatchResult:
    """What a forward made: on the device, and on the host after ``copy_done``.

    Attributes:
        next_token_ids: int64 ``[batch]``; None until a delayed sampling is launched.
        delay_sample_func: launches it; None: the forward has sampled.
        future_indices: where the tokens of a delayed sampling go; see
            :class:`~refcache.engine.future_map.FutureMap`.
        copy_done: recorded behind the copy to the host.
    """

    def __init__(self, next_tokens: NextTokens, runtime: Runtime) -> None:
        self.runtime = runtime
        self.next_token_ids: torch.Tensor | None = None
        self.delay_sample_func: Callable[[], torch.Tensor] | None = None
        if isinstance(next_tokens, torch.Tensor):
            self.next_token_ids = next_tokens
        else:
            self.delay_sample_func = next_tokens
        self.copy_done: Event | None = None
        self.future_indices: Any = None

    def sample(self) -> None:
        """Launch a sampling that was delayed, on the current stream."""
        if self.delay_sample_func is not None:
            self.next_token_ids = self.delay_sample_func()
            self.delay_sample_func = None

    def sampled(self) -> torch.Tensor:
        """The tokens, as a tensor; the host does not wait.

        Raises:
            InvalidArgument: they have not been sampled.
        """
        if self.next_token_ids is None:
            raise InvalidArgument(
                "tokens of a result that was not sampled: expected sample() first"
            )
        return self.next_token_ids

    def copy_to_cpu(self, return_logprob: bool = False) -> None:
        """Launch the copy to the host on the current stream, and record ``copy_done`` after it.

        Raises:
            InvalidArgument: ``return_logprob``: log probabilities are not modelled.
        """
        if return_logprob:
            raise InvalidArgument("copy_to_cpu(return_logprob=True): expected False")
        made = self.sampled()
        on_host = torch.empty_like(made, device="cpu")
        self.runtime.d2h(on_host, made, pinned=True)
        self.next_token_ids = on_host
        if self.copy_done is None:
            self.copy_done = self.runtime.Event()
        self.copy_done.record()

    def wait(self) -> None:
        """The host waits for the tokens."""
        if self.copy_done is not None:
            self.copy_done.synchronize()
        else:
            self.runtime.host_sync()

    def tokens(self) -> list[int]:
        """The tokens; the host waits for them."""
        self.wait()
        made = self.sampled()
        tokens: list[int] = []
        self.runtime.host_access(
            "read_tokens",
            lambda: tokens.extend(made.tolist()),
            reads=[Region(made, 0, 0, range(made.numel()))],
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

    def forward_batch_generation(
        self, model_worker_batch: ModelWorkerBatch
    ) -> GenerationBatchResult:
        """Issue the forward of ``batch`` on the current stream."""
        self.set_hicache_consumer(model_worker_batch.hicache_consumer_index)
        runner = self.model_runner
        return GenerationBatchResult(runner.forward(model_worker_batch), runner.runtime)
