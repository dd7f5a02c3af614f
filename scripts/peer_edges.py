"""Which ordering edges a release's two-tier cache lacks: every distinct race, not the first one.

``python scripts/peer_edges.py sglang:0.5.10+overlap --examples 60`` plays the calls of an overlap
loop on the simulated machine, with a tracker that only collects, and prints one line a kind of race
and write policy: the two accesses with their streams, how often, and an example. The first race,
with its program, is what ``refcache check TARGET --suite hicache.state --write-policy POLICY`` ends
with.
"""

import argparse
import re
from collections import Counter

from refcache.oracle import HiCacheDriver, resolve
from refcache.oracle.drivers.hicache.bench import HiCacheBench
from refcache.runtime import RaceFound
from refcache.testing import run_suite
from refcache.testing.machines.hicache import HiCacheMachine
from refcache.testing.registry import SUITES, Suite
from refcache.types import WRITE_POLICIES

EDGES = "hicache.edges"
CASES = 5
"""Cases a seed: a violation of another rule ends a seed's cases."""

SIDE = re.compile(r"(read|write) by '[^']+' \(number \d+ of (?:stream|host thread) '([^']+)'\)")


class CollectingBench(HiCacheBench):
    """Goes on after a race."""

    def build(self) -> None:
        super().build()
        assert self.machine.tracker is not None
        self.machine.tracker.stop = False


class Collecting(HiCacheDriver):
    """Goes on after a race."""

    bench_type = CollectingBench


def kind(race: RaceFound) -> str:
    """A race without its cell, and with streams for the accesses."""
    sides = SIDE.findall(str(race))
    cell = race.where.split()[0]
    return f"{cell}: " + ", then ".join(f"a {what} on stream {on}" for what, on in sides)


def machine(found: Counter[str], examples: dict[str, str]) -> type[HiCacheMachine]:
    """The machine of ``hicache.state``; at the end of a case the races are added up."""

    class Machine(HiCacheMachine):
        make = Collecting

        def teardown(self) -> None:
            try:
                super().teardown()
            finally:
                tracker = self.d.machine.tracker
                races = [r for r in (tracker.reports if tracker else ()) if type(r) is RaceFound]
                for name in {kind(race) for race in races}:
                    found[name] += 1
                for race in races:
                    examples.setdefault(kind(race), str(race))

    return Machine


def main() -> None:
    """The command; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--examples", type=int, default=60)
    given = parser.parse_args()
    target = resolve(given.target)
    for policy in WRITE_POLICIES:
        found: Counter[str] = Counter()
        examples: dict[str, str] = {}
        SUITES[EDGES] = Suite(EDGES, machine(found, examples))
        cases, rules = 0, Counter[str]()
        for seed in range(-(-given.examples // CASES)):
            result = run_suite(
                EDGES, target, max_examples=CASES, seed=seed, shrink=False, write_policy=policy
            )
            cases += result.cases
            if result.failure is not None:
                rules[result.failure.rule] += 1
        print(f"{given.target} {policy}: {cases} cases; other rules: {dict(rules)}", flush=True)
        for name, count in found.most_common():
            print(f"  {count:4} cases  {name}\n             {examples[name]}", flush=True)


if __name__ == "__main__":
    main()
