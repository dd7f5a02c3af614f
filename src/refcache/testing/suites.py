"""The suites as test classes: subclass one, say what is on trial, and pytest runs it.

    from refcache.testing.suites import TreeSuite

    class TestMyTree(TreeSuite):
        def target(self):
            return MyTarget()

A class is a part, each of its tests a kind. What the target lacks is skipped with the reason. The
base class takes the target from ``REFCACHE_TARGET``, so ``pytest --pyargs refcache.testing`` judges
a target without any file of its own. ``REFCACHE_EXAMPLES`` and ``REFCACHE_SEED`` set the size and
the seed of every suite, ``REFCACHE_XFAILS`` names a file of expected violations; the plugin
(:mod:`refcache.testing.plugin`) has an option for each. Needs pytest.
"""

import os

import pytest

from refcache.oracle import Target, resolve
from refcache.testing.run import MAX_EXAMPLES, run_suite
from refcache.testing.xfails import Xfails, read_xfails


class Expected(Exception):
    """A violation that the file of expected ones names: pytest shows it as an xfail."""


class PartSuite:
    """Base: where the target comes from, and how a verdict becomes a test result.

    Attributes:
        max_examples, seed: as in :func:`refcache.testing.run_suite`; a subclass may set them.
    """

    max_examples: int | None = None
    seed: int | None = None
    item: pytest.Item | None = None

    @pytest.fixture(autouse=True)
    def _keep_item(self, request: pytest.FixtureRequest) -> None:
        self.item = request.node

    def target(self) -> Target:
        """What is on trial; override it."""
        spec = os.environ.get("REFCACHE_TARGET")
        if spec is None:
            pytest.skip("no target: --refcache-target pkg.module:factory, or override target()")
        return resolve(spec)

    def judge(self, suite: str) -> None:
        """Run a suite; a violation fails with its minimal program, not with a traceback."""
        examples = self.max_examples or int(os.environ.get("REFCACHE_EXAMPLES", MAX_EXAMPLES))
        seed = int(os.environ.get("REFCACHE_SEED", 0)) if self.seed is None else self.seed
        path = os.environ.get("REFCACHE_XFAILS")
        xfails = read_xfails(path) if path else Xfails()
        result = run_suite(suite, self.target(), max_examples=examples, seed=seed)
        result = xfails.apply(result)
        if result.verdict == "skipped":
            pytest.skip(result.reason)
        if result.verdict in ("xfail", "xpass") and self.item is not None:
            self.item.add_marker(pytest.mark.xfail(raises=Expected, reason=result.reason))
        if result.verdict == "xfail" and result.failure is not None:
            raise Expected(result.failure.text)
        if result.failure is not None:
            pytest.fail(result.failure.text, pytrace=False)
        if result.verdict not in ("ok", "xpass"):
            pytest.fail(f"{suite}: {result.verdict}\n{result.reason}", pytrace=False)


class AllocatorSuite(PartSuite):
    """Suites of the part ``allocator``."""

    def test_state(self) -> None:
        self.judge("allocator.state")

    def test_misuse(self) -> None:
        self.judge("allocator.misuse")

    def test_exact(self) -> None:
        self.judge("allocator.exact")

    def test_explore(self) -> None:
        self.judge("allocator.explore")


class TreeSuite(PartSuite):
    """Suites of the part ``tree``."""

    def test_state(self) -> None:
        self.judge("tree.state")

    def test_misuse(self) -> None:
        self.judge("tree.misuse")

    def test_exact(self) -> None:
        self.judge("tree.exact")

    def test_explore(self) -> None:
        self.judge("tree.explore")


class MambaSuite(PartSuite):
    """Suites of the part ``mamba``: trees of recurrent states."""

    def test_state(self) -> None:
        self.judge("mamba.state")

    def test_misuse(self) -> None:
        self.judge("mamba.misuse")

    def test_exact(self) -> None:
        self.judge("mamba.exact")


class SWASuite(PartSuite):
    """Suites of the part ``swa``: trees of sliding windows."""

    def test_state(self) -> None:
        self.judge("swa.state")

    def test_misuse(self) -> None:
        self.judge("swa.misuse")

    def test_exact(self) -> None:
        self.judge("swa.exact")


class LoopSuite(PartSuite):
    """Suites of the part ``loop``."""

    def test_state(self) -> None:
        self.judge("loop.state")


class HiCacheSuite(PartSuite):
    """Suites of the part ``hicache``."""

    def test_state(self) -> None:
        self.judge("hicache.state")

    def test_streams(self) -> None:
        self.judge("hicache.streams")

    def test_ranks(self) -> None:
        self.judge("hicache.ranks")

    def test_explore(self) -> None:
        self.judge("hicache.explore")

    def test_faults(self) -> None:
        self.judge("hicache.faults")


class OffloadSuite(PartSuite):
    """Suites of the part ``offload``."""

    def test_state(self) -> None:
        self.judge("offload.state")


class StorageSuite(PartSuite):
    """Suites of the part ``storage`` that judge a backend."""

    def test_backend(self) -> None:
        self.judge("storage.backend")

    def test_damage(self) -> None:
        self.judge("storage.damage")

    def test_crash(self) -> None:
        self.judge("storage.crash")


class SequencesSuite(PartSuite):
    """Suites of the part ``sequences``."""

    def test_state(self) -> None:
        self.judge("sequences.state")


class ThreeTierSuite(PartSuite):
    """Suites of the part ``storage`` that judge a cache of three tiers."""

    def test_state(self) -> None:
        self.judge("storage.state")

    def test_faults(self) -> None:
        self.judge("storage.faults")


class OpsSuite(PartSuite):
    """Suites of the part ``ops``."""

    def test_transfer(self) -> None:
        self.judge("ops.transfer")
