"""The overlap loop on the simulated machine: right in every order that was drawn, free of races.

The controls take one ordering edge away and must be reported: a check that cannot fail is none.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refcache.engine import ModelConfig, SamplingParams, Scheduler, TokenizedGenerateReqInput
from refcache.runtime import RaceFound, SimulatedRuntime, Tracker, drawn, eager, lazy
from refcache.tags import greedy
from refcache.types import ServerArgs

VOCAB = 3


def make(driver, page=2, size=36, chunk=4):
    args = ServerArgs(
        page_size=page,
        max_total_tokens=size,
        max_running_requests=3,
        context_length=48,
        chunked_prefill_size=chunk,
    )
    machine = SimulatedRuntime(driver, Tracker())
    return Scheduler(args, ModelConfig(num_hidden_layers=2, vocab_size=VOCAB), runtime=machine)


def serve(scheduler, prompts, outputs=5, retract_at=()):
    for i, tokens in enumerate(prompts):
        scheduler.submit(TokenizedGenerateReqInput(f"r{i}", tokens, SamplingParams(outputs)))
    for step in range(300):
        if scheduler.is_idle():
            break
        if step in retract_at:
            scheduler.force_retraction()
        scheduler.step()
    scheduler.runtime.synchronize()
    assert scheduler.is_idle()
    for i, tokens in enumerate(prompts):
        done = next(r for r in scheduler.finished_reqs if r.rid == f"r{i}")
        assert list(done.output_ids) == greedy(tokens, outputs, VOCAB)


PROMPTS = [[0, 1, 2, 0, 1, 2, 0], [0, 1, 2, 0, 1, 2, 0], [1, 1, 1], [0, 1, 2, 0, 2, 2, 2, 2, 2]]


@pytest.mark.parametrize("driver", [eager, lazy])
@pytest.mark.parametrize("page", [1, 2, 4])
def test_eager_and_lazy(driver, page):
    serve(make(driver, page, chunk=4), PROMPTS, retract_at=(6, 9))


@settings(max_examples=25, deadline=None)
@given(
    choices=st.lists(st.integers(0, 5), max_size=300),
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=5),
    retract_at=st.sets(st.integers(0, 20), max_size=3),
    page=st.sampled_from([1, 2, 4]),
)
def test_any_order(choices, prompts, retract_at, page):
    serve(make(drawn(choices), page), prompts, retract_at=retract_at)


def without(scheduler, edge):
    """Take one ordering edge out of the loop."""
    if edge == "forward waits for schedule":
        scheduler.forward_stream.wait_stream = lambda other: None
    elif edge == "host waits for the copy":
        inner = scheduler.process_batch_result

        def without_waiting(batch, result):
            result.copy_done = Silent()
            inner(batch, result)

        scheduler.process_batch_result = without_waiting
    elif edge == "rows wait for the page table":
        scheduler.schedule_stream.wait_event = lambda event: None


class Silent:
    """An event that orders nothing."""

    def synchronize(self): ...


@pytest.mark.parametrize("driver", [eager, lazy])
@pytest.mark.parametrize(
    "edge",
    [
        "forward waits for schedule",
        "host waits for the copy",
        "rows wait for the page table",
    ],
)
def test_each_edge_is_needed(edge, driver):
    scheduler = make(driver)
    without(scheduler, edge)
    with pytest.raises(RaceFound):
        serve(scheduler, PROMPTS)
