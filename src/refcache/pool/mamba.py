"""``MambaPool``: recurrent states, one slot for each of them; every linear-attention layer has one.

The *state* of a request in a layer is what its recurrence has become after so many tokens: it has
the size of a constant, whatever the number of tokens, and it cannot be cut back to fewer. A slot
holds the state of one token sequence in all layers: short windows of a convolution (``conv``, one
or more tensors) and the recurrence itself (``temporal``). Each of these tensors is a *plane*
``[layer, size + 1, ...]``; slot 0 is the dummy of padded tokens and is never handed out. Layers are
counted among the layers that have a state, not among the model's.

A slot is free or held: the mask ``_held`` is what makes a double free an error instead of two
owners of one state.

Models SGLang's ``MambaPool``; left out: the layout that one CPU kernel wants, custom memory pools.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch

from refcache.arguments import INTEGERS
from refcache.errors import DoubleFree, InvalidArgument, InvalidSlot
from refcache.pool.planes import Plane
from refcache.runtime import ImmediateRuntime, Region, Runtime


@dataclass(kw_only=True, frozen=True)
class Mamba2StateDType:
    """Dtypes of the two kinds of tensors of a state."""

    conv: torch.dtype = torch.bfloat16
    temporal: torch.dtype = torch.float32


class StateShape(NamedTuple):
    """Shapes of one layer's state of one request: each convolution's, and the recurrence's."""

    conv: Sequence[tuple[int, ...]]
    temporal: tuple[int, ...]


@dataclass(kw_only=True, frozen=True)
class BaseLinearStateParams:
    """What a state is: shapes, dtypes, and the model's layers that have one.

    SGLang's ``Mamba2CacheParams`` and ``KimiLinearCacheParams`` have these fields too and serve.
    """

    shape: StateShape
    layers: Sequence[int]
    dtype: Mamba2StateDType = field(default_factory=Mamba2StateDType)

    @property
    def mamba_cache_per_req(self) -> int:
        """Bytes of one state, all layers."""
        conv = sum(prod(shape) for shape in self.shape.conv) * self.dtype.conv.itemsize
        temporal = prod(self.shape.temporal) * self.dtype.temporal.itemsize
        return (conv + temporal) * len(self.layers)


class MambaPool:
    """States for at most ``size`` owners.

    Args:
        size: slots that can be handed out, 1 to ``size``.
        spec_state_size, speculative_num_draft_tokens: with the second, room for the states after
            each draft token of ``spec_state_size`` requests; it is never copied between tiers.
        cache_params: shapes and dtypes, see :class:`BaseLinearStateParams`.
        mamba_layer_ids: the model's layers held here, in order; only their number counts here.

    Attributes:
        mamba_cache: all states: ``conv[i]`` ``[layers, size + 1, *conv_shape_i]``, ``temporal``
            ``[layers, size + 1, *temporal_shape]``.
        planes: the same tensors as planes ``[layer, size + 1, 1, width]``, conv first.
        free_slots: int64, the slots that nobody owns, oldest free first.

    Raises:
        InvalidArgument: a size below 1, or no layers.
    """

    @dataclass
    class State:
        """Views of some states; of one layer without the leading axis."""

        conv: list[torch.Tensor]
        temporal: torch.Tensor

        def at_layer_idx(self, layer: int) -> "MambaPool.State":
            """The views of one layer, counted among the layers with a state."""
            views: dict[str, Any] = {
                name: [t[layer] for t in value] if isinstance(value, list) else value[layer]
                for name, value in vars(self).items()
            }
            return type(self)(**views)

        def mem_usage_bytes(self) -> int:
            """Bytes of all tensors."""
            tensors = [t for v in vars(self).values() for t in (v if isinstance(v, list) else [v])]
            return sum(tensor.nbytes for tensor in tensors)

    @dataclass
    class SpeculativeState(State):
        """With the states after each draft token, ``[layers, spec_state_size + 1, draft, ...]``."""

        intermediate_ssm: torch.Tensor
        intermediate_conv_window: list[torch.Tensor]

    def __init__(
        self,
        *,
        size: int,
        spec_state_size: int,
        cache_params: BaseLinearStateParams,
        mamba_layer_ids: Sequence[int],
        device: str,
        enable_memory_saver: bool = False,
        speculative_num_draft_tokens: int | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        """``enable_memory_saver`` is accepted for SGLang's callers: states are not released."""
        layers = len(mamba_layer_ids)
        if size < 1 or layers < 1:
            raise InvalidArgument(f"{size=} states of {layers} layers: expected at least 1 of each")
        self.size = size
        self.device = device
        self.num_mamba_layers = layers
        self.runtime: Runtime = runtime or ImmediateRuntime()
        shape, dtype = cache_params.shape, cache_params.dtype

        def zeros(slots: tuple[int, ...], one: Sequence[int], kind: torch.dtype) -> torch.Tensor:
            return torch.zeros((layers, *slots, *one), dtype=kind, device=device)

        conv = [zeros((size + 1,), one, dtype.conv) for one in shape.conv]
        temporal = zeros((size + 1,), shape.temporal, dtype.temporal)
        self.mamba_cache = self.State(conv, temporal)
        self.planes = tuple(
            Plane(name, buffer.view(layers, size + 1, 1, -1), 1, buffer[0, 0].numel())
            for name, buffer in [*((f"conv{i}", c) for i, c in enumerate(conv)), ("ssm", temporal)]
        )
        if speculative_num_draft_tokens is not None:
            drafts = spec_state_size + 1, speculative_num_draft_tokens
            self.mamba_cache = self.SpeculativeState(
                conv,
                temporal,
                zeros(drafts, shape.temporal, dtype.temporal),
                [zeros(drafts, one, dtype.conv) for one in shape.conv],
            )
        self.mem_usage = self.mamba_cache.mem_usage_bytes() / 2**30
        self.clear()

    def clear(self) -> None:
        """Make every slot free, in ascending order; the bytes stay."""
        self.free_slots = torch.arange(1, self.size + 1, device=self.device)
        self._held = torch.zeros(self.size + 1, dtype=torch.bool, device=self.device)

    def available_size(self) -> int:
        """Free slots."""
        return len(self.free_slots)

    def mamba2_layer_cache(self, layer_id: int) -> State:
        """The views of one layer, counted among the layers with a state; waits for nothing."""
        return self.mamba_cache.at_layer_idx(layer_id)

    def get_speculative_mamba2_params_all_layers(self) -> SpeculativeState:
        """All states, with those after draft tokens.

        Raises:
            InvalidArgument: made without ``speculative_num_draft_tokens``.
        """
        if not isinstance(self.mamba_cache, self.SpeculativeState):
            raise InvalidArgument("states of draft tokens: expected speculative_num_draft_tokens")
        return self.mamba_cache

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """``need_size`` slots from the front of the free list; their states become zero (a launch).

        Returns:
            int64 ``[need_size]`` of its own, or None (and nothing changed) when too few are free.

        Raises:
            InvalidArgument: ``need_size`` is negative.
        """
        if need_size < 0:
            raise InvalidArgument(f"alloc({need_size}) of states: expected 0 or more")
        if need_size > len(self.free_slots):
            return None
        taken, rest = self.free_slots[:need_size].clone(), self.free_slots[need_size:]
        self._held[taken] = True
        self.free_slots = rest

        def zero() -> None:
            for plane in self.planes:
                plane.buffer[:, taken] = 0

        if need_size:
            self.runtime.launch("clear states", zero, writes=self.regions(taken))
        return taken

    def free(self, free_index: torch.Tensor) -> None:
        """Give slots back, to the end of the free list in the given order; the bytes stay.

        Args:
            free_index: integer ``[n]``.

        Raises:
            InvalidArgument: not such a tensor.
            InvalidSlot: slot 0, or one out of range.
            DoubleFree: a slot that is free already, or named twice.
        """
        if free_index.dim() != 1 or free_index.dtype not in INTEGERS:
            raise InvalidArgument(
                f"free of states: {free_index.dtype} {tuple(free_index.shape)}; expected integers "
                "[n]"
            )
        if free_index.numel() == 0:
            return
        self.runtime.host_sync()
        slots = free_index.to(self.device, torch.int64)
        self._check_inside("free", slots)
        free = slots[~self._held[slots]]
        if len(free) or len(set(slots.tolist())) != len(slots):
            twice = free if len(free) else slots
            raise DoubleFree(f"free of state {int(twice[0])}: it is free already, or named twice")
        self._held[slots] = False
        self.free_slots = torch.cat([self.free_slots, slots])

    def copy_from(self, src_index: torch.Tensor, dst_index: torch.Tensor) -> None:
        """Copy state ``src_index[i]`` to slot ``dst_index[i]``, all layers and tensors: one launch.

        All sources are read before a target is written.

        Raises:
            InvalidArgument: lists of different lengths.
            InvalidSlot: slot 0, or one out of range, or one that is free (indices on the CPU only:
                reading others would wait for the device).
        """
        if src_index.shape != dst_index.shape or src_index.dim() != 1:
            raise InvalidArgument(
                f"copy of states {tuple(src_index.shape)} to {tuple(dst_index.shape)}: expected "
                "[n] each"
            )
        for index in (src_index, dst_index):
            if index.device.type == "cpu" and index.numel():
                self._check_inside("copy", index)
                if not bool(self._held[index].all()):
                    raise InvalidSlot(
                        f"copy of states {index.tolist()}: expected none that is free"
                    )

        def run() -> None:
            for plane in self.planes:
                plane.buffer[:, dst_index] = plane.buffer[:, src_index]

        self.runtime.launch("copy states", run, self.regions(src_index), self.regions(dst_index))

    def fork_from(self, src_index: torch.Tensor) -> torch.Tensor | None:
        """A new slot with a copy of state ``src_index`` (integer ``[1]``), or None.

        Raises:
            InvalidArgument, InvalidSlot: as :meth:`copy_from`, before a slot is taken.
        """
        if src_index.shape != (1,):
            raise InvalidArgument(f"fork of states {tuple(src_index.shape)}: expected [1]")
        if src_index.device.type == "cpu":
            self._check_inside("fork", src_index)
            if not self._held[src_index]:
                raise InvalidSlot(f"fork of state {int(src_index)}: expected one that is not free")
        forked = self.alloc(1)
        if forked is not None:
            self.copy_from(src_index, forked)
        return forked

    def regions(self, slots: torch.Tensor | range | int) -> list[Region]:
        """The cells of these slots in every layer and plane, to name in a launch."""
        layers = range(self.num_mamba_layers)
        return [Region(self, plane, layers, slots) for plane in range(len(self.planes))]

    def _check_inside(self, what: str, slots: torch.Tensor) -> None:
        low, high = (int(bound) for bound in slots.aminmax())
        if low < 1 or high > self.size:
            raise InvalidSlot(
                f"{what} of state {low if low < 1 else high}: expected 1 to {self.size}"
            )
