"""The allocator of two pools: both or none, window slots freed alone, the table saved with it.

The numbers are SGLang 0.5.10's own answers, except where it is said that it is wrong there.
"""

import pytest
import torch

from refcache.allocator import SWATokenToKVPoolAllocator
from refcache.errors import DoubleFree, InvalidArgument, InvalidSlot
from refcache.pool import SWAKVPool


def make(size, size_swa, page_size=1, **more):
    return SWATokenToKVPoolAllocator(size, size_swa, page_size, torch.float16, "cpu", None, **more)


def extend(allocator, before, after, last):
    prefix, seq = torch.tensor([before]), torch.tensor([after])
    return allocator.alloc_extend(prefix, prefix, seq, seq, torch.tensor([last]), after - before)


def decode(allocator, length, last):
    seq = torch.tensor([length])
    return allocator.alloc_decode(seq, seq, torch.tensor([last]))


def free_now(allocator):
    return allocator.full_available_size(), allocator.swa_available_size()


def look(allocator):
    """All that a refused call must leave as it was."""
    full, swa = allocator.full_attn_allocator, allocator.swa_attn_allocator
    lists = [part.tolist() for one in (full, swa) for part in (one.free_pages, one.release_pages)]
    return lists, allocator.full_to_swa_index_mapping.tolist()


def test_single_slots():
    allocator = make(8, 4)
    assert (allocator.size, allocator.size_full, allocator.size_swa) == (4, 8, 4)
    slots = allocator.alloc(3)
    assert slots.tolist() == [1, 2, 3]
    assert allocator.translate_loc_from_full_to_swa(torch.tensor([1, 2, 3, 4, -1])).tolist() == [
        1, 2, 3, 0, -1,
    ]  # fmt: skip
    for _ in range(2):
        allocator.free_swa(slots[:2])
        assert free_now(allocator) == (5, 3)
    assert allocator.available_size() == 3
    allocator.free(slots)
    assert free_now(allocator) == (8, 4)
    assert not allocator.full_to_swa_index_mapping[:-1].any()


def test_both_or_none():
    allocator = make(8, 4)
    before = look(allocator)
    assert allocator.alloc(5) is None
    assert look(allocator) == before
    allocator.free_swa(allocator.alloc(4))
    assert allocator.alloc(4).tolist() == [5, 6, 7, 8]
    before = look(allocator)
    assert allocator.alloc(1) is None
    assert look(allocator) == before


def test_pages():
    allocator = make(32, 16, 4)
    assert extend(allocator, 0, 6, -1).tolist() == [4, 5, 6, 7, 8, 9]
    assert extend(allocator, 6, 9, 9).tolist() == [10, 11, 12]
    assert decode(allocator, 10, 12).tolist() == [13]
    assert free_now(allocator) == (20, 4)
    before = look(allocator)
    assert extend(allocator, 0, 4, -1) is None  # one page of each is free, but 0.5.10 asks for two
    assert look(allocator) == before


def test_a_decode_that_fails_takes_no_full_page():
    """0.5.10: None, and the full pool has a page less for good (24 -> 20)."""
    allocator = make(32, 8, 4)
    extend(allocator, 0, 4, -1)
    for length in (5, 6, 7, 8):
        assert decode(allocator, length, length + 2).tolist() == [length + 3]
    assert free_now(allocator) == (24, 0)
    before = look(allocator)
    assert decode(allocator, 9, 11) is None
    assert look(allocator) == before


def test_what_grows_from_a_full_page_does_not_need_its_window_slots():
    allocator = make(32, 16, 4)
    allocator.free_swa(extend(allocator, 0, 4, -1))
    assert decode(allocator, 5, 7).tolist() == [8]
    allocator.free_swa(torch.tensor([8]))
    with pytest.raises(InvalidArgument, match="last_loc"):
        decode(allocator, 6, 8)
    allocator.clear()
    allocator.free_swa(extend(allocator, 0, 4, -1))
    assert extend(allocator, 4, 6, 7).tolist() == [8, 9]


def test_a_freed_window_slot_is_freed_once_whoever_names_its_token():
    """An entry that outlives its slot would free the next owner's (0.5.10, by half a page)."""
    allocator = make(32, 16, 4)
    first = extend(allocator, 0, 8, -1)
    allocator.free_swa(first[:2])  # half a page is a page
    assert free_now(allocator) == (24, 12)
    assert allocator.full_to_swa_index_mapping[first].tolist() == [0, 0, 0, 0, 8, 9, 10, 11]
    other = extend(allocator, 0, 4, -1)
    taken = allocator.full_to_swa_index_mapping[other]
    assert taken.tolist() == [4, 5, 6, 7]
    allocator.free(first)
    assert free_now(allocator) == (28, 12)
    assert torch.equal(allocator.full_to_swa_index_mapping[other], taken)


def test_a_double_free_is_refused_before_anything_is_freed():
    allocator = make(8, 4)
    slots = allocator.alloc(4)
    allocator.free(slots[:1])
    before = look(allocator)
    for wrong, error in (
        (slots, DoubleFree),
        (torch.tensor([2, 0]), InvalidSlot),
        (torch.tensor([2, 9]), InvalidSlot),
        (torch.tensor([2.0]), InvalidArgument),
    ):
        with pytest.raises(error):
            allocator.free(wrong)
        assert look(allocator) == before
    for wrong, error in (
        (torch.tensor([2, 0]), InvalidSlot),
        (torch.tensor([2, 9]), InvalidSlot),
        (torch.tensor([-1]), InvalidSlot),
        (torch.tensor([True]), InvalidArgument),
        (torch.tensor(2), InvalidArgument),
    ):
        with pytest.raises(error):
            allocator.free_swa(wrong)
        assert look(allocator) == before
    allocator.free_swa(torch.tensor([], dtype=torch.int64))
    assert look(allocator) == before


def test_a_group_frees_both_kinds_at_its_end():
    allocator = make(8, 4)
    slots = allocator.alloc(4)
    allocator.free_group_begin()
    assert not allocator.is_not_in_free_group
    allocator.free(slots[:2])
    allocator.free_swa(slots[2:3])
    assert free_now(allocator) == (4, 0)
    with pytest.raises(DoubleFree):
        allocator.free(slots[1:3])
    with pytest.raises(InvalidArgument):
        allocator.free_group_begin()
    allocator.free_group_end()
    assert free_now(allocator) == (6, 3)
    assert allocator.full_to_swa_index_mapping[1:5].tolist() == [0, 0, 0, 4]
    with pytest.raises(InvalidArgument):
        allocator.free_group_end()


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_table_is_saved_and_restored_with_the_lists(page_size):
    """0.5.10 restores the lists alone: a window slot has two owners then."""
    allocator = make(32, 16, page_size)
    kept = allocator.alloc(4) if page_size == 1 else extend(allocator, 0, 4, -1)
    saved, before = allocator.backup_state(), look(allocator)
    allocator.free_swa(kept)
    if page_size == 1:
        allocator.alloc(2)
    else:
        extend(allocator, 0, 4, -1)
    assert look(allocator) != before
    allocator.restore_state(saved)
    assert look(allocator) == before
    allocator.free(kept)
    assert free_now(allocator) == (32, 16)


def test_wrong_calls_are_refused_and_change_nothing():
    paged, single = make(32, 16, 4), make(8, 4)
    extend(paged, 0, 6, -1)
    paged.free_swa(torch.tensor([8]))  # the last page has no window slots any more
    before = look(paged), look(single)
    calls = (
        lambda: paged.alloc(4),
        lambda: single.alloc(-1),
        lambda: extend(single, 0, 4, -1),
        lambda: decode(single, 1, -1),
        lambda: extend(paged, 6, 8, 9),
        lambda: decode(paged, 7, 9),
        lambda: extend(paged, 6, 8, 40),
        lambda: extend(paged, 6, 8, -2),
        lambda: decode(paged, 7, 8),
    )
    for call in calls:
        with pytest.raises(InvalidArgument):
            call()
        assert (look(paged), look(single)) == before
    paged.clear()
    assert free_now(paged) == (32, 16)
    assert not paged.full_to_swa_index_mapping[:-1].any()


def test_freed_pages_wait_to_be_sorted():
    allocator = make(16, 16, 4, need_sort=True)
    slots = extend(allocator, 0, 8, -1)
    allocator.free(slots)
    assert free_now(allocator) == (16, 16)
    assert look(allocator)[0] == [[3, 4], [1, 2], [3, 4], [1, 2]]
    allocator.merge_and_sort_free()
    assert look(allocator)[0] == [[1, 2, 3, 4], [], [1, 2, 3, 4], []]


def test_the_pool_reads_the_allocator_s_table():
    pool = SWAKVPool(8, 4, 1, torch.float32, 1, 1, [1], [0], False, "cpu")
    allocator = SWATokenToKVPoolAllocator(8, 4, 1, torch.float32, "cpu", pool)
    assert allocator.get_kvcache() is pool
    allocator.free_swa(allocator.alloc(2))
    slots = allocator.alloc(2)
    saved = allocator.backup_state()
    allocator.free(slots)
    allocator.restore_state(saved)
    row = torch.ones(2, 1, 1)
    for layer in (0, 1):
        pool.set_kv_buffer(layer, slots, row, row)
    assert pool.get_key_buffer(0).flatten().nonzero().flatten().tolist() == [3, 4]
    assert pool.get_key_buffer(1).flatten().nonzero().flatten().tolist() == [3, 4]
