"""Defaults of ``ServerArgs``: SGLang 0.5.10's, or listed in the docs."""

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from refcache.peers.releases import folder, unpacked
from refcache.types import ServerArgs

PAGE = Path(__file__).parents[2] / "docs" / "serving_loop.md"

# what SGLang leaves open (None) until it starts
FOUND_OUT = {
    "page_size",
    "max_running_requests",
    "chunked_prefill_size",
    "context_length",
    "mem_fraction_static",
    "device",
}
DEFAULTS = {
    "served_model_name": None,
    "max_total_tokens": None,
    "max_prefill_tokens": 16384,
    "kv_cache_dtype": "auto",
    "schedule_policy": "fcfs",
    "enable_priority_scheduling": False,
    "disable_priority_preemption": False,
    "schedule_low_priority_values_first": False,
    "priority_scheduling_preemption_threshold": 10,
    "prefill_max_requests": None,
    "schedule_conservativeness": 1.0,
    "disable_overlap_schedule": False,
    "disable_radix_cache": False,
    "radix_eviction_policy": "lru",
    "speculative_algorithm": None,
    "tp_size": 1,
    "dp_size": 1,
    "enable_dp_attention": False,
    "enable_memory_saver": False,
    "enable_pdmux": False,
    "enable_metrics": False,
    "swa_full_tokens_ratio": 0.8,
    "max_mamba_cache_size": None,
    "mamba_scheduler_strategy": "auto",
    "mamba_track_interval": 256,
    "enable_hierarchical_cache": False,
    "hicache_ratio": 2.0,
    "hicache_size": 0,
    "hicache_write_policy": "write_through",
    "hicache_io_backend": "kernel",
    "hicache_mem_layout": "layer_first",
    "hicache_storage_backend": None,
    "hicache_storage_prefetch_policy": "best_effort",
    "hicache_storage_backend_extra_config": None,
}
DIFFERENT = {"hicache_io_backend": "auto"}  # chosen for each copy
OURS = {
    "model_path": "",  # needed there
    "mamba_cache_chunk_size": None,  # the larger of 64 and the page size
    "enable_kv_cache_events": False,  # SGLang: kv_events_config, a text that is not None
}


def test_defaults_are_sglang_s_or_listed():
    ours = {f.name: f.default for f in fields(ServerArgs)}
    same = {name: default for name, default in ours.items() if name not in FOUND_OUT}
    assert same == DEFAULTS | OURS | DIFFERENT
    listed = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in listed]
    shown = {row[0].strip("`"): row[2].strip('`"') for row in cells if len(row) == 3}
    for name in FOUND_OUT | set(DIFFERENT):
        assert shown[name] == str(ours[name]), name


def test_the_release_has_these_defaults():
    if "0.5.10" not in unpacked():
        pytest.skip("SGLang 0.5.10 is not unpacked")
    tree = ast.parse((folder("0.5.10") / "sglang/srt/server_args.py").read_text())
    cls = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "ServerArgs")
    theirs = {
        line.target.id: ast.literal_eval(line.value)
        for line in cls.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.value, ast.Constant)
    }
    assert {name: theirs[name] for name in DEFAULTS} == DEFAULTS
    assert {theirs[name] for name in FOUND_OUT} == {None}
