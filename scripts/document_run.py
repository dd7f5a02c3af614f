"""One traced run that does everything the document describes, and the list of what it called.

    PYTHONPATH=src:aliases python scripts/document_run.py

prints every function of the tree, the controller, the pools, the allocators and the engine that
ran, with its calls. ``tests/unit/test_source_map.py`` requires each function of the source map.
"""

import importlib
import inspect
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import torch
from hybrid_pictures import insert, match, tree_of_states, tree_of_windows

from refcache.engine import (
    AbortReq,
    ModelConfig,
    SamplingParams,
    Scheduler,
    TokenizedGenerateReqInput,
)
from refcache.engine.model_runner import make_model
from refcache.keys import RadixKey
from refcache.runtime import SimulatedRuntime, Tracker, lazy
from refcache.storage import HiCacheMemory
from refcache.types import EvictParams, InitLoadBackParams, MatchPrefixParams, ServerArgs

PACKAGES = ("tree", "controller", "pool", "allocator", "engine")
SIZES = {
    "page_size": 2,
    "max_total_tokens": 48,
    "max_running_requests": 3,
    "context_length": 44,
    "chunked_prefill_size": 8,
    "enable_hierarchical_cache": True,
    "hicache_io_backend": "kernel",
}


def prompt(start: int, length: int) -> list[int]:
    """A prompt of its own for each ``start``."""
    return [(start * 100 + i) % 997 for i in range(length)]


def delayed(runner: Any) -> Any:
    """A model that samples only when the results before are known."""
    model: Any = make_model(runner)
    sample = model._sample
    model._sample = lambda out: partial(sample, out)
    return model


class Run:
    """What ran.

    Attributes:
        facts: how often each thing happened that the run is there for.
        calls: calls of each code object of the packages, in the order of the first call.
        instances: for each class the last object that a method of it was called on.
    """

    def __init__(self) -> None:
        self.facts: Counter[str] = Counter()
        self.calls: Counter[CodeType] = Counter()
        self.instances: dict[type, Any] = {}

    def __enter__(self) -> "Run":
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.calls[frame.f_code] += 1
            this = frame.f_locals.get("self")
            for cls in type(this).__mro__:
                self.instances[cls] = this

    def names(self) -> list[str]:
        """Module, function and calls of what belongs to the packages, by module."""
        found = []
        for code, count in self.calls.items():
            module = inspect.getmodule(code)
            name = "" if module is None else module.__name__
            inner = "<" in code.co_qualname  # a comprehension, or a function inside one
            if not inner and name.startswith(tuple(f"refcache.{package}" for package in PACKAGES)):
                found.append(f"{name}: {code.co_qualname} {count}")
        return sorted(found)


def serve(scheduler: Scheduler, prompts: dict[str, list[int]], outputs: int = 3) -> None:
    """Submit, and run until nothing is left; a step that can do nothing lets time pass."""
    for rid, tokens in prompts.items():
        scheduler.submit(TokenizedGenerateReqInput(rid, tokens, SamplingParams(outputs)))
    while not scheduler.is_idle():
        if scheduler.step() is None:
            scheduler.runtime.synchronize()
    scheduler.runtime.synchronize()


def two_tiers(
    run: Run, write_policy: str, small_load_bytes: int, runtime: Any = None, **more: Any
) -> Scheduler:
    """A scheduler over two tiers, on the simulated machine, whose loads and writes are counted."""
    scheduler = Scheduler(
        ServerArgs(hicache_write_policy=write_policy, **SIZES, **more),
        ModelConfig(num_hidden_layers=3),
        runtime=runtime or SimulatedRuntime(lazy, Tracker()),
    )
    tree, controller = scheduler.tree_cache, scheduler.tree_cache.cache_controller
    tree.load_back_threshold = 2
    tree.token_to_kv_pool_host.small_load_bytes = small_load_bytes

    def counted(owner: Any, name: str, fact: str, when: Callable[[Any], bool]) -> None:
        inner = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            run.facts[fact] += when(result)
            return result

        setattr(owner, name, call)

    how = "flags" if small_load_bytes else "an event a layer"
    counted(controller, "start_loading", f"loads with {how}", lambda index: index >= 0)
    counted(controller, "evict_host", "host copies dropped", bool)
    counted(tree, "init_load_back", "host hits", lambda found: len(found[0]) > 0)
    write_backup = tree.write_backup

    def counted_write(node: Any, write_back: bool = False) -> int:
        tokens: int = write_backup(node, write_back)
        run.facts["write-back evictions" if write_back else "writes through"] += tokens > 0
        return tokens

    tree.write_backup = counted_write
    return scheduler


def fill(scheduler: Scheduler, first: int, count: int) -> None:
    """Serve new prompts, one at a time, until older ones had to go."""
    for number in range(first, first + count):
        serve(scheduler, {f"fill {number}": prompt(number, 20)})


def load_slots(run: Run, scheduler: Scheduler) -> None:
    """Four loads, none of which a forward waits for: the fourth has to wait for the first."""
    tree = scheduler.tree_cache
    tree.check_hicache_events()
    tree.evict(EvictParams(scheduler.max_total_num_tokens))
    for number in range(4):
        found = tree.match_prefix(MatchPrefixParams(RadixKey(prompt(number, 4))))
        tree.init_load_back(InitLoadBackParams(found.last_host_node, found.host_hit_length))
        tree.ready_to_load_host_cache()
    run.facts["load slot waits"] += tree.cache_controller.load_slot_waits
    scheduler.runtime.synchronize()
    tree.check_hicache_events()


def hybrid_trees(run: Run) -> None:
    """A prompt is found again, with its state, and with its window."""
    states, windows = tree_of_states(), tree_of_windows()
    request = SimpleNamespace(mamba_pool_idx=None, req_pool_idx=None)
    insert(states, [1, 2, 3])
    match(states, [1, 2, 3, 4], req=request, cow_mamba=True)
    insert(windows, [1, 2, 3])
    run.facts["states copied"] += request.mamba_pool_idx is not None
    run.facts["windows found"] += len(match(windows, [1, 2, 3, 4]).device_indices) == 3


def below_the_host(run: Run) -> None:
    """A prompt that storage alone still has, and a second life with the same store."""
    store = HiCacheMemory()
    for _ in range(2):
        scheduler = Scheduler(
            ServerArgs(**SIZES, hicache_storage_prefetch_policy="wait_complete"), ModelConfig()
        )
        tree = scheduler.tree_cache
        assert tree.attach_storage_backend(store, '{"prefetch_threshold": 2}')[0]
        serve(scheduler, {"a": prompt(0, 20)})
        run.facts["storage hits"] += sum(r.storage_hit_length > 0 for r in scheduler.finished_reqs)
        tree.detach_storage_backend()


def everything(run: Run) -> None:
    """The run. Each part is one thing that the document tells of, or more."""
    hybrid_trees(run)
    layered = two_tiers(run, "write_through", 0, enable_memory_saver=True, hicache_ratio=4.0)
    fill(layered, 0, 3)
    serve(layered, {"long": prompt(0, 22), "again": prompt(1, 21)}, outputs=4)
    fill(layered, 3, 1)
    load_slots(run, layered)
    layered.release_memory_occupation()
    layered.resume_memory_occupation()

    back = two_tiers(run, "write_back", 1 << 20, hicache_ratio=1.5, speculative_algorithm="NGRAM")
    fill(back, 20, 8)
    serve(back, {f"host {n}": prompt(n, 20) for n in (27, 26, 25, 24)})
    back.new_token_ratio = back.min_new_token_ratio = 0.0
    for rid in "abc":
        back.submit(TokenizedGenerateReqInput(rid, prompt(ord(rid), 6), SamplingParams(12)))
        back.step()
    back.force_retraction()
    back.submit(AbortReq("a"))
    serve(back, {})
    run.facts["retractions"] += back.num_retracted_reqs
    run.facts["aborts"] += sum("ABORT" in repr(r.finished_reason) for r in back.finished_reqs)
    pool = back.model_runner.token_to_kv_pool
    assert pool is not None
    pool.move_kv_cache(torch.tensor([4]), torch.tensor([5]))  # type: ignore[attr-defined]
    below_the_host(run)

    late = Scheduler(ServerArgs(**SIZES | {"page_size": 1}), ModelConfig(), make_model=delayed)
    serve(late, {"a": prompt(0, 9), "b": prompt(0, 5)})
    normal = Scheduler(
        ServerArgs(**SIZES, disable_overlap_schedule=True),
        ModelConfig(kv_lora_rank=3, qk_rope_head_dim=1),
        pre_model_load_memory=1.0,
    )
    normal.submit(TokenizedGenerateReqInput("a", prompt(0, 9), SamplingParams(2)))
    normal.dispatch_event_loop()
    late.submit(TokenizedGenerateReqInput("c", prompt(1, 9), SamplingParams(2)))
    late.dispatch_event_loop()


def traced() -> Run:
    """The run, done."""
    with Run() as run:
        everything(run)
    return run


# ---- what a path names ---------------------------------------------------------------------------


def table_paths(named: bool = False) -> list[str]:
    """Every path of docs/document.toml (``named``: of its names) without its parameter, once."""
    with (Path(__file__).parents[1] / "docs" / "document.toml").open("rb") as file:
        sections = tomllib.load(file)["section"]
    found = [
        path.partition("(")[0]
        for section in sections
        for item in section["item"]
        for path in [
            *(path for _, path in item.get("names", [])),
            *([] if named else item.get("where", [])),
        ]
        if path
    ]
    return list(dict.fromkeys(found))


def importable(path: str) -> tuple[Any, list[str]]:
    """The longest importable prefix of ``path``, and the names after it.

    Raises:
        ModuleNotFoundError: a package outside refcache is missing, or nothing of it imports.
    """
    names = path.split(".")
    for end in range(len(names), 0, -1):
        try:
            return importlib.import_module(".".join(names[:end])), names[end:]
        except ModuleNotFoundError as error:
            if not path.startswith(error.name or ""):
                raise
    raise ModuleNotFoundError(f"{path}: nothing of it imports")


def resolve(path: str, instances: dict[type, Any]) -> Any:
    """What ``path`` names: an attribute of a module, of a class, or of a class's instances.

    Raises:
        AttributeError: it is not there.
    """
    value, names = importable(path)
    for name in names:
        if inspect.isclass(value) and not hasattr(value, name):
            if name in value.__annotations__:
                return value.__annotations__[name]
            value = instances.get(value)
        value = getattr(value, name)
    return value


def code_of(value: Any) -> CodeType | None:
    """The code of a function, a method or a property; None for anything else."""
    if isinstance(value, property):
        value = value.fget
    value = inspect.unwrap(getattr(value, "__func__", value))
    code: CodeType | None = getattr(value, "__code__", None)
    return code


if __name__ == "__main__":
    done = traced()
    print("\n".join(done.names()))
    print(dict(done.facts))
