"""``LinearBlock``: a recurrent layer of the small transformer, whose state stands for the prefix.

The state of a request is a short window of a convolution and an outer-product memory
(:func:`~refcache.engine.models.transformer_math.recur`). The recurrence runs token by token, in one
order, so a state taken anywhere on the way, and gone on from, gives the bits of the whole run.

A forward reads the running state of each request, runs its new tokens, writes it back, and leaves a
snapshot on the way where the batch asks for one (``ModelWorkerBatch.mamba_track``).
"""

from collections.abc import Callable
from typing import Any

import torch

from refcache.engine.model_config import ModelConfig
from refcache.engine.models.transformer_math import feed_forward, linear, recur, rms_norm
from refcache.engine.schedule_batch import ModelWorkerBatch
from refcache.pool import BaseLinearStateParams, Mamba2StateDType, StateShape
from refcache.runtime import Region

WINDOW = 2  # tokens before its own that the convolution sees


def state_params(layers: tuple[int, ...], heads: int, dim: int) -> BaseLinearStateParams:
    """What ``ModelConfig.mamba2_cache_params`` must be for these layers: all float64."""
    shape = StateShape([(3 * heads * dim, WINDOW)], (heads, dim, dim))
    kinds = Mamba2StateDType(conv=torch.float64, temporal=torch.float64)
    return BaseLinearStateParams(shape=shape, layers=layers, dtype=kinds)


class LinearBlock:
    """One layer; see the module docstring.

    Attributes:
        rows: the :class:`~refcache.pool.HybridReqToTokenPool`.
    """

    def __init__(
        self,
        layer_id: int,
        draw: Callable[..., torch.Tensor],
        config: ModelConfig,
        heads: int,
        rows: Any,
    ) -> None:
        self.layer_id, self.heads, self.rows = layer_id, heads, rows
        hidden = heads * config.head_dim
        self.w_in = draw(3 * hidden, hidden)
        self.taps = draw(1 + WINDOW, 3 * hidden)
        self.w_out = draw(hidden, hidden)
        self.w_up = draw(2 * hidden, hidden)
        self.w_down = draw(hidden, 2 * hidden)

    def finish(self, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The layer's result from its input and what the recurrence gave."""
        return feed_forward(hidden, out.flatten(1), self.w_out, self.w_up, self.w_down)

    def whole(
        self, hidden: torch.Tensor, table: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The layer's result for a whole sequence, from an empty state."""
        dim = hidden.shape[1] // self.heads
        conv = hidden.new_zeros((len(self.w_in), WINDOW))
        temporal = hidden.new_zeros((self.heads, dim, dim))
        out = []
        for u in linear(rms_norm(hidden), self.w_in):
            one, conv, temporal = recur(u, self.taps, self.heads, conv, temporal)
            out.append(one)
        return self.finish(hidden, torch.stack(out))

    def run(
        self,
        hidden: torch.Tensor,
        table: torch.Tensor,
        positions: torch.Tensor,
        batch: ModelWorkerBatch,
        backend: Any,
    ) -> torch.Tensor:
        """Launch the layer; its result, filled by a launch."""
        state = self.rows.mamba2_layer_cache(self.layer_id)
        conv, temporal = state.conv[0], state.temporal
        result = torch.empty_like(hidden)
        assert batch.mamba_indices is not None
        slots, tracks = batch.mamba_indices, list(batch.mamba_track)
        ends, counts = batch.seq_lens_cpu.tolist(), batch.extend_seq_lens or [1] * len(slots)

        def run() -> None:
            inputs, out = linear(rms_norm(hidden), self.w_in), []
            row = 0
            for slot, end, count, track in zip(slots.tolist(), ends, counts, tracks, strict=True):
                window, memory = conv[slot], temporal[slot]
                for position in range(end - count, end):
                    one, window, memory = recur(inputs[row], self.taps, self.heads, window, memory)
                    out.append(one)
                    row += 1
                    if track is not None and track[0] == position + 1:
                        conv[track[1]], temporal[track[1]] = window, memory
                conv[slot], temporal[slot] = window, memory
            result.copy_(self.finish(hidden, torch.stack(out)))

        pool, index = self.rows.mamba_pool, self.rows.mamba_map[self.layer_id]
        written = torch.tensor([*slots.tolist(), *(t[1] for t in tracks if t is not None)])
        regions = [Region(pool, plane, index, written) for plane in range(len(pool.planes))]
        backend.runtime.launch("recurrence", run, reads=regions, writes=regions)
        return result
