"""Host pools: the second tier of KV rows, in pinned memory, in any layout.

A host pool is built from the planes that its device pool declares (name, heads, width, dtype), so
every plane has its counterpart and nothing is computed again from a model's configuration. Slots
are handed out in whole pages, numbered from 0.

How rows move between the tiers is :mod:`refcache.pool.host_copies`; pages as flat tensors, for
storage below the host, are :mod:`refcache.pool.host_pages`.

Models SGLang's ``HostKVCache``, ``MHATokenToKVPoolHost`` and ``MLATokenToKVPoolHost``; left out:
the check that enough host memory is free.
"""

import math
import weakref

import torch

from refcache.backend import resolve
from refcache.errors import (
    HostPoolTooSmall,
    HostRegisterError,
    InvalidArgument,
    UnknownName,
)
from refcache.pool.device import MHATokenToKVPool, MLATokenToKVPool
from refcache.pool.host_copies import HostCopies, check_device_pool
from refcache.pool.host_pages import HostPages
from refcache.pool.host_slots import HostSlots
from refcache.pool.kv_cache import KVCache
from refcache.pool.pinned import (
    Cudart,
    HostTensorAllocator,
    LoadedCudart,
    alloc_with_host_register,
)
from refcache.reference import Layout
from refcache.runtime import Runtime
from refcache.types import ServerArgs


class HostKVCache(HostSlots, HostCopies, HostPages):
    """Slots and rows on the host for the planes of one device pool.

    Args:
        device_pool: whose rows it holds.
        host_to_device_ratio: host tokens / device tokens; unused when ``host_size`` is above 0.
        host_size: GB of host memory.
        page_size: slots a page; the device pool's.
        layout: one of :data:`refcache.reference.LAYOUTS`.
        pin_memory: register the memory with CUDA (where there is a CUDA device).
        allocator_type: only "default".
        backend: who copies for the "kernel" I/O backend; see :func:`refcache.backend.resolve`.
        cudart: who registers memory; by default CUDA's runtime for a CUDA device, else nobody.
        runtime: the machine; the device pool's by default.

    Attributes:
        size: slots, in whole pages, one page more than asked for as in SGLang; ``page_num`` pages.
        planes: one buffer a device plane, in ``layout``.
        small_load_bytes: a kernel loads all layers in one launch where a layer has at most so many
            bytes; None: as the rules of the card say (see :meth:`plan_transfer`).
        release: unregisters the memory; called by itself when the pool is gone.

    Raises:
        WrongTier: ``device_pool`` is no device pool.
        HostPoolTooSmall: not larger than the device pool.
        UnknownName, InvalidArgument: a layout or allocator that does not exist, another page size.
        HostRegisterError: pinning was refused.
    """

    def __init__(
        self,
        device_pool: KVCache,
        host_to_device_ratio: float,
        host_size: int,
        page_size: int,
        layout: str,
        pin_memory: bool = True,
        device: str = "cpu",
        allocator_type: str = "default",
        backend: str | None = None,
        cudart: Cudart | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        check_device_pool(device_pool)
        if allocator_type != "default":
            raise UnknownName("allocator_type", allocator_type, ["default"])
        number = isinstance(host_to_device_ratio, int | float) and not isinstance(
            host_to_device_ratio, bool
        )
        if not number or not 0 <= host_to_device_ratio < math.inf:
            raise InvalidArgument(f"{host_to_device_ratio=}: expected a number of 0 or more")
        if not isinstance(host_size, int | float) or not 0 <= host_size < math.inf:
            raise InvalidArgument(f"{host_size=}: expected GB, 0 or more")
        if page_size != device_pool.page_size:
            raise InvalidArgument(
                f"{page_size=}: expected {device_pool.page_size}, as on the device"
            )
        self.device_pool = device_pool
        self.layout = layout
        self.pin_memory = pin_memory
        self.device = device
        self.runtime: Runtime = runtime or device_pool.runtime
        self.small_load_bytes: int | None = None
        self.dtype = device_pool.store_dtype
        self.layer_num = device_pool.layer_num
        self.start_layer = device_pool.start_layer
        self.end_layer = device_pool.end_layer
        self.size_per_token = self.get_size_per_token()
        if host_size > 0:
            tokens = int(host_size * 1e9 // self.size_per_token)
        else:
            tokens = int(device_pool.size * host_to_device_ratio)
        self.page_num = tokens // page_size + 1
        size = self.page_num * page_size
        if size <= device_pool.size:
            raise HostPoolTooSmall(
                f"a host pool of {size} slots: expected more than the device pool's "
                f"{device_pool.size}"
            )
        super().__init__(size, page_size, self.runtime)
        self._backend = resolve(backend, device_pool.device)
        if cudart is None and str(device_pool.device).startswith("cuda"):
            cudart = LoadedCudart()
        self.allocator = HostTensorAllocator(cudart)
        self.release = weakref.finalize(self, self.allocator.release)
        try:
            self.planes = self.init_kv_buffer()
        except HostRegisterError:
            self.release()
            raise

    def get_ksize_per_token(self) -> int:
        """Bytes of one token in the first plane: its K, or its latent row."""
        plane = self.device_pool.planes[0]
        return plane.head_num * plane.head_dim * self.layer_num * self.dtype.itemsize

    def get_size_per_token(self) -> int:
        """Bytes of one token: every layer of every plane, as wide as on the device."""
        return sum(plane.slot_bytes for plane in self.device_pool.planes) * self.layer_num

    def init_kv_buffer(self) -> tuple[torch.Tensor, ...]:
        """Allocate (and pin) one buffer a plane; KV of equal width shares one allocation."""
        planes = self.device_pool.planes
        layouts = [
            Layout.of(
                self.layout,
                self.size // plane.slots_per_row,
                self.page_size // plane.slots_per_row,
                self.layer_num,
                plane.head_num,
                plane.head_dim,
            )
            for plane in planes
        ]
        pairs = [(plane.buffer.dtype, where) for plane, where in zip(planes, layouts, strict=True)]
        kv = self.device_pool.kv_planes
        together = kv if len(set(pairs[:kv])) == 1 else 0
        buffers: tuple[torch.Tensor, ...] = ()
        if together:
            dtype, where = pairs[0]
            buffers = tuple(self._allocate((kv, *where.shape), where, dtype))
        apart = (self._allocate(where.shape, where, dtype) for dtype, where in pairs[together:])
        return (*buffers, *apart)

    def _allocate(self, dims: tuple[int, ...], where: Layout, dtype: torch.dtype) -> torch.Tensor:
        page_bytes = where.page_stride * dtype.itemsize
        return alloc_with_host_register(
            dims, dtype, self.device, self.pin_memory, self.allocator, page_bytes
        )

    @property
    def kv_buffer(self) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The KV planes: as one tensor with a leading axis where they are equally wide."""
        kv = self.planes[: self.device_pool.kv_planes]
        first = kv[0]
        if any((plane.shape, plane.dtype) != (first.shape, first.dtype) for plane in kv):
            return kv
        return first.as_strided((len(kv), *first.shape), (first.numel(), *first.stride()))


class MHATokenToKVPoolHost(HostKVCache):
    """K and V; their widths may differ."""

    device_pool: MHATokenToKVPool

    @property
    def head_num(self) -> int:
        """Heads of K, and of V."""
        return self.device_pool.head_num

    @property
    def head_dim(self) -> int:
        """Width of K."""
        return self.device_pool.head_dim

    @property
    def k_buffer(self) -> torch.Tensor:
        """K, in ``layout``."""
        return self.planes[0]

    @property
    def v_buffer(self) -> torch.Tensor:
        """V, in ``layout``."""
        return self.planes[1]


class MLATokenToKVPoolHost(HostKVCache):
    """One latent plane, which is what ``kv_buffer`` is here."""

    device_pool: MLATokenToKVPool

    @property
    def kv_lora_rank(self) -> int:
        """Width of the latent part."""
        return self.device_pool.kv_lora_rank

    @property
    def qk_rope_head_dim(self) -> int:
        """Width of the rope part."""
        return self.device_pool.qk_rope_head_dim

    @property
    def kv_cache_dim(self) -> int:
        """Width of a row: both parts."""
        return self.device_pool.kv_cache_dim

    @property
    def kv_buffer(self) -> torch.Tensor:
        """The plane, in ``layout``."""
        return self.planes[0]


def host_pool_for(device_pool: KVCache, server_args: ServerArgs) -> HostKVCache:
    """The host pool that goes with ``device_pool`` under these server arguments.

    A kind of pool that has no class of its own gets the base class: all its planes are copied.
    """
    kinds = {MHATokenToKVPool: MHATokenToKVPoolHost, MLATokenToKVPool: MLATokenToKVPoolHost}
    return kinds.get(type(device_pool), HostKVCache)(
        device_pool,
        server_args.hicache_ratio,
        server_args.hicache_size,
        server_args.page_size,
        server_args.hicache_mem_layout,
    )
