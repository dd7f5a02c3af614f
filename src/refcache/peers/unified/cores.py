"""Both tree cores of SGLang 0.5.23 at once: the Rust core leads, the Python core must agree.

The cache is the release's own and works with what the Rust core answers. The Python core gets the
same calls with copies of the same arguments; an answer that differs is a violation of DIFF, and so
is an exception that only one of them raises. Both count nodes alike, so numbers of nodes are
compared too; only the numbers of host locks are each core's own, and translated. So is the digest
of what write-back has reclaimed, which the release compares among ranks, whose cores are equal: the
Rust core's is three times the other, modulo ``2**42``.

Registered through the release's own registry of cores.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from refcache.oracle.rules.violation import Violation
from refcache.peers.engine import Engine

BACKEND = "rust, compared"
DIGEST = "write_back_duplicate_reclaim_digest"
LOCKS = ("component_lock_uuids", "component_host_lock_uuids")


def register(engine: Engine) -> None:
    """Make the pair known to the release under the name ``BACKEND``."""
    registry = engine.module("mem_cache.unified_cache.tree_core_registry")
    if BACKEND in registry.registered_tree_core_backends():
        return
    node = engine.module("mem_cache.unified_cache.unified_tree_core").UnifiedTreeNode

    def make(params: Any, components: dict[Any, Any]) -> Cores:
        leader = registry.get_tree_core_factory("rust")(params, components)
        own = {kind: type(one)(one.cache, params) for kind, one in components.items()}
        node.counter = leader.root_node_handle()
        return Cores(leader, registry.get_tree_core_factory("python")(params, own), node)

    registry.register_tree_core_backend(BACKEND, make)


class Pair:
    """Two objects with one interface; ``leader``'s answers count, ``shown`` must give the same."""

    def __init__(self, leader: Any, shown: Any) -> None:
        self.__dict__.update(leader=leader, shown=shown, names={})

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.leader, name, value)
        setattr(self.shown, name, value)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.leader, name)
        if callable(value):
            return self._both(name, value, getattr(self.shown, name))
        other = getattr(self.shown, name)
        if name == DIGEST:
            other = 3 * other % 2**42
        self._compare(name, value, other)
        return value

    def _both(self, name: str, leader: Callable[..., Any], shown: Callable[..., Any]) -> Any:
        """A call of both cores, with arguments of their own; what differs is DIFF."""

        def call(*args: Any, **kwargs: Any) -> Any:
            theirs = self._translated(copy.deepcopy((args, kwargs)))
            answer, error = _outcome(leader, args, kwargs)
            other, other_error = _outcome(shown, *theirs)
            if (error is None) != (other_error is None):
                raise Violation(
                    "DIFF",
                    f"{name}: the Rust core raised {error!r}, the Python core {other_error!r}",
                )
            if error is not None:
                raise error
            self._compare(name, answer, other)
            _drain(other)
            return answer

        return call

    def _compare(self, name: str, answer: Any, other: Any) -> None:
        where = difference(answer, other, self.names)
        if where is not None:
            raise Violation("DIFF", f"{name}{where}")

    def _translated(self, value: Any) -> Any:
        """Receipts with the other core's numbers of locks."""
        if isinstance(value, tuple) and type(value) is tuple:
            return tuple(self._translated(item) for item in value)
        if isinstance(value, dict):
            return {key: self._translated(item) for key, item in value.items()}
        for field in LOCKS:
            if hasattr(value, field):
                numbers = getattr(value, field)
                setattr(value, field, {k: self.names.get(v, v) for k, v in numbers.items()})
        return value


class Cores(Pair):
    """The two cores. ``reset`` lets both count their nodes from the same number again."""

    def __init__(self, leader: Any, shown: Any, node: Any) -> None:
        super().__init__(leader, shown)
        events = Pair(leader.kv_events, shown.kv_events)
        self.__dict__.update(node=node, kv_events=events)
        node.counter = leader.root_node_handle() + 1

    def reset(self) -> None:
        self.leader.reset()
        self.node.counter = self.leader.root_node_handle()
        self.shown.reset()
        self.node.counter = self.leader.root_node_handle() + 1


def _outcome(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    try:
        return function(*args, **kwargs), None
    except Exception as error:
        return None, error


def difference(one: Any, other: Any, names: dict[Any, Any]) -> str | None:
    """Where two answers differ, in words; None when they do not. Learns the numbers of locks."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        one, other = one.tolist(), other.tolist()
    if isinstance(one, dict) and isinstance(other, dict):
        parts = [(f"[{key}]", one.get(key), other.get(key)) for key in {**one, **other}]
    elif isinstance(one, list | tuple) and len(one) == len(other):
        parts = [(f"[{i}]", a, b) for i, (a, b) in enumerate(zip(one, other, strict=True))]
    elif _fields(one) and type(one).__name__ == type(other).__name__:
        parts = [
            (f".{field}", getattr(one, field), getattr(other, field)) for field in _fields(one)
        ]
    else:
        return None if one == other else f": {one!r}, the Python core has {other!r}"
    a: Any
    b: Any
    for name, a, b in parts:
        if name[1:] in LOCKS:
            names.update({number: b[kind] for kind, number in a.items()})
        elif (where := difference(_kept(a), _kept(b), names)) is not None:
            return name + where
    return None


def _kept(value: Any) -> Any:
    """An empty list is as good as none."""
    return None if isinstance(value, dict | list) and not value else value


def _fields(value: Any) -> Sequence[str]:
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    fields: Sequence[str] = getattr(value, "__struct_fields__", ()) or getattr(
        value, "__slots__", ()
    )
    return fields


def _drain(result: Any) -> None:
    """What a step gave back is the cache's to free, once: the copy forgets it."""
    for name in ("device_frees", "host_frees", "cache_actions"):
        if hasattr(result, name) and not isinstance(result, tuple):
            getattr(result, name).clear()
