"""Misuse by kind: four outcomes, and the damage of what was accepted; ``PagedAdapter``."""

from typing import Any

import pytest

from refcache.cli.main import main
from refcache.oracle import NaiveAllocator, NaiveTarget, PagedAdapter, Target, resolve
from refcache.oracle.drivers.kinds import ALLOCATOR, TREE, Outcome, misuse_by_kind
from refcache.peers.others import sources
from refcache.testing import run_suite


def outcomes(target: Target) -> dict[str, Outcome]:
    return {one.kind: one for one in misuse_by_kind(target)}


@pytest.mark.parametrize("name", ["refcache", "naive"])
def test_what_declares_it_refuses_every_kind(name: str) -> None:
    found = outcomes(resolve(name))
    assert found.keys() == {*ALLOCATOR, *TREE}
    assert {one.outcome for one in found.values()} == {"refused"}


class Pool(PagedAdapter):
    """Numbers in a list, from 0 on."""

    first = 0

    def open(self) -> None:
        self.pages = list(range(self.config.pages))

    def take(self, n: int) -> list[int] | None:
        return [self.pages.pop() for _ in range(n)] if n <= len(self.pages) else None

    def give(self, pages: Any) -> None:
        self.pages += pages

    def count(self) -> int:
        return len(self.pages)


class Careful(Pool):
    """Ignores a page that is free, or not its own."""

    def give(self, pages: Any) -> None:
        self.pages += [p for p in pages if p not in self.pages and 0 <= p < self.config.pages]


class Breaks(Careful):
    """Refuses, and is of no use afterwards."""

    def give(self, pages: Any) -> None:
        if set(pages) & set(self.pages):
            self.pages = None  # type: ignore[assignment]
            raise ValueError("a free page")
        super().give(pages)


class Pages(Target):
    name = "pages"
    capabilities = frozenset({"allocator"})
    errors = ValueError
    made: type[PagedAdapter] = Pool

    def allocator(self, config: Any) -> PagedAdapter:
        return self.made(config)


def pages(made: type[PagedAdapter]) -> Pages:
    target = Pages()
    target.made = made
    return target


def test_an_adapter_of_ten_lines_is_an_allocator() -> None:
    result = run_suite("allocator.state", pages(Pool), max_examples=30)
    assert result.verdict == "ok", result.failure and result.failure.text


def test_the_same_misuse_has_three_outcomes() -> None:
    seen = {made: outcomes(pages(made))["free_free_page"] for made in (Pool, Careful, Breaks)}
    assert [one.outcome for one in seen.values()] == ["accepted", "ignored", "crash"]
    assert "page 1 has two owners" in seen[Pool].evidence
    assert seen[Pool].steps[-1] == "d.free_free_page(0)"
    assert "TypeError" in seen[Breaks].evidence
    assert outcomes(pages(Pool))["free_outside"].evidence.endswith("page 4 is not of the pool")


class Leaks(NaiveTarget):
    """A free that is refused has taken the page's neighbour away."""

    def allocator(self, config: Any) -> NaiveAllocator:
        made = super().allocator(config)
        free = made.free

        def leaking(slots: Any) -> None:
            try:
                free(slots)
            except ValueError:
                made._free.discard(3)
                raise

        made.free = leaking  # type: ignore[method-assign]
        return made


def test_only_pages_reach_the_pool() -> None:
    seen = outcomes(pages(Pool))
    unchecked = {kind for kind, one in seen.items() if one.outcome != "refused"}
    assert unchecked == {"free_free_page", "free_with_free_page", "free_dummy_page", "free_outside"}


def test_a_refusal_that_changes_something_is_none() -> None:
    one = outcomes(Leaks())["free_free_page"]
    assert one.outcome == "accepted"
    assert "pages [3] are lost" in one.evidence


class LosesLocks(NaiveTarget):
    """A tree that takes an unlock of an unlocked prefix without a word."""

    capabilities = NaiveTarget.capabilities - {"refuses_misuse"}

    def tree(self, config: Any, allocator: Any, req_to_token_pool: Any) -> Any:
        made = super().tree(config, allocator, req_to_token_pool)
        unlock = made.dec_lock_ref

        def lenient(*args: Any) -> Any:
            try:
                return unlock(*args)
            except Exception:
                return None

        made.dec_lock_ref = lenient  # type: ignore[method-assign]
        return made


def test_a_tree_may_ignore_an_unlock() -> None:
    assert outcomes(LosesLocks())["unlock_unlocked"].outcome == "ignored"


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["misuse", "naive"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(ALLOCATOR) + len(TREE)
    assert lines[0].split()[:2] == ["free_free_page", "refused"]


class NoAllocator(Target):
    name = "none"


class Empty(Pages):
    """Has no page, whatever is asked."""

    def allocator(self, config: Any) -> PagedAdapter:
        made = super().allocator(config)
        made.take = lambda n: None  # type: ignore[method-assign]
        return made


def test_the_command_on_what_cannot_be_misused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("refcache.oracle.resolve", lambda name: NoAllocator(), raising=False)
    assert main(["misuse", "x"]) == 2
    assert "target 'none' has no allocator" in capsys.readouterr().err
    monkeypatch.setattr("refcache.oracle.resolve", lambda name: Empty(), raising=False)
    assert main(["misuse", "x"]) == 1
    assert "a legal call went wrong\nAL2" in capsys.readouterr().out


@pytest.mark.parametrize(("part", "outcome"), [("tensor", "ignored"), ("paged", "accepted")])
def test_lmcache_s_allocators_differ(part: str, outcome: str) -> None:
    if not sources.present("lmcache"):
        pytest.skip(f"lmcache is not unpacked in {sources.folder('lmcache')}")
    one = outcomes(resolve(f"lmcache:{part}"))["free_free_page"]
    assert one.outcome == outcome
    if outcome == "accepted":
        assert "a pool of 3 pages, of which 1 are in use, hands out [3, 1, 1]" in one.evidence
