"""Faults inside calls: a call of a driver is made again and again, each time with another of its
inner steps raising, before it is made in peace.

An *inner step* is whatever a call asks of somebody else and may not get: an allocation (of device
slots, of host slots, of rows; with ``tensors`` of memory for a tensor, too), giving any of them
back, a launch, an event (a record, a wait, a query, the host waiting), and what the target names in
``inner_steps`` (hashes).

What must hold after a call that raised:

====================================  ============================================================
call                                  state
====================================  ============================================================
``evict``, ``evict_host``             whole leaves may be gone, a write-back may be in flight
``init_load_back``                    leaves that were in its way may be gone
``check_hicache_events``              some of what was done may be acknowledged
``ready_to_load_host_cache``          its loads are undone: nothing of them matches on the device
every other call                      as it was before (Z3)
====================================  ============================================================

An insert or an eviction may also go on without the write to the host that failed inside it, and
``check_hicache_events`` raises that error later. In each case every rule of a state holds, and the
same call, made again, does what it should.
"""

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from refcache.oracle.drivers.tree.request import Request
from refcache.oracle.rules.violation import Violation
from refcache.oracle.target.config import HiCacheParts

SLOTS_GIVEN_BACK = "evict_host of slots"
"""The controller's ``evict_host``, which is given slots; the tree's is given how many to free."""
AS_BEFORE = frozenset(
    {
        "match_prefix", "insert", "inc_lock_ref", "dec_lock_ref", "cache_unfinished_req",
        "cache_finished_req", "reset", "alloc", "alloc_extend", "alloc_decode",
        "free", "write", "clear", "write_backup", "load", "start_loading", "free_group_begin",
        "free_group_end", "backup_state", "restore_state", "evict_device", SLOTS_GIVEN_BACK,
    }
)  # fmt: skip
IN_PART = frozenset({"evict", "evict_host", "init_load_back", "check_hicache_events"})
UNDONE = "ready_to_load_host_cache"
MOST = 60
"""So many inner steps of one call are tried; more would be the same again."""

Made = Callable[..., Any]


class InjectedFault(Exception):
    """What an inner step raises."""


class Tensors(TorchFunctionMode):
    """Makes every call of torch that gives a tensor an inner step."""

    def __init__(self, step: Callable[[str], None]) -> None:
        super().__init__()
        self.step = step

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name not in ("__get__", "__set__", "__len__", "dim", "numel", "size", "tolist", "item"):
            self.step("tensor")
        return func(*args, **(kwargs or {}))


class InnerSteps:
    """Counts the inner steps of one call, and raises at one of them.

    Attributes:
        raised: the fault of the last call, if its step was reached; ``at``: which step that was.
    """

    def __init__(self, names: tuple[str, ...], tensors: bool) -> None:
        self.names, self.tensors = names, tensors
        self.raised: InjectedFault | None = None
        self.at = ""
        self._left = 0
        self._paused = 0

    def step(self, name: str) -> None:
        """An inner step begins."""
        if self._left == 0 or self._paused:
            return
        self._left -= 1
        if self._left == 0:
            self.raised, self.at = InjectedFault(f"the step {name!r} fails"), name
            raise self.raised

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing in the block is an inner step."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @contextmanager
    def armed(self, number: int) -> Iterator[None]:
        """In the block the inner step of that number raises."""
        self.raised, self._left = None, number
        originals = []
        for place in self.names:
            module, _, name = place.partition(":")
            owner = importlib.import_module(module)
            originals.append((owner, name, getattr(owner, name)))
            self.watch(owner, name, "hash")
        try:
            if self.tensors:
                with Tensors(self.step):
                    yield
            else:
                yield
        finally:
            self._left = 0
            for owner, name, function in originals:
                setattr(owner, name, function)

    def watch(self, owner: Any, name: str, kind: str) -> None:
        """``owner.name`` is an inner step from now on; what it does inside is none."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.step(kind)
            with self.paused():
                return function(*args, **kwargs)

        setattr(owner, name, watched)

    def leave_out(self, owner: Any, name: str) -> None:
        """``owner.name`` never fails."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def whole(*args: Any, **kwargs: Any) -> Any:
            with self.paused():
                return function(*args, **kwargs)

        setattr(owner, name, whole)


def watch_machine(steps: InnerSteps, machine: Any) -> None:
    """Launches and events of a simulated machine are inner steps."""
    for name in ("launch", "launch_parts"):
        steps.watch(machine, name, "launch")
    for name in ("_capture", "_wait", "_query", "_block"):
        steps.watch(machine, name, "event")
    steps.leave_out(machine, "synchronize")
    steps.leave_out(machine, "host_access")


class Faults:
    """See the module docstring. It is the ``made`` of a bench's trial.

    Attributes:
        met: how often a call was made with an inner step of it raising.
        pairs: which: (call, inner step, its number).
    """

    def __init__(self, bench: Any, parts: HiCacheParts) -> None:
        self.bench, self.config = bench, bench.config
        self.steps = InnerSteps(bench.target.inner_steps, self.config.fault_tensors)
        self.met = 0
        self.pairs: set[tuple[str, str, int]] = set()
        self.relied_on = False
        self._reported: list[InjectedFault] = []
        self._told: list[InjectedFault] = []
        self._inside: set[int] = set()
        self._busy = False
        self._calls = 0
        watch_machine(self.steps, bench.machine)
        self._watch_allocator(parts.allocator)
        self.steps.watch(parts.host_pool, "alloc", "host slots")
        self.steps.watch(parts.host_pool, "free", "host slots back")
        self.steps.watch(parts.rows, "alloc", "row")
        self.steps.watch(parts.rows, "free", "row back")
        bench.trial.made = self.made

    def _watch_allocator(self, allocator: Any) -> None:
        """Allocations and frees are inner steps; what a call takes and gives back itself is no
        ledger's."""
        size, free = self.config.page_size, allocator.free

        def given_back(free_index: torch.Tensor) -> None:
            self.steps.step("device slots back")
            with self.steps.paused():
                pages = {slot // size for slot in free_index.tolist()}
                if self._busy and pages and pages <= self._inside:
                    self._inside -= pages
                    allocator.inner.free(free_index)
                else:
                    free(free_index)

        names = ("alloc", "alloc_extend", "alloc_decode")
        for name in [name for name in names if hasattr(allocator.inner, name)]:
            method = getattr(allocator, name)

            def handed_out(*args: Any, method: Any = method) -> Any:
                self.steps.step("device slots")
                slots = method(*args)
                if self._busy and slots is not None:
                    with self.steps.paused():
                        self._inside |= {slot // size for slot in slots.tolist()}
                return slots

            setattr(allocator, name, functools.wraps(method)(handed_out))
        allocator.free = functools.wraps(free)(given_back)
        if hasattr(allocator, "free_each"):
            self.steps.watch(allocator, "free_each", "device slots back")

    # ---- one call --------------------------------------------------------------------------------

    def made(self, function: Made, *args: Any, **kwargs: Any) -> Any:
        """Make a call with one inner step after the other raising, then in peace."""
        name = getattr(function, "__name__", "")
        if name == "evict_host" and isinstance(args[0], torch.Tensor):
            name = SLOTS_GIVEN_BACK
        known = name in AS_BEFORE or name in IN_PART or name == UNDONE
        if self._busy or not known or (name == UNDONE and self.relied_on):
            self.relied_on = self.relied_on and name != UNDONE
            return function(*args, **kwargs)
        self._calls += 1
        every = self.config.fault_calls
        self._busy = True
        try:
            if self._calls % every:
                return self._in_peace(name, function, args, kwargs)
            if name == UNDONE:
                with self.bench.ledger.permits(lambda page: None):
                    return self._made(name, function, args, kwargs)
            return self._made(name, function, args, kwargs)
        finally:
            self._busy = False

    def _made(self, name: str, function: Made, args: Any, kwargs: Any) -> Any:
        """Make a call with each inner step raising in turn, until one passes without."""
        given = 0  # tokens that an eviction gave before it raised
        for number in range(self.config.fault, self.config.fault + MOST):
            self._inside = set()
            before, free = self._state(args), self._free(name)
            try:
                with self.steps.armed(number):
                    result = function(*args, **kwargs)
            except Exception as error:
                self._ours(name, error)
                self.bench.trial.raise_noted()
                if name == "evict":
                    self._acknowledge()
                given += self._free(name) - free
                if name == UNDONE:
                    return self._undone(error)
                if name in AS_BEFORE:
                    self._same(name, before, self._state(args))
                args = self._rest(name, args, self._free(name) - free)
            else:
                if self.steps.raised is not None:  # it went on without
                    self._note_pair(name, number)
                    self._reported.append(self.steps.raised)
                    self.bench.no_room = True
                    if name == "evict" and result.num_tokens_evicted < args[0].num_tokens:
                        given += result.num_tokens_evicted  # a leaf that could not be written stays
                        args = self._rest(name, args, result.num_tokens_evicted)
                        break
                return self._whole(name, result, given)
            self._note_pair(name, number)
        return self._whole(name, self._in_peace(name, function, args, kwargs), given)

    def _acknowledge(self) -> None:
        """One poll, which may report what failed before."""
        try:
            self.bench.tree.check_hicache_events()
        except Exception as error:
            self._ours("check_hicache_events", error)

    def _in_peace(self, name: str, function: Made, args: Any, kwargs: Any) -> Any:
        """Make a call with no step raising, once what was reported is acknowledged."""
        self._inside = set()
        self.steps.raised = None
        while name == "check_hicache_events" and self._reported:
            left = len(self._reported)
            self._acknowledge()
            if len(self._reported) == left:
                break
        try:
            return function(*args, **kwargs)
        except Exception as error:
            self._ours(name, error)
            raise

    def _note_pair(self, name: str, number: int) -> None:
        if self.steps.raised is not None:
            self.met += 1
            self.pairs.add((name, self.steps.at, number))

    def _ours(self, name: str, error: BaseException) -> None:
        """Raise again what does not come of an injected fault."""
        chain: list[BaseException] = []
        cause: BaseException | None = error
        while cause is not None and cause not in chain:
            chain.append(cause)
            cause = cause.__cause__ or cause.__context__
        if self.steps.raised in chain:
            return
        late = [fault for fault in self._reported if fault in chain]
        if any(fault in chain for fault in self._told):
            raise Violation("Z3", f"{name} raised {error!r}, which was raised before")
        if not late:
            raise error
        if name != "check_hicache_events":
            raise Violation("Z3", f"{name} raised {late[0]!r}, which an earlier call had met")
        for fault in late:
            self._reported.remove(fault)
            self._told.append(fault)

    def _same(self, name: str, before: dict[str, Any], after: dict[str, Any]) -> None:
        """Z3: a call that raised has left what it found."""
        changed = [what for what in before if before[what] != after[what]]
        self.bench.trial.require(
            not changed,
            "Z3",
            f"{name} raised at its inner step {self.steps.at!r}, and left another state: "
            + "; ".join(f"{what} was {before[what]}, is {after[what]}" for what in changed),
        )

    def _undone(self, error: Exception) -> int:
        """The load of a batch has failed: who held a node of it holds its ancestor."""
        self._note_pair(UNDONE, 0)
        bench, moved = self.bench, getattr(error, "moved", {})
        for holders in (bench.ledger.holders, bench.holds):
            holders[:] = [
                (moved.get(node, node), bench.ledger.longest(prefix) if node in moved else prefix)
                for node, prefix in holders
            ]
        return -1

    # ---- evictions -------------------------------------------------------------------------------

    def _free(self, name: str) -> int:
        """Free tokens of the tier that the call evicts from."""
        if name == "evict":
            return int(self.bench.allocator.available_size())
        return len(self.bench.host().free) if name == "evict_host" else 0

    def _rest(self, name: str, args: Any, given: int) -> Any:
        """What is left to ask for after some was given."""
        if name == "evict":
            left = max(args[0].num_tokens - given, 0)
            return (self.bench.target.EvictParams(num_tokens=left),)
        return (max(args[0] - given, 0),) if name == "evict_host" else args

    def _whole(self, name: str, result: Any, given: int) -> Any:
        if name == "evict":
            result.num_tokens_evicted += given
        return result + given if name == "evict_host" else result

    # ---- state -----------------------------------------------------------------------------------

    def _state(self, args: Any) -> dict[str, Any]:
        """All that a call must leave as it was: a split that changes no content may stay."""
        bench, size = self.bench, self.config.page_size
        view, host = bench.target.inspect(bench.tree), bench.target.inspect_host(bench.tree)
        nodes: dict[Any, Any] = {}
        for index, names in view.pages(size):
            node = view.nodes[index]
            for k, page in enumerate(names):
                at = slice(k * size, k * size + size)
                tiers = [None if t is None else t[at].tolist() for t in (node.device, node.host)]
                nodes[page] = (*tiers, node.lock_ref, host.nodes[node.handle].host_ref)
        requests = [*bench.requests]
        for arg in args:
            requests += [r for r in (arg if isinstance(arg, list) else [arg]) if is_request(r)]
        tree = bench.tree
        return {
            "nodes": nodes,
            "sizes": (tree.evictable_size(), tree.protected_size(), tree.total_size()),
            "free tokens": bench.allocator.available_size(),
            "free rows": bench.rows.available_size(),
            "free host slots": sorted(host.free.tolist()),
            "copies": sorted((t.kind, str(t.op)) for t in host.transfers),
            "requests": [
                (
                    req.rid,
                    req.req_pool_idx,
                    req.cache_protected_len,
                    req.prefix_indices.tolist(),
                    id(req.last_node),
                    req.kv_committed_freed,
                    [] if req.req_pool_idx is None else bench.row(req),
                )
                for req in dict.fromkeys(requests)
            ],
        }


def is_request(value: Any) -> bool:
    """Whether an argument is a request of the driver."""
    return isinstance(value, Request)
