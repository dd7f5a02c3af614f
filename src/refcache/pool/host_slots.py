"""Who hands out the slots of a host pool: whole pages, thread-safe, every slot with one owner.

A slot is free or held; the mask ``_held`` is what makes a double free an error instead of two
owners of one slot. Storage threads free slots as well as the scheduler, so every change is made
under the lock.
"""

import torch

from refcache.arguments import shown, slot_list, whole_number
from refcache.errors import DoubleFree, InvalidArgument, InvalidSlot
from refcache.runtime import Runtime


class HostSlots:
    """Slots 0 to ``size - 1``, in whole pages.

    Attributes:
        free_slots: int64, the slots that nobody owns, oldest free first.
        lock: held during every change.
    """

    def __init__(self, size: int, page_size: int, runtime: Runtime) -> None:
        self.size = size
        self.page_size = page_size
        self.lock = runtime.Lock()
        self.clear()

    def clear(self) -> None:
        """Make every slot free, in ascending order."""
        free_slots, held = torch.arange(self.size), torch.zeros(self.size, dtype=torch.bool)
        with self.lock:
            self.free_slots, self._held = free_slots, held

    def available_size(self) -> int:
        """Free slots."""
        return len(self.free_slots)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """``need_size`` slots in whole ascending pages, from the front of the free list.

        Returns:
            int64 ``[need_size]`` of its own, or None (and nothing changed) when too few are free.

        Raises:
            InvalidArgument: ``need_size`` negative or not in whole pages.
        """
        if whole_number("need_size", need_size) % self.page_size:
            raise InvalidArgument(
                f"alloc({need_size}): expected a multiple of page_size={self.page_size}, 0 or more"
            )
        with self.lock:
            if need_size > len(self.free_slots):
                return None
            taken, rest = self.free_slots[:need_size].clone(), self.free_slots[need_size:]
            self._held[taken] = True
            self.free_slots = rest
            return taken

    def check_held(self, indices: torch.Tensor) -> None:
        """Raise InvalidSlot unless every slot in ``indices`` has an owner."""
        slots = slot_list("host slots", indices).to("cpu", torch.int64)
        inside = (slots >= 0) & (slots < self.size)
        bad = slots[~(inside & self._held[slots * inside])]
        if len(bad):
            raise InvalidSlot(f"host slot {int(bad[0])}: expected one that was handed out")

    def free(self, indices: torch.Tensor) -> int:
        """Give pages back, to the end of the free list in the given order.

        Args:
            indices: integer ``[n]``: whole pages, ascending inside each page.

        Returns:
            ``n``.

        Raises:
            InvalidArgument: not such a tensor.
            InvalidSlot: a slot out of range.
            DoubleFree: a slot that is free already, or named twice.
        """
        if len(slot_list("free", indices)) % self.page_size:
            raise InvalidArgument(f"free: {shown(indices)}; expected whole pages")
        slots = indices.to("cpu", torch.int64)
        if len(slots) == 0:
            return 0
        low, high = (int(bound) for bound in slots.aminmax())
        if low < 0 or high >= self.size:
            raise InvalidSlot(f"free of slots {low} to {high}: expected 0 to {self.size - 1}")
        pages = slots.view(-1, self.page_size)
        first = pages[:, 0]
        whole = torch.equal(pages, first[:, None] + torch.arange(self.page_size))
        if not whole or int((first % self.page_size).count_nonzero()):
            raise InvalidArgument(f"free of {pages.tolist()}: expected whole ascending pages")
        with self.lock:
            free = slots[~self._held[slots]]
            if len(free) or len(set(first.tolist())) != len(first):
                twice = free if len(free) else slots
                raise DoubleFree(f"free of host slot {int(twice[0])}: it is free, or named twice")
            free_slots = torch.cat([self.free_slots, slots])
            self._held[slots] = False
            self.free_slots = free_slots
        return len(slots)
