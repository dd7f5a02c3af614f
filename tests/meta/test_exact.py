"""Exact profiles see a changed choice, and only that; SGLang 0.5.10 itself chooses as we say."""

import pytest

from refcache.errors import UnknownName
from refcache.oracle import AllocatorDriver, NaiveTarget, TreeDriver, Violation, resolve
from refcache.peers.releases import unpacked
from refcache.planted import find
from refcache.testing import run_suite


class Exact(NaiveTarget):
    """Says that it decides as the reference does; it hands out the highest page first."""

    capabilities = NaiveTarget.capabilities | {"exact"}


@pytest.mark.parametrize("suite", ["allocator.exact", "tree.exact"])
def test_another_choice_is_a_difference(suite: str) -> None:
    result = run_suite(suite, Exact(), max_examples=10)
    assert result.failure is not None
    assert result.failure.rule == "DIFF"
    assert "the reference has" in result.failure.evidence
    assert "profile='sglang-0.5.10'" in result.failure.text


def test_a_planted_policy_breaks_no_rule_but_the_difference_sees_it() -> None:
    """Least recently used without the use: everything is in order, the wrong prefix is gone."""

    def evicts(profile: str | None) -> TreeDriver:
        d = TreeDriver(resolve("refcache"), size=4, profile=profile)
        d.insert((0,))
        d.insert((1,))
        d.match((0,))
        d.evict(1)
        d.wind_down()
        return d

    assert evicts("sglang-0.5.10").found is None
    with find("match-refreshes-nothing").active():
        assert evicts(None).found is None
        with pytest.raises(Violation, match="DIFF: page cached for") as seen:
            evicts("sglang-0.5.10")
    assert seen.value.call == "d.evict(1)"


def test_unknown_profiles_are_refused() -> None:
    with pytest.raises(UnknownName, match="unknown profile 'vllm'"):
        AllocatorDriver(resolve("refcache"), profile="vllm")


def test_sglang_0_5_10_makes_the_choices_of_its_profile() -> None:
    if "0.5.10" not in unpacked():
        pytest.skip("sglang 0.5.10 is not unpacked: make peers")
    target = resolve("sglang:0.5.10+exact")
    result = run_suite("tree.exact", target, max_examples=20)
    assert result.verdict == "ok", result.failure.text if result.failure else result.reason
