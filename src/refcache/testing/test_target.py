"""What ``pytest --pyargs refcache.testing`` collects: every suite on ``REFCACHE_TARGET``."""

from refcache.testing.suites import (
    AllocatorSuite,
    HiCacheSuite,
    LoopSuite,
    MambaSuite,
    OffloadSuite,
    OpsSuite,
    SequencesSuite,
    StorageSuite,
    SWASuite,
    ThreeTierSuite,
    TreeSuite,
)


class TestAllocator(AllocatorSuite):
    """Part ``allocator``."""


class TestTree(TreeSuite):
    """Part ``tree``."""


class TestMamba(MambaSuite):
    """Part ``mamba``."""


class TestSWA(SWASuite):
    """Part ``swa``."""


class TestLoop(LoopSuite):
    """Part ``loop``."""


class TestHiCache(HiCacheSuite):
    """Part ``hicache``."""


class TestOffload(OffloadSuite):
    """Part ``offload``."""


class TestStorage(StorageSuite):
    """Part ``storage``."""


class TestSequences(SequencesSuite):
    """Part ``sequences``."""


class TestThreeTiers(ThreeTierSuite):
    """Three tiers of the part ``storage``."""


class TestOps(OpsSuite):
    """Part ``ops``."""
