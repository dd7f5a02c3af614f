"""``UnifiedRadixCache``: the same calls here and on SGLang 0.5.23 have the same answers."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from environment import environment
from refcache.allocator import SWATokenToKVPoolAllocator
from refcache.errors import ForeignNode, InvalidArgument, LockUnderflow
from refcache.keys import RadixKey
from refcache.peers.releases import unpacked
from refcache.pool import ReqToTokenPool
from refcache.tree import SWARadixCache
from refcache.tree.unified import (
    CacheInitParams,
    ComponentType,
    DecLockRefParams,
    InsertParams,
    UnifiedRadixCache,
)
from refcache.types import MatchPrefixParams
from unified_calls import KINDS, answers, insert, make, match, ours

HELPERS = Path(__file__).parents[1] / "helpers"


def test_the_answers_are_those_of_the_release():
    if "0.5.23" not in unpacked():
        pytest.skip("SGLang 0.5.23 is not unpacked")
    done = subprocess.run(
        [sys.executable, HELPERS / "unified_calls.py"],
        env=environment(HELPERS) | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])
    assert {kind: answers(ours(), kind) for kind in KINDS} == theirs


@pytest.mark.parametrize(("kind", "used", "branching"), [("full", 4, None), ("mamba", 0, 4)])
def test_a_match_says_what_is_there_and_what_can_be_used(kind, used, branching):
    run = make(ours(), kind)
    insert(run, [1, 2, 3, 4, 5, 6])
    insert(run, [1, 2, 3, 4, 7, 8])
    found = match(run, [1, 2, 3, 4, 0])
    assert (found.device_prefix_len, found.full_kv_hit_length) == (used, 4)
    assert found.mamba_branching_seqlen == branching
    req = SimpleNamespace(last_node=found.last_device_node, prefix_len=used)
    assert run.tree.prefix_device_indices(req).tolist() == [1, 2, 3, 4][:used]
    assert run.slots.available_size() == 32 - 8


def windows():
    slots = SWATokenToKVPoolAllocator(32, 32, 1, torch.float32, "cpu", None)
    components = (ComponentType.FULL, ComponentType.SWA)
    rows = ReqToTokenPool(4, 32, "cpu", False)
    params = CacheInitParams(
        False, rows, slots, 1, sliding_window_size=2, tree_components=components
    )
    tree = UnifiedRadixCache(params)
    taken = slots.alloc(6)
    slots.free_swa(taken[:4])
    asked = InsertParams(RadixKey([1, 2, 3, 4, 5, 6]), taken)
    asked.set_evicted_seqlen(ComponentType.SWA, 4)
    assert tree.insert(asked).prefix_len == 0
    return tree


def test_windows_have_receipts():
    tree = windows()
    assert isinstance(tree.tree, SWARadixCache)
    assert tree.swa_evictable_size() == 2
    found = tree.match_prefix(MatchPrefixParams(RadixKey([1, 2, 3, 4, 5, 6, 7])))
    assert found.device_prefix_len == 6
    held = tree.lock(found.last_device_node)
    assert tree.swa_protected_size() == 2
    other = DecLockRefParams(tree.root_node_handle(), held.receipt.component_lock_uuids)
    for wrong in (other, DecLockRefParams(held.node)):
        with pytest.raises(InvalidArgument, match="receipt"):
            tree.dec_lock_ref(held.node, wrong)
    tree.unlock(held)
    tree.unlock(None)
    assert (tree.full_protected_size(), tree.swa_protected_size()) == (0, 0)
    with pytest.raises(LockUnderflow):
        tree.unlock(held)


def test_what_is_not_there_is_refused():
    with pytest.raises(ForeignNode, match="node 99"):
        windows().path_device_indices(99)
    every = tuple(ComponentType)
    with pytest.raises(InvalidArgument, match="FULL and SWA, or FULL and MAMBA"):
        UnifiedRadixCache(CacheInitParams(False, None, None, 1, tree_components=every))
    with pytest.raises(AttributeError):
        windows().no_such_name  # noqa: B018
