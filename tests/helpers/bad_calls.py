"""What a call must not be given, and what it must leave alone: wrong values, and fingerprints."""

from array import array
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch

WRONG: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "text": lambda: "4",
    "float": lambda: 1.5,
    "bool": lambda: True,
    "negative": lambda: -1,
    "huge": lambda: 2**70,
    "list": lambda: [4, 5],
    "unhashable": lambda: {"a": [1]},
    "object": object,
    "mask": lambda: torch.tensor([True, True, False, True]),
    "float tensor": lambda: torch.tensor([4.0, 5.0, 6.0, 7.0]),
    "complex tensor": lambda: torch.tensor([4j, 5j]),
    "2-d": lambda: torch.tensor([[4, 5], [6, 7]]),
    "0-d": lambda: torch.tensor(4),
    "negative slots": lambda: torch.tensor([-4, -3, -2, -1]),
    "slots beyond": lambda: torch.tensor([4000, 4001, 4002, 4003]),
    "huge slots": lambda: torch.tensor([2**62, 2**62 + 1, 2**62 + 2, 2**62 + 3]),
    "slots twice": lambda: torch.tensor([4, 5, 4, 5]),
    "meta": lambda: torch.zeros(4, dtype=torch.int64, device="meta"),
}
COUNTS = frozenset({"negative", "huge"})
NOTHING = frozenset({"None"})


def fingerprint(value: Any, seen: dict[int, int] | None = None) -> Any:
    """Everything that a value holds, down to the elements of tensors, in a form that compares.

    Machines, locks, threads and functions count as themselves.
    """
    seen = {} if seen is None else seen
    if value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype):
        return value
    if id(value) in seen:
        return ("again", seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, torch.Tensor):
        elements = None if value.is_meta else value.tolist()
        return (str(value.dtype), tuple(value.shape), elements)
    if isinstance(value, dict):
        return [(fingerprint(k, seen), fingerprint(v, seen)) for k, v in value.items()]
    if isinstance(value, set | frozenset):
        return sorted(id(element) for element in value)
    if isinstance(value, list | tuple | array):
        return [fingerprint(element, seen) for element in value]
    module = type(value).__module__
    if isinstance(value, SimpleNamespace) or (
        module.startswith("refcache") and not module.startswith("refcache.runtime")
    ):
        return {name: fingerprint(held, seen) for name, held in attributes(value)}
    return id(value)


def attributes(value: Any) -> Iterable[tuple[str, Any]]:
    """What an object holds, by name; not how many nodes were ever numbered, nor the clock."""
    names = list(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = getattr(kind, "__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    for name in sorted(set(names) - {"_next_id", "clock"}):
        if hasattr(value, name):
            yield name, getattr(value, name)


def public_methods(kind: type) -> list[str]:
    """The methods of a class that take arguments, its own and inherited ones."""
    found = []
    for name in dir(kind):
        member = getattr(kind, name)
        if name.startswith("_") or not callable(member) or isinstance(member, type):
            continue
        code = getattr(member, "__code__", getattr(member, "__func__", None))
        code = getattr(code, "__code__", code)
        if code is not None and code.co_argcount + code.co_kwonlyargcount > 1:
            found.append(name)
    return found
