"""Unpack published SGLang releases and put each on trial: what ``make peers`` runs.

``python scripts/peers.py unpack`` downloads each release's wheel (40 to 60 MB, no dependencies) and
unpacks it below ``.peers`` (or ``$REFCACHE_PEERS``); what is there stays. ``verdicts`` prints one
row a target, suite and write policy, each target in a process of its own, and exits with 0: a
violation of a release is a result. ``--examples N`` sets the size; the first failing program of a
row follows it with ``--explain``.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hypothesis.stateful import initialize

from refcache.oracle import HiCacheDriver, resolve
from refcache.peers import VERSIONS, engine
from refcache.testing import run
from refcache.testing.machines.hicache import HiCacheMachine
from refcache.testing.machines.strategies import hicache_configs
from refcache.testing.registry import SUITES, Suite
from refcache.types import WRITE_POLICIES

ONE_TIER = ("allocator.state", "allocator.misuse", "tree.state", "tree.misuse")
TARGETS = {
    "sglang:0.5.10": (*ONE_TIER, "hicache.state"),
    "sglang:0.5.10+overlap": ("hicache.streams",),
    "sglang:0.5.10+events": ("tree.state",),
    "sglang:0.5.12": (*ONE_TIER, "hicache.state"),
    "sglang:0.5.12+overlap": ("hicache.streams",),
    "sglang:0.5.12+events": ("tree.state",),
    "sglang:0.5.23": (*ONE_TIER, "hicache.state"),
    "sglang:0.5.23+rust": ("tree.state", "hicache.state"),
    "sglang:0.5.23+overlap": ("hicache.streams",),
    "sglang:0.5.23+events": ("tree.state",),
    "sglang:0.5.23+kernels": ("allocator.state",),
}
"""What is run on which target: releases as they are, and held to more (``+variant``)."""


def unpack() -> int:
    """Download and unpack what is missing."""
    for version in VERSIONS:
        folder = engine.folder(version)
        if version in engine.unpacked():
            print(f"sglang {version}: in {folder}")
            continue
        partial = folder.with_name(f"{version}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
        done = subprocess.run([*command, str(partial), f"sglang=={version}"], check=False)
        if done.returncode:
            print(f"sglang {version}: pip failed with {done.returncode}", file=sys.stderr)
            return 1
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        print(f"sglang {version}: unpacked in {folder}")
    return 0


def machine(
    policy: str, streams: bool, driver: type[HiCacheDriver] = HiCacheDriver
) -> type[HiCacheMachine]:
    """The two-tier machine with one write policy; for streams, the calls of an overlap loop only:
    no insert of KV that is being computed, no reset with copies in flight."""

    class Machine(HiCacheMachine):
        make = driver

        @initialize(config=hicache_configs().map(lambda c: {**c, "write_policy": policy}))
        def start(self, config: Any) -> None:
            self.begin(**config)
            if streams:
                self.d.insert = self.d.reset = nothing  # type: ignore[method-assign]

    return Machine


def nothing(*_: Any) -> None:
    """A step that an overlap loop does not make."""


def rows(target: str, suites: list[str], given: argparse.Namespace) -> None:
    """Print the rows of one target; this process imports its release."""
    subject = resolve(target)
    for name in suites:
        tiers = name.startswith("hicache")
        for policy in (given.policy or WRITE_POLICIES) if tiers else ("-",):
            row = name
            if tiers:
                row = f"{name} {policy}"
                made = machine(policy, name.endswith("streams"))
                SUITES[row] = Suite(row, made)
            start = time.monotonic()
            result = run.run_suite(row, subject, max_examples=given.examples, seed=given.seed)
            found = result.reason.splitlines()[-1:] or [""]
            if result.failure is not None:
                steps = sum(line.startswith("d.") for line in result.failure.steps)
                found = [f"{result.failure.rule}, {steps} steps"]
            print(
                f"{target:22} {name:17} {policy:24} {result.verdict:10} {result.cases:5} cases "
                f"{time.monotonic() - start:5.0f} s  {found[0]}",
                flush=True,
            )
            if given.explain and result.failure is not None:
                print(result.failure.text, flush=True)


def verdicts(examples: int, explain: bool, only: str) -> int:
    """Every row of every unpacked release."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    for target, suites in TARGETS.items():
        version = target.partition(":")[2].partition("+")[0]
        if not target.startswith(only):
            continue
        if version not in engine.unpacked():
            print(f"{target:22} skipped: not unpacked")
            continue
        command = [sys.executable, str(Path(__file__)), "rows", target, *suites]
        command += ["--examples", str(examples), *["--explain"] * explain]
        subprocess.run(command, env=environment, check=False)
    return 0


def main() -> int:
    """The command; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["unpack", "verdicts", "rows"])
    parser.add_argument("target", nargs="?", default="")
    parser.add_argument("suites", nargs="*")
    parser.add_argument("--examples", type=int, default=60)
    parser.add_argument("--explain", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", action="append", choices=WRITE_POLICIES, help="rows: only this")
    given = parser.parse_args()
    if given.command == "unpack":
        return unpack()
    if given.command == "rows":
        rows(given.target, given.suites, given)
        return 0
    return verdicts(given.examples, given.explain, given.target)


if __name__ == "__main__":
    sys.exit(main())
