"""``docs/source_map.md``: every path imports, and three requests call every function of the loop.

They run over a host tier; one prompt comes in two chunks, and prefixes are shared.
"""

import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

from refcache.engine import ModelConfig, SamplingParams, Scheduler, TokenizedGenerateReqInput
from refcache.tree.hiradix_cache import HiRadixCache
from refcache.types import ServerArgs

MAP = Path(__file__).parents[2] / "docs" / "source_map.md"
ROW = re.compile(r"\| (?P<name>[^|]+) \| (?P<part>[ABL-]) \| (?P<where>[^|]+) \|")
PATH = re.compile(r"`([\w.]+)(?:\((\w+)\))?`")


def rows():
    found = [ROW.fullmatch(line) for line in MAP.read_text().splitlines()]
    return [(m["name"], m["part"], m["where"]) for m in found if m]


PATHS = [(name, *PATH.fullmatch(where).groups()) for name, _, where in rows() if where[0] == "`"]


class Run:
    """``called``: code objects; ``instances``: for each class the last ``self`` seen."""

    def __init__(self):
        self.called, self.instances = set(), {}
        sys.setprofile(self.note)
        try:
            scheduler = Scheduler(
                ServerArgs(
                    page_size=2,
                    max_total_tokens=48,
                    max_running_requests=3,
                    context_length=40,
                    chunked_prefill_size=8,
                    enable_hierarchical_cache=True,
                    hicache_io_backend="direct",
                ),
                ModelConfig(num_hidden_layers=2),
                make_tree=HiRadixCache,
                pre_model_load_memory=1.0,
            )
            for rid, length in (("a", 7), ("b", 13), ("c", 9)):
                scheduler.submit(TokenizedGenerateReqInput(rid, range(length), SamplingParams(3)))
            scheduler.dispatch_event_loop()
        finally:
            sys.setprofile(None)
        assert [len(r.output_ids) for r in scheduler.finished_reqs] == [3, 3, 3]

    def note(self, frame, event, argument):
        if event == "call":
            self.called.add(frame.f_code)
            this = frame.f_locals.get("self")
            for cls in type(this).__mro__:
                self.instances[cls] = this


@pytest.fixture(scope="module")
def run():
    return Run()


def importable(path):
    """The longest importable prefix of ``path``, and the names after it."""
    names = path.split(".")
    for end in range(len(names), 0, -1):
        try:
            return importlib.import_module(".".join(names[:end])), names[end:]
        except ModuleNotFoundError as error:
            if not ".".join(names).startswith(error.name or ""):
                pytest.skip(f"needs {error.name}")
    raise AssertionError(f"{path}: nothing of it imports")


def resolve(path, instances):
    """What ``path`` names: an attribute of a module, of a class, or of a class's instances."""
    value, names = importable(path)
    for name in names:
        if inspect.isclass(value) and not hasattr(value, name):
            if name in value.__annotations__:
                return value.__annotations__[name]
            value = instances.get(value)
        value = getattr(value, name)
    return value


def code_of(value):
    if isinstance(value, property):
        value = value.fget
    value = inspect.unwrap(getattr(value, "__func__", value))
    return getattr(value, "__code__", None)


def test_the_map_has_rows_of_every_kind():
    parts = [part for _, part, _ in rows()]
    assert {part: parts.count(part) > 5 for part in "ABL-"} == dict.fromkeys("ABL-", True)
    for name, _, where in rows():
        assert PATH.fullmatch(where) or where == "next" or where.startswith("not modelled: "), name


@pytest.mark.parametrize(("name", "path", "parameter"), PATHS)
def test_path_is_there(name, path, parameter, run):
    value = resolve(path, run.instances)
    if parameter is not None:
        assert parameter in inspect.signature(value).parameters


def test_a_path_that_is_not_there_is_noticed(run):
    with pytest.raises(AttributeError):
        resolve("refcache.engine.Scheduler.event_loop_async", run.instances)
    with pytest.raises(AttributeError):
        resolve("refcache.tree.RadixTrie", run.instances)


@pytest.mark.parametrize(
    "path", sorted({p for _, p, _ in PATHS if p.startswith("refcache.engine")})
)
def test_three_requests_call_every_function_of_the_loop(path, run):
    value = resolve(path, run.instances)
    code = None if inspect.isclass(value) else code_of(value)
    assert code is None or code in run.called


def test_what_was_not_called_is_noticed(run):
    assert code_of(Scheduler.step) in run.called
    assert code_of(Scheduler.flush_cache) not in run.called
