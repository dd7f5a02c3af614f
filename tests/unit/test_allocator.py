"""The allocator: any free page is legal, misuse is refused, and a page that two own is named."""

import pytest
import torch

from refcache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from refcache.errors import InvalidArgument, RefcacheError
from refcache.oracle import AllocatorDriver, CacheConfig, Violation, resolve
from refcache.pool.host_slots import HostSlots
from refcache.runtime import ImmediateRuntime


def test_a_mask_is_no_list_of_slots() -> None:
    """A mask of booleans would be read as slots 0 and 1."""
    mask = torch.tensor([True, True])
    allocator = TokenToKVPoolAllocator(8, torch.float16, "cpu", None)
    host = HostSlots(8, 2, ImmediateRuntime())
    for owner in (allocator, host):
        owner.alloc(8)
        with pytest.raises(InvalidArgument, match=r"free: torch\.bool"):
            owner.free(mask)
        assert owner.available_size() == 0


def test_any_free_page_is_a_legal_answer() -> None:
    for target in ("refcache", "naive"):
        d = AllocatorDriver(resolve(target), page_size=4, size=16)
        d.extend(((0, 6),))
        d.extend(((0, 3), (1, 5)))
        d.release(0, 4)
        d.wind_down()
    first = {t: AllocatorDriver(resolve(t), page_size=4, size=16) for t in ("refcache", "naive")}
    for d in first.values():
        d.alloc(1)
    assert first["refcache"].sequences != first["naive"].sequences


# Pages of 2, four of them: slots 2 to 9. Each last_loc sits at the offset that its prefix says.
@pytest.mark.parametrize("target", ["refcache", "naive"])
@pytest.mark.parametrize(
    ("prefix", "last", "legal"),
    [
        ((1,), (2,), True),  # the first slot of the pool
        ((2,), (9,), True),  # the last one
        ((1, 0), (2, -1), True),
        ((2, 0), (9, -1), True),
        ((), (), True),
        ((2,), (1,), False),  # the last slot of the dummy page
        ((1,), (10,), False),  # the first slot past the pool
        ((2, 0), (1, -1), False),
        ((1, 0), (10, -1), False),
        ((1,), (3,), False),  # another offset
        ((2,), (2,), False),
        ((1, 1), (2, 5), False),
        ((1,), (-1,), False),  # no slot at all
    ],
)
def test_last_loc_is_the_slot_of_the_last_token(
    target: str, prefix: tuple[int, ...], last: tuple[int, ...], legal: bool
) -> None:
    allocator = resolve(target).allocator(CacheConfig(page_size=2, size=8))
    before, where = torch.tensor(prefix, dtype=torch.int64), torch.tensor(last, dtype=torch.int64)
    extend = (before, before, before + 1, before + 1, where, len(prefix))
    decode = (before + 1, before + 1, where)
    for grow, given in ((allocator.alloc_extend, extend), (allocator.alloc_decode, decode)):
        if legal:
            assert len(grow(*given)) == len(prefix)
        else:
            with pytest.raises(RefcacheError):
                grow(*given)
    assert legal or allocator.available_size() == 8


@pytest.mark.parametrize("how", ["alloc", "alloc_extend", "alloc_decode"])
def test_released_pages_join_the_free_list_only_when_a_request_is_short(how: str) -> None:
    """``need_sort``: four pages, three taken, the first and the third given back."""
    allocator = resolve("refcache").allocator(CacheConfig(page_size=2, size=8, need_sort=True))
    taken = allocator.alloc(6)
    allocator.free(taken[4:])
    allocator.free(taken[:2])

    def one_page() -> int:
        none, one, last = torch.tensor([0]), torch.tensor([1]), torch.tensor([-1])
        match how:
            case "alloc":
                slots = allocator.alloc(2)
            case "alloc_extend":
                slots = allocator.alloc_extend(none, none, one, one, last, 1)
            case _:
                slots = allocator.alloc_decode(one, one, last)
        return int(slots[0]) // 2

    # page 4 never was handed out: one page is not short of it, the next one is
    assert [one_page(), one_page(), one_page()] == [4, 1, 3]


def test_a_page_that_two_own_is_named() -> None:
    class Generous(type(resolve("naive"))):  # type: ignore[misc]
        def allocator(self, config):  # type: ignore[no-untyped-def]
            made = super().allocator(config)
            grow = made._grow

            def _grow(rows):  # type: ignore[no-untyped-def]
                before = set(made._free)
                out = grow(rows)
                made._free = before  # hands pages out and keeps them free
                return out

            made._grow = _grow
            return made

    d = AllocatorDriver(Generous(), page_size=1, size=2)
    with pytest.raises(Violation, match="P1") as caught:
        d.alloc(1)
    assert caught.value.call == "d.alloc(1)"
    assert caught.value.steps[-1] == "d.alloc(1)"


@pytest.mark.parametrize("lengths", [[0], [3, 0], [-1, 5]])
def test_a_decode_to_no_token_is_refused(lengths: list[int]) -> None:
    allocator = PagedTokenToKVPoolAllocator(16, 2, torch.int64, "cpu", None)
    seq_lens = torch.tensor(lengths)
    with pytest.raises(InvalidArgument, match="expected 1 up"):
        allocator.alloc_decode(seq_lens, seq_lens, torch.full_like(seq_lens, 3))
    assert allocator.available_size() == 16
