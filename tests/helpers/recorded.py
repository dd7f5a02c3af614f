"""Programs whose every choice SGLang 0.5.10's own code has made, and the choices: as data.

The exact suites compare a target with the reference; where the reference is on trial that compares
it with itself. ``recorded_choices.jsonl`` has the answers of the release: a line a program, its
driver, its configuration, and for each step what changed of all that a cache is free to choose
(null: no more there). Written anew by::

    PYTHONPATH=src:aliases:tests/helpers python tests/helpers/recorded.py

which needs the release unpacked (``make peers``). The programs are drawn from a fixed seed.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from refcache.oracle import AllocatorDriver, Driver, Target, TreeDriver, Violation, resolve
from refcache.types import EVICTION_POLICIES

FILE = Path(__file__).with_name("recorded_choices.jsonl")
RELEASE = "sglang:0.5.10+exact"
DRIVERS: dict[str, type[Driver]] = {"allocator": AllocatorDriver, "tree": TreeDriver}
Calls = list[tuple[str, list[Any]]]
UPPER_HALF: Calls = [
    ("insert", [[0, 0, 0], None, False, 2]),
    ("insert", [[0, 1, 1], None, False, 0]),  # cuts the node in two
    ("evict", [2]),
    ("evict", [2]),
    ("insert", [[1, 1], None, False, 1]),
    ("evict", [1]),  # not the upper half: it has the priority of the whole
]
"""What a node's upper half has of it decides long after the cut."""


class Program(NamedTuple):
    """A program, with what changed of the choices at each step once it was recorded."""

    driver: str
    config: dict[str, Any]
    calls: Calls
    changes: list[dict[str, Any]]

    def played(self, target: Target) -> Iterator[dict[str, Any]]:
        """Make the steps on a target; yields all its choices after each, in the form of JSON."""
        driver = DRIVERS[self.driver](target, **self.config)
        for name, arguments in self.calls:
            getattr(driver, name)(*map(_tuples, arguments))
            yield json.loads(json.dumps(driver.bench.choices()))

    def recorded(self) -> Iterator[dict[str, Any]]:
        """All choices of the release after each step."""
        now: dict[str, Any] = {}
        for change in self.changes:
            now |= change
            now = {name: chosen for name, chosen in now.items() if chosen is not None}
            yield dict(now)


def programs() -> list[Program]:
    """What is recorded: every strategy, pages of one and more, EAGLE, batches and groups."""
    drawn = Random(0)
    made = [
        Program("allocator", {"page_size": size, "size": 8 * size}, _allocator_calls(drawn), [])
        for size in (1, 1, 2, 4)
    ]
    for policy in EVICTION_POLICIES:
        for size in (1, 2):
            config = {"page_size": size, "size": 12 * size, "eviction_policy": policy}
            if size == 2 and policy in ("lru", "slru"):
                config["is_eagle"] = True
            made.append(Program("tree", config, _tree_calls(drawn, 5 * size), []))
    by_priority = {"page_size": 1, "size": 12, "eviction_policy": "priority"}
    made.append(Program("tree", by_priority, UPPER_HALF, []))
    return made


def _allocator_calls(drawn: Random) -> Calls:
    calls: Calls = []
    for _ in range(60):
        few = [drawn.randrange(4) for _ in range(drawn.randint(1, 3))]
        calls.append(
            drawn.choice(
                [
                    ("alloc", [drawn.randint(0, 3)]),
                    ("extend", [[[i, drawn.randint(0, 5)] for i in few]]),
                    *2 * [("decode", [few])],
                    ("release", [few[0]]),
                    ("release", [few[0], drawn.randint(0, 4)]),
                    ("release_together", [few]),
                    ("begin_group", []),
                    *2 * [("end_group", [])],
                    ("draft", [drawn.randint(1, 3)]),
                ]
            )
        )
    return calls


def _tree_calls(drawn: Random, longest: int) -> Calls:
    calls: Calls = []
    for _ in range(60):
        tokens = [drawn.randrange(2) for _ in range(drawn.randint(1, longest))]
        space, which = drawn.choice([None, None, "a"]), drawn.randrange(3)
        priority = drawn.randrange(3)
        calls.append(
            drawn.choice(
                [
                    ("admit", [tokens, space, drawn.choice([None, 2]), priority]),
                    ("proceed", [which]),
                    ("cache", [which]),
                    ("decode", [which, drawn.randrange(2)]),
                    *2 * [("finish", [which])],
                    ("finish_together", [[0, which]]),
                    ("abort", [which]),
                    ("retract", [which]),
                    *2 * [("match", [tokens, space])],
                    ("insert", [tokens, space, drawn.random() < 0.5, priority]),
                    *3 * [("insert", [tokens, space, False, priority])],
                    *2 * [("evict", [drawn.randint(1, 4)])],
                    ("hold", [tokens, space]),
                    *2 * [("unhold", [which])],
                ]
            )
        )
    return calls


def record(program: Program, target: Target) -> Program:
    """The program with the choices of a target, without the calls at which it breaks a rule."""
    changes, before = [], dict[str, Any]()
    try:
        for now in program.played(target):
            gone = {name: None for name in before if name not in now}
            new = {name: chosen for name, chosen in now.items() if before.get(name) != chosen}
            changes.append(gone | new)
            before = now
    except Violation:
        broken = len(changes)
        calls = program.calls[:broken] + program.calls[broken + 1 :]
        return record(program._replace(calls=calls), target)
    return program._replace(changes=changes)


def read() -> list[Program]:
    """The recorded programs."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    made = [Program(*json.loads(line)) for line in lines]
    return [p._replace(calls=[(name, arguments) for name, arguments in p.calls]) for p in made]


def text_of(made: list[Program]) -> str:
    """The text of the file."""
    return "".join(json.dumps(program, separators=(",", ":")) + "\n" for program in made)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


if __name__ == "__main__":
    release = resolve(RELEASE)
    FILE.write_text(text_of([record(program, release) for program in programs()]))
