"""Each ordering edge, removed, is reported in every order; kept, in none."""

import pytest

from refcache.errors import UnknownName
from refcache.oracle.drivers.streams.edges import EDGES, edge
from refcache.runtime import RaceFound, drawn, eager, lazy

# What `--without-edge list` prints.
NAMES = [
    "write-start",
    "write-fence",
    "load-start",
    "key-getter",
    "value-getter",
    "mla-getter",
    "load-fence",
    "forward-schedule",
    "row-reuse",
    "host-reuse-d2h",
    "device-reuse-d2h",
    "host-reuse-h2d",
    "producer-reuse",
    "decode-load",
    "graph-load",
    "alt-start",
    "alt-join",
    "engine-write-start",
    "engine-load-fence",
    "engine-slots-computed",
    "engine-slots-read",
    "engine-flag",
    "engine-decode-load",
    "engine-host-reuse-d2h",
    "engine-device-reuse-d2h",
    "engine-host-reuse-h2d",
    "engine-producer-reuse",
]


def test_all_edges_are_there_and_unknown_ones_are_refused():
    assert list(EDGES) == NAMES
    assert all(edge(name).name == name for name in NAMES)
    with pytest.raises(UnknownName, match="unknown edge 'write-end'"):
        edge("write-end")


@pytest.mark.parametrize("name", NAMES)
def test_with_the_edge_no_order_has_a_race(name):
    orders = edge(name).orders(removed=False)
    assert orders
    assert not any(orders)


@pytest.mark.parametrize("name", NAMES)
def test_without_the_edge_every_order_has_a_race(name):
    orders = edge(name).orders(removed=True)
    assert len(orders) >= 2  # the edge did order something
    for reports in orders:
        assert reports
        assert all(isinstance(report, RaceFound) for report in reports)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("driver", [eager, lazy, drawn([2, 1, 3, 1, 2, 2])])
def test_report_is_about_the_streams_of_the_edge(name, driver):
    machine = edge(name).run(driver, removed=True)
    assert machine.ignored
    between = {
        frozenset((r.first.actor.name, r.second.actor.name)) for r in machine.tracker.reports
    }
    assert len(between) == 1
    with pytest.raises(RaceFound):
        edge(name).run(driver, removed=True, stop=True)


# What the reports are about, where the edge protects rows of a pool.
CELLS = {
    "write-start": "MHATokenToKVPool plane 0",
    "write-fence": "MHATokenToKVPool plane 0",
    "key-getter": "MHATokenToKVPool plane 0",
    "value-getter": "MHATokenToKVPool plane 1",
    "mla-getter": "MLATokenToKVPool plane 0",
    "load-fence": "MHATokenToKVPool plane 0",
    "forward-schedule": "ReqToTokenPool plane 0",
    "row-reuse": "ReqToTokenPool plane 0",
    "host-reuse-d2h": "MHATokenToKVPoolHost plane 0",
    "device-reuse-d2h": "MHATokenToKVPool plane 0",
    "host-reuse-h2d": "MHATokenToKVPoolHost plane 0",
    "producer-reuse": "MHATokenToKVPoolHost plane 0",
    "decode-load": "MHATokenToKVPool plane 0",
    "graph-load": "MHATokenToKVPool plane 0",
    "alt-start": "MHATokenToKVPool plane 1",
    "alt-join": "MHATokenToKVPool plane 1",
}


@pytest.mark.parametrize("name", CELLS)
def test_report_names_the_cells_that_the_edge_protects(name):
    reports = edge(name).run(lazy, removed=True).tracker.reports
    assert any(report.where.startswith(CELLS[name] + " ") for report in reports)
