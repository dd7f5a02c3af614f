"""The other ways to copy, beside which refcache's are measured; none is used by the product.

SGLang's kernels (see ``collect_peer.py``), launched as it does: one launch and one event a layer
for a load, one launch for a write; rows one by one for pages of 1, page runs by TMA for pages of 16
and more. Batched memcpy as vLLM does it: every page of every layer listed and issued by the caller.
"""

import ctypes
from pathlib import Path
from typing import Any

import torch
from collect_peer import build

from refcache_ops.engine import list_copies


class _Copy(ctypes.Structure):
    _fields_ = [(n, ctypes.c_void_p) for n in ("k_dst", "v_dst", "dst", "k_src", "v_src", "src")]
    _fields_ += [
        (n, ctypes.c_int64) for n in ("src_stride", "dst_stride", "row", "slots", "layers")
    ]


class SGLang:
    """Its kernels over planes ``[layer, slot, head, dim]`` of both tiers."""

    def __init__(self, folder: Path, host: Any, device: Any, page: int) -> None:
        self.copy = ctypes.CDLL(str(build(folder).resolve())).peer_copy
        self.host, self.device, self.tma = host, device, int(page >= 16)
        self.row = host[0].shape[-2] * host[0].shape[-1] * host[0].element_size()
        self.tables = [
            torch.tensor([layer.data_ptr() for layer in plane], device="cuda")
            for plane in (*host, *device)
        ]

    def _launch(self, to: list[int], to_slots: Any, of: list[int], of_slots: Any, n: int) -> None:
        pad = [None] * (2 - len(to))
        copy = _Copy(
            *to, *pad, to_slots.data_ptr(), *of, *pad, of_slots.data_ptr(),
            self.row, self.row, self.row, len(to_slots), n,
        )  # fmt: skip
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if code := self.copy(ctypes.byref(copy), self.tma, stream):
            raise RuntimeError(f"peer_copy returned {code}")

    def load_layer(self, layer: int, host_slots: torch.Tensor, device_slots: torch.Tensor) -> None:
        to, of = ([p[layer].data_ptr() for p in planes] for planes in (self.device, self.host))
        self._launch(to, device_slots, of, host_slots, 0)

    def write(self, host_slots: torch.Tensor, device_slots: torch.Tensor) -> None:
        host, device = self.tables[: len(self.host)], self.tables[len(self.host) :]
        to, of = ([t.data_ptr() for t in tables] for tables in (host, device))
        self._launch(to, host_slots, of, device_slots, len(self.host[0]))


class Memcpy:
    """Batched copies by the copy engine, listed and issued in the call."""

    def __init__(self, host: Any, device: Any, page: int) -> None:
        self.where = host, device
        self.page = page

    def listed(self, host_slots: torch.Tensor, device_slots: torch.Tensor) -> Any:
        return list_copies(*self.where, host_slots, device_slots, self.page, "layer_first")
