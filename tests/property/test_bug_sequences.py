"""The published corruption bugs of hierarchical caches, each as its smallest sequence.

Every sequence was run on an engine's release and failed there. Here it must pass on the reference,
with copies delayed as long as possible and without delay; the planted bug that models it must fail.

Notation: ``A`` admit (match, lock, load back, compute, cache; ``/c`` in chunks of c), ``D x``
decode one token, ``F`` finish with insert, ``X`` abort without, ``E n`` evict n tokens, ``T`` all
copies finish and are acknowledged, ``M`` match, ``R`` reset.
"""

import pytest

from refcache.errors import NotProtected
from refcache.oracle import HiCacheDriver, Violation, resolve
from refcache.oracle.planted import find

SEQUENCES = {
    # name: (policy, page size, device, host, program, the planted bug that models it)
    "B01-load-back-evicts-its-source": (
        "write_back", 1, 8, 9,
        "A 111; F; A 002110; D 0; F; A 1111", "load-back-unprotected",
    ),
    "B01-pages-of-two": (
        "write_back", 2, 16, 18,
        "A 02201212; F; A 00010221121; D 1; F; A 022012121", "load-back-unprotected",
    ),
    "B02-host-leaf-with-a-child": (
        "write_back", 1, 6, 7,
        "A 11; F; E 1; A 110; F; T; E 2", "host-leaf-with-children",
    ),
    "B03-eviction-below-a-dropped-node": (
        "write_back", 1, 8, 9,
        "A 002; F; E 1; A 0021; F; T; A 211111; F; A 002", "host-leaf-with-children",
    ),
    "B03-host-slot-leaked": (
        "write_back", 1, 8, 9,
        "A 111; F; E 1; A 11121; D 1; T; F; A 2102; F; E 1", "host-leaf-with-children",
    ),
    "B06-split-while-the-copy-runs": (
        "write_through", 1, 8, 20,
        "A 0121; F; M 012; M 010; T; E 4", "split-forgets-the-copy",
    ),
    "B19-reset-with-a-copy-in-flight": (
        "write_through", 1, 8, 20,
        "A 012; F; R; A 2222; F; T", "reset-leaves-copies",
    ),
    "B23-write-back-into-a-full-host": (
        "write_back", 1, 6, 7,
        "A 1111; F; E 4; A 2222; F; E 4; A 0000; F; E 4", None,
    ),
    "B26-chunk-aborted": (
        "write_through", 1, 16, 40,
        "A 01201201/4; X; T; E 4; M 0120", None,
    ),
    "B27-one-request-twice": (
        "write_through_selective", 1, 16, 40,
        "A 0120; D 1; F; T; E 16; M 0120", None,
    ),
}  # fmt: skip


def run(driver, program):
    for step in program.split("; "):
        call, _, rest = step.partition(" ")
        text, _, chunk = rest.partition("/")
        tokens = tuple(int(c) for c in text) if call in "AM" else ()
        last = len(driver.requests) - 1
        match call:
            case "A":
                driver.admit(tokens, None, int(chunk) if chunk else None)
                driver.cache(len(driver.requests) - 1)
            case "D":
                driver.decode(last, int(text))
            case "F":
                driver.finish(last)
            case "X":
                driver.abort(last)
            case "E":
                driver.evict(int(text))
            case "T":
                driver.settle()
            case "M":
                driver.match(tokens)
            case "R":
                driver.reset()
    driver.wind_down()


def driver_for(name, **more):
    policy, page_size, size, host_size, _, _ = SEQUENCES[name]
    return HiCacheDriver(
        resolve("refcache"), page_size=page_size, size=size, host_size=host_size,
        write_policy=policy, **more,
    )  # fmt: skip


@pytest.mark.parametrize("delay", [True, False])
@pytest.mark.parametrize("hit_policy", ["per_visit", "per_request", "chunks_count"])
@pytest.mark.parametrize("name", SEQUENCES)
def test_the_reference_passes(name, delay, hit_policy):
    run(driver_for(name, delay=delay, hit_policy=hit_policy), SEQUENCES[name][4])


@pytest.mark.parametrize("name", [n for n, s in SEQUENCES.items() if s[5]])
def test_its_planted_bug_fails(name):
    with find(SEQUENCES[name][5]).active(), pytest.raises((Violation, NotProtected)):
        run(driver_for(name), SEQUENCES[name][4])


def on_host(driver, tokens):
    found = driver._match(tokens, None)
    return len(found.device_indices) + found.host_hit_length


@pytest.mark.parametrize(
    ("hit_policy", "kept"), [("per_visit", 0), ("per_request", 0), ("chunks_count", 4)]
)
def test_an_aborted_chunk_is_backed_up_only_if_chunks_count(hit_policy, kept):
    """B26 is policy: the default drops a prefix that only chunks of a prefill have visited."""
    d = driver_for("B26-chunk-aborted", hit_policy=hit_policy)
    d.admit((0, 1, 2, 0, 1, 2, 0, 1), None, 4)
    d.cache(0)
    d.abort(0)
    d.settle()
    d.evict(4)
    assert on_host(d, (0, 1, 2, 0)) == kept


@pytest.mark.parametrize(
    ("hit_policy", "kept"), [("per_visit", 4), ("per_request", 0), ("chunks_count", 4)]
)
def test_one_request_counts_twice_unless_hits_are_per_request(hit_policy, kept):
    """B27 is policy: by default one request passes its own prompt twice, which is "selective"."""
    d = driver_for("B27-one-request-twice", hit_policy=hit_policy)
    d.admit((0, 1, 2, 0))
    d.cache(0)
    d.decode(0, 1)
    d.finish(0)
    d.settle()
    d.evict(16)
    assert on_host(d, (0, 1, 2, 0)) == kept
