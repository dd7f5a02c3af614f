"""Rows and device pools: what a write touches, what is refused, who waits."""

from types import SimpleNamespace

import pytest
import torch

from refcache.errors import DoubleFree, InvalidArgument, InvalidSlot
from refcache.pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool


def requests(n):
    return [SimpleNamespace(req_pool_idx=None) for _ in range(n)]


def test_rows_are_kept_by_chunks_and_refused_when_short():
    pool = ReqToTokenPool(2, 8)
    a, b, c = requests(3)
    assert pool.alloc([a, b]) == [0, 1]
    assert pool.alloc([a]) == [0]
    assert pool.alloc([a, c]) is None
    assert c.req_pool_idx is None
    assert pool.available_size() == 0
    pool.free(a)
    assert pool.alloc([b, c]) == [1, 0]
    with pytest.raises(DoubleFree):
        pool.free(a)
    for row in (-1, 2, 99):
        with pytest.raises(DoubleFree):
            pool.free(SimpleNamespace(req_pool_idx=row))
    assert pool.available_size() == 0
    stale = SimpleNamespace(req_pool_idx=1)
    pool.free(b)
    with pytest.raises(DoubleFree):
        pool.free(stale)
    assert pool.available_size() == 1


@pytest.mark.parametrize(
    ("columns", "count"), [(slice(6, 10), 4), (slice(0, 3), 2), (slice(5, 4), 0)]
)
def test_a_write_never_leaves_its_row(columns, count):
    pool = ReqToTokenPool(2, 8)
    with pytest.raises(InvalidArgument, match="columns"):
        pool.write((0, columns), torch.ones(count, dtype=torch.int64))
    assert not pool.req_to_token.any()


def test_write_and_read_of_a_row():
    pool = ReqToTokenPool(2, 4)
    pool.write((1, slice(1, 3)), torch.tensor([7, 8]))
    assert pool.read(1, slice(0, 4)).tolist() == [0, 7, 8, 0]
    assert pool.read(1, slice(0, 4)).dtype == torch.int64
    assert not pool.req_to_token[0].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_rows_land_in_their_layer_plane_and_slot_only(dtype):
    pool = MHATokenToKVPool(6, 2, dtype, 2, 3, 2, "cpu", v_head_dim=1, start_layer=4)
    loc = torch.tensor([5, 2])
    k = torch.arange(1, 13).reshape(2, 2, 3)
    v = torch.arange(13, 17).reshape(2, 2, 1)
    pool.set_kv_buffer(SimpleNamespace(layer_id=5), loc, k, v)
    assert torch.equal(pool.get_key_buffer(5)[loc].to(torch.int64), k)
    assert torch.equal(pool.get_value_buffer(5)[loc].to(torch.int64), v)
    assert pool.get_kv_buffer(5)[0].data_ptr() == pool.get_key_buffer(5).data_ptr()
    others = [0, 1, 3, 4, 6, 7]
    for plane in pool.planes:
        assert not plane.buffer[0].view(torch.uint8).any()
        assert not plane.buffer[1][others].view(torch.uint8).any()
    assert pool.k_buffer[1].data_ptr() == int(pool.k_data_ptrs[1])
    assert pool.data_strides.tolist() == [6 * dtype.itemsize] * 2 + [2 * dtype.itemsize] * 2


def test_mla_keeps_latent_and_rope_side_by_side():
    pool = MLATokenToKVPool(4, 1, torch.float32, 3, 2, 1, "cpu")
    loc = torch.tensor([3])
    pool.set_mla_kv_buffer(0, loc, torch.ones(1, 1, 3), torch.full((1, 1, 2), 2.0))
    assert pool.get_key_buffer(0)[3, 0].tolist() == [1, 1, 1, 2, 2]
    assert pool.get_value_buffer(0)[3, 0].tolist() == [1, 1, 1]
    pool.set_kv_buffer(0, loc, torch.zeros(1, 1, 5))
    assert not pool.kv_buffer[0].any()


def test_bad_writes_are_refused_before_anything_is_written():
    pool = MHATokenToKVPool(4, 2, torch.float32, 1, 2, 1, "cpu")
    row = torch.ones(1, 1, 2)
    with pytest.raises(InvalidSlot):
        pool.set_kv_buffer(0, torch.tensor([6]), row, row)
    with pytest.raises(InvalidSlot):
        pool.set_kv_buffer(0, torch.tensor([-1]), row, row)
    with pytest.raises(InvalidArgument, match="v rows"):
        pool.set_kv_buffer(0, torch.tensor([2]), row, row[..., :1])
    with pytest.raises(InvalidArgument, match="layer 1"):
        pool.set_kv_buffer(1, torch.tensor([2]), row, row)
    assert not any(plane.buffer.any() for plane in pool.planes)


@pytest.mark.parametrize("bad", [{"size": 0}, {"head_num": 0}, {"v_head_dim": 0}, {"end_layer": 3}])
def test_bad_extents(bad):
    good = {"size": 4, "page_size": 2, "dtype": torch.float32, "head_num": 1, "head_dim": 2}
    with pytest.raises(InvalidArgument):
        MHATokenToKVPool(**(good | {"layer_num": 2, "device": "cpu"} | bad))


class Recorder:
    def __init__(self):
        self.waits = []

    def wait_until(self, threshold):
        self.waits.append(threshold)


def test_every_getter_waits_for_its_layer():
    mha = MHATokenToKVPool(2, 1, torch.float32, 1, 1, 3, "cpu", start_layer=10)
    mla = MLATokenToKVPool(2, 1, torch.float32, 1, 1, 3, "cpu", start_layer=10)
    for pool in (mha, mla):
        counter = Recorder()
        pool.register_layer_transfer_counter(counter)
        pool.get_key_buffer(11)
        assert counter.waits == [1]
        pool.get_value_buffer(12)
        assert counter.waits == [1, 2]
        pool.get_kv_buffer(10)
        assert counter.waits == [1, 2, 0, 0]
