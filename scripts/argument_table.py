"""Write docs/arguments.md and docs/arguments.json: which values of which argument each suite met.

PYTHONPATH=src:aliases python scripts/argument_table.py [--cases 100]

Every public method with arguments of the allocators, pools, controller and trees is watched while
each suite runs on the reference, with the cases that ``refcache check`` asks for. Values are put
into classes; an argument that met one class only is listed with the reason, or as a hole.
"""

import inspect
import json
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from refcache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from refcache.allocator.base import BaseTokenToKVPoolAllocator
from refcache.controller import HiCacheController
from refcache.oracle import resolve
from refcache.pool import ReqToTokenPool
from refcache.pool.host_copies import HostCopies
from refcache.pool.host_slots import HostSlots
from refcache.testing import SUITES, run_suite
from refcache.tree import HiRadixCache, RadixCache
from refcache.tree.radix_tree import RadixTree

DOCS = Path(__file__).parents[1] / "docs"
CLASSES = (
    BaseTokenToKVPoolAllocator, TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator,
    ReqToTokenPool, HostSlots, HostCopies, HiCacheController, RadixTree, RadixCache, HiRadixCache,
)  # fmt: skip
HUGE = 2**31
Met = dict[str, dict[str, Counter[str]]]
REASONS = {
    "params": "an object: its fields have rows of their own",
    "req": "an object: a request",
    "reqs": "objects: requests",
    "node": "an object: a node of the tree",
    "key": "an object",
    "op": "an object: an operation",
    "device_pool": "an object: the one pool that there is",
    "flags": "an object",
    "layer_transfer_counter": "an object",
    "backup_only": "must be True",
    "below": "the walk of a whole tree is what the checks need",
    "stream": "an object: the forwards' stream",
    "last_host_node": "an object: a node of the tree",
    **dict.fromkeys(
        ("mamba_num", "swa_num_tokens", "mamba_value", "prev_prefix_len", "swa_evicted_seqlen",
         "cow_mamba"),
        "read by trees of hybrid models only, which have tests but no suite",
    ),
}  # fmt: skip
"""Why an argument has one class of values."""


def classes_of(value: Any) -> Iterator[str]:
    """What a value is, in words; of a tensor several."""
    if value is None or isinstance(value, bool):
        yield str(value)
    elif isinstance(value, int):
        small = {0: "zero", 1: "one"}.get(value)
        yield small or ("negative" if value < 0 else "more" if value < HUGE else "huge")
    elif isinstance(value, str):
        yield repr(value)
    elif isinstance(value, torch.Tensor):
        count = value.numel()
        yield ("empty", "one element")[count] if count < 2 else "several elements"
        yield str(value.dtype).removeprefix("torch.")
        if count and not value.is_contiguous():
            yield "strided"
        if count > 1 and not value.is_floating_point() and len(torch.unique(value)) < count:
            yield "repeated"
        if count and not value.is_floating_point() and int(value.min()) < 0:
            yield "negative elements"
    elif isinstance(value, list | tuple):
        count = ("none", "one", "more")[min(len(value), 2)]
        yield f"{type(value).__name__} of {count}"
    else:
        yield type(value).__name__


def fields_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The argument, and the fields of a parameter object."""
    yield name, value
    if type(value).__name__.endswith("Params"):
        for field, held in vars(value).items():
            yield f"{name}.{field}", held


def public(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The methods of its own that take arguments."""
    for name, member in vars(kind).items():
        takes = inspect.isfunction(member) and len(inspect.signature(member).parameters) > 1
        if takes and not name.startswith("_"):
            yield name, member


@contextmanager
def watched(met: Met, suite: str) -> Iterator[None]:
    """In the block, calls from anywhere are counted."""
    with ExitStack() as undo:
        for kind in CLASSES:
            for name, method in public(kind):
                setattr(kind, name, _counting(method, f"{kind.__name__}.{name}", met, suite))
                undo.callback(setattr, kind, name, method)
        yield


def _counting(method: Callable[..., Any], name: str, met: Met, suite: str) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @wraps(method)
    def counted(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return method(*args, **kwargs)
        for argument in list(signature.parameters)[1:]:
            if argument not in given:
                met[f"{name}({argument})"]["absent"][suite] += 1
                continue
            for field, value in fields_of(argument, given[argument]):
                for one in classes_of(value):
                    met.setdefault(f"{name}({field})", {}).setdefault(one, Counter())[suite] += 1
        return method(*args, **kwargs)

    return counted


def arguments() -> Iterator[str]:
    """Every argument that is watched."""
    for kind in CLASSES:
        for name, method in public(kind):
            for argument in list(inspect.signature(method).parameters)[1:]:
                yield f"{kind.__name__}.{name}({argument})"


def table(cases: int) -> dict[str, dict[str, dict[str, int]]]:
    """Argument, class of values, suite: how often."""
    met: Met = {argument: {"absent": Counter()} for argument in arguments()}
    for suite in SUITES:
        with watched(met, suite):
            run_suite(suite, resolve("refcache"), max_examples=cases, shrink=False)
    return {
        argument: {one: dict(counts) for one, counts in sorted(classes.items()) if counts}
        for argument, classes in sorted(met.items())
    }


def page(found: dict[str, dict[str, dict[str, int]]], cases: int) -> str:
    """The page in Markdown."""
    lines = [
        "# Which values of which argument the suites meet",
        "",
        "Generated by `scripts/argument_table.py`; do not edit. What each suite met, with numbers,",
        "is in [arguments.json](arguments.json). Counted on the reference with",
        f"`--max-examples {cases}`; calls that the reference makes inside itself count too.",
        "",
        "| argument | classes of values met | suites |",
        "| --- | --- | --- |",
    ]
    for argument, classes in found.items():
        suites = sorted({suite for counts in classes.values() for suite in counts})
        if len(classes) > 1:
            lines.append(f"| `{argument}` | {', '.join(classes)} | {len(suites)} |")
    lines += ["", "## Never varied", "", "| argument | met | why |", "| --- | --- | --- |"]
    for argument, classes in found.items():
        if len(classes) < 2:
            last = argument.partition("(")[2].rstrip(")").rpartition(".")[2]
            why = REASONS.get(last, "not drawn") if classes else "no suite makes this call"
            lines.append(f"| `{argument}` | {', '.join(classes) or 'nothing'} | {why} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("--cases", type=int, default=100)
    chosen = parser.parse_args().cases
    counted_table = table(chosen)
    text = json.dumps({"cases": chosen, "arguments": counted_table}, indent=1) + "\n"
    (DOCS / "arguments.json").write_text(text, encoding="utf-8")
    (DOCS / "arguments.md").write_text(page(counted_table, chosen), encoding="utf-8")
