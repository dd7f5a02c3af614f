"""Run by ``torch.distributed.run``, one process a rank: seeded work on a two-tier cache.

    python -m torch.distributed.run --nproc-per-node 2 ranks_program.py FOLDER

Ranks get the same requests and differ in when their copies finish: each machine picks what runs
next by a seed of its own. What a rank decides goes to ``FOLDER/RANK.json``, part by part. The part
``alone`` leaves out the agreement: the control, in which ranks must drift apart.
"""

import json
import random
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from refcache.engine import ModelConfig, SamplingParams, Scheduler, TokenizedGenerateReqInput
from refcache.oracle import HiCacheDriver, resolve
from refcache.oracle.drivers.ranks.driver import Rank
from refcache.runtime import SimulatedRuntime, Tracker
from refcache.tree.consensus import ProcessGroupConsensus, SingleRank
from refcache.types import WRITE_POLICIES, ServerArgs


class Listed:
    """A consensus that lists the calls made of it."""

    def __init__(self, inner):
        self.inner, self.calls = inner, 0

    def all_reduce_min(self, values):
        self.calls += 1
        return self.inner.all_reduce_min(values)


def timing(rank):
    """A machine's own pace: now and then everything runs, mostly little or nothing."""
    draw = random.Random(1000 + rank)
    return lambda machine, point: draw.choice((0, 1, 1, 1, 2, 3))


def calls(group, rank, policy):
    """Random calls on the tree; every check of the oracle is on."""
    draw = random.Random(7)
    d = HiCacheDriver(
        resolve("refcache"), size=16, host_size=18, page_size=2, write_policy=policy, tp_group=group
    )
    d.machine.driver = timing(rank)
    decided_by, log = Rank(d), []
    for _ in range(120):
        tokens = tuple(draw.choice((0, 0, 1)) for _ in range(draw.randint(2, 13)))
        which = draw.randrange(4)
        match draw.randrange(9):
            case 0 | 1:
                d.admit(tokens)
            case 2:
                d.finish(which)
            case 3:
                d.evict(draw.randint(1, 16))
            case 4:
                d.reload(which)
            case 5:
                d.readmit(which, draw.randrange(3))
            case 6:
                d.decode(which, draw.randrange(3))
            case 7:
                d.poll()
            case 8:
                d.match(tokens)
        log.append([sorted((k, repr(v)) for k, v in decided_by.decisions().items()), group.calls])
    d.wind_down()
    return log


def scheduler_of(driver, group, policy, page_size, max_running_requests):
    """A small overlap loop over two tiers, on a machine of its own."""
    args = ServerArgs(
        page_size=page_size,
        max_total_tokens=24,
        max_running_requests=max_running_requests,
        context_length=32,
        chunked_prefill_size=4,
        enable_hierarchical_cache=True,
        hicache_ratio=1.5,
        hicache_write_policy=policy,
    )
    machine = SimulatedRuntime(driver, Tracker())
    scheduler = Scheduler(
        args, ModelConfig(num_hidden_layers=2, vocab_size=3), runtime=machine, tp_cpu_group=group
    )
    scheduler.tree_cache.load_back_threshold = 1
    return scheduler


def decided(scheduler, batch):
    """All that a step decides, as JSON has it."""
    return [
        batch and [batch.forward_mode.name, [[r.rid, len(r.prefix_indices)] for r in batch.reqs]],
        [[r.rid, list(r.output_ids)] for r in scheduler.finished_reqs],
        [[len(n.key), n.evicted, n.backuped, n.lock_ref] for n in scheduler.tree_cache.nodes()],
    ]


def serving(group, rank, policy):
    """The overlap loop over two tiers; its forwards check every row they read."""
    draw = random.Random(11)
    scheduler = scheduler_of(timing(rank), group, policy, page_size=2, max_running_requests=3)
    log = []
    for number in range(200):
        if number % 5 == 0 and number < 100:
            tokens = [draw.randrange(2) for _ in range(draw.randint(2, 11))]
            request = TokenizedGenerateReqInput(f"r{number}", tokens, SamplingParams(3))
            scheduler.submit(request)
        batch = scheduler.step()
        log.append([*decided(scheduler, batch), group.calls])
    assert scheduler.is_idle()
    return log


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, agreed = dist.get_rank(), ProcessGroupConsensus(dist.group.WORLD)
    logs = {"alone": serving(Listed(SingleRank()), rank, "write_through")}
    for policy in WRITE_POLICIES:
        logs[f"calls, {policy}"] = calls(Listed(agreed), rank, policy)
        logs[f"serving, {policy}"] = serving(Listed(agreed), rank, policy)
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(logs))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
