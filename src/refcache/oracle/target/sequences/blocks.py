"""The base of an adapter for a cache of hashed blocks, or for any cache that keeps requests.

Such engines have a request object and a manager. The base keeps the objects and appends tokens; an
adapter says the rest in :meth:`make`, :meth:`admit`, :meth:`more`, :meth:`mark`, :meth:`release`.
"""

from collections.abc import Sequence
from typing import Any


class RequestCache:
    """Implements :class:`refcache.oracle.target.sequences.contract.Sequences` over five hooks.

    A preempted sequence comes back as a new object with all its tokens. A result that comes after
    an abort is dropped here, as the engines do that know their requests by number.
    """

    requests: dict[int, Any]
    lengths: dict[int, int]

    def __new__(cls, *_: Any, **__: Any) -> "RequestCache":
        """An adapter's ``__init__`` need not call this class's."""
        made = super().__new__(cls)
        made.requests, made.lengths = {}, {}
        return made

    # ---- what an adapter says --------------------------------------------------------------------

    def make(self, seq: int, tokens: list[int], namespace: str | None) -> Any:
        """The engine's request object."""
        raise NotImplementedError

    def admit(self, request: Any) -> int | None:
        """Look it up, hold what is found, take room; tokens found, or None without room."""
        raise NotImplementedError

    def push(self, request: Any, token: int) -> None:
        """One token more was sampled; by default nothing is told."""

    def more(self, request: Any, n: int) -> bool:
        """Room for the first ``n`` tokens; False without it."""
        raise NotImplementedError

    def mark(self, request: Any, n: int) -> None:
        """The first ``n`` tokens are computed; by default nothing is told."""

    def release(self, request: Any) -> None:
        """The request ends, whatever the reason."""
        raise NotImplementedError

    def pages(self, request: Any) -> Any:
        """Its pages in order, or one list a group."""
        raise NotImplementedError

    # ---- the contract ----------------------------------------------------------------------------

    def start(self, seq: int, tokens: Sequence[int], namespace: str | None) -> int | None:
        request = self.make(seq, list(tokens), namespace)
        found = self.admit(request)
        if found is not None:
            self.requests[seq], self.lengths[seq] = request, len(tokens)
        return found

    def _known(self, seq: int, tokens: Sequence[int]) -> Any:
        """The request, with all its tokens."""
        request = self.requests[seq]
        for token in tokens[self.lengths[seq] :]:
            self.push(request, token)
        self.lengths[seq] = len(tokens)
        return request

    def grow(self, seq: int, tokens: Sequence[int], n: int) -> bool:
        return self.more(self._known(seq, tokens), n)

    def computed(self, seq: int, tokens: Sequence[int], n: int) -> None:
        if seq in self.requests:
            self.mark(self._known(seq, tokens), n)

    def finish(self, seq: int, tokens: Sequence[int]) -> None:
        self._known(seq, tokens)
        self.abort(seq)

    def abort(self, seq: int) -> None:
        self.release(self.requests[seq])
        del self.requests[seq], self.lengths[seq]

    def preempt(self, seq: int) -> None:
        self.abort(seq)

    def table(self, seq: int) -> Any:
        return self.pages(self.requests[seq])
