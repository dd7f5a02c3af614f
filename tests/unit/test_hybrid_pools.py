"""States, rows with states, and pools whose layers lie in several: answers, refusals, waits.

The numbers are SGLang 0.5.10's own answers, except where it is said that it is wrong there.
"""

from types import SimpleNamespace

import pytest
import torch

from refcache.errors import DoubleFree, InvalidArgument, InvalidSlot
from refcache.pool import (
    BaseLinearStateParams,
    HybridLinearKVPool,
    HybridReqToTokenPool,
    Mamba2StateDType,
    MambaPool,
    StateShape,
    SWAKVPool,
)

SHAPE = StateShape(conv=[(3, 2), (1, 2)], temporal=(2, 2, 1))
FLOATS = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)


def states(size, layers=(0, 1), **more):
    params = BaseLinearStateParams(shape=SHAPE, layers=layers, dtype=FLOATS)
    return MambaPool(
        size=size,
        spec_state_size=2,
        cache_params=params,
        mamba_layer_ids=layers,
        device="cpu",
        **more,
    )


def rows(size, mamba_size, extra=False, layers=(0, 1), **more):
    return HybridReqToTokenPool(
        size=size,
        mamba_size=mamba_size,
        mamba_spec_state_size=0,
        max_context_len=8,
        device="cpu",
        enable_memory_saver=False,
        cache_params=BaseLinearStateParams(shape=SHAPE, layers=layers, dtype=FLOATS),
        mamba_layer_ids=layers,
        enable_mamba_extra_buffer=extra,
        **more,
    )


def requests(n):
    return [
        SimpleNamespace(
            req_pool_idx=None,
            mamba_pool_idx=None,
            mamba_ping_pong_track_buffer=None,
            mamba_next_track_idx=None,
        )
        for _ in range(n)
    ]


def fill(pool, slot, value):
    for plane in pool.planes:
        plane.buffer[:, slot] = value


def values(pool, slot):
    """The distinct values in all layers and tensors of a slot."""
    return {v for plane in pool.planes for v in plane.buffer[:, slot].flatten().tolist()}


class Waits(list):
    """A counter that writes down what it was asked to wait for."""

    wait_until = list.append


def test_states_are_handed_out_in_order_zeroed_and_given_back_to_the_end():
    pool = states(4)
    assert pool.alloc(2).tolist() == [1, 2]
    fill(pool, 1, 5)
    fill(pool, 2, 7)
    pool.free(torch.tensor([1]))
    assert pool.free_slots.tolist() == [3, 4, 1]
    assert values(pool, 1) == {5}
    assert pool.fork_from(torch.tensor([2])).tolist() == [3]
    assert values(pool, 3) == {7}
    assert pool.alloc(2).tolist() == [4, 1]
    assert values(pool, 1) == {0}
    assert pool.alloc(1) is None
    assert pool.fork_from(torch.tensor([2])) is None
    pool.clear()
    assert pool.free_slots.tolist() == [1, 2, 3, 4]
    assert values(pool, 2) == {7}


def test_what_alloc_returns_is_the_caller_s():
    """0.5.10 returns a view of its free list."""
    pool = states(4)
    whole = pool.free_slots.untyped_storage()
    taken = pool.alloc(2)
    assert taken.untyped_storage().data_ptr() != whole.data_ptr()
    taken.fill_(4)
    assert torch.tensor(whole.tolist()[::8]).tolist() == [1, 2, 3, 4]
    assert pool.alloc(2).tolist() == [3, 4]
    pool.free(torch.tensor([1, 2, 3, 4]))


@pytest.mark.parametrize(
    ("slots", "error"),
    [
        (torch.tensor([3]), DoubleFree),
        (torch.tensor([1, 1]), DoubleFree),
        (torch.tensor([1, 3]), DoubleFree),
        (torch.tensor([1, 0]), InvalidSlot),
        (torch.tensor([1, 5]), InvalidSlot),
        (torch.tensor([-1]), InvalidSlot),
        (torch.tensor([1.0]), InvalidArgument),
        (torch.tensor([True]), InvalidArgument),
        (torch.tensor(1), InvalidArgument),
    ],
)
def test_a_wrong_free_of_states_changes_nothing(slots, error):
    pool = states(4)
    pool.alloc(2)
    with pytest.raises(error):
        pool.free(slots)
    assert pool.free_slots.tolist() == [3, 4]
    pool.free(slots.new_empty(0).to(torch.int64))
    pool.free(torch.tensor([2, 1], dtype=torch.int32))
    assert pool.free_slots.tolist() == [3, 4, 2, 1]


def test_copies_read_all_sources_first_and_refuse_free_slots():
    pool = states(4)
    pool.alloc(3)
    for slot in (1, 2, 3):
        fill(pool, slot, slot)
    pool.copy_from(torch.tensor([1, 2]), torch.tensor([2, 3]))
    assert [values(pool, slot) for slot in (1, 2, 3)] == [{1}, {1}, {2}]
    for wrong, error in (
        ([1], InvalidArgument),
        ([4, 1], InvalidSlot),
        ([0, 1], InvalidSlot),
        ([5, 1], InvalidSlot),
    ):
        with pytest.raises(error):
            pool.copy_from(torch.tensor(wrong), torch.tensor([2, 3]))
        with pytest.raises(error):
            pool.copy_from(torch.tensor([2, 3]), torch.tensor(wrong))
    with pytest.raises(InvalidSlot):
        pool.fork_from(torch.tensor([4]))
    with pytest.raises(InvalidArgument):
        pool.fork_from(torch.tensor([1, 2]))
    assert pool.available_size() == 1
    assert [values(pool, slot) for slot in (1, 2, 3)] == [{1}, {1}, {2}]


def test_a_layer_s_views_are_counted_among_the_layers_with_a_state():
    pool = states(3, layers=(4, 9), speculative_num_draft_tokens=5)
    fill(pool, 2, 1)
    for plane in pool.planes:
        plane.buffer[1] *= 3
    layer = pool.mamba2_layer_cache(1)
    assert [list(t.shape) for t in (*layer.conv, layer.temporal)] == [
        [4, 3, 2],
        [4, 1, 2],
        [4, 2, 2, 1],
    ]
    assert (layer.temporal[2] == 3).all()
    assert (layer.conv[0][2] == 3).all()
    assert layer.conv[0].dtype == torch.bfloat16
    assert layer.temporal.dtype == torch.float32
    drafts = pool.get_speculative_mamba2_params_all_layers()
    assert list(drafts.intermediate_ssm.shape) == [2, 3, 5, 2, 2, 1]
    assert [list(t.shape) for t in drafts.intermediate_conv_window] == [
        [2, 3, 5, 3, 2],
        [2, 3, 5, 1, 2],
    ]
    with pytest.raises(InvalidArgument, match="speculative_num_draft_tokens"):
        states(3).get_speculative_mamba2_params_all_layers()
    assert BaseLinearStateParams(shape=SHAPE, layers=[0, 1], dtype=FLOATS).mamba_cache_per_req == 64
    for wrong in ((0, (0,)), (3, ())):
        with pytest.raises(InvalidArgument, match="at least 1"):
            states(*wrong)


def test_a_request_gets_its_row_its_state_and_its_ping_pong_slots():
    pool = rows(4, 6, extra=True)
    (a,) = requests(1)
    assert pool.alloc([a]) == [0]
    assert (int(a.mamba_pool_idx), a.mamba_ping_pong_track_buffer.tolist()) == (1, [2, 3])
    assert a.mamba_next_track_idx == 0
    assert pool.get_mamba_indices(torch.tensor([0])).tolist() == [1]
    assert pool.req_index_to_mamba_ping_pong_track_buffer_mapping[0].tolist() == [2, 3]
    assert [pool.get_mamba_ping_pong_other_idx(i) for i in (0, 1)] == [1, 0]
    assert pool.alloc([a]) == [0]  # a chunk keeps all of them
    assert pool.mamba_pool.available_size() == 3
    pool.free_mamba_cache(a, mamba_ping_pong_track_buffer_to_keep=1)
    assert pool.mamba_pool.free_slots.tolist() == [4, 5, 6, 1, 2]
    # 0.5.10 leaves the request pointing at slots that are free
    assert (a.mamba_pool_idx, a.mamba_ping_pong_track_buffer) == (None, None)
    with pytest.raises(DoubleFree):
        pool.free_mamba_cache(a)


def test_without_overlap_there_is_one_tracked_slot():
    pool = rows(2, 4, extra=True, enable_overlap_schedule=False)
    (a,) = requests(1)
    pool.alloc([a])
    assert a.mamba_ping_pong_track_buffer.tolist() == [2]
    assert [pool.get_mamba_ping_pong_other_idx(i) for i in (0, 1)] == [0, 1]
    with pytest.raises(InvalidArgument, match="keep ping-pong slot 1"):
        pool.free_mamba_cache(a, mamba_ping_pong_track_buffer_to_keep=1)
    assert pool.mamba_pool.available_size() == 2
    pool.free_mamba_cache(a, mamba_ping_pong_track_buffer_to_keep=0)
    assert pool.mamba_pool.free_slots.tolist() == [3, 4, 1]


def test_a_state_that_a_match_copied_is_kept():
    pool = rows(2, 4)
    (a,) = requests(1)
    a.mamba_pool_idx = pool.mamba_pool.alloc(1)[0]
    assert pool.alloc([a]) == [0]
    assert (int(a.mamba_pool_idx), pool.mamba_pool.available_size()) == (1, 3)
    with pytest.raises(InvalidArgument, match="keep ping-pong slot 0"):
        pool.free_mamba_cache(a, mamba_ping_pong_track_buffer_to_keep=0)
    pool.free_mamba_cache(a)
    assert pool.mamba_pool.available_size() == 4


@pytest.mark.parametrize("mamba_size", [1, 6])
def test_the_mappings_have_an_entry_a_row(mamba_size):
    """0.5.10 sizes them by states: 4 rows and 1 state fail at the second row."""
    pool = rows(4, mamba_size, extra=True)
    assert list(pool.req_index_to_mamba_index_mapping.shape) == [4]
    assert list(pool.req_index_to_mamba_ping_pong_track_buffer_mapping.shape) == [4, 2]
    single = rows(4, 1)
    one, two = requests(2)
    single.alloc([one])
    single.free_mamba_cache(one)
    assert single.alloc([two]) == [1]
    assert single.get_mamba_indices(torch.tensor([1])).tolist() == [1]


@pytest.mark.parametrize(
    ("size", "states", "extra"), [(4, 1, False), (1, 6, False), (4, 5, True), (1, 8, True)]
)
def test_a_refusal_of_rows_or_states_changes_nothing(size, states, extra):
    """0.5.10 fails an assertion, with the rows and the states already taken."""
    pool = rows(size, states, extra=extra)
    asked = requests(2)
    assert pool.alloc(asked) is None
    assert pool.available_size() == size
    assert pool.mamba_pool.free_slots.tolist() == list(range(1, states + 1))
    assert asked == requests(2)
    assert pool.alloc(asked[:1]) == [0]
    pool.clear()
    assert pool.mamba_pool.available_size() == states
    assert not pool.req_index_to_mamba_index_mapping.any()


def test_the_states_of_a_layer_are_waited_for():
    pool = rows(2, 2, layers=(4, 7), start_layer=4)
    pool.mamba2_layer_cache(7)
    pool.register_layer_transfer_counter(waits := Waits())
    fill(pool.mamba_pool, 1, 2)
    pool.mamba_pool.mamba_cache.temporal[1] = 9
    assert (pool.mamba2_layer_cache(7).temporal == 9).all()
    assert waits == [3]
    for absent in (5, 0, 3):
        with pytest.raises(InvalidArgument, match=f"layer {absent}"):
            pool.mamba2_layer_cache(absent)
    for wrong in ((3, 7), (7, 4), (4, 4)):
        with pytest.raises(InvalidArgument, match="ascending ids"):
            rows(2, 2, layers=wrong, start_layer=4)


def hybrid(ids=(2, 5, 8), **more):
    return HybridLinearKVPool(6, torch.float32, 2, 1, 3, ids, False, "cpu", None, **more)


def test_a_hybrid_pool_s_layers_have_the_model_s_ids():
    pool = hybrid()
    assert pool.full_attention_layer_id_mapping == {2: 0, 5: 1, 8: 2}
    assert not hasattr(pool, "layer_num")
    pool.register_layer_transfer_counter(waits := Waits())
    k = torch.ones(1, 1, 3)
    pool.set_kv_buffer(SimpleNamespace(layer_id=5), torch.tensor([4]), 2 * k, 3 * k)
    assert waits == []
    assert (pool.get_key_buffer(5)[4] == 2).all()
    assert (pool.get_value_buffer(5)[4] == 3).all()
    assert not pool.get_key_buffer(2).any()
    assert not pool.get_kv_buffer(8)[0].any()
    assert waits == [5, 5, 2, 8]
    for absent in (3, 0, 9):
        with pytest.raises(ValueError, match=f"layer {absent}"):
            pool.get_key_buffer(absent)
        with pytest.raises(InvalidArgument):
            pool.set_kv_buffer(absent, torch.tensor([4]), k, k)
    assert pool.get_v_head_dim() == 3
    assert pool.get_kv_size_bytes() == (3 * 8 * 3 * 4, 3 * 8 * 3 * 4)
    assert pool.mem_usage == pool.full_kv_pool.mem_usage


def test_a_stage_waits_from_its_own_first_layer():
    pool = hybrid(start_layer=4, ids=(5, 8))
    pool.register_layer_transfer_counter(waits := Waits())
    pool.get_kv_buffer(8)
    assert waits == [4]
    assert pool.full_kv_pool.layer_transfer_counter is None
    for wrong in ((3, 5), (5, 5)):
        with pytest.raises(InvalidArgument, match="each once"):
            hybrid(start_layer=4, ids=wrong)


def test_a_hybrid_pool_of_latent_rows_waits_too():
    pool = hybrid(use_mla=True, kv_lora_rank=2, qk_rope_head_dim=1)
    pool.register_layer_transfer_counter(waits := Waits())
    latent, rope = torch.full((1, 1, 2), 4.0), torch.full((1, 1, 1), 5.0)
    pool.set_mla_kv_buffer(8, torch.tensor([3]), latent, rope)
    pool.set_kv_buffer(5, torch.tensor([3]), torch.ones(1, 1, 3))
    got = pool.get_mla_kv_buffer(SimpleNamespace(layer_id=8), torch.tensor([3]))
    assert [t.flatten().tolist() for t in got] == [[4, 4], [5]]
    assert (pool.get_value_buffer(5)[3] == 1).all()
    assert waits == [8, 5]
    assert pool.get_v_head_dim() == 2
    with pytest.raises(InvalidArgument, match="use_mla"):
        hybrid().get_mla_kv_buffer(8, torch.tensor([3]))
    with pytest.raises(InvalidArgument, match="use_mla"):
        pool.move_kv_cache(torch.tensor([3]), torch.tensor([2]))


def windowed(**more):
    return SWAKVPool(6, 4, 1, torch.float32, 1, 2, [1, 4], [0, 3], False, "cpu", **more)


def test_a_window_s_layers_are_written_at_their_own_slots():
    pool = windowed(swa_head_num=2, swa_head_dim=1, enable_kv_cache_copy=True)
    assert pool.layers_mapping == {0: (0, False), 3: (1, False), 1: (0, True), 4: (1, True)}
    assert list(pool.get_key_buffer(4).shape) == [5, 2, 1]
    assert list(pool.get_key_buffer(3).shape) == [7, 1, 2]
    with pytest.raises(InvalidArgument, match="register_mapping"):
        pool.set_kv_buffer(4, torch.tensor([5]), torch.ones(1, 2, 1), torch.ones(1, 2, 1))
    pool.register_mapping(torch.tensor([0, 0, 0, 0, 2, 3, 0, -1]))
    pool.register_layer_transfer_counter(waits := Waits())
    pool.set_kv_buffer(4, torch.tensor([5]), torch.ones(1, 2, 1), torch.ones(1, 2, 1))
    pool.set_kv_buffer(3, torch.tensor([5]), torch.ones(1, 1, 2), torch.ones(1, 1, 2))
    assert pool.get_key_buffer(4).sum(dim=(1, 2)).tolist() == [0, 0, 0, 2, 0]
    assert pool.get_value_buffer(3).sum(dim=(1, 2)).tolist() == [0, 0, 0, 0, 0, 2, 0]
    assert waits == [4, 3]
    pool.move_kv_cache(torch.tensor([4]), torch.tensor([5]))
    assert pool.get_key_buffer(4).sum(dim=(1, 2)).tolist() == [0, 0, 2, 2, 0]
    pool.set_swa_loc(torch.tensor([1]))
    pool.set_kv_buffer(1, torch.tensor([5]), torch.ones(1, 2, 1), torch.ones(1, 2, 1))
    assert pool.get_key_buffer(1).sum(dim=(1, 2)).tolist() == [0, 2, 0, 0, 0]
    with pytest.raises(InvalidArgument, match="layer 2"):
        pool.get_key_buffer(2)
    k, v = pool.get_kv_size_bytes()
    assert (k, v) == (2 * (7 * 2 + 5 * 2) * 4,) * 2
    assert pool.mem_usage == (k + v) / 2**30
