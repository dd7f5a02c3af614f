"""What the storage threads work on: a write of pages, and a prefetch.

A prefetch is asked about by the scheduler while a thread works on it. What both touch is changed
and read under the operation's lock, which is also what orders a thread's writes to the host before
the scheduler's use of them.

Models SGLang 0.5.10's ``StorageOperation`` and ``PrefetchOperation``. Added: ``finished``. Without
it nobody can tell a prefetch that failed from one that is slow.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from threading import RLock
from typing import Any

import torch


class StorageOperation:
    """Pages to be written to storage.

    Attributes:
        host_indices: int64 ``[n]``, whole pages; ``token_ids``: what they hold.
        hash_value: the key of each page.
        last_hash: the key of the page before the first; None: the first of its namespace.
        prefix_keys: the keys of all pages before, if the backend is told them.
        completed_tokens: how many, from the front, are done.
        error: what ended it early; None: nothing did.
    """

    counter = 0

    def __init__(
        self,
        host_indices: torch.Tensor,
        token_ids: Any,
        last_hash: str | None = None,
        hash_value: Sequence[str] | None = None,
        prefix_keys: Sequence[str] | None = None,
    ) -> None:
        self.host_indices = host_indices
        self.token_ids = token_ids
        self.last_hash = last_hash
        self.completed_tokens = 0
        self.hash_value = list(hash_value or ())
        self.prefix_keys = None if prefix_keys is None else list(prefix_keys)
        self.error: Exception | None = None
        self.id = StorageOperation.counter
        StorageOperation.counter += 1

    def __lt__(self, other: "StorageOperation") -> bool:
        return self.id < other.id


class PrefetchOperation(StorageOperation):
    """Pages to be read from storage into ``host_indices``, as far as they are hits.

    Slots beyond ``completed_tokens`` belong to the operation until it is finished, and are then on
    the controller's release queue; those before are the caller's to take.

    Attributes:
        request_id: whose.
        start_time: a reading of the caller's clock.
        hits: tokens that storage had when it was asked; None: not known yet.
    """

    def __init__(
        self,
        request_id: str,
        host_indices: torch.Tensor,
        token_ids: Any,
        last_hash: str | None = None,
        prefix_keys: Sequence[str] | None = None,
        start_time: float = 0.0,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        super().__init__(host_indices, token_ids, last_hash, prefix_keys=prefix_keys)
        self.request_id = request_id
        self.start_time = start_time
        self.hits: int | None = None
        self._lock = lock or RLock()
        self._terminated = self._finished = False

    def increment(self, num_tokens: int) -> bool:
        """So many tokens more are there; False, and nothing changed, once it is terminated."""
        with self._lock:
            if self._terminated:
                return False
            self.completed_tokens += num_tokens
            return True

    def mark_terminate(self) -> None:
        """What is not there yet will not be waited for."""
        with self._lock:
            self._terminated = True

    def is_terminated(self) -> bool:
        """Has anybody given it up?"""
        with self._lock:
            return self._terminated

    def terminate(self) -> tuple[int, list[str]]:
        """Give it up; the tokens that are there, for good, and the keys of the hit."""
        with self._lock:
            self._terminated = True
            return self.completed_tokens, self.hash_value

    def finish(self) -> None:
        """No thread will touch the host slots of this operation any more."""
        with self._lock:
            self._finished = True

    def is_finished(self) -> bool:
        """Is it over, whether it was read whole, in part, or not at all?"""
        with self._lock:
            return self._finished
