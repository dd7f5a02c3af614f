"""Host pools: the second tier of KV rows, in pinned memory, in any layout.

A host pool is built from the planes that its device pool declares (name, heads, width, dtype), so
every plane has its counterpart and nothing is computed again from a model's configuration. Slots
are handed out in whole pages, numbered from 0. A transfer is a set of (host slot, device slot)
pairs; the order of the pairs means nothing.

Bytes move in launches on the current stream: :meth:`HostKVCache.backup_from_device_all_layer` is
one, :meth:`HostKVCache.load_to_device_per_layer` one a layer, and
:meth:`HostKVCache.load_to_device_all_layer` one that announces layer after layer. The I/O backend
says who copies and where the index tensors must be ("kernel": on the device; "direct": on the
host); both give the same bytes. Memory that is not pinned is copied by the host's own waiting, and
refused for kernels.

Models SGLang's ``HostKVCache``, ``MHATokenToKVPoolHost`` and ``MLATokenToKVPoolHost``; left out:
pages as flat tensors (for storage below the host), and the check that enough host memory is free.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from refcache.backend import copy_engine, resolve
from refcache.errors import (
    HostPoolTooSmall,
    HostRegisterError,
    InvalidArgument,
    UnknownName,
    WrongTier,
)
from refcache.pool.device import KVCache, MHATokenToKVPool, MLATokenToKVPool
from refcache.pool.host_slots import HostSlots
from refcache.pool.pinned import (
    Cudart,
    HostTensorAllocator,
    LoadedCudart,
    alloc_with_host_register,
)
from refcache.reference import Layout
from refcache.runtime import Flags, Part, Region, Runtime
from refcache.types import IO_BACKENDS, ServerArgs

# Of one layer: from here on a launch a layer keeps the link as busy (docs/performance.md).
SMALL_LOAD_BYTES = 4 << 20


class HostKVCache(HostSlots):
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
        small_load_bytes: see :meth:`loads_at_once`; by default :data:`SMALL_LOAD_BYTES`.
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
        _check_device_pool(device_pool)
        if allocator_type != "default":
            raise UnknownName("allocator_type", allocator_type, ["default"])
        if page_size != device_pool.page_size:
            raise InvalidArgument(
                f"{page_size=}: expected {device_pool.page_size}, as on the device"
            )
        self.device_pool = device_pool
        self.layout = layout
        self.pin_memory = pin_memory
        self.device = device
        self.runtime: Runtime = runtime or device_pool.runtime
        self.small_load_bytes = SMALL_LOAD_BYTES
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

    def get_size_per_token(self) -> int:
        """Bytes of one token: every layer of every plane, as wide as on the device."""
        widths = sum(plane.head_num * plane.head_dim for plane in self.device_pool.planes)
        return widths * self.layer_num * self.dtype.itemsize

    def init_kv_buffer(self) -> tuple[torch.Tensor, ...]:
        """Allocate (and pin) one buffer a plane; planes of equal width share one allocation."""
        layouts = [
            Layout.of(
                self.layout,
                self.size,
                self.page_size,
                self.layer_num,
                plane.head_num,
                plane.head_dim,
            )
            for plane in self.device_pool.planes
        ]
        shapes = {where.shape for where in layouts}
        if len(shapes) == 1:
            return tuple(self._allocate((len(layouts), *layouts[0].shape), layouts[0]))
        return tuple(self._allocate(where.shape, where) for where in layouts)

    def _allocate(self, dims: tuple[int, ...], where: Layout) -> torch.Tensor:
        page_bytes = where.page_stride * self.dtype.itemsize
        return alloc_with_host_register(
            dims, self.dtype, self.device, self.pin_memory, self.allocator, page_bytes
        )

    @property
    def kv_buffer(self) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The planes: as one tensor with a leading axis where they are equally wide."""
        first = self.planes[0]
        if any(plane.shape != first.shape for plane in self.planes):
            return self.planes
        return first.as_strided((len(self.planes), *first.shape), (first.numel(), *first.stride()))

    # ---- rows ----------------------------------------------------------------------------------

    def backup_from_device_all_layer(
        self,
        device_pool: KVCache,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
    ) -> None:
        """Launch the copy of all layers of device slot i of the list into host slot i.

        The launch reads the index tensors when it runs and does not keep them alive.

        Args:
            host_indices, device_indices: int32 or int64 ``[n]``, where ``io_backend`` wants them.

        Raises:
            WrongTier, UnknownName, InvalidArgument: before anything is launched.
        """
        copy = self._copy_function("backup_all_layer", io_backend)
        self._check(device_pool, host_indices, device_indices)
        rows = [plane.buffer for plane in device_pool.planes]

        def run(host_slots: torch.Tensor, device_slots: torch.Tensor) -> None:
            copy(self.planes, rows, host_slots, device_slots, self.page_size, self.layout)

        layers = range(self.layer_num)
        self._launch(
            "backup",
            run,
            self._regions(device_pool, layers, device_indices),
            self._regions(self, layers, host_indices),
            (host_indices, device_indices),
        )

    def load_to_device_per_layer(
        self,
        device_pool: KVCache,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
    ) -> None:
        """Launch the copy of one layer of host slot i of the list into device slot i.

        ``layer_id`` counts from 0 in this pool. Otherwise as :meth:`backup_from_device_all_layer`.
        """
        copy = self._copy_function("load_per_layer", io_backend)
        self._check(device_pool, host_indices, device_indices)
        if not 0 <= layer_id < self.layer_num:
            raise InvalidArgument(f"{layer_id=}: expected 0 to {self.layer_num - 1}")
        rows = [plane.buffer for plane in device_pool.planes]

        def run(host_slots: torch.Tensor, device_slots: torch.Tensor) -> None:
            copy(rows, self.planes, host_slots, device_slots, layer_id, self.page_size, self.layout)

        self._launch(
            f"load layer {layer_id}",
            run,
            self._regions(self, layer_id, host_indices),
            self._regions(device_pool, layer_id, device_indices),
            (host_indices, device_indices),
        )

    def load_to_device_all_layer(
        self,
        device_pool: KVCache,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        flags: Flags,
        io_backend: str,
    ) -> None:
        """Launch the copy of all layers of host slot i of the list into device slot i.

        ``flags`` (one part a layer) says of each layer when it has arrived, in no promised order.
        Otherwise as :meth:`backup_from_device_all_layer`.

        Raises:
            InvalidArgument: also for an ``io_backend`` other than "kernel": the copy engine raises
                no flags.
        """
        if io_backend != "kernel":
            raise InvalidArgument(f"{io_backend=} for all layers at once: expected 'kernel'")
        load_per_layer = self._copy_function("load_per_layer", io_backend)
        load_layers = self._copy_function("load_layers", io_backend)
        self._check(device_pool, host_indices, device_indices)
        rows = [plane.buffer for plane in device_pool.planes]
        how = self.page_size, self.layout

        def run(values: torch.Tensor, *slots: torch.Tensor) -> None:
            load_layers(rows, self.planes, *slots, values, 0, self.layer_num, *how)

        def part(layer_id: int) -> Part:
            return Part(
                f"layer {layer_id}",
                lambda *slots: load_per_layer(rows, self.planes, *slots, layer_id, *how),
                self._index_regions(host_indices, device_indices)
                + self._regions(self, layer_id, host_indices),
                self._regions(device_pool, layer_id, device_indices),
            )

        parts = map(part, range(self.layer_num))
        self.runtime.launch_parts("load", parts, flags, run, (host_indices, device_indices))

    def loads_at_once(self, tokens: int, io_backend: str) -> bool:
        """Whether a load of so many tokens should be one launch, not one a layer.

        It is where a layer has less than ``small_load_bytes``: there a launch takes longer than its
        bytes. ``io_backend``: "kernel" or "direct" (never: the copy engine raises no flags).
        """
        layer_bytes = tokens * self.size_per_token // self.layer_num
        return io_backend == "kernel" and layer_bytes < self.small_load_bytes

    def choose_io_backend(self, io_backend: str, *, to_host: bool) -> str:
        """What "auto" means in this direction: "direct" where the copy engine has long runs.

        Anything else is what it is. The rule is measured on a device, so without the kernels
        "auto" is "kernel".
        """
        if io_backend != "auto":
            return io_backend
        if self._backend.name != "triton":
            return "kernel" if self.pin_memory else "direct"
        engine = copy_engine()
        run = min(
            engine.run_bytes(
                self.layout,
                self.page_size,
                self.layer_num,
                plane.head_num * plane.head_dim * self.dtype.itemsize,
                plane.head_num,
                one_layer=not to_host,
            )
            for plane in self.device_pool.planes
        )
        chosen: str = engine.choose(run, to_host=to_host)
        return chosen

    def _regions(self, pool: Any, layers: range | int, slots: torch.Tensor) -> list[Region]:
        return [Region(pool, plane, layers, slots) for plane in range(len(self.planes))]

    def _index_regions(self, *indices: torch.Tensor) -> list[Region]:
        return [Region(index, 0, 0, 0) for index in indices]

    def _launch(
        self,
        name: str,
        run: Callable[..., None],
        reads: list[Region],
        writes: list[Region],
        indices: tuple[torch.Tensor, ...],
    ) -> None:
        self.runtime.launch(name, run, self._index_regions(*indices) + reads, writes, indices)
        if not self.pin_memory:
            self.runtime.host_sync()

    def _copy_function(self, name: str, io_backend: str) -> Callable[..., None]:
        if io_backend not in IO_BACKENDS:
            raise UnknownName("io_backend", io_backend, IO_BACKENDS)
        if io_backend == "kernel" and not self.pin_memory:
            raise InvalidArgument(
                "io_backend 'kernel' on host memory that is not pinned: expected 'direct'"
            )
        io_backend = self.choose_io_backend(io_backend, to_host=name == "backup_all_layer")
        copies: Any = resolve("reference")
        if self.pin_memory and io_backend == "kernel":
            copies = self._backend
        elif self.pin_memory and self._backend.name == "triton":
            copies = copy_engine()
        function: Callable[..., None] = getattr(copies, name)
        return function

    def _check(
        self, device_pool: KVCache, host_indices: torch.Tensor, device_indices: torch.Tensor
    ) -> None:
        _check_device_pool(device_pool)
        for what, index in (("host", host_indices), ("device", device_indices)):
            if index.dim() != 1 or index.dtype not in (torch.int32, torch.int64):
                raise InvalidArgument(
                    f"{what}_indices: {index.dtype} {tuple(index.shape)}; expected int32 or int64 "
                    "[n]"
                )
        if len(host_indices) != len(device_indices):
            raise InvalidArgument(
                f"{len(host_indices)} host and {len(device_indices)} device slots: expected as "
                "many of each"
            )
        if [p[2:] for p in device_pool.planes] != [p[2:] for p in self.device_pool.planes]:
            raise InvalidArgument(
                f"a device pool with planes {[p.name for p in device_pool.planes]}: expected the "
                "planes that this host pool was built from"
            )


class MHATokenToKVPoolHost(HostKVCache):
    """K and V; their widths may differ."""

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

    @property
    def kv_buffer(self) -> torch.Tensor:
        """The plane, in ``layout``."""
        return self.planes[0]


def _check_device_pool(pool: Any) -> None:
    if not isinstance(pool, KVCache):
        raise WrongTier(f"a {type(pool).__name__} as device pool: expected a KVCache")


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
