"""A decode loop as a captured graph: its free list and its cursor are on the device."""

import pytest
import torch

import refcache_ops
from refcache.allocator import PagedTokenToKVPoolAllocator
from refcache.errors import InvalidArgument


def captured(batch, page, lent):
    """A graph of one step: each request grows by a token. The graph, lengths and last slots."""
    seq = torch.zeros(batch, dtype=torch.int64, device="cuda")
    last = torch.full((batch,), -1, device="cuda")
    spare = lent.cursor.clone()

    def step():
        seq.add_(1)
        last.copy_(refcache_ops.alloc_decode(seq, last, lent.pages, page, lent.cursor))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # compiles
    torch.cuda.synchronize()
    seq.zero_()
    last.fill_(-1)
    lent.cursor.copy_(spare)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph, seq, last


@pytest.mark.parametrize("batch", [1, 3, 64, 129, 1024])
@pytest.mark.parametrize("page", [1, 16])
def test_replays_hand_out_distinct_slots_until_the_list_ends(page, batch):
    replays = 60
    pages = -(-replays // page) * batch
    short = max(1, batch // 2) if batch > 1 else 0
    allocator = PagedTokenToKVPoolAllocator(
        (pages - short) * page, page, torch.float16, "cuda", None
    )
    for _ in range(2):  # the same graph would do: addresses stay
        lent = allocator.lend_free_pages()
        graph, seq, last = captured(batch, page, lent)
        taken = []
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(replays):
                graph.replay()
                taken.append(last.clone())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        slots = torch.stack(taken).cpu()
        there = slots[slots >= 0]
        assert len(there.unique()) == len(there)
        assert int(there.min()) >= page
        steps = replays - page * (-(-replays // page) - 1)  # after the last page was opened
        assert int((slots < 0).sum()) == short * steps
        assert seq.tolist() == [replays] * batch
        assert int(lent.cursor) - len(lent.pages) == short
        assert allocator.reclaim_free_pages() == short
        assert allocator.available_size() == 0
        allocator.free(there.cuda())
        assert allocator.available_size() == (pages - short) * page


@pytest.mark.parametrize("batch", [1, 7, 1100])
def test_extends_with_a_cursor_in_a_graph(batch):
    page, grow = 16, 21
    free = torch.randperm(batch * 12, device="cuda") + 1
    cursor = torch.zeros(1, dtype=torch.int64, device="cuda")
    seq = torch.zeros(batch, dtype=torch.int64, device="cuda")
    last = torch.full((batch,), -1, device="cuda")
    total, taken = batch * grow, []

    def step():
        before = seq.clone()
        seq.add_(grow)
        slots = refcache_ops.alloc_extend(before, seq, last, free, page, total, cursor)
        last.copy_(slots.view(batch, grow)[:, -1])
        return slots

    taken.append(step().clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(5):
        graph.replay()
        taken.append(out.clone())
    slots = torch.cat(taken)
    assert int(cursor) == batch * -(-grow * 6 // page)
    assert len(slots.unique()) == len(slots)
    assert int(slots.min()) >= page


@pytest.mark.parametrize(
    "bad", [{"page_size": 0}, {"page_size": -4}, {"last_loc": [3]}, {"cursor": [0, 0]}]
)
def test_bad_arguments_are_refused_by_name_on_the_card(bad):
    given = {"seq_lens": [5, 6], "last_loc": [7, 8], "free_pages": [3, 4], "cursor": [0]} | bad
    given = {k: torch.tensor(v).cuda() if isinstance(v, list) else v for k, v in given.items()}
    given = {"page_size": 4} | given
    for op, more in (
        ("alloc_decode", {}),
        ("alloc_extend", {"prefix_lens": given["seq_lens"] - 1, "extend_num_tokens": 2}),
    ):
        with pytest.raises(InvalidArgument, match=next(iter(bad))):
            getattr(refcache_ops, op)(**given, **more)
