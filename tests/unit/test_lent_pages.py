"""An allocator hands its free pages to a loop on the device and takes them back."""

import pytest
import torch

from refcache import reference
from refcache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from refcache.errors import DoubleFree, InvalidArgument


def paged(need_sort=False):
    return PagedTokenToKVPoolAllocator(32, 4, torch.float16, "cpu", None, need_sort=need_sort)


def steps(lent, page, seq, last, count):
    """The slots of ``count`` decode steps, and the last slots."""
    out = []
    for _ in range(count):
        seq += 1
        last = reference.alloc_decode(seq, last, lent.pages, page, lent.cursor)
        out.append(last)
    return torch.stack(out)


def everything(allocator):
    """Each page once: free, or handed out."""
    held = allocator._held.nonzero().flatten()
    pages = torch.cat([allocator.free_pages, allocator.release_pages, held]).sort().values
    return pages.tolist() == list(range(1, allocator.num_pages + 1))


@pytest.mark.parametrize("need_sort", [False, True])
def test_a_loop_takes_what_is_lent_and_the_rest_comes_back(need_sort):
    allocator = paged(need_sort)
    first = allocator.alloc(8)
    allocator.free(first[:4])
    lent = allocator.lend_free_pages()
    assert allocator.available_size() == 0
    assert allocator.alloc(4) is None
    seq, last = torch.tensor([0, 3]), torch.tensor([-1, int(first[6])])
    slots = steps(lent, 4, seq, last, 4)  # two pages: one for each request
    assert len(set(slots.flatten().tolist())) == 8
    assert allocator.reclaim_free_pages() == 0
    assert everything(allocator)
    assert allocator.available_size() == 32 - 4 - 8
    allocator.free(torch.cat([slots.flatten(), first[4:]]))
    assert allocator.available_size() == 32
    assert everything(allocator)


def test_what_is_freed_meanwhile_is_free_and_what_the_loop_took_is_not_yet_its_callers():
    allocator = paged()
    first = allocator.alloc(8)
    lent = allocator.lend_free_pages()
    slots = steps(lent, 4, torch.tensor([0]), torch.tensor([-1]), 1)
    with pytest.raises(DoubleFree):
        allocator.free(slots[0])
    allocator.free(first[4:])
    assert allocator.alloc(4).tolist() == first[4:].tolist()
    assert allocator.reclaim_free_pages() == 0
    allocator.free(slots[0])
    assert everything(allocator)


def test_a_loop_that_runs_out_is_told_of_and_every_page_is_handed_out():
    allocator = paged()
    lent = allocator.lend_free_pages()
    batch = torch.zeros(3, dtype=torch.int64)
    slots = steps(lent, 4, batch, batch - 1, 12)  # nine pages, eight are there
    assert (slots[8:, 2] == -1).all()
    assert (slots[:, :2] > 0).all()
    assert int(lent.cursor) == len(lent.pages) + 1
    assert allocator.reclaim_free_pages() == 1
    assert allocator.available_size() == 0
    assert everything(allocator)


def test_a_loan_keeps_its_addresses_so_that_a_captured_graph_stays_right():
    allocator = TokenToKVPoolAllocator(6, torch.float16, "cpu", None)
    places = set()
    for round_ in range(3):
        lent = allocator.lend_free_pages()
        places.add((lent.pages.data_ptr(), lent.cursor.data_ptr(), len(lent.pages)))
        one = torch.tensor([round_])
        slots = steps(lent, 1, one, one - 1, 2)
        assert allocator.reclaim_free_pages() == 0
        assert everything(allocator)
        if round_:
            allocator.free(slots.flatten())
    assert len(places) == 1


def test_calls_that_a_loan_does_not_allow_are_refused_and_change_nothing():
    allocator = paged()
    with pytest.raises(InvalidArgument, match="nothing is lent"):
        allocator.reclaim_free_pages()
    state = allocator.backup_state()
    lent = allocator.lend_free_pages()
    kept = lent.pages.tolist(), int(lent.cursor)
    calls = (
        allocator.lend_free_pages,
        allocator.backup_state,
        lambda: allocator.restore_state(state),
    )
    for call in calls:
        with pytest.raises(InvalidArgument, match="are lent"):
            call()
    assert (lent.pages.tolist(), int(lent.cursor)) == kept
    lent.cursor.sub_(1)
    with pytest.raises(InvalidArgument, match="cursor=-1, expected 0 or more"):
        allocator.reclaim_free_pages()
    lent.cursor.add_(1)
    assert allocator.reclaim_free_pages() == 0
    lent = allocator.lend_free_pages()
    allocator.clear()
    assert allocator.available_size() == 32
    with pytest.raises(InvalidArgument, match="nothing is lent"):
        allocator.reclaim_free_pages()
