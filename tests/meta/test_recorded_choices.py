"""The reference chooses what SGLang 0.5.10's own code chose, without the release at hand."""

from typing import Any

import pytest

from recorded import RELEASE, Program, programs, read, record
from refcache.oracle import resolve
from refcache.peers.releases import unpacked
from refcache.types import EVICTION_POLICIES

RECORDED = read()
NAMES = [
    f"{p.driver}-{p.config.get('eviction_policy', '')}{p.config['page_size']}" for p in RECORDED
]


@pytest.mark.parametrize("program", RECORDED, ids=NAMES)
def test_the_reference_chooses_what_the_release_chose(program: Program) -> None:
    steps = zip(program.calls, program.played(resolve("refcache")), program.recorded(), strict=True)
    for number, (call, chosen, expected) in enumerate(steps):
        assert chosen == expected, f"step {number}: {call}"


def test_programs_are_long_enough_to_choose() -> None:
    """The drawn ones make nine choices and more; one of six steps was written for one choice."""
    made = sorted(sum(map(bool, p.changes)) for p in RECORDED)
    assert made[0] == 6
    assert made[1] >= 8


def differs(program: Program, **config: Any) -> bool:
    changed = program._replace(config=program.config | config)
    return [*changed.played(resolve("refcache"))] != [*program.recorded()]


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_another_strategy_is_seen(policy: str) -> None:
    """Where the exact suites see nothing: the reference always chooses as it does itself."""
    mine = [p for p in RECORDED if p.config.get("eviction_policy") == policy]
    other = EVICTION_POLICIES[EVICTION_POLICIES.index(policy) - 1]
    assert any(differs(program, eviction_policy=other) for program in mine)


def test_another_order_of_free_pages_is_seen() -> None:
    assert all(differs(p, need_sort=True) for p in RECORDED if p.driver == "allocator")


def test_the_release_still_chooses_so() -> None:
    if "0.5.10" not in unpacked():
        pytest.skip("sglang 0.5.10 is not unpacked: make peers")
    release = resolve(RELEASE)
    assert [record(program, release) for program in programs()] == RECORDED
