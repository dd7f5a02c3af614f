"""A frame: who owns each slot of both tiers, the tree and the requests, after one step.

Everything is looked at from outside: the ledger's owners, and what the target shows. What a driver
does not have is left out, and the state in words is always there.
"""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from refcache.oracle.program.driver import Driver

Frame = dict[str, Any]
"""``step``: the line; ``text``: the state in words; and where there is one ``device`` and ``host``
(a cell for each page), ``tree`` (nodes, parents first), ``requests``, ``flight`` (copies)."""


def frame_of(driver: Driver, step: str) -> Frame:
    """The state after ``step``; never raises: a broken target's view is left out."""
    bench, frame = driver.bench, Frame(step=step, text="")
    with suppress(Exception):
        frame["text"] = driver.describe()
    ledger: Any = getattr(bench, "ledger", None)
    if hasattr(ledger, "numbers"):
        with suppress(Exception):
            frame["device"] = [_cell(ledger, page) for page in ledger.numbers]
    if hasattr(bench, "requests"):
        with suppress(Exception):
            frame["requests"] = [_request(bench, req) for req in bench.requests]
    if "inspect" in driver.target.capabilities and hasattr(bench, "tree"):
        with suppress(Exception):
            frame["tree"] = [_node(node) for node in driver.target.inspect(bench.tree).nodes]
    if hasattr(bench, "host"):
        with suppress(Exception):
            host = bench.host()
            frame["host"] = _host_cells(host, frame.get("tree", ()), driver.config.page_size)
            frame["flight"] = [
                f"{t.kind} of {_many(len(t.handles), 'node')}" for t in host.transfers
            ]
    return frame


def _cell(ledger: Any, page: int) -> dict[str, Any]:
    owner = ledger.owner.get(page)
    kind = "free" if owner is None else "request" if isinstance(owner, str) else "cached"
    if ledger.queued and page in ledger.queued:
        kind = "queued"
    return {"page": page, "kind": kind, "says": ledger.says(page)}


def _request(bench: Any, req: Any) -> dict[str, Any]:
    return {
        "name": req.rid,
        "tokens": [*req.tokens],
        "computed": req.computed,
        "protected": req.cache_protected_len,
        "slots": list(bench.row(req)),
    }


def _node(node: Any) -> dict[str, Any]:
    return {
        "parent": node.parent,
        "key": [str(element) for element in node.key],
        "space": node.extra_key,
        "device": _numbers(node.device),
        "host": _numbers(node.host),
        "lock": node.lock_ref,
    }


def _numbers(slots: Any) -> list[int] | None:
    return None if slots is None else [int(slot) for slot in slots]


def _host_cells(host: Any, nodes: Iterable[dict[str, Any]], page_size: int) -> list[dict[str, Any]]:
    """Host pages: free, or the node's that has them."""
    owner = {
        slot // page_size: f"KV of {' '.join(node['key'])}"
        for node in nodes
        for slot in node["host"] or ()
    }
    free = {int(slot) // page_size for slot in host.free}
    cells = []
    for page in range(host.size // page_size):
        kind = "cached" if page in owner else "free" if page in free else "copy"
        says = owner.get(page, "free" if page in free else "in a copy, or nobody's")
        cells.append({"page": page, "kind": kind, "says": f"host page {page}: {says}"})
    return cells


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
