"""The loop's driver reaches every part of the serving loop."""

import pytest

from refcache.oracle import LoopDriver, resolve


@pytest.mark.parametrize("overlap", [False, True])
def test_the_driver_reaches_every_part_of_the_loop(overlap: bool) -> None:
    """Chunks, hits, retraction, eviction, abort: what the suite is meant to meet does happen."""
    d = LoopDriver(resolve("refcache"), page_size=2, size=24, overlap=overlap, chunk_pages=2)
    prompt = (0, 1) * 5
    d.submit(prompt, 4)
    d.run(8)
    d.submit(prompt, 6)
    d.submit((0, 1, 0, 1, 2, 2), 6)
    d.run(5)
    d.retract()
    d.run(2)
    d.submit((2,) * 12, 2)
    d.run(3)
    d.abort(0)
    d.wind_down()
    scheduler = d.scheduler
    assert [req.rid for req in scheduler.finished_reqs if req.cached_tokens]
    assert scheduler.num_retracted_reqs >= 1
    assert {type(req.finished_reason).__name__ for req in scheduler.finished_reqs} == {
        "FINISH_LENGTH",
        "FINISH_ABORT",
    }
    assert scheduler.model_runner.check.rows_checked > 100
