"""How rows move between a host pool and its device pool: launches on the current stream.

A transfer is a set of (host slot, device slot) pairs; the order of the pairs means nothing.
:meth:`HostCopies.backup_from_device_all_layer` is one launch,
:meth:`HostCopies.load_to_device_per_layer` one a layer, and
:meth:`HostCopies.load_to_device_all_layer` one that announces each layer. The I/O backend says who
copies and where the index tensors must be ("kernel": on the device; "direct": on the host, for the
copy engine); both give the same bytes. :meth:`HostCopies.issue_copies` has the copy engine copy all
layers, one after another; it is made to be called from a thread of its own, and
:meth:`HostCopies.plan_transfer` says which way a transfer goes. Memory that is not pinned is copied
by the host's own waiting, and refused for kernels.

A copy function moves planes of one dtype that have a row a slot. What a pool declares beside is
copied by the same functions in the same launch, as rows of its own (see
:class:`~refcache.pool.planes.PlaneGroup`).

Models the transfers of SGLang's ``HostKVCache``; what serves all layers of a load is added.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from refcache.arguments import shown, slot_list, slots_inside, truth, whole_number, with_attributes
from refcache.backend import Backend, copy_engine, resolve
from refcache.errors import InvalidArgument, UnknownName, WrongTier
from refcache.pool.kv_cache import KVCache
from refcache.pool.planes import PlaneGroup, check_whole_pages, group_planes
from refcache.pool.transfer_rule import Rules, TransferPlan, TransferRule, card_name, rules_for
from refcache.runtime import Flags, Part, Region, Runtime
from refcache.types import IO_BACKENDS

# Where nothing was measured: the immediate and the simulated machine.
PLAIN_RULES: Rules = (TransferRule(False, "kernel", at_once=4 << 20), TransferRule(True, "kernel"))


PAIRS = "host_indices", "device_indices"


class HostCopies:
    """The transfers of :class:`refcache.pool.HostKVCache`, which has the attributes named here."""

    device_pool: KVCache
    dtype: torch.dtype
    layer_num: int
    layout: str
    page_size: int
    pin_memory: bool
    planes: tuple[torch.Tensor, ...]
    runtime: Runtime
    size: int
    size_per_token: int
    small_load_bytes: int | None
    _backend: Backend

    def backup_from_device_all_layer(
        self,
        device_pool: KVCache,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
        max_programs: int = 0,
    ) -> None:
        """Launch the copy of all layers of device slot i of the list into host slot i.

        The launch reads the index tensors when it runs and does not keep them alive.

        Args:
            host_indices, device_indices: int32 or int64 ``[n]``, where ``io_backend`` wants them.
            max_programs: a cap on what a kernel takes of the device; 0: none.

        Raises:
            WrongTier, UnknownName, InvalidArgument: before anything is launched.
        """
        copy = self._copy_function("backup_all_layer", io_backend, max_programs)
        self._check(device_pool, host_indices, device_indices)
        groups = self._groups(device_pool)

        def run(*slots: torch.Tensor) -> None:
            for one in groups:
                copy(one.host, one.device, *one.rows(*slots), one.page_size, self.layout)

        layers = range(self.layer_num)
        self._launch(
            "backup",
            run,
            self._regions(device_pool, layers, device_indices),
            self._regions(self, layers, host_indices),
            (host_indices, device_indices),
        )

    def load_to_device_per_layer(
        self,
        device_pool: KVCache,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
        max_programs: int = 0,
    ) -> None:
        """Launch the copy of one layer of host slot i of the list into device slot i.

        ``layer_id`` counts from 0 in this pool. Otherwise as :meth:`backup_from_device_all_layer`.
        """
        copy = self._copy_function("load_per_layer", io_backend, max_programs)
        self._check(device_pool, host_indices, device_indices)
        if whole_number("layer_id", layer_id) >= self.layer_num:
            raise InvalidArgument(f"{layer_id=}: expected 0 to {self.layer_num - 1}")
        run = partial(self._load_layer, copy, self._groups(device_pool), layer_id)
        self._launch(
            f"load layer {layer_id}",
            run,
            self._regions(self, layer_id, host_indices),
            self._regions(device_pool, layer_id, device_indices),
            (host_indices, device_indices),
        )

    def load_to_device_all_layer(
        self,
        device_pool: KVCache,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        flags: Flags,
        io_backend: str,
        max_programs: int = 0,
    ) -> None:
        """Launch the copy of all layers of host slot i of the list into device slot i.

        ``flags`` (one part a layer) says of each layer when it has arrived, in no promised order.
        Otherwise as :meth:`backup_from_device_all_layer`.

        Raises:
            InvalidArgument: also for an ``io_backend`` other than "kernel" (for the copy engine
                see :meth:`issue_copies`), and for flags of another number of layers.
        """
        with_attributes("flags", flags, "parts")
        if len(flags.parts) != self.layer_num:
            raise InvalidArgument(
                f"{len(flags.parts)} flags: expected {self.layer_num}, one a layer"
            )
        if io_backend != "kernel":
            raise InvalidArgument(f"{io_backend=} for all layers at once: expected 'kernel'")
        load_per_layer = self._copy_function("load_per_layer", io_backend)
        load_layers = self._copy_function("load_layers", io_backend, max_programs)
        self._check(device_pool, host_indices, device_indices)
        groups = self._groups(device_pool)
        *others, last = groups

        def run(values: torch.Tensor, *slots: torch.Tensor) -> None:
            for layer_id in range(self.layer_num):  # before the flags, which the last group raises
                self._load_layer(load_per_layer, others, layer_id, *slots)
            where = (0, self.layer_num, last.page_size, self.layout)
            load_layers(last.device, last.host, *last.rows(*slots), values, *where)

        def part(layer_id: int) -> Part:
            return Part(
                f"layer {layer_id}",
                partial(self._load_layer, load_per_layer, groups, layer_id),
                self._index_regions(host_indices, device_indices)
                + self._regions(self, layer_id, host_indices),
                self._regions(device_pool, layer_id, device_indices),
            )

        parts = map(part, range(self.layer_num))
        self.runtime.launch_parts("load", parts, flags, run, (host_indices, device_indices))

    def load_to_device_by_copy_engine(
        self,
        device_pool: KVCache,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        flags: Flags,
    ) -> None:
        """Launch the copies of one layer after another, and raise its part of ``flags`` behind it.

        The epoch is expected already. Lists the copies first, which takes the host's time: call it
        on a thread. Otherwise as :meth:`load_to_device_all_layer` with "direct".
        """
        with_attributes("flags", flags, "parts")
        load_per_layer = self._copy_function("load_per_layer", "direct")
        self._check(device_pool, host_indices, device_indices)
        groups = self._groups(device_pool)
        listed: list[Any] = []
        if self._by_engine:
            for one in groups:
                rows = one.rows(host_indices, device_indices)
                where = (one.page_size, self.layout)
                listed.append(copy_engine().list_copies(one.host, one.device, *rows, *where))

        def run(layer_id: int, *slots: torch.Tensor) -> None:
            if not listed:
                self._load_layer(load_per_layer, groups, layer_id, *slots)
            for copies in listed:
                copies.issue(layer_id, to_host=False)

        for layer_id in range(self.layer_num):
            self._launch(
                f"load layer {layer_id}",
                partial(run, layer_id),
                self._regions(self, layer_id, host_indices),
                self._regions(device_pool, layer_id, device_indices),
                (host_indices, device_indices),
            )
            self.runtime.raise_flag(flags, layer_id)

    def plan_transfer(
        self, io_backend: str, tokens: int, *, to_host: bool, phase: str = ""
    ) -> TransferPlan:
        """Which way a transfer of so many tokens goes, by the rules of the card.

        ``io_backend``: "auto", or the one that must be taken. ``phase``: see
        :class:`~refcache.pool.transfer_rule.TransferRule`. Without kernels nothing was measured:
        "auto" is then "kernel" if the memory is pinned, as nothing else but "direct" can serve.

        Raises:
            UnknownName: no such backend.
        """
        if io_backend not in IO_BACKENDS:
            raise UnknownName("io_backend", io_backend, IO_BACKENDS)
        whole_number("tokens", tokens)
        truth("to_host", to_host)
        if not self.pin_memory and io_backend == "auto":
            return TransferPlan("direct", 0, False, "host memory is not pinned")
        card, rules, piece = "no card", PLAIN_RULES, 0
        if self._backend.name == "triton":
            card = card_name(str(self.device_pool.device))
            rules, piece = rules_for(card), self._copy_bytes(to_host)
        total = tokens * self.size_per_token
        chosen = TransferRule(to_host, "kernel" if io_backend == "auto" else io_backend)
        for rule in rules:
            if io_backend in ("auto", rule.io_backend) and rule.applies(
                to_host=to_host, copy_bytes=piece, total=total, phase=phase
            ):
                chosen = rule
                break
        limit = chosen.at_once if self.small_load_bytes is None else self.small_load_bytes
        kernel = chosen.io_backend == "kernel"
        return TransferPlan(
            chosen.io_backend,
            chosen.max_programs if kernel else 0,
            kernel and not to_host and total // self.layer_num <= limit,
            f"{card}, io_backend {io_backend}, {total} bytes, copies of {piece}: {chosen}",
        )

    def _copy_bytes(self, to_host: bool) -> int:
        """Bytes of each copy that the copy engine would make of whole pages, at least."""
        found: int = min(
            copy_engine().copy_bytes(
                self.layout,
                self.page_size // plane.slots_per_row,
                self.layer_num,
                plane.head_num * plane.head_dim * plane.buffer.dtype.itemsize,
                plane.head_num,
                to_host=to_host,
            )
            for plane in self.device_pool.planes
        )
        return found

    @property
    def _by_engine(self) -> bool:
        """Whether "direct" is the copy engine, and not the reference."""
        return self.pin_memory and self._backend.name == "triton"

    def _regions(self, pool: Any, layers: range | int, slots: torch.Tensor) -> list[Region]:
        return [Region(pool, plane, layers, slots) for plane in range(len(self.planes))]

    def _groups(self, device_pool: KVCache) -> list[PlaneGroup]:
        return group_planes(self.planes, device_pool.planes, self.page_size)

    def _load_layer(
        self,
        copy: Callable[..., None],
        groups: Sequence[PlaneGroup],
        layer_id: int,
        *slots: torch.Tensor,
    ) -> None:
        """Copy one layer of each group."""
        for one in groups:
            rows = one.rows(*slots)
            copy(one.device, one.host, *rows, layer_id, one.page_size, self.layout)

    def _index_regions(self, *indices: torch.Tensor) -> list[Region]:
        return [Region(index, 0, 0, 0) for index in indices]

    def _launch(
        self,
        name: str,
        run: Callable[..., None],
        reads: list[Region],
        writes: list[Region],
        indices: tuple[torch.Tensor, ...],
    ) -> None:
        self.runtime.launch(name, run, self._index_regions(*indices) + reads, writes, indices)
        if not self.pin_memory:
            self.runtime.host_sync()

    def _copy_function(
        self, name: str, io_backend: str, max_programs: int = 0
    ) -> Callable[..., None]:
        if io_backend not in IO_BACKENDS:
            raise UnknownName("io_backend", io_backend, IO_BACKENDS)
        if io_backend == "kernel" and not self.pin_memory:
            raise InvalidArgument(
                "io_backend 'kernel' on host memory that is not pinned: expected 'direct'"
            )
        whole_number("max_programs", max_programs)
        to_host = name == "backup_all_layer"
        if io_backend == "auto":
            io_backend = self.plan_transfer(io_backend, self.size, to_host=to_host).io_backend
        copies: Any = resolve("reference")
        if io_backend == "kernel":
            copies = self._backend
        elif self._by_engine:
            copies = copy_engine()
        function: Callable[..., None] = getattr(copies, name)
        if max_programs and copies is self._backend and self._backend.name == "triton":
            function = partial(function, max_programs=max_programs)
        return function

    def _check(
        self, device_pool: KVCache, host_indices: torch.Tensor, device_indices: torch.Tensor
    ) -> None:
        check_device_pool(device_pool)
        device_pool.check_resident()
        ends = self.size, device_pool.size + device_pool.page_size
        for what, index, end in zip(PAIRS, (host_indices, device_indices), ends, strict=True):
            slot_list(what, index)
            if index.dtype not in (torch.int32, torch.int64):
                raise InvalidArgument(f"{what}: {shown(index)}; expected int32 or int64 [n]")
            slots_inside(what, index.clamp(min=0), 0, end)  # a negative one is skipped
        if len(host_indices) != len(device_indices):
            raise InvalidArgument(
                f"{len(host_indices)} host and {len(device_indices)} device slots: expected as "
                "many of each"
            )
        if max(plane.slots_per_row for plane in self.device_pool.planes) > 1:
            check_whole_pages(self.page_size, host_indices, device_indices)
        if [p[2:] for p in device_pool.planes] != [p[2:] for p in self.device_pool.planes]:
            raise InvalidArgument(
                f"a device pool with planes {[p.name for p in device_pool.planes]}: expected the "
                "planes that this host pool was built from"
            )


def check_device_pool(pool: Any) -> None:
    """Raise WrongTier unless ``pool`` is a device pool."""
    if not isinstance(pool, KVCache):
        raise WrongTier(f"a {type(pool).__name__} as device pool: expected a KVCache")
