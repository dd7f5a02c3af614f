"""A plane that is declared, and nothing else, is written, waited for, copied and checked."""

from functools import partial

import pytest
import torch

from refcache.engine import ModelConfig, SamplingParams, Scheduler, TokenizedGenerateReqInput
from refcache.engine.models.content import ContentViolation
from refcache.errors import InvalidArgument, InvalidSlot, UnknownName
from refcache.pool import (
    MHATokenToKVPool,
    MLATokenToKVPool,
    NSATokenToKVPool,
    PlaneSpec,
    host_pool_for,
)
from refcache.reference import LAYOUTS
from refcache.runtime import ImmediateRuntime, SimulatedRuntime, lazy
from refcache.types import ServerArgs

PAGE, SIZE, LAYERS = 4, 16, 3
BY_SLOT = PlaneSpec("made up", 2, 8, torch.uint8)
BY_PAGE = PlaneSpec("paged", 1, PAGE * 8, torch.uint8, slots_per_row=PAGE)
HALF_PAGES = PlaneSpec("halves", 1, 2 * 4, torch.float32, slots_per_row=2)
EXTRA = {"by slot": [BY_SLOT], "by page": [BY_PAGE], "all": [BY_PAGE, BY_SLOT, HALF_PAGES]}


def mha(extra, runtime=None):
    return MHATokenToKVPool(
        SIZE, PAGE, torch.int64, 2, 3, LAYERS, "cpu", runtime=runtime, extra_planes=extra
    )


def mla(extra, runtime=None):
    return MLATokenToKVPool(
        SIZE, PAGE, torch.float8_e5m2, 6, 2, LAYERS, "cpu", runtime=runtime, extra_planes=extra
    )


def fill(pool, start=0):
    """Other bytes everywhere; a plane's never look like another's."""
    for number, plane in enumerate(pool.planes):
        flat = plane.buffer.view(torch.uint8).flatten()
        flat.copy_((torch.arange(len(flat)) * (2 * number + 3) + start) % 251)


def bytes_of(pool):
    return [plane.by_slot().clone().view(torch.uint8) for plane in pool.planes]


def load(host, pool, host_slots, slots, way):
    if way == "a layer":
        for layer in range(LAYERS):
            host.load_to_device_per_layer(pool, host_slots, slots, layer, "kernel")
        return
    flags = pool.runtime.flags(LAYERS)
    if way == "at once":
        host.load_to_device_all_layer(pool, host_slots, slots, flags, "kernel")
    else:
        pool.runtime.expect(flags, pool.runtime.current_stream())
        host.load_to_device_by_copy_engine(pool, host_slots, slots, flags)


@pytest.mark.parametrize("way", ["a layer", "at once", "copy engine"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", [mha, mla])
@pytest.mark.parametrize("extra", EXTRA)
def test_it_goes_round_both_tiers(extra, make, layout, way):
    pool = make(EXTRA[extra])
    host = host_pool_for(pool, ServerArgs(page_size=PAGE, hicache_mem_layout=layout))
    fill(pool)
    before = bytes_of(pool)
    slots = torch.tensor([8, 9, 10, 11, 16, 17, 18, 19])
    host_slots = torch.tensor([20, 21, 22, 23, 4, 5, 6, 7])
    host.backup_from_device_all_layer(pool, host_slots, slots, "kernel")
    fill(pool, start=100)
    bystanders = bytes_of(pool)
    there = torch.tensor([12, 13, 14, 15, 4, 5, 6, 7])
    load(host, pool, host_slots, there, way)
    rest = [s for s in range(SIZE + PAGE) if s not in there.tolist()]
    for was, other, now in zip(before, bystanders, bytes_of(pool), strict=True):
        assert torch.equal(now[:, there], was[:, slots])
        assert torch.equal(now[:, rest], other[:, rest])


def test_its_bytes_are_counted():
    pool = mha(EXTRA["all"])
    host = host_pool_for(pool, ServerArgs(page_size=PAGE))
    assert host.size_per_token == LAYERS * (2 * 2 * 3 * 8 + 8 + 16 + 16)
    assert pool.mem_usage * 2**30 == LAYERS * (SIZE + PAGE) * (2 * 2 * 3 * 8 + 8 + 16 + 16)
    assert pool.get_kv_size_bytes() == (LAYERS * (SIZE + PAGE) * 2 * 3 * 8,) * 2
    assert host.kv_buffer.shape[0] == 2
    assert len(host.planes) == 5


class Waits(list):
    wait_until = list.append


def test_its_getter_waits_and_its_setter_writes_one_slot_s_part():
    pool = mha(EXTRA["all"])
    pool.register_layer_transfer_counter(waits := Waits())
    for spec in EXTRA["all"]:
        dim = spec.head_dim // spec.slots_per_row
        rows = torch.arange(2 * spec.head_num * dim).reshape(2, spec.head_num, dim)
        pool.set_plane_buffer(spec.name, 1, torch.tensor([5, 7]), rows)
        got = pool.get_plane_buffer(spec.name, 1)
        assert got.dtype == spec.dtype
        by_slot = got.reshape(SIZE + PAGE, spec.head_num, dim)
        assert torch.equal(by_slot[[5, 7]].to(torch.int64), rows)
        assert by_slot.sum() == rows.sum()
        assert not pool.get_plane_buffer(spec.name, 0).any()
        with pytest.raises(InvalidArgument, match="rows of shape"):
            pool.set_plane_buffer(spec.name, 1, torch.tensor([5]), rows)
        with pytest.raises(InvalidSlot):
            pool.set_plane_buffer(spec.name, 1, torch.tensor([5, 20]), rows)
    assert waits == [1, 0] * 3
    waits.clear()
    assert len(pool.extra_buffers(2)) == 3
    assert waits == [2] * 3
    with pytest.raises(UnknownName, match="made up"):
        pool.get_plane_buffer("mode up", 1)


@pytest.mark.parametrize(
    "extra",
    [
        [PlaneSpec("k", 1, 1)],
        [PlaneSpec("wide", 1, 3, slots_per_row=3)],
        [PlaneSpec("none", 1, 0)],
        [PlaneSpec("none", 1, 1, slots_per_row=0)],
    ],
)
def test_a_declaration_that_cannot_be_is_refused(extra):
    with pytest.raises(InvalidArgument):
        mha(extra)


def test_parts_of_pages_are_refused_where_a_row_has_a_page():
    pool = mha([BY_PAGE])
    host = host_pool_for(pool, ServerArgs(page_size=PAGE))
    fill(pool)
    whole = torch.arange(4, 8)
    for slots in ([4, 5, 6], [5, 6, 7, 8], [7, 6, 5, 4]):
        index = torch.tensor(slots)
        with pytest.raises(InvalidArgument, match="whole ascending pages"):
            host.backup_from_device_all_layer(pool, whole[: len(index)], index, "direct")
        with pytest.raises(InvalidArgument, match="whole ascending pages"):
            host.load_to_device_per_layer(pool, index, whole[: len(index)], 0, "direct")


SIZES = {"page_size": PAGE, "max_total_tokens": 24, "context_length": 32, "max_running_requests": 2}


def serve(extra, runtime=None, patch=None):
    """Prompts that evict one another and come back from the host; the rows that were checked."""
    scheduler = Scheduler(
        ServerArgs(
            **SIZES, enable_hierarchical_cache=True, hicache_ratio=3.0,
            hicache_write_policy="write_through",
        ),
        ModelConfig(num_hidden_layers=2, vocab_size=50, extra_planes=tuple(extra)),
        runtime=runtime or ImmediateRuntime(),
    )  # fmt: skip
    scheduler.tree_cache.load_back_threshold = 1
    pool = scheduler.tp_worker.model_runner.token_to_kv_pool
    if patch:
        patch(pool, scheduler.tree_cache.token_to_kv_pool_host)
    for i in range(6):
        prompt = [1 + (i % 3), *range(10, 21)]
        params = SamplingParams(max_new_tokens=2)
        scheduler.submit(TokenizedGenerateReqInput(f"r{i}", prompt, params))
        while not scheduler.is_idle():
            scheduler.step()
    return scheduler.tp_worker.model_runner.check.rows_checked


@pytest.mark.parametrize("extra", EXTRA)
def test_a_served_workload_checks_it(extra):
    without = serve([])
    assert serve(EXTRA[extra]) * 2 == without * (2 + len(EXTRA[extra]))


@pytest.mark.parametrize("spec", EXTRA["all"], ids=lambda spec: spec.name)
def test_wrong_bytes_of_it_are_seen(spec):
    """On the host, so that it is seen only if the plane was loaded, and read."""

    def patch(pool, host):
        number = [plane.name for plane in pool.planes].index(spec.name)
        original = host.backup_from_device_all_layer

        def backup(*args, **kwargs):
            original(*args, **kwargs)
            host.planes[number].view(torch.uint8).fill_(77)

        host.backup_from_device_all_layer = backup

    serve(EXTRA["all"])
    with pytest.raises(ContentViolation, match="plane"):
        serve(EXTRA["all"], patch=patch)


def nsa(runtime=None):
    return NSATokenToKVPool(
        256, 64, 6, torch.bfloat16, 2, 2, "cpu", 128, False, 8, start_layer=3, runtime=runtime
    )


def test_the_index_of_a_sparse_attention_lies_keys_first_and_waits():
    pool = nsa()
    assert [list(b.shape) for b in pool.index_k_with_scale_buffer] == [[5, 64 * 132]] * 2
    keys = (torch.arange(70 * 128) % 253).to(torch.uint8).view(70, 128)
    scales = torch.arange(70, dtype=torch.float32)
    loc = torch.cat([torch.arange(128, 192), torch.arange(64, 70)])
    pool.register_layer_transfer_counter(waits := Waits())
    pool.set_index_k_scale_buffer(4, loc, keys, scales[:, None])
    assert waits == []
    pages = torch.tensor([2, 1])
    assert torch.equal(pool.get_index_k_continuous(4, 70, pages), keys)
    got = pool.get_index_k_scale_continuous(4, 70, pages)
    assert torch.equal(got.view(torch.float32).flatten(), scales)
    row = pool.get_index_k_with_scale_buffer(4)[2]
    assert torch.equal(row[: 64 * 128].view(64, 128), keys[:64])
    assert torch.equal(row[64 * 128 :].view(torch.float32), scales[:64])
    both = pool.get_index_k_scale_buffer(
        4, torch.tensor([66, 3]), torch.tensor([[2, 1], [1, 0]]), 69, 66
    )
    assert torch.equal(both[0], torch.cat([keys[:66], keys[64:67]]))
    assert torch.equal(
        both[1].view(torch.float32).flatten(), torch.cat([scales[:66], scales[64:67]])
    )
    assert waits == [1] * 5  # 0.5.10 waits for one getter of four
    assert not pool.index_k_with_scale_buffer[0].any()
    for wrong in (
        partial(pool.set_index_k_scale_buffer, 4, loc, keys[:, :64], scales),
        partial(pool.set_index_k_scale_buffer, 4, loc + 256, keys, scales),
        partial(pool.get_index_k_continuous, 4, 129, pages),
        partial(NSATokenToKVPool, 256, 32, 6, torch.bfloat16, 2, 2, "cpu", 128, False, 8),
    ):
        with pytest.raises(InvalidArgument):
            wrong()


def test_the_index_goes_round_both_tiers():
    pool = nsa(runtime := SimulatedRuntime(lazy))
    args = ServerArgs(page_size=64, hicache_mem_layout="page_first_direct")
    host = host_pool_for(pool, args)
    fill(pool)
    before = bytes_of(pool)
    slots, host_slots = torch.arange(64, 128), torch.arange(64)
    host.backup_from_device_all_layer(pool, host_slots, slots, "kernel")
    runtime.synchronize()
    fill(pool, 9)
    for layer in range(2):
        host.load_to_device_per_layer(pool, host_slots, slots + 64, layer, "kernel")
    runtime.synchronize()
    for was, now in zip(before, bytes_of(pool), strict=True):
        assert torch.equal(now[:, slots + 64], was[:, slots])
