"""``Transformer``: a small decoder-only model whose logits show every wrong bit of its KV cache.

Where :class:`~refcache.engine.models.model.TagModel` says which row is wrong, this model says
whether that
matters: with any cache the logits must be *bitwise* those of :meth:`Transformer.recompute`, which
knows tokens only. It is a real model (RMS norm, rotary positions, grouped-query or multi-head
latent attention over the page table, in some layers over a sliding window only, or a recurrent
layer instead, :mod:`refcache.engine.models.linear_attention`; a feed-forward part, greedy sampling)
with random weights, in
the float64 arithmetic of :mod:`refcache.engine.models.transformer_math`, which no batch can change.

A namespace (``extra_key``) moves the embeddings, as a LoRA adapter would: requests of two
namespaces share no KV, and logits show it if they do.

Left out: trained weights, quantised KV, tensor parallel ranks.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from refcache.engine.model_config import ModelConfig
from refcache.engine.models.attention import AttentionBackend, ForwardMetadata, RadixAttention
from refcache.engine.models.content import read_every_row
from refcache.engine.models.linear_attention import LinearBlock
from refcache.engine.models.transformer_math import (
    attend,
    feed_forward,
    linear,
    rms_norm,
    rope,
    rope_table,
)
from refcache.engine.schedule_batch import ModelWorkerBatch
from refcache.errors import InvalidArgument
from refcache.pool import KVCache
from refcache.runtime import Region, Runtime
from refcache.tags import as_tensor, namespace_tag

if TYPE_CHECKING:
    from refcache.engine.model_runner_kv_cache_mixin import ModelRunnerKVCacheMixin

Draw = Callable[..., torch.Tensor]
OnLogits = Callable[[ModelWorkerBatch, torch.Tensor], None]
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Block(RadixAttention):
    """One layer. Subclasses say how a row becomes q, k and v; all else is common.

    Attributes:
        shapes: of q, k, v and the attention's output, without the leading ``tokens``.
    """

    shapes: tuple[tuple[int, int], ...]
    out_shape: tuple[int, int]
    scale: float

    def __init__(
        self, layer_id: int, draw: Draw, hidden: int, values: int, window: int | None = None
    ) -> None:
        super().__init__(layer_id, window)
        self.w_out = draw(hidden, values)
        self.w_up = draw(2 * hidden, hidden)
        self.w_down = draw(hidden, 2 * hidden)

    @abstractmethod
    def project(self, x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> QKV:
        """q, k and v of the rows ``x`` ``[n, hidden]``; k and v are what the pool keeps."""

    def values(self, out: torch.Tensor) -> torch.Tensor:
        """What the heads give, ``[n, values]``."""
        return out.flatten(1)

    def finish(self, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The layer's result, ``[n, hidden]``, from its input and its attention's output."""
        return feed_forward(hidden, self.values(out), self.w_out, self.w_up, self.w_down)

    def whole(
        self, hidden: torch.Tensor, table: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The layer's result for a whole sequence, from nothing but its input."""
        q, k, v = self.project(hidden, table, positions)
        rows = range(len(hidden))
        starts = [0 if self.window is None else max(0, i + 1 - self.window) for i in rows]
        out = [
            attend(q[i], k[first : i + 1], v[first : i + 1], self.scale)
            for i, first in zip(rows, starts, strict=True)
        ]
        return self.finish(hidden, torch.stack(out))

    def run(
        self,
        hidden: torch.Tensor,
        table: torch.Tensor,
        positions: torch.Tensor,
        batch: ModelWorkerBatch,
        backend: AttentionBackend,
    ) -> torch.Tensor:
        """Launch the layer; its result, filled by a launch."""
        q, k, v = (torch.empty((len(hidden), *one), dtype=torch.float64) for one in self.shapes)

        def project() -> None:
            for rows, result in zip((q, k, v), self.project(hidden, table, positions), strict=True):
                rows.copy_(result)

        backend.runtime.launch("qkv", project)
        out = self.forward(q, k, v, batch, backend)
        result = torch.empty_like(hidden)
        backend.runtime.launch("finish", lambda: result.copy_(self.finish(hidden, out)))
        return result

    def empty_output(self, batch: ModelWorkerBatch) -> torch.Tensor:
        return torch.empty((len(batch.input_ids), *self.out_shape), dtype=torch.float64)

    def attend(
        self,
        q: torch.Tensor,
        buffers: Sequence[torch.Tensor],
        metadata: ForwardMetadata,
        batch: ModelWorkerBatch,
        new: list[int],
        out: torch.Tensor,
    ) -> None:
        """Every new token, over the rows of its request up to itself, or the last of them."""
        keys, values = buffers[:2]
        row = 0
        for slots, count in zip(metadata.pages_of(self), new, strict=True):
            k, v = keys[slots], values[slots]
            for end in range(len(slots) - count + 1, len(slots) + 1):
                first = 0 if self.window is None else max(0, end - self.window)
                out[row] = attend(q[row], k[first:end], v[first:end], self.scale)
                row += 1


class GroupedQueryBlock(Block):
    """``heads`` query heads over the config's KV heads."""

    def __init__(self, layer_id: int, draw: Draw, config: ModelConfig, heads: int) -> None:
        dim, kv_heads = config.head_dim, config.num_key_value_heads
        v_dim = dim if config.v_head_dim is None else config.v_head_dim
        hidden = heads * dim
        window = config.sliding_window_size if layer_id in config.swa_attention_layer_ids else None
        super().__init__(layer_id, draw, hidden, heads * v_dim, window)
        self.shapes = (heads, dim), (kv_heads, dim), (kv_heads, v_dim)
        self.out_shape = heads, v_dim
        self.scale = 1 / math.sqrt(dim)
        self.weights = [draw(h * d, hidden) for h, d in self.shapes]

    def project(self, x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> QKV:
        x = rms_norm(x)
        q, k, v = (
            linear(x, weight).reshape(-1, *shape)
            for weight, shape in zip(self.weights, self.shapes, strict=True)
        )
        return rope(q, table, positions), rope(k, table, positions), v


class LatentBlock(Block):
    """Multi-head latent attention in its absorbed form: one KV row for all heads.

    The row is a latent, from which keys and values of each head could be unfolded, and a rotary
    key. Instead the query is folded into the latent space, and the value unfolded after attention.
    """

    def __init__(self, layer_id: int, draw: Draw, config: ModelConfig, heads: int) -> None:
        rank, rotary, dim = config.kv_lora_rank, config.qk_rope_head_dim, config.head_dim
        v_dim = dim if config.v_head_dim is None else config.v_head_dim
        hidden = heads * dim
        super().__init__(layer_id, draw, hidden, heads * v_dim)
        self.shapes = (heads, rank + rotary), (1, rank + rotary), (1, rank)
        self.out_shape = heads, rank
        self.scale = 1 / math.sqrt(dim + rotary)
        self.query = heads, dim + rotary
        self.dim = dim
        self.w_query = draw(heads * (dim + rotary), hidden)
        self.w_latent = draw(rank, hidden)
        self.w_rotary = draw(rotary, hidden)
        self.w_fold = draw(heads, rank, dim)
        self.w_unfold = draw(heads, v_dim, rank)

    def project(self, x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> QKV:
        x = rms_norm(x)
        query = linear(x, self.w_query).reshape(-1, *self.query)
        plain, rotary = query[..., : self.dim], query[..., self.dim :]
        q = torch.cat([linear(plain, self.w_fold), rope(rotary, table, positions)], dim=-1)
        latent = rms_norm(linear(x, self.w_latent)).unsqueeze(1)
        key = rope(linear(x, self.w_rotary).unsqueeze(1), table, positions)
        return q, torch.cat([latent, key], dim=-1), latent

    def values(self, out: torch.Tensor) -> torch.Tensor:
        return linear(out, self.w_unfold).flatten(1)


class Transformer:
    """See the module docstring.

    Args:
        config: ``hidden`` is ``num_attention_heads * head_dim``.
        pool: a float64 pool of that shape.
        states: of a model with recurrent layers the pool of request rows, which has their states.
        positions: tokens of a request at most.
        num_attention_heads: a multiple of the config's KV heads (any number with MLA).
        seed: of the weights.
        on_logits: called inside the launch that has computed them, with the batch and its logits
            ``[batch, vocab]``, those of each request's last token.

    Raises:
        InvalidArgument: an odd rotary width, heads that do not divide, no pool, or another dtype.
    """

    plan = staticmethod(read_every_row)

    def __init__(
        self,
        config: ModelConfig,
        pool: KVCache | None,
        runtime: Runtime,
        positions: int,
        num_attention_heads: int,
        seed: int = 0,
        on_logits: OnLogits | None = None,
        states: Any = None,
    ) -> None:
        rotary = config.qk_rope_head_dim if config.is_mla else config.head_dim
        kv_heads = 1 if config.is_mla else config.num_key_value_heads
        if rotary < 2 or rotary % 2:
            raise InvalidArgument(f"rotary width {rotary}: expected an even number")
        if num_attention_heads < 1 or num_attention_heads % kv_heads:
            raise InvalidArgument(
                f"num_attention_heads={num_attention_heads}: expected a multiple of {kv_heads}"
            )
        if pool is None or pool.dtype != torch.float64:
            seen = "no KV" if pool is None else f"KV of {pool.dtype}"
            raise InvalidArgument(f"{seen}: expected a pool of torch.float64")
        self.config = config
        self.runtime = runtime
        self.on_logits = on_logits
        self.table = rope_table(positions, rotary)
        self.hidden = num_attention_heads * config.head_dim
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            weights = torch.randn(shape, generator=generator, dtype=torch.float64)
            return weights / math.sqrt(shape[-1])

        block = LatentBlock if config.is_mla else GroupedQueryBlock
        self.blocks: list[Any] = [
            LinearBlock(layer, draw, config, num_attention_heads, states)
            if layer in config.mamba_layer_ids
            else block(layer, draw, config, num_attention_heads)
            for layer in range(pool.start_layer, pool.start_layer + config.num_hidden_layers)
        ]
        self.embedding = draw(config.vocab_size, self.hidden)
        self.w_logits = draw(config.vocab_size, self.hidden)

    # ---- rows ----------------------------------------------------------------------------------

    def adapter(self, extra_key: str | None) -> torch.Tensor:
        """What a namespace adds to every embedding, ``[hidden]``."""
        if extra_key is None:
            return torch.zeros(self.hidden, dtype=torch.float64)
        generator = torch.Generator().manual_seed(namespace_tag(extra_key))
        return torch.randn(self.hidden, generator=generator, dtype=torch.float64)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[n, vocab]`` from the last layer's rows ``[n, hidden]``."""
        return linear(rms_norm(hidden), self.w_logits)

    def recompute(self, token_ids: Sequence[int], extra_key: str | None = None) -> torch.Tensor:
        """The logits after each token, ``[n, vocab]``, from the tokens alone: no pool, no pages."""
        ids = as_tensor(token_ids)
        positions = torch.arange(len(ids))
        hidden = self.embedding[ids] + self.adapter(extra_key)
        for block in self.blocks:
            hidden = block.whole(hidden, self.table, positions)
        return self.logits(hidden)

    # ---- launches ------------------------------------------------------------------------------

    def forward(self, batch: ModelWorkerBatch, backend: AttentionBackend) -> torch.Tensor:
        """Run every layer and pick the next tokens, int64 ``[batch]``."""
        new = batch.extend_seq_lens or [1] * len(batch.rows)
        ends = batch.seq_lens_cpu.tolist()
        positions = torch.cat([torch.arange(e - n, e) for e, n in zip(ends, new, strict=True)])
        counts = torch.tensor(new)
        hidden = self._embed(counts, batch)
        for block in self.blocks:
            hidden = block.run(hidden, self.table, positions, batch, backend)
        return self._sample(hidden, counts.cumsum(0) - 1, batch)

    def _embed(self, counts: torch.Tensor, batch: ModelWorkerBatch) -> torch.Tensor:
        adapters = torch.stack([self.adapter(key) for key in batch.extra_keys])
        adapters = adapters.repeat_interleave(counts, dim=0)
        hidden = torch.empty_like(adapters)
        self.runtime.launch(
            "embed",
            lambda: torch.add(self.embedding[batch.input_ids], adapters, out=hidden),
            reads=[Region(batch.input_ids, 0, 0, range(len(hidden)))],
        )
        return hidden

    def _sample(
        self, hidden: torch.Tensor, last: torch.Tensor, batch: ModelWorkerBatch
    ) -> torch.Tensor:
        next_token_ids = torch.empty_like(batch.seq_lens)

        def run() -> None:
            logits = self.logits(hidden[last])
            next_token_ids.copy_(logits.argmax(-1))
            if self.on_logits is not None:
                self.on_logits(batch, logits)

        self.runtime.launch(
            "sample", run, writes=[Region(next_token_ids, 0, 0, range(len(next_token_ids)))]
        )
        return next_token_ids


def make_transformer(
    runner: "ModelRunnerKVCacheMixin",
    num_attention_heads: int,
    seed: int = 0,
    on_logits: OnLogits | None = None,
    kind: type[Transformer] = Transformer,
) -> Transformer:
    """A transformer over the runner's pool; with ``functools.partial``, a ``make_model``."""
    return kind(
        runner.model_config,
        runner.token_to_kv_pool,
        runner.runtime,
        runner.req_to_token_pool.max_context_len,
        num_attention_heads,
        seed,
        on_logits,
        runner.req_to_token_pool,
    )
