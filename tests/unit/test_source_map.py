"""The source map: every path imports, and one run calls every function and reads what is used.

The run is ``scripts/document_run.py``: it does everything that the document describes.
"""

import ast
import dataclasses
import inspect
import sys
import textwrap
from collections import Counter
from enum import Enum
from pathlib import Path
from types import FunctionType

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

document = pytest.importorskip("document")
import document_run  # noqa: E402
from document_run import code_of, resolve  # noqa: E402

from refcache.controller import CacheOperation, TransferBuffer  # noqa: E402
from refcache.engine import Scheduler  # noqa: E402

PATHS = document_run.table_paths()
CALLERS = [path for item in document.items() for path in item.get("callers", [])]
UNUSED = [(path, i.get("reader")) for i in document.items() for path in i.get("unused", [])]
USED = [  # controls: the counting sees these
    "refcache.types.CacheInitParams.page_size",
    "refcache.types.MatchPrefixParams.key",
    "refcache.types.InitLoadBackParams.mem_quota",
    "refcache.controller.HiCacheController.mem_pool_host",
    "refcache.engine.Req.host_hit_length",
]


class Counted:
    """In the place of an attribute: counts who reads it; who copies all of them does not."""

    def __init__(self, name):
        self.name, self.readers = name, Counter()

    def __get__(self, instance, owner=None):
        if instance is None:
            return self
        reader = sys._getframe(1).f_code
        if reader is not dataclasses.replace.__code__:
            self.readers[reader] += 1
        return instance.__dict__[self.name]

    def __set__(self, instance, value):
        instance.__dict__[self.name] = value


def attribute(path):
    """The class and the name of a path to an attribute of instances; None for anything else."""
    if path.endswith(")"):
        return None
    owner, _, name = path.rpartition(".")
    try:
        cls = resolve(owner, {})
    except ModuleNotFoundError:
        return None
    known = inspect.getattr_static(cls, name, None)
    of_instances = inspect.isclass(cls) and not issubclass(cls, tuple | Enum)
    kinds = FunctionType | property | classmethod | staticmethod
    slotted = inspect.ismemberdescriptor(known)
    return None if not of_instances or isinstance(known, kinds) or slotted else (cls, name)


@pytest.fixture(scope="module")
def run():
    """The traced run, with the attributes that matter counted."""
    with pytest.MonkeyPatch.context() as patch:
        counted = {}
        for path in {path for path, _ in UNUSED} | {*USED, *PATHS}:
            where = attribute(path)
            if where is not None:
                counted[path] = Counted(where[1])
                patch.setattr(*where, counted[path], raising=False)
        done = document_run.traced()
    done.counted = counted
    return done


def test_the_run_does_everything(run):
    assert min(run.facts.values()) > 0, run.facts
    assert set(run.facts) == {
        "aborts",
        "host copies dropped",
        "host hits",
        "load slot waits",
        "loads with an event a layer",
        "loads with flags",
        "retractions",
        "states copied",
        "storage hits",
        "windows found",
        "write-back evictions",
        "writes through",
    }


def test_the_run_lists_what_it_called(run):
    names = run.names()
    for package in document_run.PACKAGES:
        assert sum(name.startswith(f"refcache.{package}") for name in names) > 10, package
    assert any(name.startswith("refcache.tree.hiradix_cache: HiRadixCache.evict") for name in names)
    assert not any("<" in name for name in names)


@pytest.mark.parametrize("path", PATHS)
def test_path_is_there(path, run):
    resolved(path, run.instances)


def resolved(path, instances):
    try:
        return resolve(path, instances)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("refcache"):
            raise
        pytest.skip(f"needs {error.name}")


def test_parameters_are_there_and_read_or_marked(run):
    with_parameter = [
        path
        for item in document.items()
        for path in (*(p for _, p in item.get("names", [])), *item.get("where", []))
        if path.endswith(")")
    ]
    assert len(with_parameter) > 10
    marked = {path for path, _ in UNUSED}
    for path in with_parameter:
        function, _, parameter = path.rstrip(")").partition("(")
        value = resolve(function, run.instances)
        assert parameter in inspect.signature(value).parameters, path
        if inspect.isclass(value):
            path = f"{function}.__init__({parameter})"
        assert reads_parameter(path, run.instances) != (path in marked), path


def test_a_path_that_is_not_there_is_noticed(run):
    with pytest.raises(AttributeError):
        resolve("refcache.engine.Scheduler.event_loop_async", run.instances)
    with pytest.raises(AttributeError):
        resolve("refcache.tree.RadixTrie", run.instances)


def test_names_that_are_not_there_are_not_there(run):
    for item in document.items():
        gone = [name for name, path in item.get("names", []) if not path]
        missing = item.get("missing", [])
        assert len(missing) >= len(gone), item["says"]
        for path in missing:
            owner = resolve(path.rpartition(".")[0], {})
            assert inspect.ismodule(owner) or owner in run.instances, path  # else nothing is asked
            with pytest.raises(AttributeError):
                resolve(path, run.instances)


@pytest.mark.parametrize("package", document_run.PACKAGES)
def test_the_run_calls_every_function_of_the_map(package, run):
    never = {one for one, _ in UNUSED}
    missed = []
    for path in PATHS:
        if path in never or not path.startswith(f"refcache.{package}."):
            continue
        value = resolved(path, run.instances)
        code = None if inspect.isclass(value) else code_of(value)
        if code is not None and code not in run.calls:
            missed.append(path)
    assert not missed


def test_what_was_not_called_is_noticed(run):
    assert run.calls[code_of(Scheduler.step)] > 10
    assert code_of(Scheduler.recv_requests) in run.calls
    assert code_of(TransferBuffer.full) not in run.calls


def reads_parameter(path, instances):
    """Whether a function's body reads a parameter."""
    function, _, parameter = path.rstrip(")").partition("(")
    source = textwrap.dedent(inspect.getsource(resolve(function, instances)))
    return any(
        isinstance(node, ast.Name) and node.id == parameter and isinstance(node.ctx, ast.Load)
        for node in ast.walk(ast.parse(source))
    )


def test_what_is_accepted_and_unused_is_not_read(run):
    for path, reader in UNUSED:
        if path.endswith(")"):
            assert not reads_parameter(path, run.instances), path
        elif path in run.counted:
            readers = set(run.counted[path].readers)
            allowed = set() if reader is None else {code_of(resolve(reader, run.instances))}
            assert readers == allowed, (path, readers)
        else:
            assert run.calls[code_of(resolve(path, run.instances))] == 0, path


def test_what_is_used_is_seen_to_be_read(run):
    for path in USED:
        assert run.counted[path].readers, path
    init = "refcache.controller.HiCacheController.__init__"
    assert reads_parameter(f"{init}(write_policy)", run.instances)
    assert run.calls[code_of(CacheOperation.merge_ops)] > 0


def test_an_attribute_of_the_map_is_read_or_marked(run):
    marked = {path for path, _ in UNUSED}
    assert len(set(run.counted) & set(PATHS)) > 60
    unread = {path for path in PATHS if path in run.counted and not run.counted[path].readers}
    assert unread == marked & set(PATHS) & unread | set(CALLERS)
