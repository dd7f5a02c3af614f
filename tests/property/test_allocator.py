"""The allocator's driver: any free page is legal, and a page that two own is named."""

import pytest

from refcache.oracle import AllocatorDriver, Violation, resolve


def test_any_free_page_is_a_legal_answer() -> None:
    for target in ("refcache", "naive"):
        d = AllocatorDriver(resolve(target), page_size=4, size=16)
        d.extend(((0, 6),))
        d.extend(((0, 3), (1, 5)))
        d.release(0, 4)
        d.wind_down()
    first = {t: AllocatorDriver(resolve(t), page_size=4, size=16) for t in ("refcache", "naive")}
    for d in first.values():
        d.alloc(1)
    assert first["refcache"].sequences != first["naive"].sequences


def test_a_page_that_two_own_is_named() -> None:
    class Generous(type(resolve("naive"))):  # type: ignore[misc]
        def allocator(self, config):  # type: ignore[no-untyped-def]
            made = super().allocator(config)
            grow = made._grow

            def _grow(rows):  # type: ignore[no-untyped-def]
                before = set(made._free)
                out = grow(rows)
                made._free = before  # hands pages out and keeps them free
                return out

            made._grow = _grow
            return made

    d = AllocatorDriver(Generous(), page_size=1, size=2)
    with pytest.raises(Violation, match="P1") as caught:
        d.alloc(1)
    assert caught.value.call == "d.alloc(1)"
    assert caught.value.steps[-1] == "d.alloc(1)"
