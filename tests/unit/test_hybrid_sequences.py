"""The published bugs of hybrid caches on one tier, each as its smallest sequence.

Each must be right here. Those that were seen on SGLang 0.5.10 are seen there again, if it is
unpacked; the others were corrected before, or are a race, which the simulated machine shows.
"""

import json
import subprocess
import sys
from array import array
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from environment import environment
from hybrid_sequences import SEQUENCES, ours
from refcache.allocator import TokenToKVPoolAllocator
from refcache.engine.hybrid import track_point
from refcache.keys import RadixKey
from refcache.peers.releases import unpacked
from refcache.pool import (
    BaseLinearStateParams,
    HybridReqToTokenPool,
    Mamba2StateDType,
    StateShape,
)
from refcache.runtime import RaceFound, SimulatedRuntime, Tracker, lazy
from refcache.tree import MambaRadixCache
from refcache.types import CacheInitParams, InsertParams, MatchPrefixParams

SEEN = ("H01", "W01", "W02", "W03", "W04", "W07")
"""On 0.5.10. W05 and W09 are right there, and so is W08 for whoever asks for the right kind."""
HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.mark.parametrize("name", SEQUENCES)
def test_right_here(name):
    assert list(SEQUENCES[name](ours())) == []


def test_seen_on_the_release():
    if "0.5.10" not in unpacked():
        pytest.skip("SGLang 0.5.10 is not unpacked")
    done = subprocess.run(
        [sys.executable, HELPERS / "hybrid_sequences.py", *SEQUENCES],
        env=environment(HELPERS) | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert tuple(name for name, wrong in found.items() if wrong) == SEEN, found


# ---- states --------------------------------------------------------------------------------------


def tree_of_states(runtime=None, overlap=True, extra=True):
    rows = HybridReqToTokenPool(
        size=4,
        mamba_size=8,
        mamba_spec_state_size=0,
        max_context_len=32,
        device="cpu",
        enable_memory_saver=False,
        cache_params=BaseLinearStateParams(
            shape=StateShape(conv=[(1, 2)], temporal=(1, 2, 1)),
            layers=[0, 1],
            dtype=Mamba2StateDType(conv=torch.float32, temporal=torch.float32),
        ),
        mamba_layer_ids=[0, 1],
        enable_mamba_extra_buffer=extra,
        enable_overlap_schedule=overlap,
        runtime=runtime,
    )
    slots = TokenToKVPoolAllocator(32, torch.float32, "cpu", None)
    params = CacheInitParams(
        False, rows, slots, 1, enable_mamba_extra_buffer=extra, mamba_cache_chunk_size=4
    )
    return MambaRadixCache(params)


def request(tree, tokens):
    return SimpleNamespace(
        req_pool_idx=None,
        mamba_pool_idx=None,
        mamba_ping_pong_track_buffer=None,
        mamba_next_track_idx=None,
        mamba_last_track_seqlen=None,
        origin_input_ids=array("q", tokens),
        output_ids=array("q"),
        fill_ids=array("q", tokens),
        extra_key=None,
        cache_protected_len=0,
        last_node=tree.root_node,
        priority=None,
    )


def snapshot_beside_a_forward(overlap, flip_late):
    """A result is processed while the next forward runs."""
    machine = SimulatedRuntime(lazy, Tracker())
    tree = tree_of_states(machine, overlap)
    rows, pool = tree.req_to_token_pool, tree.req_to_token_pool.mamba_pool
    req = request(tree, [1, 2, 3, 4])
    rows.alloc([req])
    tree.inc_lock_ref(tree.root_node)
    slots = tree.token_to_kv_pool_allocator.alloc(4)
    rows.write((req.req_pool_idx, slice(0, 4)), slots)
    forwards = machine.Stream()

    def forward():
        written = req.mamba_ping_pong_track_buffer[req.mamba_next_track_idx].reshape(1)
        states = [*pool.regions(written), *pool.regions(req.mamba_pool_idx.reshape(1))]
        forwards.wait_stream(machine.current_stream())
        with machine.stream(forwards):
            machine.launch("forward", lambda: None, writes=states)
            return forwards.record_event()

    def flip():
        size = rows.mamba_ping_pong_track_buffer_size
        req.mamba_next_track_idx = (req.mamba_next_track_idx + 1) % size

    first = forward()
    if not flip_late:
        flip()
    forward()
    first.synchronize()
    if flip_late:
        flip()
    req.mamba_last_track_seqlen = 4
    tree.cache_unfinished_req(req)
    machine.synchronize()


@pytest.mark.parametrize(
    ("overlap", "flip_late", "races"),
    [(True, False, False), (True, True, True), (False, False, True)],
    ids=["two-slots", "flipped-late", "one-slot"],
)
def test_h11_the_snapshot_that_is_cached_is_not_the_one_written(overlap, flip_late, races):
    with pytest.raises(RaceFound, match="forward") if races else nullcontext():
        snapshot_beside_a_forward(overlap, flip_late)


def test_h10_a_request_that_waits_has_one_state_at_most_and_it_goes_back():
    tree = tree_of_states(extra=False)
    pool = tree.req_to_token_pool.mamba_pool
    kv = tree.token_to_kv_pool_allocator.alloc(3)
    tree.insert(InsertParams(RadixKey([1, 2, 3]), kv, mamba_value=pool.alloc(1)))
    req = request(tree, [1, 2, 3, 4])
    for _ in range(3):  # it is looked up in every step until there is room
        tree.match_prefix(MatchPrefixParams(RadixKey([1, 2, 3, 4]), cow_mamba=True, req=req))
        assert pool.available_size() == 6
    tree.req_to_token_pool.free_mamba_cache(req)
    assert (req.mamba_pool_idx, pool.available_size()) == (None, 7)


def test_h12_where_a_state_is_taken_is_the_request_s_own():
    """Not a place on a grid of the whole batch: so many chunks behind its own prefix."""
    for prefix in range(0, 12, 2):
        for extend in range(1, 20):
            point = track_point(prefix, extend, None, 4)
            taken = None if point is None else point.seqlen - prefix
            assert taken == (None if extend < 4 else extend // 4 * 4)


def test_h13_a_prompt_of_whole_chunks_is_found_again_from_the_second_time_on():
    """Its last token is always computed, so the state at its end does not help the same prompt."""
    tree = tree_of_states(extra=False)
    pool, prompt = tree.req_to_token_pool.mamba_pool, list(range(8))

    def insert(tokens):
        kv = tree.token_to_kv_pool_allocator.alloc(len(tokens))
        tree.insert(InsertParams(RadixKey(tokens), kv, mamba_value=pool.alloc(1)))

    def match(tokens):
        found = tree.match_prefix(MatchPrefixParams(RadixKey(tokens)))
        return len(found.device_indices), found.mamba_branching_seqlen

    insert(prompt)
    assert match([*prompt, 9]) == (8, None)
    assert match(prompt[:-1]) == (0, 4)
    insert(prompt[:4])
    assert match(prompt[:-1])[0] == 4
