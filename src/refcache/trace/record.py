"""``record``: write down what a live cache is asked and what it answers.

The methods of one object, and of the parts it works on, are replaced by wrappers that call the
original and write a line (:mod:`refcache.trace.format`). Nothing else changes: arguments,
results, exceptions and the order of calls are the cache's own. ``Recorder.close`` takes the
wrappers off.

Recorded are a tree cache (one or two tiers) with its allocator, host pool and controller; a
controller with its allocator and host pool; or an allocator alone, with SGLang's names, or with
others and a table (:mod:`refcache.trace.names`). A call
that one part makes on itself is not a record: it is an implementation's own business.

The subject must be empty when the recording starts: a judge has to know who owns what. On a GPU,
each recorded call waits for the index tensors that it writes down.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

from refcache.trace import format as f
from refcache.trace.captures import OPTIONAL, Capture
from refcache.trace.file import Closes, TraceWriter
from refcache.trace.names import Named, Names
from refcache.trace.parts import Parts


def record(
    subject: Any, path: str | Path, names: Mapping[str, str | Named] | None = None
) -> "Recorder":
    """Record every call on ``subject`` to ``path`` until the recorder is closed.

    Args:
        subject: a tree cache, a ``HiCacheController``, or an allocator, with nothing in it yet.
        path: the file; it is overwritten. ``.zst`` compresses.
        names: for an object with names of its own: from its method to the operation in SGLang's
            words (:mod:`refcache.trace.names`).

    Returns:
        The :class:`Recorder`; also a context manager. Its ``missing`` are the operations that the
        object has no method for.

    Raises:
        InvalidArgument: not such an object (the text says what is missing), or one that is in use
            already.
        UnknownName: ``names`` has an operation that there is not.
        InvalidTrace: the file cannot be written.
    """
    return Recorder(subject, path, Names(names))


class Recorder(Closes):
    """What :func:`record` returns. ``header``: the first line; ``close``: stop; ``missing``: what
    is not recorded, since the object has no such method: ``part.operation``."""

    def __init__(self, subject: Any, path: str | Path, names: Names) -> None:
        self._parts = Parts(subject, names)
        self.tree = self._parts.tree
        self.header = self._parts.header(subject)
        self._writer = TraceWriter(path, self.header)
        self._n = 0
        self._write_lock = threading.Lock()
        self._thread = threading.local()
        self._nodes: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._values: dict[Any, int] = {}
        self._numbers = count()
        self._states: dict[int, tuple[int, Any]] = {}
        self._seen_acks: dict[str, list[Any]] = {"write": [], "load": []}
        self._undo: list[Callable[[], None]] = []
        self.closed = False
        self.missing: list[str] = []
        if hasattr(self._parts.tree, "root_node"):
            self.node(self._parts.tree.root_node)
        for part, owner, methods in self._parts.wrapped():
            for operation, capture in methods.items():
                name = names.method(operation)
                if hasattr(owner.subject, name):
                    self._wrap(part, owner.subject, name, names.capture(operation, capture))
                elif operation not in OPTIONAL:
                    self.missing.append(f"{part}.{operation}")

    def close(self) -> None:
        """Take the wrappers off and finish the file."""
        if self.closed:
            return
        self.closed = True
        for undo in reversed(self._undo):
            undo()
        self._writer.close()

    # ---- wrapping --------------------------------------------------------------------------------

    def _wrap(self, part: str, owner: Any, name: str, capture: Capture) -> None:
        """Put a recording method in the place of ``owner.name``, and remember the way back."""
        original = getattr(owner, name)
        bare = owner.__dict__.get(name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return self._call(part, original, capture, args, kwargs)

        setattr(owner, name, wrapper)

        def undo() -> None:
            if bare is None:
                delattr(owner, name)
            else:
                setattr(owner, name, bare)

        self._undo.append(undo)

    def _call(self, part: str, original: Any, capture: Capture, args: Any, kwargs: Any) -> Any:
        """Make a call and write its record, or add it to the record of the call around it."""
        stack: list[tuple[str, list[f.AnyCall]]] = self._thread.__dict__.setdefault("stack", [])
        if any(open_part == part for open_part, _ in stack):
            try:
                return original(*args, **kwargs)
            finally:
                if part == "tree":
                    self._look_for_acks(stack[0][1])
        inner = stack[0][1] if stack else []
        stack.append((part, inner))
        steps = capture(self, *args, **kwargs)
        call = next(steps)
        try:
            result = original(*args, **kwargs)
        except Exception as error:
            call.error = repr(error)
            steps.close()
            raise
        else:
            with contextlib.suppress(StopIteration):
                steps.send(result)
            return result
        finally:
            stack.pop()
            if part in ("tree", "controller"):
                self._look_for_acks(inner)
            if stack:
                inner.append(call)
            else:
                self._write(call, inner)

    def _write(self, call: f.AnyCall, inner: list[f.AnyCall]) -> None:
        with self._write_lock:
            self._n += 1
            self._writer.write(f.Line(n=self._n, call=call, inner=inner, after=self._parts.sizes()))

    def _look_for_acks(self, inner: list[f.AnyCall]) -> None:
        """Acknowledgements leave their queue when they are served: see which have gone."""
        if self._parts.controller is None:
            return
        for kind, seen in self._seen_acks.items():
            queue = getattr(self._parts.controller, f"ack_{kind}_queue")
            now = {id(ack) for ack in queue}
            gone = [i for ack in seen if id(ack) not in now for i in ack.node_ids]
            if gone:
                inner.append(f.Ack(kind=kind, ids=gone))
            self._seen_acks[kind] = list(queue)

    # ---- values ----------------------------------------------------------------------------------

    def node(self, handle: Any) -> int:
        """A small number for a node handle; the same handle, the same number."""
        try:
            ref(handle)
            known: Any = self._nodes
        except TypeError:  # a value, such as a tuple: equal handles are one
            known = self._values
        if handle not in known:
            known[handle] = next(self._numbers)
        number: int = known[handle]
        return number

    def state(self, value: Any) -> int:
        """A number for what ``backup_state`` returned; kept for the last few only."""
        if id(value) not in self._states:
            last = max((number for number, _ in self._states.values()), default=0)
            self._states[id(value)] = (last + 1, value)
            if len(self._states) > 8:
                del self._states[next(iter(self._states))]
        return self._states[id(value)][0]
