"""An allocator of one's own, with a page that is handed out twice; judge it with

refcache check double_handout:MyTarget --suite allocator
"""

import torch

from refcache.oracle import Target


class MyAllocator:
    """Pages in a list; page 0 is the dummy that nobody gets."""

    def __init__(self, size, page_size):
        self.size, self.page_size = size, page_size
        self.clear()

    def clear(self):
        self.pages, self.group = list(range(1, self.size // self.page_size + 1)), None

    def available_size(self):
        return len(self.pages) * self.page_size

    def alloc(self, need_size):
        return self._grow([(0, need_size, -1)])

    def alloc_extend(self, prefix_lens, _prefix_cpu, seq_lens, _seq_cpu, last_loc, _total):
        return self._grow(torch.stack([prefix_lens, seq_lens, last_loc], dim=1).tolist())

    def _grow(self, rows):
        pages, slots = list(self.pages), []
        for start, end, last in rows:
            for position in range(start, end):
                if position % self.page_size:
                    last += 1
                elif pages:
                    last = pages.pop(0) * self.page_size
                else:
                    return None
                slots.append(last)
        self.pages = pages
        return torch.tensor(slots, dtype=torch.int64)

    def alloc_decode(self, seq_lens, _seq_cpu, last_loc):
        opens_page = (seq_lens - 1) % self.page_size == 0
        need = int(opens_page.sum())
        if need > len(self.pages):
            return None
        slots = last_loc + 1
        if need:  # the bug: every request of the batch that opens a page gets the first free one
            slots[opens_page] = self.pages[0] * self.page_size
        self.pages = self.pages[need:]
        return slots

    def free(self, free_index):
        queue = self.pages if self.group is None else self.group
        queue.extend(sorted({slot // self.page_size for slot in free_index.tolist()}))

    def free_group_begin(self):
        self.group = []

    def free_group_end(self):
        self.pages, self.group = self.pages + self.group, None

    def merge_and_sort_free(self):
        self.pages.sort()


class MyTarget(Target):
    """How refcache makes one."""

    name = "mine"
    capabilities = frozenset({"allocator"})

    def allocator(self, config):
        return MyAllocator(config.size, config.page_size)
