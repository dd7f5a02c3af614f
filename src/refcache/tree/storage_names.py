"""SGLang's names of what a tree does with storage, for its callers: ``StorageNames``.

A reader of two tiers can leave this out: everything is :class:`refcache.tree.storage.TreeStorage`,
which a tree has as ``storage``.
"""

from collections.abc import Sequence
from typing import Any

from refcache.controller import HiCacheController, PrefetchOperation
from refcache.storage.policy import check_stop_policy
from refcache.tree.node import TreeNode
from refcache.tree.storage import Prefetch, TreeStorage
from refcache.types import check_write_policy


class StorageNames:
    """A tree's methods about storage. ``HiRadixCache`` has the attributes named here."""

    cache_controller: HiCacheController
    storage: TreeStorage
    write_policy: str

    @property
    def enable_storage(self) -> bool:
        """A storage backend is attached."""
        return self.storage.enabled

    @property
    def ongoing_prefetch(self) -> dict[str, Prefetch]:
        """See :class:`TreeStorage`."""
        return self.storage.ongoing_prefetch

    @property
    def ongoing_backup(self) -> dict[int, list[TreeNode]]:
        """See :class:`TreeStorage`."""
        return self.storage.ongoing_backup

    @property
    def prefetch_loaded_tokens_by_reqid(self) -> dict[str, int]:
        """See :attr:`TreeStorage.loaded`."""
        return self.storage.loaded

    @property
    def prefetch_stop_policy(self) -> str:
        """One of :data:`refcache.types.PREFETCH_STOP_POLICIES`."""
        return self.storage.prefetch_stop_policy

    @property
    def prefetch_threshold(self) -> int:
        """A prefetch of fewer tokens is not begun."""
        return self.storage.policy.prefetch_threshold

    @property
    def hicache_storage_pass_prefix_keys(self) -> bool:
        """The backend is told the keys of the pages before."""
        return self.storage.policy.hicache_storage_pass_prefix_keys

    def attach_storage_backend(
        self,
        storage_backend: Any,
        storage_backend_extra_config_json: str | None = None,
        served_model_name: str | None = None,
        hicache_storage_prefetch_policy: str | None = None,
        hicache_write_policy: str | None = None,
    ) -> tuple[bool, str]:
        """Store and fetch pages there from now on. No request may be queued or running.

        With the backend that is attached already, the policies are set and nothing else.

        Args:
            storage_backend: a name, or a :class:`refcache.storage.HiCacheStorage`.
            storage_backend_extra_config_json: see :mod:`refcache.storage.policy`.

        Returns:
            Whether it is attached, and a sentence. When it is not, nothing has changed.
        """
        controller = self.cache_controller
        try:
            check_stop_policy(hicache_storage_prefetch_policy or self.prefetch_stop_policy)
            check_write_policy(hicache_write_policy or self.write_policy)
            if self.enable_storage:
                if storage_backend not in (
                    controller.storage_backend_type, controller.storage_backend
                ):  # fmt: skip
                    return False, f"{controller.storage_backend_type} is attached: detach it first"
                self.storage.prefetch_stop_policy = (
                    hicache_storage_prefetch_policy or self.prefetch_stop_policy
                )
                message = "this backend was attached before; the policies are set"
            else:
                self.storage.attach(
                    storage_backend,
                    storage_backend_extra_config_json,
                    served_model_name,
                    hicache_storage_prefetch_policy,
                )
                message = "the storage backend is attached"
        except Exception as error:  # also the backend's own: an operator's call ends no server
            return False, f"attach of {storage_backend!r} failed: {error}"
        self.storage.tree._set_write_policy(hicache_write_policy or self.write_policy)
        return True, message

    def detach_storage_backend(self) -> tuple[bool, str]:
        """End everything that goes on in storage, and detach. Idempotent.

        Returns:
            Whether nothing is attached now, and a sentence.
        """
        try:
            self.storage.detach()
        except Exception as error:
            return False, f"detach failed: {error}"
        return True, "no storage backend is attached"

    def clear_storage_backend(self) -> bool:
        """Have the backend forget what it stored; False where none is attached, or it cannot."""
        try:
            return self.enable_storage and bool(self.cache_controller.storage_backend.clear())
        except Exception:
            return False

    def shutdown(self) -> None:
        """Detach."""
        self.detach_storage_backend()

    def write_backup_storage(self, node: TreeNode) -> None:
        """Write a node to storage; its host slots stay until the acknowledgement.

        Raises:
            ForeignNode, InvalidArgument: not a node of this tree, or not on the host.
        """
        self.storage.tree._path(node)
        self.storage.write([node])

    def prefetch_from_storage(
        self,
        req_id: str,
        last_host_node: TreeNode,
        new_input_tokens: Sequence[int],
        last_hash: str | None = None,
        prefix_keys: Sequence[str] | None = None,
        extra_key: str | None = None,
    ) -> None:
        """Ask storage for the pages of ``new_input_tokens``, which follow ``last_host_node``.

        Nothing happens when no backend is attached, when they are fewer than the threshold, when
        prefetches occupy too much, or without room on the host.

        Args:
            last_host_node: on the host, or the root.
            last_hash, prefix_keys: as in SGLang; the tree knows them itself.
            extra_key: their namespace, where ``last_host_node`` is the root.

        Raises:
            InvalidArgument: one goes on for this request, or the node is not on the host.
        """
        self.storage.prefetch(req_id, last_host_node, new_input_tokens, extra_key)

    def can_terminate_prefetch(self, operation: PrefetchOperation) -> bool:
        """Does the stop policy let the request go on? Every rank gets the same answer."""
        return self.storage.can_terminate(operation)

    def is_prefetch_timeout(self, operation: PrefetchOperation) -> bool:
        """Has it taken longer than the policy "timeout" allows?"""
        return self.storage.is_prefetch_timeout(operation)

    def check_prefetch_progress(self, req_id: str) -> bool:
        """May the request be scheduled? If so, what has come for it is on the host, in the tree."""
        return self.storage.check_progress(req_id)

    def pop_prefetch_loaded_tokens(self, req_id: str) -> int:
        """How many tokens storage has brought for a request; 0 from the second time on."""
        return self.storage.loaded.pop(req_id, 0)

    def terminate_prefetch(self, req_id: str) -> None:
        """Wait no longer: the next check takes what has come."""
        self.storage.terminate(req_id)

    def release_aborted_request(self, rid: str) -> None:
        """The request is gone: end its prefetch, and drop what has come."""
        self.storage.abort(rid)

    def drain_storage_control_queues(self) -> None:
        """Take what the storage threads have done, as much of it as every rank has."""
        self.storage.drain()
