"""``ReqToTokenPool``: for each running request, one row with the device slot of each of its tokens.

Models SGLang's ``ReqToTokenPool`` (0.5.10 hands out rows 0 to size - 1; later versions reserve row
0 as padding).
"""

from collections.abc import Sequence
from typing import Any

import torch

from refcache.errors import DoubleFree, InvalidArgument
from refcache.runtime import ImmediateRuntime, Region, Runtime

Rows = int | torch.Tensor
Columns = slice | torch.Tensor


class ReqToTokenPool:
    """Rows for at most ``size`` requests of at most ``max_context_len`` tokens.

    Attributes:
        req_to_token: int32 ``[size, max_context_len]``. It is device memory: write it through
            :meth:`write` and read it on the host through :meth:`read`.
        free_slots: row numbers, oldest free first.

    Raises:
        InvalidArgument: an extent below 1.
    """

    def __init__(
        self,
        size: int,
        max_context_len: int,
        device: str = "cpu",
        enable_memory_saver: bool = False,
        runtime: Runtime | None = None,
    ) -> None:
        """``enable_memory_saver`` is accepted for SGLang's callers: memory is released while no
        request runs, so no row is lost."""
        if size < 1 or max_context_len < 1:
            raise InvalidArgument(f"{size=}, {max_context_len=}: expected at least 1 of each")
        self.size = size
        self.max_context_len = max_context_len
        self.device = device
        self.runtime: Runtime = runtime or ImmediateRuntime()
        self.req_to_token = torch.zeros((size, max_context_len), dtype=torch.int32, device=device)
        self.clear()

    def clear(self) -> None:
        """Make every row free."""
        self.free_slots = list(range(self.size))

    def available_size(self) -> int:
        """Free rows."""
        return len(self.free_slots)

    def alloc(self, reqs: Sequence[Any]) -> list[int] | None:
        """Give each request without a row one; a request that has one (a chunk) keeps it.

        Sets ``req.req_pool_idx``.

        Returns:
            The row of each request, or None (and nothing changed) when too few are free.
        """
        without = [req for req in reqs if req.req_pool_idx is None]
        if len(without) > len(self.free_slots):
            return None
        rows, self.free_slots = self.free_slots[: len(without)], self.free_slots[len(without) :]
        for req, row in zip(without, rows, strict=True):
            req.req_pool_idx = row
        return [req.req_pool_idx for req in reqs]

    def free(self, req: Any) -> None:
        """Take the row back; sets ``req.req_pool_idx`` to None.

        Raises:
            DoubleFree: the request has no row, or its row is free already.
        """
        row = req.req_pool_idx
        if row not in range(self.size) or row in self.free_slots:
            raise DoubleFree(f"free of row {row}: the request has no row of this pool")
        self.free_slots.append(row)
        req.req_pool_idx = None

    def write(self, indices: tuple[Rows, Columns], values: torch.Tensor) -> None:
        """``req_to_token[rows, columns] = values``, as one launch on the current stream.

        Raises:
            InvalidArgument: a slice that leaves the row, or does not fit ``values``.
        """
        rows, columns = indices
        if isinstance(columns, slice):
            start, stop = columns.start or 0, columns.stop
            if not 0 <= start <= stop <= self.max_context_len or stop - start != len(values):
                raise InvalidArgument(
                    f"write of {len(values)} slots to columns {start} to {stop}: expected as many, "
                    f"inside a row of {self.max_context_len}"
                )

        def run() -> None:
            if isinstance(columns, slice):
                self.req_to_token[rows, columns].copy_(values)
            else:
                self.req_to_token[rows, columns] = values.to(torch.int32)

        self.runtime.launch("req_to_token.write", run, writes=[Region(self, 0, 0, rows)])

    def read(self, rows: Rows, columns: Columns) -> torch.Tensor:
        """A copy, int64, of these cells; the host waits for the current stream first."""
        self.runtime.host_sync()
        return self.req_to_token[rows, columns].to(torch.int64)
