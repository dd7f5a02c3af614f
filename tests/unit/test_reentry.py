"""Re-entrancy mode: each allocation inside an operation first evicts all that can be evicted."""

import pytest

from refcache.oracle import HiCacheDriver, Violation, resolve
from refcache.planted import find


def driver(**config):
    return HiCacheDriver(resolve("refcache"), size=16, host_size=20, **config)


def below_an_ancestor(**config):
    """Load two tokens that hang from two on the device, which nobody locks."""
    d = driver(**config)
    for tokens in ((0, 1), (0, 1, 2, 0)):
        d.insert(tokens)
    d.settle()
    d.evict(2)
    assert d.ledger.cached.keys() == {(None, (0,)), (None, (0, 1))}
    d.reload(0)
    d.settle()
    d.wind_down()


def beside_another(**config):
    """Load three tokens while a node on the device has no host copy."""
    d = driver(write_policy="write_back", **config)
    d.insert((1, 1, 1))
    d.evict(3)
    d.insert((2, 2, 2))
    d.reload(0)
    d.settle()
    d.wind_down()


PROGRAMS = {below_an_ancestor: "load-leaves-ancestor", beside_another: "load-back-unprotected"}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("delay", [True, False])
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_reference_passes(program, delay, reentrant):
    program(delay=delay, reentrant=reentrant)


@pytest.mark.parametrize("program", PROGRAMS)
def test_with_room_to_spare_only_this_mode_sees_the_bug(program):
    with find(PROGRAMS[program]).active():
        program()
        with pytest.raises(Violation):
            program(reentrant=True)


@pytest.mark.parametrize("page_size", [1, 2])
def test_every_allocation_evicts_everything(page_size):
    d = driver(page_size=page_size)
    r = driver(page_size=page_size, reentrant=True)
    for one in (d, r):
        one.insert((0, 1, 2, 0))
        one.settle()
        one.insert((1, 1, 2, 0))
        one.settle()
    assert len(d.ledger.cached) * page_size == 8
    assert len(r.ledger.cached) * page_size == 4
    for one in (d, r):
        one.admit((2, 2, 2, 2, 2))
        one.decode(0, 1)
        one.finish(0)
        one.wind_down()
    assert d.bench.no_room is r.bench.no_room is False
