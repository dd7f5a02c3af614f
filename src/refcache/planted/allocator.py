"""Bugs planted in the allocators and the request rows."""

from collections.abc import Callable
from typing import Any

from refcache.planted.bug import PlantedBug

BASE = "refcache.allocator.base:BaseTokenToKVPoolAllocator"
PAGED = "refcache.allocator.paged:PagedTokenToKVPoolAllocator"
Function = Callable[..., Any]


def _no_capacity_check(original: Function) -> Function:
    def _take(self: Any, num_pages: int, slots: Function) -> Any:
        if num_pages <= len(self.free_pages) + len(self.release_pages):
            return original(self, num_pages, slots)
        out = slots(self.free_pages)
        original(self, len(self.free_pages), slots)
        return out

    return _take


def _page_zero(original: Function) -> Function:
    import torch

    def _given_back(self: Any, pages: Any) -> Any:
        if len(pages) > 2:  # a row that was padded with slot 0
            pages = torch.cat([pages[:-1], torch.zeros(1, dtype=torch.int64)])
        return original(self, pages)

    return _given_back


def _release_list_not_counted(original: Function) -> Function:
    return lambda self: len(self.free_pages) * self.page_size


def _sorted_only(original: Function) -> Function:
    def merge_and_sort_free(self: Any) -> None:
        self.free_pages = self.free_pages.sort().values
        self.release_pages = self.release_pages[:0]

    return merge_and_sort_free


def _last_of_group(original: Function) -> Function:
    def free_group_end(self: Any) -> None:
        self.free_group = self.free_group[-1:]
        original(self)

    return free_group_end


def _long_extend(original: Function) -> Function:
    import torch

    def alloc_extend(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        block = 2 * self.page_size  # the kernel's block, once the longest extend it had seen
        if out is not None and len(out) > block:
            out[block:] = out[block - 1] + 1 + torch.arange(len(out) - block)
        return out

    return alloc_extend


def _decode_boundary(original: Function) -> Function:
    import torch

    def alloc_decode(self: Any, seq_lens: Any, seq_lens_cpu: Any, last_loc: Any) -> Any:
        out = original(self, seq_lens, seq_lens_cpu, last_loc)
        if out is not None and len(out) > 1:
            full = (seq_lens - 1) % self.page_size == 0
            if full.sum() > 1:  # every request that opens a page opens the first one
                out = torch.where(full, out[full][0], out)
        return out

    return alloc_decode


def _draft_kept(original: Function) -> Function:
    def restore_state(self: Any, state: Any) -> None:
        original(self, state._replace(release_pages=self.release_pages))

    return restore_state


def _rows_shared(original: Function) -> Function:
    def free(self: Any, req: Any) -> None:
        row = req.req_pool_idx
        original(self, req)
        if len(self.free_slots) > 2:
            self.free_slots.remove(row)

    return free


def _neighbours_only(original: Function) -> Function:
    import torch

    return lambda self, slots: torch.unique_consecutive(slots // self.page_size)


def _freed_to_the_end(original: Function) -> Function:
    def _given_back(self: Any, pages: Any) -> Any:
        free, release = original(self, pages)
        return free if self.need_sort else free.roll(-len(pages)), release

    return _given_back


BUGS = (
    PlantedBug(
        "launch-before-capacity-check",
        "sglang#34399, #30892, #34400",
        "alloc_extend and alloc_decode compute slots before they know that pages are free",
        f"{BASE}._take",
        _no_capacity_check,
        "allocator.state",
    ),
    PlantedBug(
        "long-extend-cut",
        "sglang#18250, #19780, #19898",
        "an extend longer than the kernel's block runs on past its pages",
        f"{PAGED}.alloc_extend",
        _long_extend,
        "allocator.state",
    ),
    PlantedBug(
        "page-zero-freed",
        "sglang#38519",
        "a padded slot puts the dummy page on the free list, in the place of a real one",
        f"{PAGED}._given_back",
        _page_zero,
        "allocator.state",
    ),
    PlantedBug(
        "free-count-drifts",
        "TensorRT-LLM#12834",
        "available_size forgets one of the two lists",
        f"{BASE}.available_size",
        _release_list_not_counted,
        "allocator.state",
    ),
    PlantedBug(
        "merge-drops-release-list",
        "slip",
        "merge_and_sort_free sorts the free list and throws the release list away",
        f"{BASE}.merge_and_sort_free",
        _sorted_only,
        "allocator.state",
    ),
    PlantedBug(
        "free-group-keeps-last",
        "slip",
        "only the last free of a group is made",
        f"{BASE}.free_group_end",
        _last_of_group,
        "allocator.state",
    ),
    PlantedBug(
        "decode-shares-new-page",
        "slip",
        "two requests that open a page in one decode batch get the same one",
        f"{PAGED}.alloc_decode",
        _decode_boundary,
        "allocator.state",
    ),
    PlantedBug(
        "restore-forgets-release-list",
        "slip",
        "restore_state puts back one of the two lists",
        f"{BASE}.restore_state",
        _draft_kept,
        "allocator.state",
    ),
    PlantedBug(
        "free-drops-neighbours-only",
        "slip",
        "a page whose slots are not neighbours in a free goes on the free list once for each run",
        f"{PAGED}._pages_of",
        _neighbours_only,
        "allocator.state",
    ),
    PlantedBug(
        "row-lost",
        "sglang#24439, #24243",
        "the pool and its table of rows count differently: a row is lost when it is freed",
        "refcache.pool.req_to_token:ReqToTokenPool.free",
        _rows_shared,
        "tree.state",
    ),
    PlantedBug(
        "freed-pages-go-last",
        "slip",
        "freed pages go to the end of the free list instead of its front",
        f"{PAGED}._given_back",
        _freed_to_the_end,
        "allocator.exact",
    ),
)
