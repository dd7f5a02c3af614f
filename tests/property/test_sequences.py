"""Contract ``sequences``: silent on the reference and the naive cache, and what it must see."""

import re
import sys
from pathlib import Path

import pytest

from refcache.errors import InvalidArgument
from refcache.oracle import SequencesDriver, Traits, Violation, resolve
from refcache.oracle.target.naive import NaiveTarget
from refcache.planted import all_bugs, find
from refcache.testing import hunt, run_suite

PAGE = (Path(__file__).parents[2] / "docs" / "own_cache.md").read_text(encoding="utf-8")
BUGS = [bug for bug in all_bugs() if bug.suite == "sequences.state"]


@pytest.mark.parametrize(("target", "seed"), [("refcache", 1), ("naive", 2)])
def test_silence(target, seed):
    result = run_suite("sequences.state", resolve(target), max_examples=20, seed=seed)
    assert result.verdict == "ok", result.failure and result.failure.text
    assert result.steps > 5 * result.cases > 0


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("target", ["refcache", "naive"])
def test_silence_for_long(target, seed):
    result = run_suite("sequences.state", resolve(target), max_examples=1000, seed=seed)
    assert result.verdict == "ok", result.failure and result.failure.text


@pytest.mark.parametrize(
    "bug",
    [pytest.param(b, marks=() if i % 3 else pytest.mark.nightly) for i, b in enumerate(BUGS)],
    ids=lambda b: b.name,
)
def test_a_planted_bug_is_caught(bug):
    caught = hunt(bug)
    assert caught.counts, caught.failure and caught.failure.text


def test_there_are_enough_bugs_and_most_model_a_report():
    assert len(BUGS) >= 12
    assert sum(bug.report != "slip" for bug in BUGS) > len(BUGS) / 2


def page_target(name, folder, monkeypatch, change=("", "")):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (folder / f"{name}.py").write_text(example.replace(*change))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return resolve(f"{name}:MyTarget")


def test_the_example_of_the_page_is_judged(tmp_path, monkeypatch):
    target = page_target("blocks_of_page", tmp_path, monkeypatch)
    result = run_suite("sequences.state", target, max_examples=30)
    assert result.verdict == "ok", result.failure and result.failure.text


def test_the_failure_of_the_page(tmp_path, monkeypatch):
    change = ("if not self.users[page]:", "if True:")
    target = page_target("blocks_spoiled", tmp_path, monkeypatch, change)
    failure = run_suite("sequences.state", target).failure
    assert failure is not None
    assert failure.rule.startswith("SQ")
    assert len(failure.steps) <= 10


def test_a_failure_is_a_short_program():
    bug = find("shared-page-written")
    failure = hunt(bug, shrink=True).failure
    assert failure is not None
    assert len(failure.steps) <= 9
    with bug.active(), pytest.raises(Violation, match="SQ2"):
        exec("\n".join(step for step in failure.steps if "plant" not in step), {})


class OnlyOnes(NaiveTarget):
    def sequences(self, config):
        if config.page_size > 1:
            raise NotImplementedError("pages of one token only")
        return super().sequences(config)


class NotYet(NaiveTarget):
    def sequences(self, config):
        raise NotImplementedError("not yet")


def test_a_configuration_that_is_not_offered_is_passed_over():
    assert run_suite("sequences.state", OnlyOnes(), max_examples=30).verdict == "ok"
    result = run_suite("sequences.state", NotYet(), max_examples=30)
    assert (result.verdict, result.reason) == ("skipped", "not yet")


class SaysComputed(NaiveTarget):
    traits = Traits(caches_when="computed")


def test_a_trait_that_is_claimed_is_held_to():
    failure = run_suite("sequences.state", SaysComputed(), shrink=False).failure
    assert failure is not None
    assert failure.rule == "SQ6"


@pytest.mark.parametrize(
    "given",
    [{"page_sizes": ()}, {"caches_when": "never"}, {"slot_dtype": "int8"}, {"windows": (0,)}],
)
def test_traits_that_make_no_sense_are_refused(given):
    with pytest.raises(InvalidArgument, match=f"{next(iter(given))}="):
        Traits(**given)


@pytest.mark.parametrize("host_size", [0, 20])
def test_a_program_by_hand(host_size):
    d = SequencesDriver(resolve("refcache"), page_size=1, size=4, host_size=host_size)
    d.start((0, 1, 2))
    d.run(0)
    d.finish(0)
    d.start((3, 3, 3, 3))
    d.run(0)
    d.finish(0)
    d.start((0, 1, 1))
    assert d.running[0].computed == (2 if host_size else 0)
    d.wind_down()
