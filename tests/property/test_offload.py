"""Contract ``offload``: silent on the reference and the naive manager, and what it must see."""

import re
import sys
from pathlib import Path

import pytest

from refcache.errors import InvalidArgument
from refcache.oracle import OffloadDriver, OffloadTraits, Violation, resolve
from refcache.oracle.target.naive import NaiveTarget
from refcache.oracle.target.offload.naive import NaiveOffload
from refcache.planted import all_bugs
from refcache.testing import hunt, run_suite

PAGE = (Path(__file__).parents[2] / "docs" / "offload.md").read_text(encoding="utf-8")
BUGS = [bug for bug in all_bugs() if bug.suite == "offload.state"]


@pytest.mark.parametrize(("target", "seed"), [("refcache", 1), ("naive", 2)])
def test_silence(target, seed):
    result = run_suite("offload.state", resolve(target), max_examples=30, seed=seed)
    assert result.verdict == "ok", result.failure and result.failure.text
    assert result.steps > 5 * result.cases > 0


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("target", ["refcache", "naive"])
def test_silence_for_long(target, seed):
    result = run_suite("offload.state", resolve(target), max_examples=2000, seed=seed)
    assert result.verdict == "ok", result.failure and result.failure.text


@pytest.mark.parametrize(
    "bug",
    [pytest.param(b, marks=() if i % 2 else pytest.mark.nightly) for i, b in enumerate(BUGS)],
    ids=lambda b: b.name,
)
def test_a_planted_bug_is_caught(bug):
    caught = hunt(bug)
    assert caught.counts, caught.failure and caught.failure.text


def test_there_are_enough_bugs_and_most_model_a_report():
    assert len(BUGS) >= 8
    assert sum(bug.report != "slip" for bug in BUGS) > len(BUGS) / 2


def test_the_example_of_the_page_is_judged(tmp_path, monkeypatch):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "managed.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "managed", raising=False)
    assert run_suite("offload.state", resolve("managed:MyTarget")).verdict == "ok"
    spoiled = example.replace("self.readers[key] -= 1", "self.readers[key] = 0")
    (tmp_path / "spoiled.py").write_text(spoiled)
    result = run_suite("offload.state", resolve("spoiled:MyTarget"))
    assert result.failure is not None
    assert result.failure.rule == "OF3"


def test_a_failure_is_a_short_program():
    (bug,) = (b for b in BUGS if b.name == "first-reader-unpins")
    failure = hunt(bug, shrink=True).failure
    assert failure is not None
    assert len(failure.steps) <= 10
    with bug.active(), pytest.raises(Violation, match="OF3"):
        exec("\n".join(step for step in failure.steps if "plant" not in step), {})


class OneByOne(NaiveOffload):
    """Evicts key by key: of a store without room for all it may have let blocks go."""

    def prepare_store(self, keys):
        answer = {}
        for key in keys:
            one = super().prepare_store([key])
            if one is None:
                return None
            answer |= one
        return answer


class OneByOneTarget(NaiveTarget):
    def offload(self, config):
        return OneByOne(config)


class SaysSo(OneByOneTarget):
    offload_traits = OffloadTraits(batch=1)


def test_a_manager_that_cannot_take_back_half_a_store_says_so():
    failure = run_suite("offload.state", OneByOneTarget(), shrink=False).failure
    assert failure is not None
    assert failure.rule in {"OF4", "OF5", "OF6"}
    assert run_suite("offload.state", SaysSo()).verdict == "ok"


class Claims(NaiveTarget):
    offload_traits = OffloadTraits(uses=frozenset({"load"}))


def test_an_order_of_eviction_that_is_claimed_is_held_to():
    failure = run_suite("offload.state", Claims(), shrink=False).failure
    assert failure is not None
    assert failure.rule == "OF8"


@pytest.mark.parametrize("given", [{"batch": 0}, {"uses": frozenset({"read"})}, {"token_bytes": 0}])
def test_traits_that_make_no_sense_are_refused(given):
    with pytest.raises(InvalidArgument, match=f"{next(iter(given))}="):
        OffloadTraits(**given)


def test_a_program_by_hand():
    d = OffloadDriver(resolve("naive"), page_size=1, size=2)
    d.store((0, 1))
    d.stored(0, True, 1)
    d.load((0, 1))
    d.stored(0, False)
    d.fill()
    d.loaded(0)
    d.wind_down()
    assert sorted(d.bench.stored) == [1025, 1026]
