"""Replays of the public conversation trace, each with its target: time and peak memory.

Every replay checks itself while it runs (see ``refcache.replay.loop``), so a time is printed only
for a run without a violation. Each runs in a process of its own, on one core, or its peak memory
would be that of the largest before it.
"""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from refcache.readers import read_requests
from refcache.replay.config import ReplayConfig
from refcache.replay.loop import replay

GB = 1 << 30

RUNS = {
    "whole trace, sampled": ({}, 60, 4),
    "first 500 requests, every check": ({"limit": 500, "check": "every"}, 60, 4),
    "serial, unlimited, page 64": (
        {"device_tokens": None, "serial": True, "no_decode": True},
        60,
        4,
    ),
}
HITS = {"serial, unlimited, page 64": 54_093_952}


def trace_path() -> Path:
    default = Path(__file__).parents[2] / "shared" / "traces" / "conversation_trace.jsonl"
    path = Path(os.environ.get("REFCACHE_TRACE", default))
    if not path.is_file():
        pytest.skip(f"no trace at {path}; set REFCACHE_TRACE to Mooncake's conversation trace")
    return path


@pytest.mark.parametrize("name", RUNS)
def test_replay(benchmark: Any, name: str) -> None:
    config, seconds, gigabytes = RUNS[name]
    command = [sys.executable, __file__, str(trace_path()), json.dumps(config)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = benchmark.pedantic(
        subprocess.run,
        args=(command,),
        kwargs={"env": environment, "capture_output": True, "text": True},
        rounds=1,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    result = json.loads(run.stdout)
    assert result["requests"] == config.get("limit", 12_031)
    assert result["hit_tokens"] == HITS.get(name, result["hit_tokens"])
    targets = {"target_seconds": seconds, "target_gigabytes": gigabytes}
    benchmark.extra_info.update(targets, **result)
    print(f"\n{name}: {result['seconds']:.1f} s of CPU (target {seconds}), ", end="")
    print(f"{result['gigabytes']:.2f} GB (target {gigabytes})")


def main() -> None:
    requests = list(read_requests(sys.argv[1]).requests)
    began = time.process_time()
    result = replay(requests, ReplayConfig(**json.loads(sys.argv[2])))
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GB
    print(
        json.dumps(
            {
                "requests": result.requests,
                "hit_tokens": result.hit_tokens,
                "rows_checked": result.rows_checked,
                "states_checked": result.states_checked,
                "seconds": seconds,
                "gigabytes": peak,
            }
        )
    )


if __name__ == "__main__":
    main()
