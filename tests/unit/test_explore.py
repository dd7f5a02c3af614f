"""The explorer: complete where it says so, the shortest program, copies and merges are checked."""

import json
from pathlib import Path

import pytest
import torch

from command_line import refused
from refcache.cli.main import main
from refcache.errors import InvalidArgument, UnknownName
from refcache.oracle import HiCacheDriver, TreeDriver, resolve
from refcache.oracle.explore import (
    SCOPES,
    CannotCopy,
    Limits,
    explored,
    fingerprint,
    freeze,
    select,
)
from refcache.oracle.explore.journal import InUse
from refcache.oracle.target.naive import NaiveTarget, NaiveTree
from refcache.planted import find
from refcache.testing.campaign import Plan, one_run
from refcache.testing.exploration import Task, explore, explore_on, failure_of

REFERENCE = resolve("refcache")


# ---- what was explored ---------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "states"), [("tokens", 64), ("pages", 227)])
def test_every_state_of_four_pages_of_an_allocator(name: str, states: int) -> None:
    found = explored(SCOPES[f"allocator.{name}"], REFERENCE)
    assert found.complete
    assert (len(found.states), found.left, found.copied) == (states, 0, True)
    assert found.compared > 0
    assert str(found).endswith("complete")


def test_a_limit_says_how_far_it_came() -> None:
    found = explored(SCOPES["tree.lru"], REFERENCE, Limits(depth=1))
    assert found.depth == 1
    assert found.left > 0
    assert "every program of 1 moves" in str(found)
    assert f"{found.left} states left" in str(found)
    assert not found.complete


def test_the_naive_target_has_an_order_too() -> None:
    assert explored(SCOPES["allocator.pages"], resolve("naive")).complete


def test_a_target_that_shows_no_order_is_never_called_complete() -> None:
    class Closed(NaiveTarget):
        def free_lists(self, allocator: object) -> None:
            return None

    found = explored(SCOPES["allocator.tokens"], Closed())
    assert found.left == 0
    assert not found.complete
    assert "never complete" in str(found)


def test_the_first_failing_program_is_the_shortest() -> None:
    with find("evict-parent-not-pushed").active():
        found = explored(SCOPES["tree.lru"], REFERENCE)
        assert found.failing is not None
        assert len(found.failing) == 3
        before = explored(SCOPES["tree.lru"], REFERENCE, Limits(depth=2))
        assert before.failing is None
    task = Task("tree.lru", "refcache", "evict-parent-not-pushed")
    failure = failure_of(task, found)
    assert failure.rule == "E3"
    assert "plant('evict-parent-not-pushed')" in failure.steps


# ---- copies --------------------------------------------------------------------------------------


def two_tiers() -> HiCacheDriver:
    d = HiCacheDriver(REFERENCE, size=3, host_size=4, write_policy="write_back")
    d.admit((0, 1))
    d.cache(0)
    d.finish(0)
    d.admit((1, 1))
    d.evict(1)
    return d


def one_tier() -> TreeDriver:
    d = TreeDriver(REFERENCE, size=4, page_size=2)
    d.admit((0, 1, 1))
    d.cache(0)
    d.hold((0, 1))
    return d


@pytest.mark.parametrize("make", [one_tier, two_tiers])
def test_a_copy_goes_on_alone(make) -> None:
    d = make()
    before, kept = d.describe(), freeze(d)
    for _ in range(2):
        copy = kept.thaw()
        assert copy.describe() == before
        copy.wind_down()
        assert d.describe() == before
    d.wind_down()
    assert kept.thaw().describe() == before


def test_copied_tensors_share_what_the_first_ones_shared() -> None:
    d = one_tier()
    d.shared = torch.arange(6)
    d.part = d.shared[2::2]
    copy = freeze(d).thaw()
    copy.shared[4] = 9
    assert copy.part.tolist() == [2, 9]
    assert d.part.tolist() == [2, 4]


def test_a_copied_closure_has_cells_of_its_own() -> None:
    d = one_tier()
    count = 0

    def more() -> int:
        nonlocal count
        count += 1
        return count

    d.more = more
    copy = freeze(d).thaw()
    assert (copy.more(), copy.more(), d.more()) == (1, 2, 1)


def test_what_has_no_copy_is_named() -> None:
    d = one_tier()
    d.stream = iter(open(__file__))  # noqa: SIM115
    with pytest.raises(CannotCopy, match="TextIOWrapper"):
        freeze(d)


class AddressTree(NaiveTree):
    """Files its used prefixes under the address of a list, which no copy has."""

    def reset(self) -> None:
        super().reset()
        self.anchor: list[int] = []
        self.filed = {id(self.anchor): 0}

    def match_prefix(self, params):
        self.filed[id(self.anchor)] += 1
        return super().match_prefix(params)


class AddressTarget(NaiveTarget):
    def tree(self, config, allocator, req_to_token_pool):
        return AddressTree(config, allocator, req_to_token_pool)


def test_where_a_copy_is_not_faithful_programs_are_replayed() -> None:
    found = explored(SCOPES["tree.requests"], AddressTarget(), Limits(depth=2))
    wanted = explored(SCOPES["tree.requests"], resolve("naive"), Limits(depth=2))
    assert found.failing is None
    assert not found.copied
    assert [state[:2] for state in found.states] == [state[:2] for state in wanted.states]


# ---- merges --------------------------------------------------------------------------------------


class CountingTree(NaiveTree):
    """Every third insert ever made is forgotten for the order of eviction: no view shows it."""

    inserts = 0

    def insert(self, params):
        self.inserts += 1
        result = super().insert(params)
        if self.inserts % 3 == 0:
            self.used = {prefix: -time for prefix, time in self.used.items()}
        return result


class CountingTarget(NaiveTarget):
    def tree(self, config, allocator, req_to_token_pool):
        return CountingTree(config, allocator, req_to_token_pool)


def test_merged_states_that_are_not_alike_are_noticed(monkeypatch) -> None:
    monkeypatch.setattr("refcache.oracle.explore.search.COMPARED", 2)
    found = explored(SCOPES["tree.lru"], CountingTarget(), Limits(programs=1500))
    assert "part at" in found.parted
    assert not found.complete
    assert "merged states differ" in str(found)


def test_names_do_not_tell_states_apart() -> None:
    digests = set()
    for token, space in ((0, "a"), (1, "b")):
        d = TreeDriver(REFERENCE, size=3)
        d.insert((1 - token,))
        d.evict(1)
        d.insert((token, 1 - token), space)
        digests.add(fingerprint(d).digest)
    assert len(digests) == 1


def test_the_order_of_access_tells_states_apart() -> None:
    digests = set()
    for last in (0, 1):
        d = TreeDriver(REFERENCE, size=3)
        d.insert((0, 0))
        d.insert((1,))
        d.match((last,))
        digests.add(fingerprint(d).digest)
    assert len(digests) == 2


# ---- on disk, over processes, on the command line ------------------------------------------------


def test_a_search_on_disk_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    task, file = Task("allocator.tokens", "refcache"), tmp_path / "a.jsonl"
    *_, part = explore(task, limits=Limits(programs=500), journal=file)
    assert part.left > 0
    with open(file, "ab") as stream:
        stream.write(b'{"children": [[["all')
    *_, whole = explore(task, journal=file)
    wanted = explored(SCOPES["allocator.tokens"], REFERENCE)
    assert (whole.states, whole.programs, whole.complete) == (wanted.states, wanted.programs, True)
    *_, again = explore(task, journal=file)
    assert again.programs == wanted.programs


@pytest.mark.parametrize("content", ["{}\n", "\n", '{"search": {"scope": "tree.lru"}}\n'])
def test_a_file_that_is_another_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(content)
    with pytest.raises(InvalidArgument, match="expected"):
        list(explore(Task("allocator.tokens", "refcache"), journal=file))
    assert file.read_text() == content


def test_two_processes_find_what_one_does() -> None:
    task = Task("allocator.tokens", "refcache", "free-group-keeps-last")
    *_, one = explore(task)
    *_, two = explore(task, workers=2)
    assert one.failing is not None
    assert (two.failing, two.states, two.programs) == (one.failing, one.states, one.programs)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explore", "--scope", "allocator.tokens", "--dir", str(tmp_path)]) == 0
    assert "64 states, 2,090 programs, complete" in capsys.readouterr().out
    arguments = ["explore", "--scope", "allocator.pages", "--planted", "page-zero-freed"]
    assert main(arguments) == 1
    assert "    d.alloc(3)\n" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 1
    (verdict,) = json.loads(capsys.readouterr().out)
    assert verdict["failure"]["rule"] == "P0"
    assert "scope 'x'" in refused(["explore", "--scope", "x"], capsys)
    assert "planted" in refused(["explore", "naive", "--planted", "page-zero-freed"], capsys)


def test_scopes_are_found_by_part_and_name() -> None:
    assert {scope.name for scope in select("allocator")} < set(SCOPES)
    assert [scope.name for scope in select("tree.lru")] == ["tree.lru"]
    with pytest.raises(UnknownName, match=r"tree\.lru"):
        select("tree.none")


def test_two_tiers_with_copies_in_flight() -> None:
    found = explored(SCOPES["hicache.write_back"], REFERENCE, Limits(depth=1))
    assert (found.failing, found.parted, found.copied) == (None, "", True)
    with find("host-leaf-with-children").active():
        found = explored(SCOPES["hicache.write_through"], REFERENCE, Limits(programs=3000))
    assert found.failing is not None


def test_a_campaign_goes_on_with_the_searches(tmp_path: Path) -> None:
    plan = Plan("refcache", ("allocator.explore",), max_examples=20)
    runs = [one_run(plan, str(tmp_path), "allocator.explore", seed) for seed in range(5)]
    assert all(run.verdict == "ok" for run in runs)
    whole = explored(SCOPES["allocator.tokens"], REFERENCE)
    assert sum(run.steps for run in runs[:4]) == whole.programs
    assert "4 pages of 2" in runs[4].reason


def test_a_search_that_another_process_has_is_passed_over(tmp_path: Path) -> None:
    task = Task("allocator.tokens", "refcache")
    going = explore(task, journal=tmp_path / "allocator.tokens.jsonl")
    next(going)
    with pytest.raises(InUse, match="another process"):
        next(explore(task, journal=tmp_path / "allocator.tokens.jsonl"))
    found = explore_on("allocator.explore", "refcache", tmp_path, 1)
    assert "4 pages of 2" in found.reason
    going.close()
