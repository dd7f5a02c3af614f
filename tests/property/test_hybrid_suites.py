"""Suites of states and of windows: silent on the reference, the planted bugs seen, explanations."""

import pytest
import torch

from refcache.oracle import MambaDriver, SWADriver, Violation, resolve
from refcache.oracle.ledger.states import StateBytes
from refcache.planted import all_bugs, find
from refcache.testing import hunt, run_suite

BUGS = [bug for bug in all_bugs() if bug.suite.split(".")[0] in ("mamba", "swa")]
SUITES = [f"{part}.{kind}" for part in ("mamba", "swa") for kind in ("state", "misuse", "exact")]
OFTEN = {
    "all-tokens-cached-with-a-tracked-state",
    "copied-state-is-zero",
    "held-windows-evicted",
    "leaf-without-windows",
    "row-kept-without-a-state",
    "state-moves-up-at-a-split",
    "unlock-takes-any-uuid",
}


@pytest.mark.parametrize("suite", SUITES)
def test_silence(suite):
    result = run_suite(suite, resolve("refcache"), max_examples=20, seed=1)
    assert result.verdict == "ok", result.failure and result.failure.text
    assert result.steps > 5 * result.cases > 0


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("suite", SUITES)
def test_silence_for_long(suite, seed):
    result = run_suite(suite, resolve("refcache"), max_examples=1000, seed=seed)
    assert result.verdict == "ok", result.failure and result.failure.text


@pytest.mark.parametrize(
    "bug",
    [pytest.param(b, marks=() if b.name in OFTEN else pytest.mark.nightly) for b in BUGS],
    ids=lambda bug: bug.name,
)
def test_a_planted_bug_is_caught(bug):
    caught = hunt(bug)
    assert caught.counts, caught.failure and caught.failure.text


def test_there_are_enough_bugs_and_most_model_a_report():
    assert {bug.name for bug in BUGS} >= OFTEN
    assert len(BUGS) >= 20
    assert sum(bug.report != "slip" for bug in BUGS) > len(BUGS) / 2


def test_a_state_says_whose_it_is():
    states = StateBytes([torch.zeros(2, 5, 2, dtype=torch.int64) for _ in range(2)])
    of_three, of_five = (None, (1, 2, 3)), (None, (1, 2, 3, 4, 5))
    states.write(2, of_three)
    assert states.differs(2, of_three) == ""
    said = "slot 2 holds the state of 3 tokens [1, 2, 3] in layer 0, tensor 0"
    assert states.differs(2, of_five) == said
    assert "[1, 2, 3] in 'a'" in states.differs(states_in(states, 3, "a"), of_three)
    assert states.differs(4, of_three) == "slot 4 holds zeros in layer 0, tensor 0"
    assert states.differs(4, (None, ())) == ""
    states.planes[1][1, 2, 1] += 1
    said = "slot 2 holds nobody's state in layer 1, tensor 1"
    assert states.differs(2, of_three) == said


def states_in(states, slot, space):
    """``slot``, with the state of ``[1, 2, 3]`` in a namespace."""
    states.write(slot, (space, (1, 2, 3)))
    return slot


def test_a_flipped_state_element_is_explained():
    d = MambaDriver(resolve("refcache"), size=16, states=6)
    d.insert((1, 2, 3))
    d.insert((1, 2, 3, 4, 5))
    (slot,) = [s for p, s in d.bench.states.cached.items() if len(p[1]) == 5]
    d.bench.bytes.write(slot, (None, (1, 2, 3)))
    with pytest.raises(Violation, match=r"MB6: beside KV of 5 tokens .* the state of 3 tokens"):
        d.match((1, 2))


def test_a_state_in_another_place_is_named():
    with find("all-tokens-cached-with-a-tracked-state").active():
        d = MambaDriver(resolve("refcache"), size=32, states=8, extra_buffer=True, chunk=4)
        d.admit((1, 2, 3, 4, 1, 2))
        with pytest.raises(Violation):
            d.cache(0)


@pytest.mark.parametrize("page_size", [1, 2])
def test_a_window_that_is_gone_ends_a_match(page_size):
    d = SWADriver(resolve("refcache"), page_size=page_size, size=32, window=2)
    tokens = (1, 2, 1, 1, 2, 2, 1, 2)
    d.insert(tokens[:4])
    d.insert(tokens)
    d.evict_windows(4)
    found = d.bench.match(tokens[:4], None)
    assert len(found.device_indices) == 0
    assert len(d.bench.match(tokens, None).device_indices) == 8
    d.wind_down()
