"""The arithmetic of :mod:`refcache.engine.models.transformer`: row functions that do not see the
batch.

A row is one token. What is computed for it must be the same bits whatever rows it shares a forward
with, however its prompt was cut, and wherever its prefix's rows lie. Library sums and products do
not promise that: they choose an order of summation by the shape. Here

* sums run from left to right (:func:`left_sum`);
* everything else is one correctly rounded operation an element (+, -, *, /, max), which is the same
  bits in a vector register and out of it; products and sums are separate calls, never contracted;
* ``exp``, ``sqrt``, ``sin`` and ``cos`` are the C library's, one number at a time.

All tensors are float64.
"""

import math

import torch

EPS = 1e-6
DECAY = 0.75  # of a recurrent state, a token


def left_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension (not empty), from left to right.

    >>> left_sum(torch.tensor([1.0, 1e100, 1.0, -1e100], dtype=torch.float64)).item()
    0.0
    """
    return x.cumsum(-1)[..., -1]


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``[..., in]`` times ``[out, in]``: ``[..., out]``."""
    return left_sum(x.unsqueeze(-2) * weight)


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    """Each row ``[..., dim]`` divided by its root mean square."""
    mean = left_sum(x * x) / x.shape[-1] + EPS
    return x / mean.apply_(math.sqrt).unsqueeze(-1)


def rope_table(positions: int, dim: int) -> torch.Tensor:
    """Cosines and sines of rotary position embedding, ``[2, positions, dim // 2]``."""
    angles = [[p / 10000 ** (2 * i / dim) for i in range(dim // 2)] for p in range(positions)]
    table = [[[f(a) for a in row] for row in angles] for f in (math.cos, math.sin)]
    return torch.tensor(table, dtype=torch.float64)


def rope(x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs of ``x`` ``[n, heads, dim]`` by their tokens' positions, int64 ``[n]``."""
    cos, sin = table[:, positions].unsqueeze(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax attention of one token over the rows it sees.

    Args:
        q: ``[heads, dim]``.
        k, v: ``[n, kv_heads, dim]``, ``[n, kv_heads, v_dim]``, in the order of positions, the
            token itself last. ``heads / kv_heads`` consecutive heads share a KV head.

    Returns:
        ``[heads, v_dim]``.
    """
    q = q.reshape(k.shape[1], -1, 1, q.shape[1])  # [kv_heads, group, 1, dim]
    k = k.transpose(0, 1)[:, None]  # [kv_heads, 1, n, dim]
    v = v.permute(1, 2, 0)[:, None]  # [kv_heads, 1, v_dim, n]
    scores = left_sum(q * k) * scale
    weights = (scores - scores.amax(-1, keepdim=True)).apply_(math.exp)
    weights = weights / left_sum(weights)[..., None]
    return left_sum(weights[:, :, None] * v).flatten(0, 1)


def feed_forward(
    hidden: torch.Tensor,
    values: torch.Tensor,
    w_out: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
) -> torch.Tensor:
    """A layer's result ``[n, hidden]``: what its heads gave is added, then a small network's."""
    hidden = hidden + linear(values, w_out)
    return hidden + linear(linear(rms_norm(hidden), w_up).clamp(min=0), w_down)


def recur(
    u: torch.Tensor, taps: torch.Tensor, heads: int, conv: torch.Tensor, temporal: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token of linear attention: a short convolution, then an outer product into the state.

    Args:
        u: ``[channels]``, what the token brings: q, k and v of all heads, side by side.
        taps: ``[1 + window, channels]``, the convolution, the token's own first.
        conv: ``[channels, window]``, what the tokens before brought, the last one first.
        temporal: ``[heads, K, V]``, the recurrence.

    Returns:
        The heads' output ``[heads, V]``, and ``conv`` and ``temporal`` after this token.
    """
    seen = torch.cat([u[:, None], conv], dim=1)
    mixed = left_sum(seen * taps.T).reshape(heads, -1)
    dim = temporal.shape[1]
    q, k, v = mixed[:, :dim], mixed[:, dim : 2 * dim], mixed[:, 2 * dim :]
    written = k[:, :, None] * v[:, None, :]
    temporal = temporal * DECAY + written
    return left_sum(q[:, None, :] * temporal.transpose(1, 2)), seen[:, :-1], temporal
