"""``HiCacheController``: copies between the tiers, on two streams of its own.

What orders the copies, besides the order of their stream:

==========  =======================================  ==========================================
copy        waits for                                is waited for by
==========  =======================================  ==========================================
write       the caller's stream, as of the call:     the host, which reuses neither side before
(D2H)       its indices, and rows computed there;    it has seen the acknowledgement's event
            the forward stream: rows computed there
load        the caller's stream, as of the call;     the forward, layer by layer (the pool's
(H2D)       the forward stream: a forward may still  getters); the host, by the acknowledgement
            write device slots that a finished
            request has given back
==========  =======================================  ==========================================

Who copies is decided for each copy by the rules of the card (:meth:`HostKVCache.plan_transfer`). A
kernel writes all layers in one launch, and loads one layer a launch or all in one that announces
each. The copy engine's copies are issued by a thread (:mod:`refcache.controller.copy_thread`),
which announces each layer of a load. Nothing is copied at ``load``: the loads of a batch are merged
and started together by ``start_loading``.

Models SGLang 0.5.10's ``HiCacheController``, which lacks the waits for the forward stream and
has one launch a layer always. Storage below the host is
:mod:`refcache.controller.storage_controller`, whose names are the controller's too. Left out:
pipeline stages, metrics.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from refcache.arguments import slot_list, slots_inside, whole_number, with_attributes
from refcache.controller.copy_thread import CopyThread
from refcache.controller.layer_events import LayerDoneCounter, LayerLoadingEvent
from refcache.controller.operation import CacheOperation, HiCacheAck, TransferBuffer
from refcache.controller.storage_controller import StorageController
from refcache.controller.storage_names import StorageNames
from refcache.errors import CopyFailed, InvalidArgument, RefcacheError, UnknownName, WrongTier
from refcache.pool import HostKVCache, HybridLinearKVPool, MLATokenToKVPool
from refcache.pool.transfer_rule import TransferPlan
from refcache.runtime import Flags, Runtime
from refcache.storage import HiCacheStorage, HiCacheStorageConfig
from refcache.types import IO_BACKENDS, WRITE_POLICIES


def rank_of(group: Any) -> tuple[int, int]:
    """The caller's rank in a group, and its size; 0 and 1 without one, or when it does not say."""
    if hasattr(group, "rank") and callable(getattr(group, "size", None)):
        return group.rank(), group.size()  # a ``torch.distributed`` group
    return 0, 1


class HiCacheController(StorageNames):
    """See the module docstring.

    Args:
        token_to_kv_pool_allocator: hands out device slots; its pool is the device tier.
        mem_pool_host: the host tier.
        page_size: of both.
        tp_group, load_cache_event: kept for the owner; the controller itself needs neither.
            ``tp_rank`` and ``tp_world_size`` are those of the group; see :func:`rank_of`.
        write_policy: kept for the owner.
        io_backend: "kernel", "direct" (the copy engine), or "auto": for each copy the one that
            :meth:`HostKVCache.plan_transfer` picks. "" is "auto".
        storage_backend: attached at once, if given; see :meth:`attach_storage_backend`, which gets
            prefetch_threshold, model_name and storage_backend_extra_config.
        pp_rank, pp_size, enable_storage_metrics: told to the backend.
        runtime: the machine; the host pool's by default.

    Attributes:
        write_queue, load_queue: operations that have not started.
        ack_write_queue, ack_load_queue: copies that have, oldest first; the owner removes them.
        layer_done_counter: registered with the device pool.
        forward_stream: what copies wait for besides their caller; None: the caller's is it.
        last_plan: which way the last copy went, and why.
        phase: what runs beside copies from now on, if the caller says so ("prefill", "decode").
        storage: who talks to storage; its names are this class's too.
        load_slot_waits: how often ``start_loading`` found its slot busy, and the host waited.

    Raises:
        WrongTier: a host pool that is none.
        UnknownName, InvalidArgument: a policy or backend that does not exist; another page size.
    """

    def __init__(
        self,
        token_to_kv_pool_allocator: Any,
        mem_pool_host: HostKVCache,
        page_size: int,
        tp_group: Any = None,
        load_cache_event: threading.Event | None = None,
        write_policy: str = "write_through_selective",
        io_backend: str = "auto",
        storage_backend: str | HiCacheStorage | None = None,
        prefetch_threshold: int = 256,
        model_name: str | None = None,
        storage_backend_extra_config: dict[str, Any] | None = None,
        pp_rank: int = 0,
        pp_size: int = 1,
        enable_storage_metrics: bool = False,
        runtime: Runtime | None = None,
    ) -> None:
        with_attributes("allocator", token_to_kv_pool_allocator, "alloc", "free", "get_kvcache")
        if not isinstance(mem_pool_host, HostKVCache):
            raise WrongTier(f"a {type(mem_pool_host).__name__} as host pool: expected HostKVCache")
        if write_policy not in WRITE_POLICIES:
            raise UnknownName("write_policy", write_policy, WRITE_POLICIES)
        io_backend = io_backend or "auto"
        if io_backend not in IO_BACKENDS:
            raise UnknownName("io_backend", io_backend, IO_BACKENDS)
        if page_size != mem_pool_host.page_size:
            raise InvalidArgument(f"{page_size=}: expected {mem_pool_host.page_size}, as the pools")
        self.runtime: Runtime = runtime or mem_pool_host.runtime
        self.mem_pool_device_allocator = token_to_kv_pool_allocator
        pool = token_to_kv_pool_allocator.get_kvcache()
        self.mem_pool_device = pool.full_kv_pool if isinstance(pool, HybridLinearKVPool) else pool
        self.mem_pool_host = mem_pool_host
        self.page_size = page_size
        self.tp_group = tp_group
        self.tp_rank, self.tp_world_size = rank_of(tp_group)
        self.load_cache_event = load_cache_event
        self.write_policy = write_policy
        self.io_backend = io_backend
        self.pp_rank = pp_rank
        self.pp_size = pp_size
        self.enable_storage_metrics = enable_storage_metrics
        self.storage = StorageController(
            mem_pool_host,
            self.mem_pool_device.size,
            page_size,
            HiCacheStorageConfig(
                tp_rank=self.tp_rank,
                tp_size=self.tp_world_size,
                pp_rank=pp_rank,
                pp_size=pp_size,
                is_mla_model=isinstance(self.mem_pool_device, MLATokenToKVPool),
                enable_storage_metrics=enable_storage_metrics,
                is_page_first_layout=mem_pool_host.layout == "page_first",
            ),
            self.runtime,
        )
        if storage_backend is not None:
            try:
                self.attach_storage_backend(
                    storage_backend, prefetch_threshold, model_name, storage_backend_extra_config
                )
            except ValueError as error:
                raise InvalidArgument(f"storage_backend={storage_backend!r}: {error}") from error
        self.device = self.mem_pool_device.device
        self.layer_num: int = self.mem_pool_device.layer_num
        self.layer_done_counter = LayerDoneCounter(self.layer_num, self.runtime)
        self.mem_pool_device.register_layer_transfer_counter(self.layer_done_counter)
        self.write_queue: list[CacheOperation] = []
        self.load_queue: list[CacheOperation] = []
        self.ack_write_queue: list[HiCacheAck] = []
        self.ack_load_queue: list[HiCacheAck] = []
        self.stop_event = threading.Event()
        self.write_buffer = TransferBuffer(self.stop_event)
        self.load_buffer = TransferBuffer(self.stop_event, buffer_count=10, max_buffer_size=100)
        self.write_stream: Any = self.runtime.Stream("write")
        self.load_stream: Any = self.runtime.Stream("load")
        self._writer = CopyThread("write", self.write_stream, self.runtime)
        self._loader = CopyThread("load", self.load_stream, self.runtime)
        self.forward_stream: Any = None
        self.load_slot_waits = 0
        self.last_plan: TransferPlan | None = None
        self.phase = ""

    @property
    def failure(self) -> CopyFailed | None:
        """The first copy that failed after it was started, until :meth:`reset`: what was computed
        since cannot be trusted."""
        return self._loader.failure or self._writer.failure

    def register_forward_stream(self, stream: Any) -> None:
        """Forwards run on ``stream`` and not on the caller's: copies come after them as well."""
        if stream is not None:
            with_attributes("forward_stream", stream, "record_event")
        self.forward_stream = stream

    @staticmethod
    def _check_names(priority: Any, node_id: Any) -> None:
        whole_number("node_id", node_id, None)
        if priority is not None:
            whole_number("priority", priority, None)

    # ---- device to host ------------------------------------------------------------------------

    def write(
        self, device_indices: torch.Tensor, priority: int | None = None, node_id: int = -1
    ) -> torch.Tensor | None:
        """Start a copy of these device slots to new host slots.

        The device slots must keep their rows, and both sides their owner, until the acknowledgement
        in ``ack_write_queue`` is done.

        Args:
            device_indices: integer ``[n]``, whole pages.

        Returns:
            int64 ``[n]`` host slots, the caller's own tensor; or None (and nothing changed) when
            too few are free.

        Raises:
            InvalidArgument: not whole pages.
            CopyFailed: the copy could not be started; its host slots are free again.
        """
        device = self.mem_pool_device
        slot_list("device_indices", device_indices, self.device)
        slots_inside("device_indices", device_indices, 0, device.size + device.page_size)
        self._check_names(priority, node_id)
        host_indices = self.mem_pool_host.alloc(len(device_indices))
        if host_indices is None:
            return None
        with ExitStack() as undo:
            undo.callback(self.mem_pool_host.free, host_indices)
            slots = host_indices.clone()
            op = CacheOperation(host_indices, device_indices, node_id, priority)
            self.write_queue.append(op)
            undo.callback(self.write_queue.remove, op)
            self.start_writing()
            undo.pop_all()
        return slots

    def start_writing(self) -> None:
        """Start everything in ``write_queue`` as one copy; nothing when it is empty.

        Raises:
            CopyFailed: the copy could not be started; the queue is as it was, and nothing runs.
        """
        if not self.write_queue:
            return
        with self._started(self._writer):
            op = CacheOperation.merge_ops(self.write_queue)
            start_event, finish_event = self._start_writing(op)
        self.write_queue.clear()
        self.ack_write_queue.append(HiCacheAck(start_event, finish_event, op.node_ids))

    def _start_writing(self, op: CacheOperation) -> tuple[Any, Any]:
        """The events before and behind the copy."""
        plan = self._plan(op, to_host=True)
        start_event = self.runtime.Event()
        if plan.io_backend == "direct":
            start_event.record()
            finish_event = self._writer.start(
                self._backup, op.host_indices, op.device_indices, start_event, self._fence()
            )
        else:
            host_indices, device_indices = self.move_indices(op, plan.io_backend)
            finish_event = self.runtime.Event()
            start_event.record()
            with self.runtime.stream(self.write_stream):
                start_event.wait(self.write_stream)
                self._wait_for_forward(self.write_stream)
                self.mem_pool_host.backup_from_device_all_layer(
                    self.mem_pool_device, host_indices, device_indices,
                    plan.io_backend, plan.max_programs,
                )  # fmt: skip
                finish_event.record()
                self._keep(self.write_stream, host_indices, device_indices)
        return start_event, finish_event

    # ---- host to device ------------------------------------------------------------------------

    def load(
        self, host_indices: torch.Tensor, priority: int | None = None, node_id: int = -1
    ) -> torch.Tensor | None:
        """Queue a copy of these host slots to new device slots; ``start_loading`` starts it.

        The host slots must keep their rows, and both sides their owner, until the acknowledgement
        in ``ack_load_queue`` is done.

        Args:
            host_indices: integer ``[n]``, whole pages.

        Returns:
            int64 ``[n]`` device slots, or None (and nothing changed) when too few are free.

        Raises:
            InvalidArgument: not whole pages.
            InvalidSlot: host slots that nobody owns.
        """
        self.mem_pool_host.check_held(host_indices)
        self._check_names(priority, node_id)
        device_indices: torch.Tensor | None = self.mem_pool_device_allocator.alloc(
            len(host_indices)
        )
        if device_indices is not None:
            op = CacheOperation(host_indices, device_indices, node_id, priority)
            self.load_queue.append(op)
        return device_indices

    def start_loading(self) -> int:
        """Start everything in ``load_queue`` as one load that announces each layer.

        When all load slots are in use, the host waits for the oldest load first.

        Returns:
            The load's slot in ``layer_done_counter``, for the batch that reads it; -1 when nothing
            was queued.

        Raises:
            CopyFailed: the load could not be started; the queue is as it was, and nothing runs.
                Start it again, or :meth:`cancel_loading`.
        """
        if not self.load_queue:
            return -1
        counter = self.layer_done_counter
        with ExitStack() as undo, self._started(self._loader):
            self._wait_for_load_slot()
            undo.callback(setattr, counter, "producer_index", counter.producer_index)
            producer_id = counter.update_producer()
            op = CacheOperation.merge_ops(self.load_queue)
            load = counter.events[producer_id]
            finish_event = self._start_loading(op, load)
            undo.pop_all()
        self.load_queue.clear()
        self.ack_load_queue.append(HiCacheAck(load.start_event, finish_event, op.node_ids))
        return producer_id

    def _start_loading(self, op: CacheOperation, load: LayerLoadingEvent) -> Any:
        """The event behind the copy."""
        plan = self._plan(op, to_host=False)
        if plan.io_backend == "direct":
            load.start_event.record()
            finish_event = self._loader.start(
                partial(self._load_by_copy_engine, load.flags), op.host_indices, op.device_indices,
                load.start_event, self._fence(), load.flags,
            )  # fmt: skip
            load.complete_by_flags()
        else:
            host_indices, device_indices = self.move_indices(op, plan.io_backend)
            finish_event = self.runtime.Event()
            load.start_event.record()
            with self.runtime.stream(self.load_stream):
                load.start_event.wait(self.load_stream)
                self._wait_for_forward(self.load_stream)
                self._copy_layers(load, host_indices, device_indices, plan)
                finish_event.record()  # of this load's own: the next one records the slot's again
                self._keep(self.load_stream, host_indices, device_indices)
        return finish_event

    def cancel_loading(self, keep: int = 0) -> None:
        """Forget all but the first ``keep`` of ``load_queue``; free their device slots."""
        whole_number("keep", keep)
        while len(self.load_queue) > keep:
            self.evict_device(self.load_queue[-1].device_indices)
            self.load_queue.pop()

    # ---- both ----------------------------------------------------------------------------------

    def move_indices(
        self, op: CacheOperation, io_backend: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The index tensors of ``op`` where the I/O backend wants them: (host slots, device slots).

        "direct" makes the host wait for the current stream, and sorts the pairs by host slot for
        ``layer_first`` (longer runs); "kernel" launches a copy on the current stream.

        ``io_backend``: the controller's by default.
        """
        with_attributes("op", op, "host_indices", "device_indices")
        io_backend = self.io_backend if io_backend is None else io_backend
        if io_backend not in IO_BACKENDS:
            raise UnknownName("io_backend", io_backend, IO_BACKENDS)
        host_indices, device_indices = op.host_indices, op.device_indices
        if io_backend == "direct":
            self.runtime.host_sync()
            device_indices = device_indices.cpu()
            if self.mem_pool_host.layout == "layer_first":
                host_indices, order = host_indices.sort()
                device_indices = device_indices[order]
            return host_indices, device_indices
        moved = torch.zeros_like(host_indices, device=self.device)
        self.runtime.h2d(moved, host_indices)
        return moved, device_indices

    def evict_device(self, device_indices: torch.Tensor) -> int:
        """Free device slots; returns how many. Raises as the allocator's ``free``."""
        self.mem_pool_device_allocator.free(device_indices)
        return len(device_indices)

    def evict_host(self, host_indices: torch.Tensor, backup_only: bool = True) -> int:
        """Free host slots; returns how many. Raises as :meth:`HostKVCache.free`.

        Raises:
            InvalidArgument: ``backup_only`` is False (there is no other policy).
        """
        if backup_only is not True:
            raise InvalidArgument("evict_host(backup_only=False): expected True")
        return self.mem_pool_host.free(host_indices)

    def reset(self) -> None:
        """Wait for every copy, then forget all queues and acknowledgements.

        If the copy engine has failed, kernels copy from now on (where they can).
        """
        self.wait_for_copies()
        self.forget()

    def wait_for_copies(self) -> None:
        """The host waits for everything that was started; what goes on in storage is given up.

        Raises:
            StorageBusy: as :meth:`StorageController.quiesce`.
        """
        self.storage.quiesce()
        self._writer.drain()
        self._loader.drain()
        self.write_stream.synchronize()
        self.load_stream.synchronize()

    def forget(self) -> None:
        """Drop all queues and acknowledgements. Nothing may be running."""
        if self.failure is not None:
            self._writer.failure = self._loader.failure = None
            if self.mem_pool_host.pin_memory:
                self.io_backend = "kernel"
        for queue in (self.write_queue, self.load_queue):
            queue.clear()
        for acks in (self.ack_write_queue, self.ack_load_queue):
            acks.clear()
        self.write_buffer.clear()
        self.load_buffer.clear()
        self.layer_done_counter.reset()
        self.storage.forget()

    @contextmanager
    def _started(self, by: CopyThread) -> Iterator[None]:
        """In the block a copy is put on a stream; what keeps it from that is ``CopyFailed``.

        It is raised when nothing of the copy runs any more. A named error is raised as it is.
        """
        try:
            yield
        except Exception as error:
            by.drain()
            by.stream.synchronize()
            if isinstance(error, RefcacheError):
                raise
            message = f"{by.name} between the tiers: {error!r}; nothing was copied"
            raise CopyFailed(message) from error

    def _copy_layers(
        self,
        load: LayerLoadingEvent,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        plan: TransferPlan,
    ) -> None:
        host, device = self.mem_pool_host, self.mem_pool_device
        how = plan.io_backend, plan.max_programs
        if plan.at_once:
            host.load_to_device_all_layer(device, host_indices, device_indices, load.flags, *how)
            load.complete_by_flags()
            return
        for layer_id in range(self.layer_num):
            host.load_to_device_per_layer(device, host_indices, device_indices, layer_id, *how)
            load.complete(layer_id)

    def _backup(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        self.mem_pool_host.backup_from_device_all_layer(
            self.mem_pool_device, host_indices, device_indices, "direct"
        )

    def _load_by_copy_engine(
        self, flags: Flags, host_indices: torch.Tensor, device_indices: torch.Tensor
    ) -> None:
        self.mem_pool_host.load_to_device_by_copy_engine(
            self.mem_pool_device, host_indices, device_indices, flags
        )

    def _plan(self, op: CacheOperation, *, to_host: bool) -> TransferPlan:
        self.last_plan = self.mem_pool_host.plan_transfer(
            self.io_backend, len(op.host_indices), to_host=to_host, phase=self.phase
        )
        return self.last_plan

    def _fence(self) -> Any:
        """The forward stream as of now, for a thread to wait for later; None: there is none."""
        return None if self.forward_stream is None else self.forward_stream.record_event()

    def _wait_for_load_slot(self) -> None:
        finish_event = self.layer_done_counter.next_producer.finish_event
        if not finish_event.query():
            self.load_slot_waits += 1
            finish_event.synchronize()

    def _wait_for_forward(self, stream: Any) -> None:
        if self.forward_stream is not None:
            stream.wait_stream(self.forward_stream)

    def _keep(self, stream: Any, *indices: torch.Tensor) -> None:
        """The launches do not keep index tensors alive; the allocator must not reuse them yet."""
        for index in indices:
            self.runtime.record_stream(index, stream)
