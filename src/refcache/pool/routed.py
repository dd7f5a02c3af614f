"""Pools of hybrid models: each layer's KV lies in one of several inner pools.

``HybridLinearKVPool`` has one inner pool, for the layers with full attention; the others keep no KV
but a state (:mod:`refcache.pool.mamba`). ``SWAKVPool`` has two: layers with full attention, and
layers with a sliding window, which keep the KV of fewer tokens in slots of their own. A table says
for a slot of the full pool which slot of the window's pool it is (0: none any more).

Callers name a layer by its id in the whole model, and there are holes between the ids: layers
without KV, and layers of other pipeline stages. A getter first waits for the layer, counted from
the stage's first one, and then asks the inner pool, which waits for nothing.

Models SGLang's classes of these names; left out: transposed pools.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from refcache.errors import InvalidArgument, refuse_unmodelled
from refcache.pool.device import NOT_OF_A_POOL, MHATokenToKVPool, MLATokenToKVPool
from refcache.pool.kv_cache import LayerTransferCounter
from refcache.pool.mamba import MambaPool
from refcache.runtime import ImmediateRuntime, Region, Runtime

InnerPool = MHATokenToKVPool | MLATokenToKVPool
Route = tuple[InnerPool, int]


class LayerRoutedKVPool:
    """Base of the two: the model's layer ids -> (inner pool, layer of it).

    Attributes:
        size, page_size, dtype, device: of the pool with full attention.
        start_layer: the model's first layer of this stage; waits count from it.
        layer_transfer_counter: who is waited for; the inner pools have none.

    Raises:
        InvalidArgument: ids that repeat or lie before ``start_layer``.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
        start_layer: int | None,
        layer_ids: Sequence[int],
        runtime: Runtime | None,
    ) -> None:
        self.start_layer = start_layer or 0
        ids = list(layer_ids)
        if len(set(ids)) != len(ids) or min(ids, default=self.start_layer) < self.start_layer:
            raise InvalidArgument(
                f"layers {ids}: expected each once, from start_layer={self.start_layer} on"
            )
        self.size = size
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        self.runtime: Runtime = runtime or ImmediateRuntime()
        self.layer_transfer_counter: LayerTransferCounter | None = None
        self._routes: Mapping[int, Route] = {}

    def register_layer_transfer_counter(
        self, layer_transfer_counter: LayerTransferCounter | None
    ) -> None:
        """From now on every getter waits on it, once, for its layer counted from the stage's."""
        self.layer_transfer_counter = layer_transfer_counter
        for pool in self.inner_pools:
            pool.register_layer_transfer_counter(None)

    @property
    def inner_pools(self) -> list[InnerPool]:
        """Each inner pool once."""
        return list(dict.fromkeys(pool for pool, _ in self._routes.values()))

    @property
    def mem_usage(self) -> float:
        """All inner pools, in GB of 2**30 bytes."""
        return sum(pool.mem_usage for pool in self.inner_pools)

    def _route(self, layer_id: int) -> Route:
        if layer_id not in self._routes:
            raise InvalidArgument(
                f"layer {layer_id} has no KV in a {type(self).__name__}: expected one of "
                f"{sorted(self._routes)}"
            )
        return self._routes[layer_id]

    def _arrived(self, layer_id: int) -> Route:
        """Where a layer's KV lies, after waiting for the layer."""
        route = self._route(layer_id)
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(layer_id - self.start_layer)
        return route

    def pool_of(self, layer_id: int) -> Route:
        """Which inner pool has a layer of the model, and as which of its layers."""
        return self._route(layer_id)

    def check_resident(self) -> None:
        """Raise MemoryReleased while the memory is given back."""
        for pool in self.inner_pools:
            pool.check_resident()

    def release(self) -> None:
        """See :meth:`KVCache.release`; all inner pools."""
        for pool in self.inner_pools:
            pool.release()

    def resume(self) -> None:
        """See :meth:`KVCache.resume`; all inner pools."""
        for pool in self.inner_pools:
            pool.resume()

    @property
    def enable_memory_saver(self) -> bool:
        """The inner pools can be released."""
        return all(pool.enable_memory_saver for pool in self.inner_pools)

    def region(self, plane: int, layer_id: int, slots: torch.Tensor | range | int) -> Region:
        """The cells of one (plane, layer of the model) of an inner pool; ``slots`` are its own."""
        pool, layer = self._route(layer_id)
        return pool.region(plane, layer, slots)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """K (or the latent rows) of a layer of the model, after waiting for it."""
        pool, layer = self._arrived(layer_id)
        return pool.get_key_buffer(layer)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """V of a layer of the model, after waiting for it."""
        pool, layer = self._arrived(layer_id)
        return pool.get_value_buffer(layer)

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, after waiting once."""
        pool, layer = self._arrived(layer_id)
        return pool.get_kv_buffer(layer)

    def set_kv_buffer(
        self,
        layer: Any,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor | None = None,
        k_scale: None = None,
        v_scale: None = None,
    ) -> None:
        """Write the rows of some tokens of one layer; see :meth:`MHATokenToKVPool.set_kv_buffer`.

        ``loc``: slots of the full pool, also for a layer with a window. Waits for nothing.
        """
        refuse_unmodelled("set_kv_buffer", {"k_scale": k_scale, "v_scale": v_scale}, NOT_OF_A_POOL)
        pool, inner = self._route(getattr(layer, "layer_id", layer))
        rows: Any = (cache_k, cache_v)  # latent rows have no V, and nothing else has none
        pool.set_kv_buffer(inner, self._slots(pool, loc), *rows)

    def _slots(self, pool: InnerPool, loc: torch.Tensor) -> torch.Tensor:
        """Slots of the full pool as slots of an inner pool."""
        return loc


class HybridLinearKVPool(LayerRoutedKVPool):
    """KV of the layers with full attention, in one inner pool, MHA or MLA.

    Args:
        full_attention_layer_ids: their ids in the whole model.
        enable_kvcache_transpose: must be False.
        mamba_pool: the states of the other layers; kept.
        use_mla, kv_lora_rank, qk_rope_head_dim: an MLA pool inside.

    Attributes:
        full_kv_pool: the inner pool, one layer an id.
        full_attention_layer_id_mapping: id -> layer of the inner pool.

    Raises:
        InvalidArgument: ids that repeat or lie before ``start_layer``; none at all.
    """

    def __init__(
        self,
        size: int,
        dtype: torch.dtype,
        page_size: int,
        head_num: int,
        head_dim: int,
        full_attention_layer_ids: Sequence[int],
        enable_kvcache_transpose: bool,
        device: str,
        mamba_pool: MambaPool | None,
        enable_memory_saver: bool = False,
        use_mla: bool = False,
        kv_lora_rank: int | None = None,
        qk_rope_head_dim: int | None = None,
        start_layer: int | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        refuse_transposed(enable_kvcache_transpose)
        ids = list(full_attention_layer_ids)
        super().__init__(size, page_size, dtype, device, start_layer, ids, runtime)
        self.head_num = head_num
        self.head_dim = head_dim
        self.mamba_pool = mamba_pool
        self.use_mla = use_mla
        common: dict[str, Any] = {
            "size": size, "page_size": page_size, "dtype": dtype, "layer_num": len(ids),
            "device": device, "enable_memory_saver": enable_memory_saver, "runtime": self.runtime,
        }  # fmt: skip
        self.full_kv_pool: MHATokenToKVPool | MLATokenToKVPool
        if use_mla:
            if kv_lora_rank is None or qk_rope_head_dim is None:
                raise InvalidArgument("use_mla: expected kv_lora_rank and qk_rope_head_dim")
            common |= {"kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": qk_rope_head_dim}
            self.full_kv_pool = MLATokenToKVPool(**common)
        else:
            self.full_kv_pool = MHATokenToKVPool(**common, head_num=head_num, head_dim=head_dim)
        self.full_layer_nums = len(ids)
        self.full_attention_layer_id_mapping = {layer_id: i for i, layer_id in enumerate(ids)}
        self._routes = {layer_id: (self.full_kv_pool, i) for i, layer_id in enumerate(ids)}

    def get_kv_size_bytes(self) -> Any:
        """Of the inner pool: bytes of K and of V, or of the latent rows."""
        return self.full_kv_pool.get_kv_size_bytes()

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """See :meth:`MHATokenToKVPool.move_kv_cache`."""
        if not isinstance(self.full_kv_pool, MHATokenToKVPool):
            raise InvalidArgument("move_kv_cache of latent rows: expected use_mla=False")
        self.full_kv_pool.move_kv_cache(tgt_loc, src_loc)

    def get_v_head_dim(self) -> int:
        """Width of V."""
        return self.full_kv_pool.get_value_buffer(0).shape[-1]

    def set_mla_kv_buffer(
        self, layer: Any, loc: torch.Tensor, cache_k_nope: torch.Tensor, cache_k_rope: torch.Tensor
    ) -> None:
        """See :meth:`MLATokenToKVPool.set_mla_kv_buffer`."""
        _, inner = self._route(getattr(layer, "layer_id", layer))
        self._latent().set_mla_kv_buffer(inner, loc, cache_k_nope, cache_k_rope)

    def get_mla_kv_buffer(
        self, layer: Any, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`MLATokenToKVPool.get_mla_kv_buffer`; waits for the layer."""
        latent = self._latent()
        _, inner = self._arrived(getattr(layer, "layer_id", layer))
        return latent.get_mla_kv_buffer(inner, loc, dst_dtype)

    def _latent(self) -> MLATokenToKVPool:
        if not isinstance(self.full_kv_pool, MLATokenToKVPool):
            raise InvalidArgument("latent rows of a pool with K and V: expected use_mla=True")
        return self.full_kv_pool


class SWAKVPool(LayerRoutedKVPool):
    """KV of layers with full attention and of layers with a sliding window, each in its own pool.

    Args:
        size, size_swa: slots of the full pool, and of the window's.
        swa_attention_layer_ids, full_attention_layer_ids: ids in the whole model.
        enable_kvcache_transpose: must be False.
        token_to_kv_pool_class: of both inner pools.
        kwargs: for the inner pools; ``swa_head_num``, ``swa_head_dim`` and ``swa_v_head_dim`` are
            the window pool's own, where it differs.

    Attributes:
        layers_mapping: id -> (layer of the inner pool, is it the window's).
        full_to_swa_index_mapping: the allocator's table, see :meth:`register_mapping`.

    Raises:
        InvalidArgument: ids that repeat or lie before ``start_layer``; none of one kind.
    """

    def __init__(
        self,
        size: int,
        size_swa: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        swa_attention_layer_ids: Sequence[int],
        full_attention_layer_ids: Sequence[int],
        enable_kvcache_transpose: bool,
        device: str,
        token_to_kv_pool_class: type[MHATokenToKVPool] = MHATokenToKVPool,
        start_layer: int | None = None,
        runtime: Runtime | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_transposed(enable_kvcache_transpose)
        swa_ids, full_ids = list(swa_attention_layer_ids), list(full_attention_layer_ids)
        super().__init__(size, page_size, dtype, device, start_layer, full_ids + swa_ids, runtime)
        self.size_swa = size_swa
        self.head_num = head_num
        self.head_dim = head_dim
        shape: dict[str, Any] = {"head_num": head_num, "head_dim": head_dim}
        shape["v_head_dim"] = kwargs.pop("v_head_dim", None)
        own = {name: kwargs.pop(f"swa_{name}", None) for name in shape}
        window = {name: width if own[name] is None else own[name] for name, width in shape.items()}
        common: dict[str, Any] = kwargs | {
            "page_size": page_size, "dtype": dtype, "device": device, "runtime": self.runtime,
        }  # fmt: skip
        make = token_to_kv_pool_class
        self.swa_layer_nums, self.full_layer_nums = len(swa_ids), len(full_ids)
        self.swa_kv_pool = make(size_swa, layer_num=len(swa_ids), **common, **window)
        self.full_kv_pool = make(size, layer_num=len(full_ids), **common, **shape)
        self.layers_mapping = {layer_id: (i, False) for i, layer_id in enumerate(full_ids)}
        self.layers_mapping |= {layer_id: (i, True) for i, layer_id in enumerate(swa_ids)}
        self._routes = {
            layer_id: (self.swa_kv_pool if is_swa else self.full_kv_pool, i)
            for layer_id, (i, is_swa) in self.layers_mapping.items()
        }
        self.full_to_swa_index_mapping: torch.Tensor | None = None
        self.swa_loc: torch.Tensor | None = None

    def register_mapping(self, full_to_swa_index_mapping: torch.Tensor) -> None:
        """From now on this table says which slot of the window's pool a full slot is."""
        self.full_to_swa_index_mapping = full_to_swa_index_mapping

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of K, and of V, of both pools."""
        (k, v), (k_swa, v_swa) = (
            pool.get_kv_size_bytes() for pool in (self.full_kv_pool, self.swa_kv_pool)
        )
        return k + k_swa, v + v_swa

    def set_swa_loc(self, loc: torch.Tensor | None) -> None:
        """From now on a layer with a window is written at these slots, whatever ``loc`` says."""
        self.swa_loc = loc

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        """Slots int32 ``[n]`` of the window's pool; 0: there is none any more; -1 stays -1.

        Raises:
            InvalidArgument: no table is registered.
        """
        if self.full_to_swa_index_mapping is None:
            raise InvalidArgument("slots of the window's pool: expected register_mapping first")
        return self.full_to_swa_index_mapping[kv_indices].to(torch.int32)

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """See :meth:`MHATokenToKVPool.move_kv_cache`; in both pools."""
        targets, sources = map(self.translate_loc_from_full_to_swa, (tgt_loc, src_loc))
        self.full_kv_pool.move_kv_cache(tgt_loc, src_loc)
        self.swa_kv_pool.move_kv_cache(targets, sources)

    def _slots(self, pool: InnerPool, loc: torch.Tensor) -> torch.Tensor:
        if pool is self.full_kv_pool:
            return loc
        return self.translate_loc_from_full_to_swa(loc) if self.swa_loc is None else self.swa_loc


def refuse_transposed(enable_kvcache_transpose: bool) -> None:
    """Raise InvalidArgument when a transposed pool is asked for."""
    given = {"enable_kvcache_transpose": enable_kvcache_transpose}
    refuse_unmodelled("a pool", given, {"enable_kvcache_transpose": False})
