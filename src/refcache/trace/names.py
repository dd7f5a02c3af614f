"""Names of a live object's own for what is recorded: a table from its methods to the operations.

An operation is a method or an attribute of SGLang's classes (``match_prefix``, ``available_size``).
``record(scheduler, path, names={"find": "match_prefix", ...})`` says which of the object's it is. A
method that takes or gives something else is a :class:`Named`, with two functions::

    names = {"find": Named("match_prefix", lambda ids: (MatchPrefixParams(RadixKey(ids)),))}
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from refcache.errors import InvalidArgument, UnknownName
from refcache.trace import captures
from refcache.trace.captures import Capture, Recording, Steps

NEEDED = {
    "tree cache": (
        "match_prefix", "insert", "evict", "evictable_size", "protected_size", "total_size",
        "token_to_kv_pool_allocator",
    ),
    "controller": ("write", "load", "start_loading", "mem_pool_device_allocator", "mem_pool_host"),
    "allocator": ("alloc", "free", "available_size", "size", "page_size"),
}  # fmt: skip
"""What a subject must have to be one, most telling first."""
TELLING = 3
OPERATIONS = frozenset().union(
    *NEEDED.values(), captures.ALLOCATOR, captures.HOST_TREE, captures.HOST_POOL,
    captures.CONTROLLER, ("root_node", "req_to_token_pool", "cache_controller", "is_eagle"),
)  # fmt: skip


@dataclass(frozen=True)
class Named:
    """A method under another name, and with other values.

    Attributes:
        operation: what it is in SGLang's words.
        arguments: from the method's arguments to those of the operation, a tuple.
        result: from the method's result to that of the operation.
    """

    operation: str
    arguments: Callable[..., tuple[Any, ...]] | None = None
    result: Callable[[Any], Any] | None = None

    def capture(self, original: Capture) -> Capture:
        """The operation's capture, told of the method's own values."""

        def captured(rec: Recording, *args: Any, **kwargs: Any) -> Steps:
            if self.arguments is not None:
                args, kwargs = self.arguments(*args, **kwargs), {}
            steps = original(rec, *args, **kwargs)
            result = yield next(steps)
            try:
                steps.send(result if self.result is None else self.result(result))
            except StopIteration:
                return

        return captured


class Names:
    """The table, read from operation to method.

    Raises:
        UnknownName: an operation that there is not.
        InvalidArgument: two methods for one operation.
    """

    def __init__(self, table: Mapping[str, str | Named] | None = None) -> None:
        self.by_operation: dict[str, tuple[str, Named]] = {}
        for method, value in (table or {}).items():
            named = value if isinstance(value, Named) else Named(value)
            operation = named.operation
            if operation not in OPERATIONS:
                raise UnknownName("operation", operation, OPERATIONS)
            if operation in self.by_operation:
                first = self.by_operation[operation][0]
                raise InvalidArgument(
                    f"record: names={{{first!r}, {method!r}}}: both {operation!r}"
                )
            self.by_operation[operation] = (method, named)

    def method(self, operation: str) -> str:
        """What the object calls it."""
        return self.by_operation[operation][0] if operation in self.by_operation else operation

    def capture(self, operation: str, original: Capture) -> Capture:
        """The capture of the operation, for the object's own method."""
        found = self.by_operation.get(operation)
        return original if found is None else found[1].capture(original)

    def kind(self, subject: Any) -> str:
        """Which of :data:`NEEDED` the subject is.

        Raises:
            InvalidArgument: none; it says what is missing of each.
        """
        view = View(subject, self)
        lacks = {kind: [n for n in ops if not hasattr(view, n)] for kind, ops in NEEDED.items()}
        for kind, missing in lacks.items():
            if not missing:
                return kind
        told = "; ".join(f"as {kind}: {', '.join(missing)}" for kind, missing in lacks.items())
        raise InvalidArgument(
            f"record: {type(subject).__name__} is no tree cache, controller or allocator. Missing "
            f"{told}. A method of another name goes into names={{'its name': 'match_prefix', ...}}"
        )


class View:
    """An object under SGLang's names. ``subject``: the object itself."""

    def __init__(self, subject: Any, names: Names) -> None:
        self.subject, self.names = subject, names

    def __getattr__(self, name: str) -> Any:
        return getattr(self.subject, self.names.method(name))
