"""docs/compatibility.md is what the sources say, and every difference has its reason."""

import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from refcache.peers.releases import folder, unpacked

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"


@pytest.fixture(scope="module")
def script() -> Any:
    """scripts/compatibility.py, which imports its neighbours."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        yield importlib.import_module("compatibility")
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def told(script: Any) -> Any:
    return script.rows()


# ---- the page ------------------------------------------------------------------------------------


def test_the_page_is_current(script: Any) -> None:
    written = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    assert written == script.page(), "run scripts/compatibility.py"


def test_every_difference_has_a_reason_in_words(told: Any) -> None:
    found, wrong = told
    assert wrong == []
    assert sum(map(len, found.values())) > 1000
    for lines in found.values():
        for name, _, reason in lines:
            assert len(reason.split()) >= 4, name
            assert "missing" not in reason, name


def test_every_name_can_be_imported_from_where_the_page_says(script: Any) -> None:
    for name, (_, module) in script.compared().items():
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def without(told: Any, key: str) -> dict[str, Any]:
    return {**told, "because": {k: v for k, v in told["because"].items() if k != key}}


def test_a_difference_without_a_reason_fails(script: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(script, "TOLD", without(script.TOLD, "widths"))
    with pytest.raises(SystemExit, match=r"no reason: MLATokenToKVPoolHost\(\)"):
        script.page()


def test_a_reason_that_nothing_needs_fails(script: Any, monkeypatch: Any) -> None:
    because = {**script.TOLD["because"], "old": {"text": "it was so", "names": ["RadixCache.gone"]}}
    monkeypatch.setattr(script, "TOLD", {**script.TOLD, "because": because})
    with pytest.raises(SystemExit, match=r"not needed: RadixCache\.gone \(old\)"):
        script.page()


# ---- the release ---------------------------------------------------------------------------------


def release(script: Any) -> Any:
    if script.VERSION not in unpacked():
        pytest.skip(f"SGLang {script.VERSION} is not unpacked")
    return script.Package(folder(script.VERSION), "sglang")


def test_the_facts_are_those_of_the_release(script: Any) -> None:
    known, read = script.facts(), script.read_facts(release(script))
    assert known.keys() == read.keys()
    assert [name for name in known if known[name] != read[name]] == []


def test_every_shared_name_is_compared_or_explained(script: Any) -> None:
    assert script.namesakes(release(script)) == set()


# ---- reading sources -----------------------------------------------------------------------------

SOURCES = {
    "base.py": """
        class Base:
            shared = 1

            def __init__(self, size):
                self.size = size
                self.reset()

            def reset(self):
                self.count, self._hidden = 0, 1

            def both(self, a, b=2): ...
        """,
    "more.py": """
        from dataclasses import dataclass, field
        from pack.base import Base

        class More(Base):
            def reset(self):
                super().reset()
                self.extra: int = 3

            @property
            def width(self): ...

            @classmethod
            def make(cls, x, *, flag=False, **rest): ...

            def _private(self): ...

        @dataclass
        class Fields:
            first: int
            second: list = field(default_factory=list)
            third: int = field(default=3, kw_only=True)

        def function(a, /, b=None): ...
        """,
}


@pytest.fixture
def package(script: Any, tmp_path: Path) -> Any:
    (tmp_path / "pack").mkdir()
    for name, text in {"__init__.py": "from pack.more import More", **SOURCES}.items():
        (tmp_path / "pack" / name).write_text(textwrap.dedent(text))
    return script.Package(tmp_path, "pack")


def test_a_shape_has_what_the_source_says(script: Any, package: Any) -> None:
    more = package.shape("pack", "More")  # through the import in the package
    assert [a.name for a in more.arguments] == ["size"]
    assert sorted(more.methods) == ["both", "make", "reset"]
    assert more.attributes == ["count", "extra", "shared", "size", "width"]
    assert [(a.name, a.default, a.kind) for a in more.methods["make"]] == [
        ("x", None, ""),
        ("flag", "False", "*"),
        ("rest", "{}", "**"),
    ]
    fields = package.shape("pack.more", "Fields").arguments
    assert [(a.name, a.default, a.kind) for a in fields] == [
        ("first", None, ""),
        ("second", "list()", ""),
        ("third", "3", "*"),
    ]
    assert [a.name for a in package.shape("pack.more", "function").arguments] == ["a", "b"]
    assert package.public("pack.more") == ["More", "Fields", "function"]
    with pytest.raises(KeyError, match="pack has no Other"):
        package.shape("pack", "Other")
    assert script.Shape.from_json(more.as_json()) == more


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        ("self, a, b", "self, a, b", []),
        ("self, a", "self, a, own=1", []),
        ("self, a, b=1", "self, a", ["A(b): no such argument"]),
        ("self, a, b", "self, b, a", ["A(): by position: `b`, there `a`"]),
        ("self, a, b=1", "self, a, b=2", ["A(b): `2` by default; there `1`"]),
        ("self, a='x'", 'self, a="x"', []),
        ("self, a=1", "self, a", ["A(a): needed; there `1`"]),
        ("self, a", "self, a=None", []),
        ("self, a, b", "self, a, *, b", ["A(): from `b` on by name only"]),
        ("self, a", "self, a, *, own", ["A(own): needed; not an argument there"]),
        ("self, a, b=1", "self, a, **rest", ["A(): from `b` on by name only"]),
    ],
)
def test_arguments_that_differ(
    script: Any, tmp_path: Path, theirs: str, ours: str, expected: list[str]
) -> None:
    shapes = []
    for name, arguments in (("theirs", theirs), ("ours", ours)):
        (tmp_path / name).mkdir()
        text = f"class A:\n    def __init__({arguments}): ...\n"
        (tmp_path / name / "__init__.py").write_text(text)
        shapes.append(script.Package(tmp_path, name).shape(name, "A"))
    assert [f"{d.name}: {d.what}" for d in script.differences("A", *shapes)] == expected


def test_members_that_differ(script: Any, tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text(
        textwrap.dedent("""
        class Theirs:
            a = b = c = 1

            def gone(self): ...

            def value(self): ...

        class Ours:
            a = value = 1

            def b(self): ...
        """)
    )
    package = script.Package(tmp_path, "p")
    shapes = [package.shape("p", name) for name in ("Theirs", "Ours")]
    assert [f"{d.name}: {d.what}" for d in script.differences("A", *shapes)] == [
        "A.gone: no such method",
        "A.value: a method there, an attribute here",
        "A.b: an attribute there, a method here",
        "A.c: no such attribute",
    ]


# ---- their scheduler on these classes ------------------------------------------------------------

THEIR_SCHEDULER = """
from types import SimpleNamespace

import torch
from refcache import keys, tree, types
from refcache.allocator import PagedTokenToKVPoolAllocator
from refcache.engine import ForwardMode, ModelConfig, Req, SamplingParams, ScheduleBatch
from refcache.peers import engine
from refcache.pool import ReqToTokenPool

release = engine.load("0.5.10")
policy, common = (release.module(m) for m in ("managers.schedule_policy", "mem_cache.common"))
for module in (policy, common):  # their imports, redirected
    for home in (types, keys, tree):
        for name, value in vars(home).items():
            if hasattr(module, name) and getattr(value, "__module__", "").startswith("refcache"):
                setattr(module, name, value)

args = SimpleNamespace(attention_backend="torch_native", page_size=4, speculative_algorithm=None)
release.module("server_args").set_global_server_args_for_scheduler(args)
allocator = PagedTokenToKVPoolAllocator(64, 4, torch.float16, "cpu", None)
rows = ReqToTokenPool(4, 64)
cache = tree.RadixCache(types.CacheInitParams(False, rows, allocator, 4))
cache.insert(types.InsertParams(keys.RadixKey(range(8)), allocator.alloc(8)))
for name in types.SCHEDULE_POLICIES:
    queue = [Req("a", "", [99], SamplingParams(1)), Req("b", "", range(12), SamplingParams(3))]
    policy.SchedulePolicy(name, cache, False, False, False).calc_priority(queue)
    if name != "random":
        print(name, *(req.rid for req in queue))
adder = policy.PrefillAdder(4, cache, allocator, None, 1.0, 64, 32)
req = Req("r", "", range(13), SamplingParams(4))
req.init_next_round_input(cache)
print(adder.add_one_req(req, False, None).name, req.extend_input_len, adder.rem_total_tokens)
none = types.SpeculativeAlgorithm.NONE
parts = rows, allocator, cache, ModelConfig(), False, none
batch = ScheduleBatch.init_new(adder.can_run_list, *parts)
batch.prefix_lens, batch.extend_lens, batch.extend_num_tokens = [8], [5], 5
batch.seq_lens = batch.seq_lens_cpu = torch.tensor([13])
slots, batch.req_pool_indices, _ = common.alloc_for_extend(batch)
print(slots.tolist(), rows.read(req.req_pool_idx, slice(0, 13)).tolist())
req.kv_committed_len = req.kv_allocated_len = 13
for _ in range(4):
    print(common.alloc_for_decode(batch, token_per_req=1).tolist())
    batch.seq_lens = batch.seq_lens_cpu = batch.seq_lens + 1
    req.output_ids.append(7)
    req.kv_committed_len = req.kv_allocated_len = req.kv_committed_len + 1
common.release_kv_cache(req, cache)
print(common.available_and_evictable_str(cache).strip())
common.evict_from_tree_cache(cache, 60)
print(allocator.available_size(), cache.total_size(), rows.available_size())
"""


def test_their_scheduler_serves_from_these_classes() -> None:
    if "0.5.10" not in unpacked():
        pytest.skip("SGLang 0.5.10 is not unpacked")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", THEIR_SCHEDULER]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "fcfs a b",
        "lpm b a",
        "dfs-weight b a",
        "lof b a",
        "routing-key a b",
        "CONTINUE 5 40",
        "[12, 13, 14, 15, 16] [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]",
        "[17]",
        "[18]",
        "[19]",
        "[20]",
        "Available tokens: 64 (available_size=48 + evictable_size=16)",
        "64 0 4",
    ]


# ---- their tests ---------------------------------------------------------------------------------

THEIRS = """
import unittest

from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=1, suite="any")


class TestCache(CustomTestCase):
    def test_right(self):
        cache = RadixCache.create_simulated()
        cache.insert(InsertParams(key=RadixKey([1, 2])))
        self.assertEqual(cache.total_size(), 2)

    def test_wrong(self):
        for size in (0, 1):
            with self.subTest(size=size):
                self.assertEqual(RadixCache.create_simulated().total_size(), size)
"""


def test_their_tests_run_with_redirected_imports(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(THEIRS)
    (tmp_path / "test_later.py").write_text(
        "from sglang.srt.mem_cache.x import HiMambaRadixCache\n"
    )
    command = [sys.executable, str(SCRIPTS / "sglang_tests.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "test_later.py",
        "    ImportError: refcache has no HiMambaRadixCache",
        "test_theirs.py::TestCache::test_wrong",
        "    AssertionError: 0 != 1",
        "test_later.py: cannot be imported",
        "test_theirs.py: 1 failed, 1 passed",
    ]
