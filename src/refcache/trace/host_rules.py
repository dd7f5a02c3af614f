"""Rules about the host tier: its pool, copies from submission to acknowledgement, load-back."""

from refcache.trace import format as f
from refcache.trace.model import show
from refcache.trace.rules import Copy, Model, Undecidable, judges


@judges(f.HostAlloc)
def _host_alloc(model: Model, call: f.HostAlloc) -> None:
    need = -(-call.need_size // model.page_size)
    free = model.host.free_count
    if call.slots is None:
        model.require(
            need > free or not model.totals,
            "AL2",
            f"refused {need} host pages although {free} are free",
        )
        return
    model.require(
        len(call.slots) == call.need_size,
        "AL1",
        f"{len(call.slots)} host slots, but {call.need_size} were asked for",
    )
    _whole_pages(model, call.slots)
    model.host.take(call.slots, f"record {model.n}")


def _whole_pages(model: Model, slots: f.Slots) -> None:
    size = model.page_size
    expected = [p * size + i for p in model.pages_of(slots) for i in range(size)]
    model.require(slots == expected, "H2", f"host slots {slots[:16]} are no whole pages")


@judges(f.HostFree)
def _host_free(model: Model, call: f.HostFree) -> None:
    model.host.release(model.pages_of(call.slots))


@judges(f.HostClear)
def _host_clear(model: Model, call: f.HostClear) -> None:
    model.host.clear()


@judges(f.Write)
def _write(model: Model, call: f.Write) -> None:
    if call.host_slots is None:
        return
    pages, hosts = model.pages_of(call.slots), model.pages_of(call.host_slots)
    model.require(
        len(call.host_slots) == len(call.slots),
        "C2",
        f"{len(call.slots)} tokens are copied to {len(call.host_slots)} host slots",
    )
    copy = Copy("write", model.n, set(pages), set(hosts))
    for page, host in zip(pages, hosts, strict=True):
        owner = model.device.owner.get(page)
        model.require(owner is not None, "X2", f"page {page} is copied to the host, and free")
        model.require(
            isinstance(model.host.owner.get(host), str),
            "H1",
            f"host page {host} is written; host {model.host.says(host)}",
        )
        model.written[page] = host
    _submit(model, call.id, copy)


def _submit(model: Model, number: int, copy: Copy) -> None:
    if (copy.kind, number) in model.copies:
        raise Undecidable(f"{copy.kind} {number} is submitted twice")
    model.copies[copy.kind, number] = copy


@judges(f.Load)
def _load(model: Model, call: f.Load) -> None:
    if call.slots is None:
        return
    pages, hosts = model.pages_of(call.slots), model.pages_of(call.host_slots)
    model.require(
        len(call.host_slots) == len(call.slots),
        "C1",
        f"{len(call.host_slots)} host slots are loaded to {len(call.slots)} slots",
    )
    for page, host in zip(pages, hosts, strict=True):
        prefix = model.host.owner.get(host)
        model.require(prefix is not None, "X1", f"host page {host} is loaded, and free")
        model.require(
            isinstance(model.device.owner.get(page), str),
            "P1",
            f"page {page} is loaded to; {model.device.says(page)}",
        )
        if isinstance(prefix, tuple):
            model.require(
                prefix not in model.device.cached,
                "C1",
                f"{show(prefix)} is loaded to page {page}, and is in page "
                f"{model.device.cached.get(prefix)} already",
            )
            model.device.adopt(prefix, page)
    model.loaded += call.slots
    _submit(model, call.id, Copy("load", model.n, set(pages), set(hosts)))


@judges(f.Ack)
def _ack(model: Model, call: f.Ack) -> None:
    for number in call.ids:
        if model.copies.pop((call.kind, number), None) is None:
            raise Undecidable(f"{call.kind} {number} is acknowledged, and was never submitted")


@judges(f.InitLoadBack)
def _init_load_back(model: Model, call: f.InitLoadBack) -> None:
    hit = call.host_hit_length
    model.require(
        call.slots == model.loaded, "C1", f"load-back gave {call.slots}, loaded {model.loaded}"
    )
    over = call.mem_quota is not None and len(call.slots) > call.mem_quota
    model.require(
        len(call.slots) in (0, hit) and not over,
        "Q1",
        f"a load of {hit} tokens, quota {call.mem_quota}, gave {len(call.slots)}",
    )
    prefix = model.prefix_of(call.host_node)
    if not call.slots:
        prefix = model.device.longest(prefix)
    else:
        expected = model.device.slots(prefix)[-hit:] if model.is_cached(prefix) else None
        model.require(
            call.slots == expected,
            "C1",
            f"load-back of {show(prefix)} gave slots {call.slots}, expected {expected}",
        )
    model.nodes[call.node] = prefix


@judges(f.EvictHost)
def _evict_host(model: Model, call: f.EvictHost) -> None:
    """Its frees are inner records."""


@judges(f.Poll)
def _poll(model: Model, call: f.Poll) -> None:
    """Its acknowledgements are inner records."""


@judges(f.StartLoading)
def _start_loading(model: Model, call: f.StartLoading) -> None:
    """The loads are in flight since they were submitted."""
