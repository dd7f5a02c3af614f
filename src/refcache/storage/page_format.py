"""A page in a file: 64 bytes that say what it is, then the page.

=======  =====  ===============================================================
offset   bytes  what
=======  =====  ===============================================================
0        8      magic, ``refpage`` and a newline
8        4      version of this format, 1
12       20     digest of the key
32       8      bytes of the page
40       20     digest of the shape (below): how the bytes are to be read
60       4      CRC-32 of the page
64              the page
=======  =====  ===============================================================

Integers are little-endian, digests the first bytes of a SHA-256. Every byte is compared with what
it must be, so there is no checksum of the header: a flipped bit anywhere in the file is seen.

The *shape* is everything that decides which bytes a key stands for and is not in the key: model,
rank, pipeline stage, and of each registered pool the dtype, layout, page size and sizes. It is part
of the file's name too, so two engines with other layouts may share a directory and never meet.
"""

import ctypes
import hashlib
import json
import re
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from refcache.storage.transfers import HiCacheStorageConfig

MAGIC = b"refpage\n"
VERSION = 1
_HEADER = struct.Struct("<8sI20sq20s")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
POOL_FIELDS = (
    "dtype",
    "layout",
    "page_size",
    "size_per_token",
    "start_layer",
    "end_layer",
    "layer_num",
    "head_num",
    "head_dim",
    "v_head_dim",
)
PLAIN = re.compile(r"[0-9a-z_-][0-9a-z._-]{0,159}")
HASHED = re.compile(r"=[0-9a-f]{64}")


class PageFormat:
    """Names and headers of the pages of one shape.

    Args:
        config: the rank and the model.
        pools: the registered host pools, by name; what they do not have is left out.
    """

    def __init__(self, config: HiCacheStorageConfig, pools: Mapping[str, Any]) -> None:
        told = json.dumps(_shape(config, pools), sort_keys=True)
        self._digest = hashlib.sha256(told.encode()).digest()[:20]
        self.ending = f".{self._digest.hex()[:16]}.page"

    def name(self, key: str) -> str:
        """The file of ``key``: the key where it is a plain lower-case name, else its digest."""
        if PLAIN.fullmatch(key):
            return key + self.ending
        return f"={hashlib.sha256(key.encode(errors='surrogatepass')).hexdigest()}{self.ending}"

    def owns(self, name: str) -> bool:
        """Whether a file of that name is a page of this shape."""
        label = name.removesuffix(self.ending)
        return label != name and bool(PLAIN.fullmatch(label) or HASHED.fullmatch(label))

    def temporary(self, name: str, writer: str) -> str:
        """Where ``writer`` writes the file ``name`` before it gets that name."""
        return f".{name}.{writer}.tmp"

    def owns_temporary(self, name: str) -> bool:
        """Whether a file of that name is a page of this shape that somebody writes, or wrote."""
        page, _, writer = name.removeprefix(".").removesuffix(".tmp").rpartition(".")
        return bool(writer) and name == self.temporary(page, writer) and self.owns(page)

    def header(self, key: str, page: memoryview) -> bytes:
        """The 64 bytes before ``page``."""
        return self._head(key, len(page)) + _CHECKSUM.pack(zlib.crc32(page))

    def announces(self, key: str, header: bytes | bytearray, page_bytes: int) -> bool:
        """Whether ``header`` is that of a page of ``key`` of so many bytes, whatever its bytes."""
        return header[: _HEADER.size] == self._head(key, page_bytes)

    def _head(self, key: str, length: int) -> bytes:
        digest = hashlib.sha256(key.encode(errors="surrogatepass")).digest()[:20]
        return _HEADER.pack(MAGIC, VERSION, digest, length, self._digest)


def _shape(config: HiCacheStorageConfig, pools: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the bytes of a key besides the key. MLA pages are the same on every rank."""
    return {
        "model": config.model_name,
        "tp": None if config.is_mla_model else [config.tp_rank, config.tp_size],
        "pp": [config.pp_rank, config.pp_size],
        "pools": {
            name: {
                field: str(getattr(pool, field)) for field in POOL_FIELDS if hasattr(pool, field)
            }
            | {"store of": str(getattr(getattr(pool, "device_pool", None), "dtype", None))}
            for name, pool in pools.items()
        },
    }


def sglang_suffix(config: HiCacheStorageConfig) -> str:
    """What SGLang's file backend puts behind a key: model, rank unless MLA, stage if there are any.

    >>> sglang_suffix(HiCacheStorageConfig(tp_rank=0, tp_size=2, pp_rank=1, pp_size=2,
    ...                                    model_name="org/m"))
    '_org-m_0_2_2_1'
    """
    parts = [(config.model_name or "").replace("/", "-")]
    if not config.is_mla_model:
        parts += [str(config.tp_rank), str(config.tp_size)]
    if config.pp_size > 1:
        parts += [str(config.pp_size), str(config.pp_rank)]
    return "_" + "_".join(parts)


def memory_of(page: torch.Tensor) -> memoryview:
    """The memory of a flat uint8 page, to write from or read into; ``page`` must outlive it."""
    size = page.numel()
    if not size:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * size).from_address(page.data_ptr())).cast("B")
