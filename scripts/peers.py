"""Unpack published releases and put each on trial: what ``make peers`` runs.

``python scripts/peers.py unpack`` downloads the wheels of SGLang's releases (40 to 60 MB each, no
dependencies) and the sources of vLLM and LMCache (47 and 9 MB, Python files only) and unpacks them
below ``.peers`` (or ``$REFCACHE_PEERS``); what is there stays. ``verdicts`` prints one
row a target, suite and write policy with the ``refcache check`` call that gives it, each target in
a process of its own, and exits with 0: a violation of a release is a result. ``--examples N`` sets
the cases of a row; its failing program follows it with ``--explain``.
"""

import argparse
import hashlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from refcache.oracle import resolve
from refcache.peers import VERSIONS, releases
from refcache.peers.others import sources
from refcache.peers.others.sources import RELEASES, present
from refcache.testing import run_suite
from refcache.testing.registry import SUITES, draws_write_policies
from refcache.types import WRITE_POLICIES

ONE_TIER = ("allocator.state", "allocator.misuse", "tree.state", "tree.misuse")
TARGETS = {
    "sglang:0.5.10": (*ONE_TIER, "hicache.state"),
    "sglang:0.5.10+overlap": ("hicache.state",),
    "sglang:0.5.10+events": ("tree.state",),
    "sglang:0.5.12": (*ONE_TIER, "hicache.state"),
    "sglang:0.5.12+overlap": ("hicache.state",),
    "sglang:0.5.12+events": ("tree.state",),
    "sglang:0.5.23": (*ONE_TIER, "hicache.state"),
    "sglang:0.5.23+rust": ("tree.state", "hicache.state"),
    "sglang:0.5.23+overlap": ("hicache.state",),
    "sglang:0.5.23+events": ("tree.state",),
    "sglang:0.5.23+kernels": ("allocator.state",),
    **{f"vllm:offload-{manager}": ("offload.state",) for manager in ("lru", "arc", "tiers")},
    "lmcache:backend": ("offload.state",),
    "lmcache:backend-paged+partial": ("offload.state",),
}
"""What is run on which target: releases as they are, and held to more (``+variant``)."""


def unpack() -> int:
    """Download and unpack what is missing."""
    for version in VERSIONS:
        folder = releases.folder(version)
        if version in releases.unpacked():
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
    for engine, version in RELEASES.items():
        if present(engine):
            print(f"{engine} {version}: in {sources.folder(engine)}")
            continue
        try:
            unpack_sources(engine, version)
        except (OSError, ValueError) as error:
            print(f"{engine} {version}: {error}", file=sys.stderr)
            return 1
        print(f"{engine} {version}: unpacked in {sources.folder(engine)}")
    return 0


def unpack_sources(engine: str, version: str) -> None:
    """The Python files of a source distribution, by the package index's own page.

    pip would build it to learn its name, which needs a compiler and CUDA.

    Raises:
        ValueError: the index has none, or another one than it says.
    """
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    page = f"{index}/{engine}/"
    with urllib.request.urlopen(page) as answer:
        links = re.findall(r'href="([^"]+)"', answer.read().decode())
    name = f"{engine}-{version}.tar.gz"
    link = next((one for one in links if one.partition("#")[0].endswith(f"/{name}")), None)
    if link is None:
        raise ValueError(f"{page}: no {name}")
    url, _, digest = urllib.parse.urljoin(page, link).partition("#sha256=")
    with urllib.request.urlopen(url) as answer:
        packed = answer.read()
    if digest and hashlib.sha256(packed).hexdigest() != digest:
        raise ValueError(f"{url}: not the file that {page} names")
    folder = releases.root() / f"{engine}-{version}"
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        inside = f"{engine}-{version}/{engine}/"
        wanted = [m for m in archive if m.name.startswith(inside) and m.name.endswith(".py")]
        archive.extractall(partial, wanted, filter="data")
    shutil.rmtree(folder, ignore_errors=True)
    (partial / f"{engine}-{version}").rename(folder)
    shutil.rmtree(partial)


@dataclass(frozen=True)
class Row:
    """One verdict; ``write_policy`` is None for a suite of one tier, ``cases`` what it draws."""

    target: str
    suite: str
    write_policy: str | None
    cases: int
    seed: int

    @property
    def max_examples(self) -> int:
        return round(self.cases / SUITES[self.suite].share)

    def call(self) -> list[str]:
        """The ``refcache`` command that gives this row."""
        policy = [] if self.write_policy is None else ["--write-policy", self.write_policy]
        size = ["--max-examples", str(self.max_examples), "--seed", str(self.seed)]
        return ["check", self.target, "--suite", self.suite, *policy, *size, "--no-planted"]

    def run(self, explain: bool) -> str:
        """Run it, in this process; the row, its call, and with ``explain`` the failing program."""
        start = time.monotonic()
        result = run_suite(
            self.suite,
            resolve(self.target),
            max_examples=self.max_examples,
            seed=self.seed,
            write_policy=self.write_policy,
        )
        found = (result.reason.splitlines() or [""])[-1]
        if result.failure is not None:
            steps = sum(line.startswith("d.") for line in result.failure.steps)
            found = f"{result.failure.rule}, {steps} steps"
        lines = [
            f"{self.target:22} {self.suite:17} {self.write_policy or '-':24} {result.verdict:10} "
            f"{result.cases:5} cases {time.monotonic() - start:5.0f} s  {found}",
            f"    {shlex.join(['refcache', *self.call()])}",
        ]
        if explain and result.failure is not None:
            lines.append(result.failure.text)
        return "\n".join(lines)


def rows(target: str, suites: list[str], given: argparse.Namespace) -> None:
    """Print the rows of one target; this process imports its release."""
    for suite in suites:
        policies = (given.policy or WRITE_POLICIES) if draws_write_policies(suite) else (None,)
        for policy in policies:
            row = Row(target, suite, policy, given.examples, given.seed)
            print(row.run(given.explain), flush=True)


def verdicts(examples: int, explain: bool, only: str) -> int:
    """Every row of every unpacked release."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    for target, suites in TARGETS.items():
        version = target.partition(":")[2].partition("+")[0]
        if not target.startswith(only):
            continue
        if version not in releases.unpacked():
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
