"""``StorageController``: the part of the HiCache controller that talks to storage below the host.

Three threads, each with its jobs in order::

    prefetch -> query thread: which pages are there? -> read thread: a batch of pages a job
    write_storage -> write thread: a batch of pages a job

A backend may be slow, may forget, may raise. Whatever it does, every operation ends: a prefetch is
*finished* (its slots beyond what came are on ``host_mem_release_queue``, and it is on
``prefetch_revoke_queue`` when nothing is read), a write is on ``ack_backup_queue``. An exception is
a failed operation, never the end of a thread. While ``storage_stop_event`` is set jobs end their
operations without asking the backend, so detaching loses nothing that somebody waits for.

Ranks that serve the same requests must agree on what a hit is. They do so in the scheduler's own
step (:meth:`StorageController.admit_answered`), never on a thread: no rank makes a collective call
that depends on how fast its storage is.

Models the storage half of SGLang 0.5.10's ``HiCacheController``. Differences: threads survive; a
query that several ranks must agree on is settled by their schedulers; the revoke queue carries
operations, since a request's name may come back.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty
from typing import Any

import torch

from refcache.controller.storage_operation import PrefetchOperation, StorageOperation
from refcache.errors import InvalidArgument, StorageBusy
from refcache.keys import RadixKey, page_hashes
from refcache.pool import HostKVCache
from refcache.runtime import DeadIndex, RaceFound, Runtime
from refcache.storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    StorageBackendFactory,
)

STORAGE_BATCH_PAGES = 128
ZERO_COPY = frozenset({"hf3fs", "mooncake", "eic", "nixl"})
"""Backends that read and write the host pool themselves."""
STOP_SECONDS = 10.0
"""How long a detach waits for each thread."""
KEPT_FAILURES = 16


class StorageController:
    """See the module docstring.

    Args:
        mem_pool_host: the tier above; ``device_size``: slots of the tier above that.
        page_size: of both.
        config: who stores, without the model's name and the backend's options.
        ranks: how many serve the same requests.

    Attributes:
        enable_storage: a backend is attached: ``storage_backend``, of ``storage_backend_type``.
        page_get_func, page_set_func: read and write a batch of pages.
        prefetch_threshold: fewer hits than this are not read, in tokens.
        prefetch_capacity_limit: tokens that prefetches may occupy on the host.
        prefetch_tokens_occupied: how many they do; the owner counts.
        storage_batch_size: pages a job.
        backup_skip: writes are acknowledged and not made: another rank makes them.
        failures: what went wrong lately, oldest first; ``failed``: how often in all.
    """

    def __init__(
        self,
        mem_pool_host: HostKVCache,
        device_size: int,
        page_size: int,
        config: HiCacheStorageConfig,
        runtime: Runtime,
    ) -> None:
        self.mem_pool_host = mem_pool_host
        self.page_size = page_size
        self.runtime = runtime
        self.own_config = self.storage_config = config
        self.ranks = config.tp_size
        self.enable_storage = False
        self.storage_backend: HiCacheStorage | None = None
        self.storage_backend_type: str | None = None
        self.storage_stop_event = threading.Event()
        self.page_get_func: Callable[..., object] = self._generic_page_get
        self.page_set_func: Callable[..., bool] = self._generic_page_set
        self.prefetch_threshold = page_size
        self.prefetch_capacity_limit = max(0, int(0.8 * (mem_pool_host.size - device_size)))
        self.prefetch_tokens_occupied = 0
        self.storage_batch_size = STORAGE_BATCH_PAGES
        self.backup_skip = False
        self.failures: deque[Exception] = deque(maxlen=KEPT_FAILURES)
        self.failed = 0
        self.prefetch_thread = runtime.Thread("storage query")
        self.prefetch_io_aux_thread = runtime.Thread("storage read")
        self.backup_thread = runtime.Thread("storage write")
        self._new_queues()

    def _new_queues(self) -> None:
        queue = self.runtime.Queue
        self.answered_queue = queue()
        self.prefetch_revoke_queue = queue()
        self.ack_backup_queue = queue()
        self.host_mem_release_queue = queue()

    # ---- attach and detach -----------------------------------------------------------------------

    def attach_storage_backend(
        self,
        storage_backend: str | HiCacheStorage,
        prefetch_threshold: int = 256,
        model_name: str | None = None,
        storage_backend_extra_config: dict[str, Any] | None = None,
    ) -> None:
        """Store and fetch pages there from now on.

        Args:
            storage_backend: a name, or a backend that is ready; its type is the name then.
            prefetch_threshold: tokens; at least a page.
            storage_backend_extra_config: the backend's own options, and ``tp_lcm_size``.

        Raises:
            StorageBusy: one is attached.
            UnknownName, InvalidArgument: no such backend, or options that do not fit.
            Exception: the backend's own. Whatever is raised, nothing is attached.
        """
        if self.enable_storage:
            raise StorageBusy(
                f"attach of {storage_backend!r}: {self.storage_backend_type!r} is attached; "
                "expected a detach first"
            )
        config = self._config(model_name, storage_backend_extra_config)
        if isinstance(storage_backend, HiCacheStorage):
            backend, kind = storage_backend, type(storage_backend).__name__
        else:
            kind = storage_backend
            backend = StorageBackendFactory.create_backend(kind, config)
        backend.register_mem_pool_host(self.mem_pool_host)
        in_place = kind in ZERO_COPY or bool((config.extra_config or {}).get("interface_v1"))
        self.storage_config = config
        self.storage_backend, self.storage_backend_type = backend, kind
        self.prefetch_threshold = max(prefetch_threshold, self.page_size)
        self.backup_skip = config.is_mla_model and config.tp_rank != 0
        if in_place:
            self.page_get_func, self.page_set_func = self._page_get_zero_copy, self._page_set_v1
        self.enable_storage = True

    def _config(self, model_name: str | None, options: dict[str, Any] | None) -> Any:
        own, options = self.own_config, dict(options or {})
        tp_lcm_size = options.pop("tp_lcm_size", None)
        split = False
        if tp_lcm_size is not None:
            if not isinstance(tp_lcm_size, int) or tp_lcm_size < 1 or tp_lcm_size % own.tp_size:
                raise InvalidArgument(f"{tp_lcm_size=}: expected a multiple of {own.tp_size}")
            one_page_a_head = self.mem_pool_host.layout == "page_head" and not own.is_mla_model
            split = one_page_a_head and tp_lcm_size > own.tp_size
        return HiCacheStorageConfig(
            tp_rank=own.tp_rank,
            tp_size=own.tp_size,
            pp_rank=own.pp_rank,
            pp_size=own.pp_size,
            is_mla_model=own.is_mla_model,
            enable_storage_metrics=own.enable_storage_metrics,
            is_page_first_layout=own.is_page_first_layout,
            model_name=model_name,
            tp_lcm_size=tp_lcm_size,
            should_split_heads=split,
            extra_config=options,
        )

    def detach_storage_backend(self) -> None:
        """End every operation and every thread, and close the backend. Idempotent.

        What the operations gave back is on the queues, for the owner to take.

        Raises:
            StorageBusy: a thread did not come back from the backend in time. The backend is still
                attached, and the threads go on.
        """
        self.quiesce()
        backend = self.storage_backend
        self.storage_backend = self.storage_backend_type = None
        self.enable_storage = False
        self.page_get_func, self.page_set_func = self._generic_page_get, self._generic_page_set
        if backend is not None:
            try:
                backend.close()
            except Exception as error:
                self._note(error)

    def quiesce(self) -> None:
        """End every operation, without asking the backend for more, and every thread.

        Raises:
            StorageBusy: a thread did not come back from the backend in time; it goes on.
        """
        self.storage_stop_event.set()
        try:
            for thread in (self.prefetch_thread, self.prefetch_io_aux_thread, self.backup_thread):
                if not thread.stop(STOP_SECONDS):
                    raise StorageBusy(
                        f"{thread.name}: still inside {self.storage_backend_type!r} after "
                        f"{STOP_SECONDS} s; expected it to come back"
                    )
            while not self.answered_queue.empty():
                self._admit(self.answered_queue.get_nowait(), 0)
        finally:
            self.storage_stop_event.clear()

    def forget(self) -> None:
        """Drop everything on the queues. Nothing may be running; who owned slots has them not."""
        self._new_queues()
        self.prefetch_tokens_occupied = 0

    # ---- storage to host -------------------------------------------------------------------------

    def prefetch(
        self,
        request_id: str,
        host_indices: torch.Tensor,
        new_input_tokens: RadixKey | Sequence[int],
        last_hash: str | None = None,
        prefix_keys: Sequence[str] | None = None,
        start_time: float = 0.0,
    ) -> PrefetchOperation:
        """Begin to read pages into these host slots, which belong to the operation from now on.

        Args:
            host_indices: int64 ``[n]``, whole pages.
            new_input_tokens: what they are to hold, ``n`` elements; a list has no namespace.
            last_hash: the key of the page before.
            start_time: see :class:`PrefetchOperation`.

        Raises:
            InvalidArgument: other lengths, or no backend.
        """
        if isinstance(new_input_tokens, RadixKey):
            key = new_input_tokens
        else:
            key = RadixKey(new_input_tokens)
        if not self.enable_storage or len(key) != len(host_indices) or len(key) % self.page_size:
            raise InvalidArgument(
                f"prefetch of {len(key)} tokens into {len(host_indices)} slots, storage "
                f"{self.storage_backend_type}: expected as many, in whole pages, and a backend"
            )
        operation = PrefetchOperation(
            request_id, host_indices, key, last_hash, prefix_keys, start_time, self.runtime.Lock()
        )
        self.prefetch_thread.submit(lambda: self._query(operation))
        return operation

    def terminate_prefetch(self, operation: PrefetchOperation) -> tuple[int, list[str]]:
        """See :meth:`PrefetchOperation.terminate`."""
        return operation.terminate()

    def prefetch_rate_limited(self) -> bool:
        """Whether prefetches occupy so much of the host that no more should begin."""
        return self.prefetch_tokens_occupied >= self.prefetch_capacity_limit

    def append_host_mem_release(self, host_indices: torch.Tensor) -> None:
        """These host slots, whole pages, are nobody's; the owner frees them at its next step."""
        if len(host_indices):
            for page in torch.split(host_indices, self.page_size):
                self.host_mem_release_queue.put(page)

    def admit_answered(self, agree: Callable[[list[int]], list[int]]) -> None:
        """Settle the queries that every rank has an answer for: the shortest hit counts.

        Ranks call it at the same point of the same step. ``agree``: the smallest of each value over
        the ranks. One rank alone has nothing to settle here, and asks nobody.
        """
        if self.ranks < 2:
            return
        (count,) = agree([self.answered_queue.qsize()])
        if count:
            operations = [self.answered_queue.get_nowait() for _ in range(count)]
            hits = agree([operation.hits or 0 for operation in operations])
            for operation, tokens in zip(operations, hits, strict=True):
                self._admit(operation, tokens)

    def _query(self, operation: PrefetchOperation) -> None:
        hashes: list[str] = []
        if not (self.storage_stop_event.is_set() or operation.is_terminated()):
            hashes = self._tried(operation, self._storage_hit_query, operation) or []
        operation.hash_value, operation.hits = hashes, len(hashes) * self.page_size
        if self.ranks < 2:
            self._admit(operation, operation.hits)
        else:
            self.answered_queue.put(operation)

    def _storage_hit_query(self, operation: PrefetchOperation) -> list[str]:
        """The keys of the leading pages that are in storage."""
        backend, key, prior = self._backend(), operation.token_ids, operation.last_hash
        known, step = operation.prefix_keys, self.page_size * self.storage_batch_size
        found: list[str] = []
        for start in range(0, len(key), step):
            hashes = page_hashes(key[start : start + step], self.page_size, prior)
            before = None if known is None else [*known, *found]
            hits = backend.batch_exists(hashes, HiCacheStorageExtraInfo(prefix_keys=before))
            found += hashes[:hits]
            if hits < len(hashes):
                break
            prior = hashes[-1]
        return found

    def _admit(self, operation: PrefetchOperation, hits: int) -> None:
        """Read what is there, or nothing."""
        wanted = not (self.storage_stop_event.is_set() or operation.is_terminated())
        operation.hits = hits
        if not wanted or hits < self.prefetch_threshold:
            operation.hash_value = []
            self._finish(operation)
            self.prefetch_revoke_queue.put(operation)
            return
        operation.hash_value = operation.hash_value[: hits // self.page_size]
        self.append_host_mem_release(operation.host_indices[hits:])
        operation.host_indices = operation.host_indices[:hits]
        self.prefetch_io_aux_thread.submit(lambda: self._read(operation, 0))

    def _read(self, operation: PrefetchOperation, first: int) -> None:
        """Read a batch, whose first page is ``first``, and then the next."""
        batch = self._batch(operation, first)
        wanted = not (self.storage_stop_event.is_set() or operation.is_terminated())
        if wanted:
            self._tried(operation, self.page_get_func, operation, *batch)
        last = first + len(batch[0])
        whole = operation.completed_tokens == last * self.page_size
        if wanted and whole and last < len(operation.hash_value):
            self.prefetch_io_aux_thread.submit(lambda: self._read(operation, last))
        else:
            self._finish(operation)

    def _finish(self, operation: PrefetchOperation) -> None:
        self.append_host_mem_release(operation.host_indices[operation.completed_tokens :])
        operation.finish()

    def _generic_page_get(
        self,
        operation: PrefetchOperation,
        hash_values: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> None:
        """Read pages into buffers, and copy them to the host until one is missing."""
        pool = self.mem_pool_host
        buffers = [pool.get_dummy_flat_data_page() for _ in hash_values]
        pages = self._backend().batch_get(hash_values, buffers)
        for first, page in zip(host_indices[:: self.page_size].tolist(), pages or (), strict=False):
            if page is None or operation.is_terminated():
                return
            pool.set_from_flat_data_page(first, page)
            if not operation.increment(self.page_size):
                return

    def _page_get_zero_copy(
        self,
        operation: PrefetchOperation,
        hash_values: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> None:
        """Have the backend write the host pool; what follows a missing page is not counted."""
        came = self._backend().batch_get_v1(hash_values, host_indices, extra_info)
        pages = next((i for i, one in enumerate(came) if not one), len(came))
        operation.increment(pages * self.page_size)

    # ---- host to storage -------------------------------------------------------------------------

    def write_storage(
        self,
        host_indices: torch.Tensor,
        token_ids: Any,
        hash_value: Sequence[str] | None = None,
        prefix_keys: Sequence[str] | None = None,
    ) -> int:
        """Begin to store the pages in these host slots, which must keep their rows and their owner
        until the operation is on ``ack_backup_queue``.

        Returns:
            The operation's id.

        Raises:
            InvalidArgument: not one key a page, or no backend.
        """
        keys = list(hash_value or ())
        if not self.enable_storage or len(keys) * self.page_size != len(host_indices):
            raise InvalidArgument(
                f"write_storage of {len(host_indices)} slots under {len(keys)} keys, storage "
                f"{self.storage_backend_type}: expected a key a page, and a backend"
            )
        operation = StorageOperation(
            host_indices.clone(), token_ids, hash_value=keys, prefix_keys=prefix_keys
        )
        self.backup_thread.submit(lambda: self._write(operation, 0))
        return operation.id

    def _write(self, operation: StorageOperation, first: int) -> None:
        """Store a batch, whose first page is ``first``, and then the next."""
        batch = self._batch(operation, first)
        last, more = first + len(batch[0]), False
        wanted = not (self.backup_skip or self.storage_stop_event.is_set())
        if wanted and self._tried(operation, self.page_set_func, *batch):
            operation.completed_tokens = last * self.page_size
            more = last < len(operation.hash_value)
        if more:
            self.backup_thread.submit(lambda: self._write(operation, last))
        else:
            self.ack_backup_queue.put(operation)

    def _generic_page_set(
        self,
        hash_values: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> bool:
        """Copy pages from the host, and store the copies."""
        first = host_indices[:: self.page_size].tolist()
        pages = [self.mem_pool_host.get_data_page(slot) for slot in first]
        return bool(self._backend().batch_set(hash_values, pages))

    def _page_set_v1(
        self,
        hash_values: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> bool:
        """Have the backend read the host pool."""
        return all(self._backend().batch_set_v1(hash_values, host_indices, extra_info))

    # ---- both ------------------------------------------------------------------------------------

    def _batch(
        self, operation: StorageOperation, first: int
    ) -> tuple[list[str], torch.Tensor, HiCacheStorageExtraInfo]:
        size = self.page_size
        keys = operation.hash_value[first : first + self.storage_batch_size]
        slots = operation.host_indices[first * size : (first + len(keys)) * size]
        before = operation.prefix_keys
        if before is not None:
            before = [*before, *operation.hash_value[:first]]
        return keys, slots, HiCacheStorageExtraInfo(prefix_keys=before)

    def _backend(self) -> HiCacheStorage:
        assert self.storage_backend is not None  # detaching ends all operations first
        return self.storage_backend

    def _tried(self, operation: StorageOperation, step: Callable[..., Any], *args: Any) -> Any:
        """Take a step of an operation; None when it raised, which is noted."""
        try:
            return step(*args)
        except (RaceFound, DeadIndex):  # the simulated machine's reports
            raise
        except Exception as error:
            operation.error = error
            self._note(error)
            return None

    def _note(self, error: Exception) -> None:
        self.failures.append(error)
        self.failed += 1


def drained(queue: Any, limit: int | None = None) -> list[Any]:
    """Take what is in a queue, at most ``limit`` items, oldest first."""
    taken: list[Any] = []
    while limit is None or len(taken) < limit:
        try:
            taken.append(queue.get_nowait())
        except Empty:
            break
    return taken
