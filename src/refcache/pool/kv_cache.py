"""``KVCache``, the base of device pools: the KV bytes of every layer, as *planes*.

A plane is one buffer ``[layer, size + page_size, head, dim]``: MHA has K and V (each with its own
width), MLA has one (latent and rope part side by side). Page 0 is a dummy for padded tokens; slots
``page_size ... size + page_size - 1`` are handed out.

A pool *declares* every plane that is indexed by slot, those of its own (index keys, scales) too: a
:class:`~refcache.pool.planes.PlaneSpec` each. Getters that wait, host pools, copies between the
tiers and checks of content are made from the declaration, so no plane needs a line of code of its
own, and none can be forgotten.

Bytes are touched only through launches. Getters wait for the layer on the registered layer transfer
counter first: a layer that is being loaded from the host is not read before it has arrived.

A pool's memory can be released while nothing uses it, and resumed (the memory saver); what it held
is lost then, so whoever knows of rows in it must forget them.

The kinds are in :mod:`refcache.pool.device`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from refcache.arguments import (
    is_tensor_on,
    shown,
    slot_list,
    slots_inside,
    whole_number,
    with_attributes,
)
from refcache.errors import InvalidArgument, MemoryReleased, UnknownName
from refcache.pool.planes import Plane, PlaneSpec
from refcache.runtime import ImmediateRuntime, Region, Runtime
from refcache.runtime.api import Slots

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LOST = 0xA5  # every byte of a pool whose memory was released


class LayerTransferCounter(Protocol):
    """Whoever knows which layers of a running load have arrived."""

    def wait_until(self, threshold: int) -> None:
        """Let the current stream wait for layer ``threshold`` (counted from 0 in this pool)."""
        ...


class KVCache:
    """Base of the device pools: planes, getters' waits, launches.

    Attributes:
        size: slots that can be handed out; ``page_size``: slots a page.
        dtype: what callers see; ``store_dtype``: what is stored (fp8 as uint8).
        start_layer, end_layer: the model's layers held here, ``end_layer`` not included;
            ``layer_num`` of them.
        planes: the buffers, KV first; ``kv_planes``: how many of them are KV.
        released: the memory is given back; every access is refused.

    Raises:
        InvalidArgument: an extent below 1, or ``end_layer`` that does not fit ``layer_num``.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        layer_num: int,
        device: str,
        widths: Sequence[PlaneSpec | tuple[str, int, int]],
        start_layer: int | None = None,
        end_layer: int | None = None,
        enable_memory_saver: bool = False,
        runtime: Runtime | None = None,
        extra_planes: Sequence[PlaneSpec] = (),
    ) -> None:
        """``widths``: (name, head_num, head_dim) of each KV plane; ``extra_planes``: the others."""
        specs = [PlaneSpec(*width) for width in widths]
        self.kv_planes = len(specs)
        specs += extra_planes
        extents = {"size": size, "page_size": page_size, "layer_num": layer_num}
        for spec in specs:
            extents |= {f"{spec.name} heads": spec.head_num, f"{spec.name} width": spec.head_dim}
            extents[f"{spec.name} slots_per_row"] = spec.slots_per_row
        for what, value in extents.items():
            whole_number(f"{type(self).__name__} {what}", value, 1)
        if not isinstance(dtype, torch.dtype):
            raise InvalidArgument(f"dtype={shown(dtype)}: expected a torch.dtype")
        for spec in specs:
            if page_size % spec.slots_per_row:
                raise InvalidArgument(
                    f"slots_per_row={spec.slots_per_row} of {spec.name}: expected a divisor of "
                    f"{page_size=}"
                )
        if len({spec.name for spec in specs}) != len(specs):
            raise InvalidArgument(f"planes {[s.name for s in specs]}: expected a name each")
        self.size = size
        self.page_size = page_size
        self.dtype = dtype
        self.store_dtype = torch.uint8 if dtype in FP8 else dtype
        self.layer_num = layer_num
        self.device = device
        self.start_layer = whole_number("start_layer", start_layer or 0)
        self.end_layer = self.start_layer + layer_num if end_layer is None else end_layer
        if self.end_layer - self.start_layer != layer_num:
            raise InvalidArgument(
                f"layers {self.start_layer} to {self.end_layer}, the last not included: expected "
                f"{layer_num} of them"
            )
        self.enable_memory_saver = enable_memory_saver
        self.released = False
        self.runtime: Runtime = runtime or ImmediateRuntime()
        self.layer_transfer_counter: LayerTransferCounter | None = None
        self.planes = tuple(self._make_plane(spec) for spec in specs)
        self._create_buffers()

    def _make_plane(self, spec: PlaneSpec) -> Plane:
        seen = spec.dtype or self.dtype
        rows = (self.size + self.page_size) // spec.slots_per_row
        shape = self.layer_num, rows, spec.head_num, spec.head_dim
        stored = torch.uint8 if seen in FP8 else seen
        buffer = torch.zeros(shape, dtype=stored, device=self.device)
        return Plane(spec.name, buffer, spec.head_num, spec.head_dim, spec.slots_per_row, seen)

    def _create_buffers(self) -> None:
        """Name the planes' per-layer views as SGLang does."""
        views = [layer for plane in self.planes for layer in plane.buffer]
        self.data_ptrs = torch.tensor(
            [v.data_ptr() for v in views], dtype=torch.uint64, device=self.device
        )
        self.data_strides = torch.tensor(
            [v[0].numel() * v.element_size() for v in views], device=self.device
        )

    def register_layer_transfer_counter(
        self, layer_transfer_counter: LayerTransferCounter | None
    ) -> None:
        """From now on every getter waits on ``layer_transfer_counter`` for its layer."""
        if layer_transfer_counter is not None:
            with_attributes("layer_transfer_counter", layer_transfer_counter, "wait_until")
        self.layer_transfer_counter = layer_transfer_counter

    def release(self) -> None:
        """Give the memory back (one launch): the bytes are lost, and the pool is refused until
        :meth:`resume`. Nothing may be using it.

        Raises:
            InvalidArgument: made without ``enable_memory_saver``.
            MemoryReleased: released already.
        """
        if not self.enable_memory_saver:
            raise InvalidArgument("release of a pool's memory: expected enable_memory_saver=True")
        self.check_resident()

        def run() -> None:
            for plane in self.planes:
                plane.buffer.view(torch.uint8).fill_(LOST)

        cells = range(self.layer_num), range(self.size + self.page_size)
        regions = [Region(self, plane, *cells) for plane in range(len(self.planes))]
        self.runtime.launch("release", run, writes=regions)
        self.released = True

    def resume(self) -> None:
        """Take memory again; what it holds means nothing.

        Raises:
            InvalidArgument: it was not released.
        """
        if not self.released:
            raise InvalidArgument("resume of a pool's memory: expected a release before it")
        self.released = False

    def check_resident(self) -> None:
        """Raise MemoryReleased while the memory is given back."""
        if self.released:
            raise MemoryReleased(f"memory of a {type(self).__name__}: expected resume first")

    def get_kv_size_bytes(self) -> Any:
        """Bytes of all planes; K and V apart where there are both."""
        return sum(plane.buffer.nbytes for plane in self.planes)

    @property
    def mem_usage(self) -> float:
        """All planes, in GB of 2**30 bytes."""
        return sum(plane.buffer.nbytes for plane in self.planes) / 2**30

    def pool_of(self, layer_id: int) -> "tuple[KVCache, int]":
        """Which pool has a layer of the model, and as which of its layers: this one, the same."""
        return self, layer_id

    def region(self, plane: int, layer_id: int, slots: torch.Tensor | range | int) -> Region:
        """The cells of one (plane, model layer), to name in a launch."""
        return Region(self, plane, self._local(layer_id), slots)

    def _local(self, layer_id: int) -> int:
        if not self.start_layer <= whole_number("layer", layer_id, None) < self.end_layer:
            raise InvalidArgument(
                f"layer {layer_id}: this pool holds layers {self.start_layer} to "
                f"{self.end_layer - 1}"
            )
        return layer_id - self.start_layer

    def _wait(self, layer_id: int) -> None:
        self.check_resident()
        local = self._local(layer_id)
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(local)

    def _view(self, plane: int, layer_id: int) -> torch.Tensor:
        view = self.planes[plane].buffer[self._local(layer_id)]
        dtype = self.planes[plane].dtype
        return view if dtype in (None, view.dtype) else view.view(dtype)

    def get_plane_buffer(self, name: str, layer_id: int) -> torch.Tensor:
        """A layer of the plane ``name``, ``[rows, head_num, head_dim]``, after waiting for it.

        Raises:
            UnknownName: no such plane.
        """
        self._wait(layer_id)
        return self._view(self._number(name), layer_id)

    def extra_buffers(self, layer_id: int) -> list[torch.Tensor]:
        """The planes besides KV of a layer, by slot, each after waiting for the layer."""
        extra: list[torch.Tensor] = []
        for plane in self.planes[self.kv_planes :]:
            self._wait(layer_id)
            extra.append(plane.by_slot()[self._local(layer_id)])
        return extra

    def set_plane_buffer(
        self, name: str, layer: Any, loc: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Write the parts of some slots in one layer of the plane ``name``, as one launch.

        ``rows``: ``[n, head_num, head_dim / slots_per_row]``, read when the launch runs. Otherwise
        as :meth:`MHATokenToKVPool.set_kv_buffer`.

        Raises:
            UnknownName, InvalidArgument, InvalidSlot: before anything is launched.
        """
        number = self._number(name)
        self.check_resident()
        local = self._local(getattr(layer, "layer_id", layer))
        self._check_rows(number, loc, (rows,))
        view = self.planes[number].by_slot()[local]
        dtype = self.planes[number].dtype or view.dtype

        def run() -> None:
            view[loc] = rows.to(dtype).view(view.dtype)

        regions = [Region(self, number, local, loc)]
        self.runtime.launch(f"set {name}", run, writes=regions)

    def regions_of(self, layer_id: int, slots: Slots | Callable[[], Slots]) -> list[Region]:
        """The cells of some slots of a model layer in every plane, to name in a launch."""
        local = self._local(layer_id)
        return [Region(self, plane, local, slots) for plane in range(len(self.planes))]

    def _number(self, name: str) -> int:
        names = [plane.name for plane in self.planes]
        if name not in names:
            raise UnknownName("plane", name, names)
        return names.index(name)

    def _write(self, layer: Any, loc: torch.Tensor, *rows: tuple[torch.Tensor, ...]) -> None:
        """Launch ``plane[layer][loc] = rows`` for every KV plane; ``layer`` has or is a layer id.

        The rows of a plane may come in parts, side by side; they are read when the launch runs.
        """
        self.check_resident()
        local = self._local(getattr(layer, "layer_id", layer))
        for number, parts in enumerate(rows):
            self._check_rows(number, loc, parts)
        self._launch_write(local, loc, rows, range(self.kv_planes))

    def _check_rows(self, number: int, loc: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> None:
        """Raise InvalidArgument or InvalidSlot unless these rows can be written at ``loc``."""
        plane = self.planes[number]
        self._check_slots("slots", loc)
        if any(not is_tensor_on(part, self.device) or part.dim() != 3 for part in parts):
            raise InvalidArgument(
                f"{plane.name} rows: {', '.join(map(shown, parts))}; expected "
                f"[n, {plane.head_num}, width] on {self.device}"
            )
        seen = (*parts[0].shape[:-1], sum(part.shape[-1] for part in parts))
        expected = (len(loc), plane.head_num, plane.head_dim // plane.slots_per_row)
        if seen != expected:
            raise InvalidArgument(f"{plane.name} rows of shape {seen}: expected {expected}")

    def _check_slots(self, what: str, slots: torch.Tensor) -> None:
        """Raise InvalidArgument or InvalidSlot unless these slots exist."""
        slots_inside(what, slot_list(what, slots, self.device), 0, self.size + self.page_size)

    def _launch_write(
        self,
        local: int,
        loc: torch.Tensor,
        rows: Sequence[tuple[torch.Tensor, ...]],
        planes: Sequence[int],
    ) -> None:
        """One launch, on the current stream, of the checked rows of some planes."""

        def run() -> None:
            for number in planes:
                parts, plane = rows[number], self.planes[number]
                row = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
                plane.buffer[local][loc] = row.to(self.dtype).view(self.store_dtype)

        regions = [Region(self, number, local, loc) for number in planes]
        self.runtime.launch("set_kv_buffer", run, writes=regions)
