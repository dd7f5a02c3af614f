"""A trace through the loop of hybrid models: hits, sums, states that are of the right tokens."""

import pytest
import torch

from refcache.errors import InvalidArgument, UnknownName
from refcache.oracle.rules.violation import Violation
from refcache.pool import MambaPool
from refcache.readers import TraceRequest
from refcache.replay.config import ReplayConfig
from refcache.replay.loop import replay

SIZES = {"page_size": 4, "device_tokens": 400, "max_running_requests": 4}


def trace(prompts=((1, 2, 3), (1, 2, 4), (1, 2, 5), (1, 2, 3, 6), (7, 8), (1, 2, 4, 9))):
    return [
        TraceRequest(i, 16 * len(ids), 12, tuple(ids), block_size=16)
        for i, ids in enumerate(prompts)
    ]


def run(model, **more):
    config = {"serial": True, "state_interval": 8, "states": 20, "window": 8} | SIZES | more
    return replay(trace(), ReplayConfig(model=model, **config))


def test_states_and_windows_hit_no_more_than_kv():
    full, swa, mamba = (run(model) for model in ("full", "swa", "mamba"))
    assert full.hit_tokens == swa.hit_tokens > mamba.hit_tokens > 0
    assert mamba.rows_checked > 0
    assert run("mamba", branching=False).hit_tokens < mamba.hit_tokens
    for refresh in ("path", "used"):
        assert run("mamba", hit_refreshes=refresh, states=6, serial=False).requests == 6
        assert run("swa", hit_refreshes=refresh, serial=False).requests == 6


def test_a_state_of_other_tokens_is_named(monkeypatch):
    original = MambaPool.copy_from

    def wrong(self, source, target):
        other = torch.full_like(source, int(source) % self.size + 1)
        self._held[other] = True
        original(self, other, target)

    monkeypatch.setattr(MambaPool, "copy_from", wrong)
    with pytest.raises(Violation, match="beside KV of"):
        run("mamba")


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"model": "hybrid"}, UnknownName),
        ({"hit_refreshes": "none"}, UnknownName),
        ({"model": "mamba", "state_interval": 6}, InvalidArgument),
        ({"model": "mamba", "host_ratio": 2.0}, InvalidArgument),
        ({"model": "swa", "window": 0}, InvalidArgument),
        ({"model": "swa", "policy": "lfu"}, InvalidArgument),
    ],
)
def test_what_cannot_be_replayed_is_refused(wrong, error):
    with pytest.raises(error):
        ReplayConfig(**SIZES | wrong)
