"""What a recording wraps: a tree, its allocator, host pool and controller, found by their names."""

import contextlib
import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from refcache.errors import InvalidArgument
from refcache.trace import captures
from refcache.trace import format as f
from refcache.trace.captures import Capture
from refcache.trace.names import Names, View


class Parts:
    """The objects to wrap, found from the subject by their names; each a :class:`View`.

    Raises:
        InvalidArgument: not such an object, or one that is in use already.
    """

    def __init__(self, subject: Any, names: Names) -> None:
        self.allocator: View
        self.tree: Any = None
        self.host: Any = None
        self.controller: Any = None
        self.names = names
        kind, view = names.kind(subject), View(subject, names)
        if kind == "tree cache":
            self.tree, self.controller = view, self._part(view, "cache_controller")
            allocator = self._part(view, "token_to_kv_pool_allocator")
            if allocator is None:
                raise InvalidArgument("record: the tree cache has no allocator")
            self.allocator = allocator
        elif kind == "controller":
            self.controller = view
            self.allocator = View(view.mem_pool_device_allocator, names)
        else:
            self.allocator = view
        self.host = (
            None if self.controller is None else self._part(self.controller, "mem_pool_host")
        )
        self._refuse_used()

    def _part(self, view: View, name: str) -> Any:
        """What the object has under that name; None if nothing."""
        found = getattr(view, name, None)
        return None if found is None else View(found, self.names)

    def _refuse_used(self) -> None:
        """Refuse what cannot be recorded from its beginning."""
        if getattr(self.tree, "disable", False):
            raise InvalidArgument("record: the tree cache is disabled")
        free, size = int(self.allocator.available_size()), int(self.allocator.size)
        cached = 0 if self.tree is None else int(self.tree.total_size())
        host = 0
        if self.host is not None:
            host = int(self.host.size) - int(self.host.available_size())
        if free != size or cached or host:
            raise InvalidArgument(
                f"record: {size - free} of {size} tokens are in use, {cached} are cached, {host} "
                "are on the host: expected a cache with nothing in it"
            )

    def header(self, subject: Any) -> f.Header:
        kind = type(subject)
        return f.Header(
            format=f.FORMAT,
            version=f.VERSION,
            page_size=int(self.allocator.page_size if self.tree is None else self.tree.page_size),
            size=int(self.allocator.size),
            host_size=None if self.host is None else int(self.host.size),
            is_eagle=bool(getattr(self.tree, "is_eagle", False)),
            write_policy=getattr(self.controller, "write_policy", None),
            subject=f"{kind.__module__}.{kind.__qualname__}",
            versions=_versions(kind.__module__.partition(".")[0]),
        )

    def wrapped(self) -> Iterator[tuple[str, View, dict[str, Capture]]]:
        """Each part with the operations that are recorded of it."""
        yield "allocator", self.allocator, captures.ALLOCATOR
        if self.tree is not None:
            yield (
                "tree",
                self.tree,
                captures.TREE if self.controller is None else captures.HOST_TREE,
            )
        if self.controller is not None:
            yield "host", self.host, captures.HOST_POOL
            yield "controller", self.controller, captures.CONTROLLER

    def sizes(self) -> f.Sizes:
        tree, host = self.tree, self.host
        return f.Sizes(
            int(self.allocator.available_size()),
            None if tree is None else int(tree.evictable_size()),
            None if tree is None else int(tree.protected_size()),
            None if host is None else int(host.available_size()),
        )


def _versions(package: str) -> dict[str, str]:
    import torch

    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in {package, "refcache"}:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
