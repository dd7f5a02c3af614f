"""Contract ``storage``: silent on what is right, and what it must see; releases, by name."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from refcache.errors import InvalidArgument, MissingExtra
from refcache.oracle import BackendDriver, CrashDriver, DamageDriver, Violation, resolve
from refcache.oracle.drivers.backend.bench import key_of
from refcache.peers import unpacked
from refcache.planted import all_bugs
from refcache.storage import HiCacheMemory
from refcache.testing import hunt, run_suite

SUITES = ("storage.backend", "storage.damage", "storage.crash")
DRIVERS = {d.__name__: d for d in (BackendDriver, CrashDriver, DamageDriver)}
BUGS = [bug for bug in all_bugs() if bug.suite in SUITES]


@pytest.mark.parametrize("suite", SUITES)
def test_silence(suite):
    result = run_suite(suite, resolve("refcache"), max_examples=30, seed=1)
    assert result.verdict == "ok", result.failure and result.failure.text
    assert result.steps > result.cases > 0


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("suite", SUITES)
def test_silence_for_long(suite, seed):
    result = run_suite(suite, resolve("storage:file"), max_examples=1000, seed=seed)
    assert result.verdict == "ok", result.failure and result.failure.text


def test_a_store_in_memory_is_right_and_does_not_last():
    assert run_suite("storage.backend", resolve("storage:memory"), max_examples=20).verdict == "ok"
    assert run_suite("storage.crash", resolve("storage:memory")).verdict == "skipped"


@pytest.mark.parametrize(
    "bug",
    [pytest.param(b, marks=() if i % 3 == 0 else pytest.mark.nightly) for i, b in enumerate(BUGS)],
    ids=lambda b: b.name,
)
def test_a_planted_bug_is_caught(bug):
    caught = hunt(bug)
    assert caught.counts, caught.failure and caught.failure.text


def test_every_image_of_a_put_an_eviction_and_a_clear_is_read_back():
    """Drawn sizes vary; here the number of images is known not to be small by accident."""
    d = CrashDriver(resolve("refcache"), max_pages=3)
    seen = [0]
    for name, args in [("put", (0, 1)), ("put", (2, 3)), ("killed", ((4, 5), 5)), ("clear", None)]:
        getattr(d, name)(*(args if name == "killed" else () if args is None else (args,)))
        seen.append(len(d.bench.seen))
    d.wind_down()
    puts, evictions, kills, clears = (b - a for a, b in itertools.pairwise(seen))
    assert puts > 20
    assert evictions > 20
    assert kills > 10
    assert clears > 0


@pytest.mark.parametrize(
    ("name", "rule"),
    [("file-not-synced", "SB7"), ("directory-not-synced", "SB7"), ("renamed-before-synced", "SB7")],
)
def test_an_acknowledged_page_is_lost_without(name, rule):
    """The three that a crash needs; a torn file that is left over is seen first."""
    (bug,) = (bug for bug in BUGS if bug.name == name)
    with bug.active():
        d = CrashDriver(resolve("refcache"))
        with pytest.raises(Violation) as seen:
            d.put((0, 1))
    assert seen.value.id in {rule, "SB8"}


class Raw(HiCacheMemory):
    """Made as SGLang's are: with a configuration and a directory. Raw bytes in a file a key."""

    def __init__(self, storage_config, path):
        super().__init__()
        self.path, self.rank = path, f"{storage_config.model_name}{storage_config.tp_rank}"

    def name(self, key):
        return os.path.join(self.path, key + self.rank.replace("/", "-"))

    def get(self, key, target_location=None, target_sizes=None):
        if not self.exists(key) or not os.path.getsize(self.name(key)):
            return None
        data = torch.frombuffer(bytearray(Path(self.name(key)).read_bytes()), dtype=torch.uint8)
        if target_location is None:
            return data
        return target_location.copy_(data) if data.shape == target_location.shape else None

    def set(self, key, value=None, target_location=None, target_sizes=None):
        if not self.exists(key):
            Path(self.name(key)).write_bytes(bytes(value.tolist()))
        return True

    def exists(self, key):
        return os.path.exists(self.name(key))

    def clear(self):
        for name in os.listdir(self.path):
            if name.endswith(self.rank.replace("/", "-")):
                os.remove(os.path.join(self.path, name))


def test_any_backend_is_judged_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "raw_backend", sys.modules[__name__])
    target = resolve("storage:raw_backend:Raw")
    assert run_suite("storage.backend", target, max_examples=20).verdict == "ok"
    crash = run_suite("storage.crash", target, max_examples=100)
    assert crash.failure is not None
    assert crash.failure.rule in {"SB1", "SB7", "SB8"}
    assert len(crash.failure.steps) <= 4
    damage = run_suite("storage.damage", target, max_examples=60)
    assert damage.failure is not None
    assert damage.failure.rule in {"SB1", "SB10"}


@pytest.mark.parametrize("name", ["", "nothing", "no.module:Class", "os:getcwd"])
def test_what_names_no_backend_is_refused(name):
    with pytest.raises(InvalidArgument, match="storage:"):
        resolve(f"storage:{name}")


def test_a_release_that_is_not_unpacked_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("REFCACHE_PEERS", str(tmp_path))
    with pytest.raises(MissingExtra, match="make peers"):
        resolve("storage:sglang-0.5.10")


def test_a_program_by_hand():
    d = BackendDriver(resolve("storage:file"), page_size=2)
    d.write_v2(0, (0, 1, 2), (1,))
    d.hits_v2(0, (0, 1, 2), 1)
    d.hits_v2(0, (0, 1, 2))
    d.read_v1(0, (2, 5))
    d.get(1, 0)
    assert d.bench.backend(0).exists(key_of(0))
    d.wind_down()


JUDGE = """
import json, sys
from refcache.oracle import BackendDriver, CrashDriver, DamageDriver, Violation, resolve
from refcache.oracle.rules.violation import without_rules
target, answers = resolve(sys.argv[1]), []
for driver, off, steps in json.loads(sys.argv[2]):
    with without_rules(*off):
        d = globals()[driver](target)
        answers.append("ok")
        try:
            for name, *args in steps:
                getattr(d, name)(*args)
        except Violation as violation:
            answers[-1] = violation.id
print(json.dumps(answers))
"""
SAID = {
    "clear removes a file of somebody else": (
        ("BackendDriver", [], [["clear", 0]]),
        {"0.5.10": "SB9", "0.5.23": "SB9"},
    ),
    "clear removes another rank's page": (
        ("BackendDriver", ["SB9"], [["set", 1, 0], ["clear", 0]]),
        {"0.5.10": "SB5", "0.5.23": "SB5"},
    ),
    "a target with gaps is answered as filled": (
        ("BackendDriver", [], [["set", 0, 0], ["get", 0, 0, "gaps"]]),
        {"0.5.10": "SB1", "0.5.23": "SB1"},
    ),
    "a larger target raises": (
        ("BackendDriver", [], [["set", 0, 0], ["get", 0, 0, "longer"]]),
        {"0.5.10": "crash", "0.5.23": "crash"},
    ),
    "a smaller target is filled": (
        ("BackendDriver", [], [["set", 0, 0], ["get", 0, 0, "shorter"]]),
        {"0.5.10": "SB1", "0.5.23": "SB1"},
    ),
    "a page of another layout is served": (
        ("DamageDriver", [], [["set", 0, 0], ["get", 3, 0]]),
        {"0.5.10": "SB10", "0.5.23": "SB10"},
    ),
    "a short file raises": (
        ("DamageDriver", [], [["set", 0, 0], ["cut", 0, 5], ["get", 0, 0]]),
        {"0.5.10": "crash", "0.5.23": "crash"},
    ),
    "a flipped bit is served": (
        ("DamageDriver", [], [["set", 0, 0], ["flip", 0, -1], ["get", 0, 0]]),
        {"0.5.10": "SB1", "0.5.23": "SB1"},
    ),
    "after a crash a read raises": (
        ("CrashDriver", ["SB8"], [["put", [0]]]),
        {"0.5.10": "crash", "0.5.23": "crash"},
    ),
    "after a crash zeros are served": (
        ("CrashDriver", ["SB8", "crash"], [["put", [0]]]),
        {"0.5.10": "SB1", "0.5.23": "SB1"},
    ),
    "after a crash an acknowledged page is lost": (
        ("CrashDriver", ["SB8", "crash", "SB1"], [["put", [0]]]),
        {"0.5.10": "SB7", "0.5.23": "SB7"},
    ),
    "a killed writer's temporary file stays": (
        ("CrashDriver", ["crash", "SB1"], [["killed", [0], 1]]),
        {"0.5.10": "ok", "0.5.23": "SB8"},
    ),
}


@pytest.mark.parametrize("version", [pytest.param("0.5.10", marks=pytest.mark.nightly), "0.5.23"])
def test_what_the_harness_says_of_a_release(version):
    """One short program for each finding; the page on storage backends has the table."""
    if version not in unpacked():
        pytest.skip(f"sglang {version} is not unpacked: make peers")
    programs = json.dumps([program for program, _ in SAID.values()])
    command = [sys.executable, "-c", JUDGE, f"storage:sglang-{version}", programs]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answers = dict(zip(SAID, json.loads(done.stdout.splitlines()[-1]), strict=True))
    assert answers == {name: rules[version] for name, (_, rules) in SAID.items()}


@pytest.mark.parametrize("program", [program for program, _ in SAID.values()], ids=list(SAID))
def test_refcache_passes_what_a_release_does_not(program):
    driver, _, steps = program
    d = DRIVERS[driver](resolve("refcache"))
    for name, *args in steps:
        getattr(d, name)(*args)
    d.wind_down()
