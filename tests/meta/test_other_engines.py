"""Caches of other engines as targets: verdicts, bugs planted into their code, sizes of adapters.

Skipped where an engine's sources are not unpacked.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from refcache.errors import MissingExtra, UnknownName
from refcache.oracle import OffloadDriver, resolve
from refcache.peers import standins
from refcache.peers.others import sources
from refcache.peers.others.named import TARGETS
from refcache.testing import run_suite

FOLDER = Path(sources.__file__).parent
ADAPTERS = {
    "vllm_offload.py": ("Manager", 40),
    "lmcache_backend.py": ("Blocks", 40),
    "nano_vllm.py": ("Blocks", 25),
}
VERDICTS = {
    "vllm:offload-lru": None,
    "vllm:offload-arc": None,
    "vllm:offload-tiers": None,
    "lmcache:backend": None,
    "lmcache:backend+partial": None,
    "lmcache:backend-paged": None,
    "lmcache:backend-paged+partial": "OF1",
}
"""Target: the rule that it breaks."""


def present(target: str) -> str:
    engine = target.partition(":")[0]
    if not sources.present(engine):
        pytest.skip(f"{engine} is not unpacked in {sources.folder(engine)}")
    return target


@pytest.mark.parametrize(
    "name", [name for name in TARGETS if "offload" in name or "backend" in name]
)
def test_verdict(name: str) -> None:
    result = run_suite("offload.state", resolve(present(name)), max_examples=25)
    assert (result.failure and result.failure.rule) == VERDICTS[name]


def test_an_object_smaller_than_its_page_reports_the_page() -> None:
    target = resolve(present("lmcache:backend-paged+partial"))
    failure = run_suite("offload.state", target).failure
    assert failure is not None
    assert len(failure.steps) <= 6
    assert "was stored with 8 bytes of its own; read are 1" in failure.evidence


def _pinned_by_one(original: Any) -> Any:
    """Planted: when one of two loads is over the chunk may go."""

    def complete_load(self: Any, keys: Any, context: Any) -> None:
        for key in keys:
            self._policy.get(key).ref_cnt = 1
        original(self, keys, context)

    def tolerant(self: Any, keys: Any, context: Any) -> None:
        complete_load(self, [k for k in keys if self._policy.get(k).ref_cnt > 0], context)

    return tolerant


def _failed_stays(original: Any) -> Any:
    """Planted: of a store that fails only the first chunk's slot is free again."""
    return lambda self, keys, context, success=True: original(
        self, keys if success else keys[:1], context, success
    )


@pytest.mark.parametrize(
    ("method", "planted"), [("complete_load", _pinned_by_one), ("complete_store", _failed_stays)]
)
@pytest.mark.parametrize("seed", range(2))
def test_a_bug_planted_into_vllm_is_caught(
    method: str, planted: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = resolve(present("vllm:offload-lru"))
    found = sources.module("vllm", "v1.kv_offload.cpu.manager").CPUOffloadingManager
    monkeypatch.setattr(found, method, planted(getattr(found, method)))
    failure = run_suite("offload.state", target, seed=seed, shrink=False).failure
    assert failure is not None
    assert failure.rule.startswith("OF")


def code_lines(source: str, name: str) -> int:
    """Lines of the class ``name``: no imports, blanks, comments, nor docstrings."""
    (found,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    texts = {
        line
        for node in ast.walk(found)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    nothing = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in nothing
    }
    own = range(found.lineno, (found.end_lineno or found.lineno) + 1)
    return len([line for line in lines if line in own and line not in texts])


@pytest.mark.parametrize("file", ADAPTERS)
def test_an_adapter_is_short(file: str) -> None:
    name, limit = ADAPTERS[file]
    assert code_lines((FOLDER / file).read_text(encoding="utf-8"), name) <= limit


@pytest.mark.parametrize(
    ("target", "part"),
    [
        ("vllm:offload-lru", "vllm.v1.kv_offload"),
        ("lmcache:backend", "lmcache.v1.storage_backend.local_cpu_backend"),
    ],
)
def test_what_is_on_trial_is_the_engine_s_own(target: str, part: str) -> None:
    OffloadDriver(resolve(present(target)), page_size=1, size=2)
    folder = str(sources.folder(target.partition(":")[0]).resolve())
    on_trial = [
        m for n, m in sys.modules.items() if n.startswith(part) and isinstance(m, ModuleType)
    ]
    assert on_trial
    for module in on_trial:
        assert not isinstance(module, standins.StandIn)
        assert (module.__file__ or str(next(iter(module.__path__)))).startswith(folder)


def test_unknown_names_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="vllm:nonsense"):
        resolve("vllm:nonsense")
    monkeypatch.setenv("REFCACHE_PEER_LMCACHE", str(tmp_path))
    with pytest.raises(MissingExtra, match="REFCACHE_PEER_LMCACHE"):
        sources.module("lmcache", "utils")


def test_sequences_of_nano_vllm() -> None:
    result = run_suite("sequences.state", resolve(present("nanovllm:blocks")), max_examples=30)
    assert result.verdict == "ok", result.failure and result.failure.text


def test_a_bug_planted_into_nano_vllm_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A free that ignores the count: what two sequences share is taken by a third."""
    target = resolve(present("nanovllm:blocks"))
    found = sources.module("nanovllm", "engine.block_manager").BlockManager
    original = found.deallocate

    def deallocate(self: Any, seq: Any) -> None:
        for block in seq.block_table:
            self.blocks[block].ref_count = 1
        original(self, seq)

    monkeypatch.setattr(found, "deallocate", deallocate)
    failure = run_suite("sequences.state", target, shrink=False).failure
    assert failure is not None
