"""What a release's storage tier does, with its own threads, on a CPU: one sequence, as JSON.

Run as ``python storage_on_release.py VERSION SEQUENCE``, in a process of its own.
"""

import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from refcache.oracle import resolve
from refcache.oracle.target.config import HiCacheConfig
from refcache.runtime import ImmediateRuntime

FOLDER: Path  # of the store's files
target = None
UNIFIED = False  # one tree for all models, whose requests and nodes have handles
THRESHOLD = '{"prefetch_threshold": 2}'


def start(version):
    """Name the release and an empty folder; this is for a process of its own."""
    global FOLDER, UNIFIED, target
    FOLDER = Path(tempfile.mkdtemp())
    os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(FOLDER)
    target = resolve(f"sglang:{version}")
    of_one_rank = {
        "is_dp_attention_enabled": lambda: False,
        "get_tensor_model_parallel_rank": lambda: 0,
        "get_tensor_model_parallel_world_size": lambda: 1,
    }
    vars(target.engine.module("managers.cache_controller")).update(of_one_rank)
    UNIFIED = version == "0.5.23"
    if UNIFIED:
        target.engine.module("runtime_context").get_parallel().override_permanently(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_tp_rank=0, attn_dcp_rank=0
        )


class Passed:
    """An allocator as a recording one shows it, without the recording."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Cache:
    """Pages of 2 tokens, 16 on the device, 34 on the host, a store of files."""

    def __init__(self, policy="best_effort", attach=True):
        machine = ImmediateRuntime()
        config = HiCacheConfig(page_size=2, size=16, host_size=34)
        wrap = Passed if UNIFIED else lambda one: one
        self.parts = target.hicache(config, machine, machine.Stream(), wrap)
        self.tree, self.host = self.parts.tree, self.parts.host_pool
        self.host.pin_memory = False  # there is no card; the buffers are made
        self.controller = self.tree.cache_controller
        if attach:
            ok, message = self.tree.attach_storage_backend("file", THRESHOLD, None, policy)
            assert ok, message

    def key(self, tokens, extra_key=None):
        return target.RadixKey(list(tokens), extra_key)

    def insert(self, tokens, extra_key=None):
        slots = self.parts.allocator.alloc(len(tokens))
        self.tree.insert(target.InsertParams(self.key(tokens, extra_key), slots))

    def poll_until(self, done, seconds=8.0):
        end = time.monotonic() + seconds
        while not done() and time.monotonic() < end:
            self.tree.check_hicache_events()
            time.sleep(0.01)
        return bool(done())

    def store(self, tokens, extra_key=None):
        self.insert(tokens, extra_key)
        idle = lambda: not self.tree.ongoing_write_through and not self.tree.ongoing_backup  # noqa: E731
        assert self.poll_until(idle)

    def match(self, tokens, extra_key=None):
        found = self.tree.match_prefix(target.MatchPrefixParams(self.key(tokens, extra_key)))
        return len(found.device_indices) + found.host_hit_length

    def prefetch(self, rid, tokens):
        root = self.tree.root_node_handle() if UNIFIED else self.tree.root_node
        self.tree.prefetch_from_storage(self.named(rid), root, list(tokens), None)

    def named(self, rid):
        if not UNIFIED:
            return rid
        return target.engine.module("mem_cache.base_prefix_cache").CacheRequestHandle(rid, 0)

    def operation(self, rid):
        return self.tree.ongoing_prefetch[self.named(rid)][3]

    def scheduled(self, rid, seconds=8.0):
        return self.poll_until(lambda: self.tree.check_prefetch_progress(self.named(rid)), seconds)

    def wait(self, done, seconds=5.0):
        end = time.monotonic() + seconds
        while not done() and time.monotonic() < end:
            if UNIFIED:  # a query is answered, and its slots are taken, in a step of the scheduler
                self.tree.check_hicache_events()
            time.sleep(0.01)
        return bool(done())


def alive():
    return sum(thread.name.endswith("(prefetch_io_aux_func)") for thread in threading.enumerate())


def files():
    return sorted(FOLDER.iterdir(), key=lambda path: path.stat().st_mtime_ns)


def torn_file():
    """T01: the second page's file is cut; then a whole store is asked for."""
    first = Cache()
    first.store([1, 2, 3, 4, 5, 6])
    first.tree.detach_storage_backend()
    torn = files()[1]
    torn.write_bytes(torn.read_bytes()[:5])
    cache = Cache("wait_complete")
    cache.prefetch("torn", [1, 2, 3, 4, 5, 6, 7])
    torn_ends = cache.scheduled("torn", 4.0)
    thread = cache.controller.prefetch_io_aux_thread.is_alive()
    cache.store([11, 12, 13, 14])
    cache.tree.evict(target.EvictParams(16))
    cache.tree.evict_host(34)
    cache.prefetch("whole", [11, 12, 13, 14])
    return {
        "torn becomes schedulable": torn_ends,
        "thread lives": thread,
        "next becomes schedulable": cache.scheduled("whole", 4.0),
    }


def split_before_ack():
    """T02: a node is split between its copy to the host and the acknowledgement."""
    cache = Cache()
    cache.insert([1, 2, 3, 4, 5, 6])
    cache.match([1, 2, 9, 9])  # splits at 2
    idle = lambda: not cache.tree.ongoing_write_through and not cache.tree.ongoing_backup  # noqa: E731
    cache.poll_until(idle)
    hashes = []
    prior = None
    for start in (0, 2, 4):
        prior = cache.controller.get_hash_str([start + 1, start + 2], prior)
        hashes.append(prior)
    stored = [any(path.name.startswith(one) for path in files()) for one in hashes]
    return {"stored": stored, "hit": cache.controller.storage_backend.batch_exists(hashes)}


def namespaces():
    """T04: the same tokens in a namespace and outside of it."""
    cache = Cache()
    cache.store([1, 2, 3, 4])
    one = len(files())
    cache.store([1, 2, 3, 4], "adapter")
    return {"files of the first": one, "files of both": len(files())}


def detach_in_flight():
    """T05: detach while a prefetch of 4 pages, 3 of them hits, has not been asked for."""
    first = Cache()
    first.store([1, 2, 3, 4, 5, 6])
    first.tree.detach_storage_backend()
    cache = Cache("wait_complete")
    cache.prefetch("r", [1, 2, 3, 4, 5, 6, 7, 8])
    operation = cache.operation("r")
    assert cache.wait(lambda: operation.completed_tokens == 6)
    cache.tree.detach_storage_backend()
    return {"free": cache.host.available_size(), "size": cache.host.size}


def reset_in_flight():
    """T06: reset while a prefetch is going on."""
    first = Cache()
    first.store([1, 2, 3, 4, 5, 6])
    first.tree.detach_storage_backend()
    before = alive()
    cache = Cache("wait_complete")
    cache.prefetch("r", [1, 2, 3, 4, 5, 6, 7])
    operation = cache.operation("r")
    assert cache.wait(lambda: operation.completed_tokens == 6)
    cache.tree.reset()
    facts = {
        "threads that read": alive() - before,
        "going on": len(cache.tree.ongoing_prefetch),
        "occupied": cache.controller.prefetch_tokens_occupied,
    }
    cache.tree.check_prefetch_progress(cache.named("r"))
    return facts | {"found after reset": cache.match([1, 2, 3, 4, 5, 6])}


def failed_attach():
    """T17: an attach that fails has changed the policies."""
    cache = Cache(attach=False)
    before = (cache.tree.prefetch_stop_policy, cache.controller.write_policy)
    ok, _ = cache.tree.attach_storage_backend(
        "file", '{"prefetch_threshold": "many"}', None, "timeout", "write_back"
    )
    after = (cache.tree.prefetch_stop_policy, cache.controller.write_policy)
    return {"ok": ok, "before": before, "after": after}


def split_while_written():
    """T03: a node is split while its pages are written to storage."""
    cache = Cache()
    gate = threading.Event()
    store = cache.controller.storage_backend
    original = store.batch_set
    store.batch_set = lambda *args, **kwargs: (gate.wait(5), original(*args, **kwargs))[1]
    cache.insert([1, 2, 3, 4, 5, 6])
    cache.poll_until(lambda: cache.tree.ongoing_backup)
    cache.match([1, 2, 9, 9])
    upper = next(iter(cache.tree.root_node.children.values()))
    count = upper.host_ref_counter
    gate.set()
    return {"users of the upper half": count}


if __name__ == "__main__":
    torch.set_num_threads(1)
    start(sys.argv[1])
    print(json.dumps(globals()[sys.argv[2]]()))
    sys.stdout.flush()
    os._exit(0)
