"""Device memory is measured on the card."""

import torch

from refcache.engine import ModelConfig
from refcache.engine.model_runner import ModelRunner
from refcache.engine.model_runner_kv_cache_mixin import get_available_gpu_memory
from refcache.types import ServerArgs


def test_the_pool_is_sized_by_what_is_free():
    before = get_available_gpu_memory("cuda:0")
    assert before == torch.cuda.mem_get_info("cuda:0")[0] / (1 << 30)
    args = ServerArgs(page_size=16, device="cuda:0", context_length=4096, mem_fraction_static=0.1)
    model = ModelConfig(num_hidden_layers=4, num_key_value_heads=8, head_dim=64)
    runner = ModelRunner(args, model)
    free = get_available_gpu_memory("cuda:0")
    planes = runner.token_to_kv_pool.planes
    pool = sum(plane.buffer.nbytes for plane in planes) / (1 << 30)
    assert 0.08 * before < pool < 0.11 * before
    assert pool <= before - free < pool + 1.0
