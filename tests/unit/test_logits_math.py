"""The transformer's arithmetic: right, and the same bits for a row whatever it is computed with."""

import math
from functools import reduce
from itertools import accumulate

import pytest
import torch

from refcache.engine import ModelConfig
from refcache.engine.models.transformer import Transformer
from refcache.engine.models.transformer_math import (
    attend,
    left_sum,
    linear,
    rms_norm,
    rope,
    rope_table,
)
from refcache.errors import InvalidArgument
from refcache.pool import KVCache, MHATokenToKVPool, MLATokenToKVPool
from refcache.runtime.immediate import ImmediateRuntime

MHA = ModelConfig(2, 2, head_dim=4, v_head_dim=3, vocab_size=24, dtype=torch.float64)
MLA = ModelConfig(2, head_dim=2, kv_lora_rank=4, qk_rope_head_dim=2, vocab_size=24)
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def pool_of(config: ModelConfig, dtype: torch.dtype = torch.float64) -> KVCache:
    if config.is_mla:
        return MLATokenToKVPool(8, 1, dtype, config.kv_lora_rank, config.qk_rope_head_dim, 2, "cpu")
    heads, dim = config.num_key_value_heads, config.head_dim
    return MHATokenToKVPool(8, 1, dtype, heads, dim, 2, "cpu", v_head_dim=config.v_head_dim)


def transformer(config: ModelConfig, heads: int = 4, seed: int = 0) -> Transformer:
    return Transformer(config, pool_of(config), ImmediateRuntime(), 32, heads, seed)


@pytest.mark.parametrize("n", [1, 2, 7, 8, 31, 64, 1000])
def test_sums_run_from_left_to_right(n: int) -> None:
    rows = rand(3, n) * 10.0 ** rand(3, n, seed=1).mul(5).round()
    expected = [reduce(lambda a, b: a + b, row) for row in rows.tolist()]
    assert left_sum(rows).tolist() == expected
    across = rows.t().contiguous().t()  # another layout of the same numbers
    assert left_sum(across).tolist() == expected
    assert rows.cumsum(-1).tolist() == [list(accumulate(row)) for row in rows.tolist()]


def test_a_library_sum_would_not_do() -> None:
    """Why the module exists: the order of a plain sum depends on the shape around the row."""
    row = rand(1, 1000) * 10.0 ** rand(1, 1000, seed=1).mul(5)
    assert row.sum(-1).item() != left_sum(row).item()


@pytest.mark.parametrize("n", [1, 2, 5, 8, 17])
def test_rows_do_not_see_each_other(n: int) -> None:
    x, weight, table, positions = rand(n, 16), rand(24, 16, seed=1), rope_table(32, 8), 3
    at = torch.arange(positions, positions + n)
    heads = x.unflatten(1, (2, 8))
    for i in range(n):
        assert torch.equal(linear(x, weight)[i], linear(x[i : i + 1].clone(), weight)[0])
        assert torch.equal(rms_norm(x)[i], rms_norm(x[i : i + 1].clone())[0])
        alone = rope(heads[i : i + 1].clone(), table, at[i : i + 1])[0]
        assert torch.equal(rope(heads, table, at)[i], alone)


@pytest.mark.parametrize("n", [1, 2, 5, 33])
def test_attention_does_not_see_where_rows_lie(n: int) -> None:
    """From a scattered, strided pool, with rows of others around, or contiguous: the same bits."""
    q, k, v = rand(4, 6), rand(n, 2, 6, seed=1), rand(n, 2, 5, seed=2)
    pool = rand(80, 2, 11, seed=3)
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(n))[:n]
    pool[slots] = torch.cat([k, v], dim=-1)
    scattered = attend(q, pool[..., :6][slots], pool[..., 6:][slots], 0.4)
    assert torch.equal(attend(q, k, v, 0.4), scattered)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (6, 1), (3, 3)])
def test_attention_is_softmax_attention(heads: int, kv_heads: int) -> None:
    q, k, v = rand(heads, 6), rand(9, kv_heads, 6, seed=1), rand(9, kv_heads, 5, seed=2)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[None, :, None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], enable_gqa=True
    )[0, :, 0]
    assert torch.allclose(attend(q, k, v, 1 / math.sqrt(6)), expected, rtol=1e-12, atol=1e-12)


def test_rope_turns_by_the_distance() -> None:
    """The product of two rotated rows depends only on how far apart they are."""
    table, q, k = rope_table(32, 4), rand(1, 1, 4), rand(1, 1, 4, seed=1)

    def product(i: int, j: int) -> float:
        at = rope(q, table, torch.tensor([i])) * rope(k, table, torch.tensor([j]))
        return float(at.sum())

    assert math.isclose(product(3, 1), product(30, 28), rel_tol=1e-12)
    assert not math.isclose(product(3, 1), product(3, 2), rel_tol=1e-3)


@pytest.mark.parametrize("config", [MHA, MLA], ids=["mha", "mla"])
def test_a_prefix_has_the_same_logits_whatever_follows(config: ModelConfig) -> None:
    model = transformer(config)
    logits = model.recompute(TOKENS)
    assert logits.shape == (len(TOKENS), config.vocab_size)
    for n in range(1, len(TOKENS)):
        assert torch.equal(model.recompute([*TOKENS[:n], 0])[:n], logits[:n])


@pytest.mark.parametrize("config", [MHA, MLA], ids=["mha", "mla"])
def test_logits_depend_on_every_token_the_order_the_namespace_and_the_seed(
    config: ModelConfig,
) -> None:
    model = transformer(config)
    last = model.recompute(TOKENS)[-1]
    others = [[*TOKENS[:i], 0, *TOKENS[i + 1 :]] for i in range(len(TOKENS))]
    others.append([TOKENS[1], TOKENS[0], *TOKENS[2:]])
    for tokens in others:
        assert not torch.equal(model.recompute(tokens)[-1], last)
    assert not torch.equal(model.recompute(TOKENS, "lora")[-1], last)
    assert not torch.equal(model.recompute(TOKENS, "lora")[-1], model.recompute(TOKENS, "x")[-1])
    assert not torch.equal(transformer(config, seed=1).recompute(TOKENS)[-1], last)
    assert torch.equal(transformer(config).recompute(TOKENS)[-1], last)


def test_bad_arguments_have_names() -> None:
    runtime, odd = ImmediateRuntime(), ModelConfig(2, 1, head_dim=3, dtype=torch.float64)
    with pytest.raises(InvalidArgument, match="rotary width 3: expected an even number"):
        Transformer(odd, pool_of(odd), runtime, 32, 2)
    with pytest.raises(InvalidArgument, match="num_attention_heads=3: expected a multiple of 2"):
        Transformer(MHA, pool_of(MHA), runtime, 32, 3)
    with pytest.raises(InvalidArgument, match=r"bfloat16: expected a pool of torch\.float64"):
        Transformer(MHA, pool_of(MHA, torch.bfloat16), runtime, 32, 4)
    with pytest.raises(InvalidArgument, match="no KV: expected a pool"):
        Transformer(MHA, None, runtime, 32, 4)
