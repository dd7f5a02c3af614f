"""A :class:`State`: a tree's inspection view with who else owns pages; what rules are about."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from refcache.oracle.view.tree import TreeView

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RequestView:
    """A running request: its row up to the last slot that it was given, and what it has locked.

    Attributes:
        row: integer slots ``[allocated]``.
        cache_protected_len: tokens of the row that the tree owns.
        last_node: the handle it has locked; None for a request that holds none.
    """

    name: str
    row: "torch.Tensor"
    cache_protected_len: int
    last_node: Any
    row_number: int | None = None


@dataclass(frozen=True)
class State:
    """What the checks look at. ``pages`` counts the pool's pages, numbered from 1.

    Attributes:
        free, queued: pages on the free and release lists, and in an open free group.
        requests: the running requests.
        holders: handles that are locked, one entry a lock; each request's is one of them.
        cached: for each page prefix (namespace, elements), the page that must hold it; None when
            nobody recorded it (a replay).
    """

    view: TreeView
    page_size: int
    pages: int
    free: "Sequence[int] | torch.Tensor"
    holders: Sequence[Any]
    requests: Sequence[RequestView] = ()
    queued: Iterable[int] = ()
    cached: Mapping[tuple[str | None, tuple[Any, ...]], int] | None = None

    @cached_property
    def slots(self) -> "torch.Tensor":
        """Device slots of all nodes, one after the other."""
        import torch

        values = [node.device for node in self.view.nodes if node.device is not None]
        return torch.cat(values) if values else torch.zeros(0, dtype=torch.int64)

    @cached_property
    def place(self) -> dict[Any, int]:
        return {node.handle: index for index, node in enumerate(self.view.nodes)}

    @cached_property
    def owners(self) -> list[tuple[str, list[int]]]:
        """Everybody who owns pages, with the pages."""
        size = self.page_size
        free = list(self.free) if isinstance(self.free, Sequence) else self.free.tolist()
        owners = [("the free list", free), ("the open free group", list(self.queued))]
        owners.append(("the tree", [slot // size for slot in self.slots[::size].tolist()]))
        for request in self.requests:
            own = request.row[request.cache_protected_len :: size].tolist()
            owners.append((request.name, [slot // size for slot in own]))
        return owners

    def name(self, index: int) -> str:
        """A node, for people: its path of keys from the root."""
        if index < 0:
            return "the root"
        path: list[str] = []
        node = self.view.nodes[index]
        space = "" if node.extra_key is None else f" in {node.extra_key!r}"
        while True:
            head = list(node.key)[:8]
            path.append(f"{head}{'...' if len(node.key) > 8 else ''}")
            if node.parent < 0:
                return "node " + " > ".join(reversed(path)) + space
            node = self.view.nodes[node.parent]


Check = Callable[[State], Iterator[str]]
