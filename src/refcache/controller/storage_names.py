"""The names of ``StorageController`` on the controller, where SGLang has them: ``StorageNames``.

A reader of two tiers can leave this out.
"""

from collections.abc import Sequence
from typing import Any

import torch

from refcache.controller.storage_controller import StorageController
from refcache.controller.storage_operation import PrefetchOperation
from refcache.keys import RadixKey
from refcache.storage import HiCacheStorage


class _OfStorage:
    """An attribute of the controller that is one of its ``storage``."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, controller: "StorageNames | None", owner: type) -> Any:
        return self if controller is None else getattr(controller.storage, self.name)

    def __set__(self, controller: "StorageNames", value: Any) -> None:
        setattr(controller.storage, self.name, value)


class StorageNames:
    """See the module docstring."""

    storage: StorageController

    enable_storage = _OfStorage()
    storage_backend = _OfStorage()
    storage_backend_type = _OfStorage()
    storage_config = _OfStorage()
    storage_stop_event = _OfStorage()
    storage_batch_size = _OfStorage()
    page_get_func = _OfStorage()
    page_set_func = _OfStorage()
    backup_skip = _OfStorage()
    backup_thread = _OfStorage()
    prefetch_thread = _OfStorage()
    prefetch_io_aux_thread = _OfStorage()
    prefetch_threshold = _OfStorage()
    prefetch_capacity_limit = _OfStorage()
    prefetch_tokens_occupied = _OfStorage()
    prefetch_revoke_queue = _OfStorage()
    ack_backup_queue = _OfStorage()
    host_mem_release_queue = _OfStorage()
    _generic_page_get = _OfStorage()
    _generic_page_set = _OfStorage()

    def attach_storage_backend(
        self,
        storage_backend: str | HiCacheStorage,
        prefetch_threshold: int = 256,
        model_name: str | None = None,
        storage_backend_extra_config: dict[str, Any] | None = None,
    ) -> None:
        """See :meth:`StorageController.attach_storage_backend`."""
        self.storage.attach_storage_backend(
            storage_backend, prefetch_threshold, model_name, storage_backend_extra_config
        )

    def detach_storage_backend(self) -> None:
        """See :meth:`StorageController.detach_storage_backend`."""
        self.storage.detach_storage_backend()

    def prefetch(
        self,
        request_id: str,
        host_indices: torch.Tensor,
        new_input_tokens: RadixKey | Sequence[int],
        last_hash: str | None = None,
        prefix_keys: Sequence[str] | None = None,
    ) -> PrefetchOperation:
        """See :meth:`StorageController.prefetch`."""
        return self.storage.prefetch(
            request_id, host_indices, new_input_tokens, last_hash, prefix_keys
        )

    def prefetch_rate_limited(self) -> bool:
        """See :meth:`StorageController.prefetch_rate_limited`."""
        return self.storage.prefetch_rate_limited()

    def terminate_prefetch(self, operation: PrefetchOperation) -> tuple[int, list[str]]:
        """See :meth:`StorageController.terminate_prefetch`."""
        return self.storage.terminate_prefetch(operation)

    def append_host_mem_release(self, host_indices: torch.Tensor) -> None:
        """See :meth:`StorageController.append_host_mem_release`."""
        self.storage.append_host_mem_release(host_indices)

    def write_storage(
        self,
        host_indices: torch.Tensor,
        token_ids: Any,
        hash_value: Sequence[str] | None = None,
        prefix_keys: Sequence[str] | None = None,
    ) -> int:
        """See :meth:`StorageController.write_storage`."""
        return self.storage.write_storage(host_indices, token_ids, hash_value, prefix_keys)
