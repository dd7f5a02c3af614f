"""``ReqToTokenPool``: for each running request, one row with the device slot of each of its tokens.

Models SGLang's ``ReqToTokenPool`` (0.5.10 hands out rows 0 to size - 1; later versions reserve row
0 as padding).
"""

from collections.abc import Sequence
from typing import Any

import torch

from refcache.arguments import shown, slot_list, slots_inside, whole_number, with_attributes
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
        whole_number("size", size, 1)
        whole_number("max_context_len", max_context_len, 1)
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

        Raises:
            InvalidArgument: not a list of requests, each once, whose rows (if any) are in use.
        """
        if not isinstance(reqs, Sequence) or len({id(req) for req in reqs}) < len(reqs):
            raise InvalidArgument(f"alloc: {shown(reqs)}; expected a list of requests, each once")
        for req in reqs:
            with_attributes("alloc", req, "req_pool_idx")
            if req.req_pool_idx is not None and not self._is_held(req.req_pool_idx):
                raise InvalidArgument(
                    f"alloc for a request in row {shown(req.req_pool_idx)}: expected one in use"
                )
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
            InvalidArgument: not a request.
            DoubleFree: the request has no row, or its row is free already.
        """
        with_attributes("free", req, "req_pool_idx")
        row = req.req_pool_idx
        if not self._is_held(row):
            raise DoubleFree(f"free of row {shown(row)}: the request has no row of this pool")
        req.req_pool_idx = None
        self.free_slots.append(row)

    def _is_held(self, row: Any) -> bool:
        whole = isinstance(row, int) and not isinstance(row, bool)
        return whole and 0 <= row < self.size and row not in self.free_slots

    def write(self, indices: tuple[Rows, Columns], values: torch.Tensor) -> None:
        """``req_to_token[rows, columns] = values``, as one launch on the current stream.

        Raises:
            InvalidArgument: rows, columns or values that are not integers; columns that leave the
                row, rows that the pool has not, or not as many cells as values.
        """
        if not isinstance(indices, tuple) or len(indices) != 2:
            raise InvalidArgument(f"write to {shown(indices)}: expected (rows, columns)")
        rows, columns = indices
        slots_inside("write", slot_list("write", values, self.device), -(2**31), 2**31)
        cells = self._cells("write", rows, columns)
        if cells != len(values):
            raise InvalidArgument(
                f"write of {len(values)} slots to {cells} columns: expected as many"
            )

        def run() -> None:
            if isinstance(columns, slice):
                self.req_to_token[rows, columns].copy_(values)
            else:
                self.req_to_token[rows, columns] = values.to(torch.int32)

        self.runtime.launch("req_to_token.write", run, writes=[Region(self, 0, 0, rows)])

    def read(self, rows: Rows, columns: Columns) -> torch.Tensor:
        """A copy, int64, of these cells; the host waits for the current stream first.

        Raises:
            InvalidArgument: as :meth:`write`.
        """
        self._cells("read", rows, columns)
        self.runtime.host_sync()
        return self.req_to_token[rows, columns].to(torch.int64)

    def _cells(self, what: str, rows: Any, columns: Any) -> int:
        """How many cells of a row these are; of several rows, one each."""
        if isinstance(rows, torch.Tensor):
            slots_inside(f"{what}: rows", slot_list(what, rows, self.device), 0, self.size)
        elif whole_number(f"{what}: row", rows) >= self.size:
            raise InvalidArgument(f"{what}: row {rows}; expected 0 to {self.size - 1}")
        end = self.max_context_len
        if isinstance(columns, torch.Tensor):
            slots_inside(f"{what}: columns", slot_list(what, columns, self.device), 0, end)
            if isinstance(rows, torch.Tensor) and len(rows) != len(columns):
                raise InvalidArgument(
                    f"{what}: {len(rows)} rows and {len(columns)} columns; expected as many"
                )
            return len(columns)
        if not isinstance(columns, slice):
            raise InvalidArgument(f"{what}: columns {shown(columns)}; expected a slice or integers")
        start, step = 0 if columns.start is None else columns.start, columns.step
        if step is not None and whole_number(f"{what}: step", step) != 1:
            raise InvalidArgument(f"{what}: columns in steps of {step}; expected 1")
        whole_number(f"{what}: first column", start)
        stop = whole_number(f"{what}: column", columns.stop)
        if not start <= stop <= end:
            raise InvalidArgument(
                f"{what}: columns {start} to {stop}; expected them inside a row of {end}"
            )
        return stop - start
