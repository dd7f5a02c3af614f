"""Rules about the host tier: its pool, copies from submission to acknowledgement, load-back."""

from refcache.trace import format as f
from refcache.trace.model import show
from refcache.trace.rules import Copy, Rules, Undecidable


class HostRules(Rules):
    """The calls of a host pool, a controller, and a tree of two tiers."""

    def _host_alloc(self, call: f.HostAlloc) -> None:
        need = -(-call.need_size // self.page_size)
        free = self.host.free_count
        if call.slots is None:
            self._require(
                need > free or not self.totals,
                "AL2",
                f"refused {need} host pages although {free} are free",
            )
            return
        self._require(
            len(call.slots) == call.need_size,
            "AL1",
            f"{len(call.slots)} host slots, but {call.need_size} were asked for",
        )
        self._whole_pages(call.slots)
        self.host.take(call.slots, f"record {self.n}")

    def _whole_pages(self, slots: f.Slots) -> None:
        size = self.page_size
        expected = [p * size + i for p in self.pages_of(slots) for i in range(size)]
        self._require(slots == expected, "H2", f"host slots {slots[:16]} are no whole pages")

    def _host_free(self, call: f.HostFree) -> None:
        self.host.release(self.pages_of(call.slots))

    def _host_clear(self, call: f.HostClear) -> None:
        self.host.clear()

    def _write(self, call: f.Write) -> None:
        if call.host_slots is None:
            return
        pages, hosts = self.pages_of(call.slots), self.pages_of(call.host_slots)
        self._require(
            len(call.host_slots) == len(call.slots),
            "C2",
            f"{len(call.slots)} tokens are copied to {len(call.host_slots)} host slots",
        )
        copy = Copy("write", self.n, set(pages), set(hosts))
        for page, host in zip(pages, hosts, strict=True):
            owner = self.device.owner.get(page)
            self._require(owner is not None, "X2", f"page {page} is copied to the host, and free")
            self._require(
                isinstance(self.host.owner.get(host), str),
                "H1",
                f"host page {host} is written; host {self.host.says(host)}",
            )
            self.written[page] = host
        self._submit(call.id, copy)

    def _submit(self, number: int, copy: Copy) -> None:
        if (copy.kind, number) in self.copies:
            raise Undecidable(f"{copy.kind} {number} is submitted twice")
        self.copies[copy.kind, number] = copy

    def _load(self, call: f.Load) -> None:
        if call.slots is None:
            return
        pages, hosts = self.pages_of(call.slots), self.pages_of(call.host_slots)
        self._require(
            len(call.host_slots) == len(call.slots),
            "C1",
            f"{len(call.host_slots)} host slots are loaded to {len(call.slots)} slots",
        )
        for page, host in zip(pages, hosts, strict=True):
            prefix = self.host.owner.get(host)
            self._require(prefix is not None, "X1", f"host page {host} is loaded, and free")
            self._require(
                isinstance(self.device.owner.get(page), str),
                "P1",
                f"page {page} is loaded to; {self.device.says(page)}",
            )
            if isinstance(prefix, tuple):
                self._require(
                    prefix not in self.device.cached,
                    "C1",
                    f"{show(prefix)} is loaded to page {page}, and is in page "
                    f"{self.device.cached.get(prefix)} already",
                )
                self.device.adopt(prefix, page)
        self.loaded += call.slots
        self._submit(call.id, Copy("load", self.n, set(pages), set(hosts)))

    def _ack(self, call: f.Ack) -> None:
        for number in call.ids:
            if self.copies.pop((call.kind, number), None) is None:
                raise Undecidable(f"{call.kind} {number} is acknowledged, and was never submitted")

    def _init_load_back(self, call: f.InitLoadBack) -> None:
        hit = call.host_hit_length
        self._require(
            call.slots == self.loaded, "C1", f"load-back gave {call.slots}, loaded {self.loaded}"
        )
        over = call.mem_quota is not None and len(call.slots) > call.mem_quota
        self._require(
            len(call.slots) in (0, hit) and not over,
            "Q1",
            f"a load of {hit} tokens, quota {call.mem_quota}, gave {len(call.slots)}",
        )
        prefix = self._prefix_of(call.host_node)
        if not call.slots:
            prefix = self.device.longest(prefix)
        else:
            expected = self.device.slots(prefix)[-hit:] if self._is_cached(prefix) else None
            self._require(
                call.slots == expected,
                "C1",
                f"load-back of {show(prefix)} gave slots {call.slots}, expected {expected}",
            )
        self.nodes[call.node] = prefix

    def _evict_host(self, call: f.EvictHost) -> None:
        """Its frees are inner records."""

    def _poll(self, call: f.Poll) -> None:
        """Its acknowledgements are inner records."""

    def _start_loading(self, call: f.StartLoading) -> None:
        """The loads are in flight since they were submitted."""
