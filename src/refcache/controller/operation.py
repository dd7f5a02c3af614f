"""What the controller queues, merges and acknowledges.

Models SGLang's ``CacheOperation``, ``HiCacheAck`` and ``TransferBuffer``. Nothing routes through
``TransferBuffer`` in the version modelled; the class is here because callers name it.
"""

from collections.abc import Sequence
from queue import Empty, Full, Queue
from threading import Event as ThreadEvent
from typing import Any, NamedTuple

import torch

from refcache.arguments import slot_list
from refcache.errors import InvalidArgument


class CacheOperation:
    """A copy to be made: a set of (host slot, device slot) pairs, and the nodes they belong to.

    Attributes:
        host_indices, device_indices: integer ``[n]`` each; pair i is element i of both.
        node_ids: who is told when it is done.
        priority: smaller first; by default the order of creation.
    """

    counter = 0

    def __init__(
        self,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        node_id: int,
        priority: int | None = None,
    ) -> None:
        """``host_indices`` and ``device_indices`` must be equally long (InvalidArgument)."""
        slot_list("host slots", host_indices)
        slot_list("device slots", device_indices)
        if host_indices.shape != device_indices.shape:
            raise InvalidArgument(
                f"host slots {tuple(host_indices.shape)} and device slots "
                f"{tuple(device_indices.shape)}: expected [n] each"
            )
        self.host_indices = host_indices
        self.device_indices = device_indices
        self.node_ids = [node_id]
        self.data: Any = None  # for whoever copies; nothing here sets it
        self.id = CacheOperation.counter
        CacheOperation.counter += 1
        self.priority = self.id if priority is None else priority

    @staticmethod
    def merge_ops(ops: "Sequence[CacheOperation]") -> "CacheOperation":
        """One operation with the pairs and nodes of all, in order, and the smallest priority.

        Raises:
            InvalidArgument: no operation.
        """
        if not ops:
            raise InvalidArgument("merge_ops of no operation: expected one or more")
        if len(ops) == 1:
            return ops[0]
        merged = CacheOperation(
            torch.cat([op.host_indices for op in ops]),
            torch.cat([op.device_indices for op in ops]),
            -1,
            min(op.priority for op in ops),
        )
        merged.node_ids = [node_id for op in ops for node_id in op.node_ids]
        return merged

    def __lt__(self, other: "CacheOperation") -> bool:
        return self.priority < other.priority


class HiCacheAck(NamedTuple):
    """A copy that was started: done when ``finish_event`` is; then ``node_ids`` are released."""

    start_event: Any
    finish_event: Any
    node_ids: list[int]


class TransferBuffer:
    """A bounded queue of operations between two threads, which stops with ``stop_event``."""

    def __init__(
        self, stop_event: ThreadEvent, buffer_count: int = 3, max_buffer_size: int = 1024
    ) -> None:
        self.stop_event = stop_event
        self.max_buffer_size = max_buffer_size
        self.buffers: Queue[CacheOperation] = Queue(maxsize=buffer_count)

    def full(self) -> bool:
        return self.buffers.full()

    def empty(self) -> bool:
        return self.buffers.empty()

    def put(self, item: CacheOperation, block: bool = True, timeout: float = 1) -> None:
        """Add ``item``; wait for room if ``block``, else drop it when there is none."""
        while not self.stop_event.is_set():
            try:
                self.buffers.put(item, block=block, timeout=timeout)
                return
            except Full:
                if not block:
                    return

    def get(self, block: bool = True, timeout: float = 1) -> CacheOperation | None:
        """The oldest item; None when there is none (within ``timeout`` seconds if ``block``)."""
        try:
            return self.buffers.get(block=block, timeout=timeout)
        except Empty:
            return None

    def clear(self) -> None:
        """Drop everything."""
        self.buffers.queue.clear()
