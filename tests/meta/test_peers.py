"""Published releases as targets: what stands in, what is real, and that known bugs are seen.

Each release is imported in a process of its own; without its wheel unpacked the test is skipped.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from refcache.errors import InvalidArgument, MissingExtra
from refcache.oracle import resolve
from refcache.peers import VERSIONS, releases
from refcache.peers.track_record import CASES, page, reproduce

ROOT = Path(__file__).parents[2]

INSPECT = """
import json, sys
from refcache.oracle import resolve
from refcache.peers import standins
resolve("sglang:" + sys.argv[1])
trial = {n: m for n, m in sys.modules.items() if standins.is_on_trial(n)}
print(json.dumps({
    "replaced": standins.replaced(),
    "trial": sorted(trial),
    "files": [m.__file__ or list(m.__path__)[0] for m in trial.values()],
    "foreign": {n: standins.foreign_names(m) for n, m in trial.items()},
}))
"""


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    if found not in releases.unpacked():
        pytest.skip(f"sglang {found} is not unpacked: make peers")
    return found


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "aliases")])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )


def test_no_module_on_trial_is_replaced(version: str) -> None:
    ran = python("-c", INSPECT, version)
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout.splitlines()[-1])
    assert not set(seen["replaced"]) & set(seen["trial"])
    assert "sglang.srt.mem_cache.radix_cache" in seen["trial"]
    assert "sglang.srt.managers.cache_controller" in seen["trial"]
    unpacked = str(releases.folder(version).resolve())
    assert all(file.startswith(unpacked) for file in seen["files"])


def test_what_the_cache_itself_takes_from_stand_ins() -> None:
    if "0.5.10" not in releases.unpacked():
        pytest.skip("sglang 0.5.10 is not unpacked: make peers")
    foreign = json.loads(python("-c", INSPECT, "0.5.10").stdout.splitlines()[-1])["foreign"]
    judged = {
        name.removeprefix("sglang.srt."): names
        for name, names in foreign.items()
        if name.endswith((".radix_cache", ".hiradix_cache", ".allocator", ".cache_controller"))
    }
    assert judged.pop("managers.cache_controller") == [
        "get_attention_dp_rank",  # asked only when storage is attached
        "get_attention_tp_rank",
        "get_attention_tp_size",
        "is_dp_attention_enabled",
    ]
    assert not any(judged.values()), judged


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, str]]:
    if "0.5.10" not in releases.unpacked():
        pytest.skip("sglang 0.5.10 is not unpacked: make peers")
    ran = python("-m", "refcache.peers.track_record", "all", "sglang:0.5.10")
    assert ran.returncode == 0, ran.stderr
    seen: dict[str, dict[str, str]] = json.loads(ran.stdout.splitlines()[-1])
    return seen


@pytest.mark.parametrize("bug", list(CASES))
def test_known_bugs_are_seen(bug: str, outcomes: dict[str, dict[str, str]]) -> None:
    assert outcomes[bug]["rule"]


@pytest.mark.nightly
def test_the_track_record_is_what_the_programs_give() -> None:
    if releases.unpacked() != list(VERSIONS):
        pytest.skip("a release is not unpacked: make peers")
    assert page() == (ROOT / "docs" / "track_record.md").read_text()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sglang:9.9", "expected sglang"),
        ("sglang:0.5.10+nonsense", "VARIANT one of"),
        ("sglang:0.5.10+rust", "has no Rust core"),
    ],
)
def test_names_are_checked(spec: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        resolve(spec)


def test_a_release_that_is_not_there_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REFCACHE_PEERS", str(tmp_path))
    with pytest.raises(MissingExtra, match="make peers"):
        resolve("sglang:0.5.10")


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "unpacked", lambda: list(VERSIONS))
    monkeypatch.setattr(releases, "find_spec", {"triton": True}.get)
    with pytest.raises(MissingExtra, match="needs numpy, not installed"):
        resolve("sglang:0.5.10")


SEQUENCES = 10_000
PARTS = 10


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("policy", ["write_through", "write_through_selective"])
def test_the_state_suite_is_silent_on_correct_code(policy: str, part: int) -> None:
    """Write-through on 0.5.10 has no known bug that the state suite is for: no alarm in 10,000
    random sequences."""
    if "0.5.10" not in releases.unpacked():
        pytest.skip("sglang 0.5.10 is not unpacked: make peers")
    size = ["--examples", str(SEQUENCES // PARTS // 2), "--seed", str(1000 + part)]
    row = ["rows", "sglang:0.5.10", "hicache.state", "--policy", policy, "--explain"]
    ran = python(str(ROOT / "scripts" / "peers.py"), *row, *size)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split()[3] == "ok", ran.stdout


CORES = """
import sys
from refcache.oracle import HiCacheDriver, Violation, resolve
from refcache.peers.unified.target import cores
target = resolve("sglang:0.5.23+rust")
d = HiCacheDriver(target, size=16, host_size=40)
core = d.tree.tree_core
assert type(core.leader).__name__ == "RustUnifiedTreeCore", core.leader
assert type(core.shown).__name__ == "UnifiedTreeCore", core.shown
d.admit((1, 2, 3, 4)); d.finish(0); d.settle(); d.evict(4); d.readmit(0, 5); d.settle()
if sys.argv[1] == "differ":
    evictable = type(core.shown).evictable_size
    type(core.shown).evictable_size = lambda self: evictable(self) + 1
try:
    d.match((1, 2, 9))
    print("same")
except Violation as violation:
    print(violation.id, violation.evidence)
"""


DIGESTS = """
import sys
from refcache.oracle import HiCacheDriver, Violation, resolve
target = resolve("sglang:0.5.23+rust")
d = HiCacheDriver(target, size=13, host_size=14, write_policy="write_back")
if sys.argv[1] == "differ":
    frozen = property(lambda self: 0, lambda self, value: None)
    type(d.tree.tree_core.shown).write_back_duplicate_reclaim_digest = frozen
try:
    d.admit((0, 1, 0, 1, 0, 1, 0)); d.finish(0)
    d.insert((0, 0, 1, 2, 0, 0, 1, 2, 0, 0, 1, 1, 2))
    d.admit((2, 1, 2, 1, 1, 1, 0, 0, 1, 2, 2, 2, 1, 2, 1), "a"); d.settle()
    print("same")
except Violation as violation:
    print(violation.id, violation.evidence)
"""


@pytest.mark.parametrize("program", [CORES, DIGESTS])
@pytest.mark.parametrize(("what", "expected"), [("same", "same"), ("differ", "DIFF")])
def test_the_rust_core_leads_and_the_python_core_is_compared(
    program: str, what: str, expected: str
) -> None:
    if "0.5.23" not in releases.unpacked():
        pytest.skip("sglang 0.5.23 is not unpacked: make peers")
    ran = python("-c", program, what)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(expected), ran.stdout


def test_an_unknown_bug_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="expected one of"):
        reproduce("B00", "sglang:0.5.10")
