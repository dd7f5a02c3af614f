"""Draws that depend on nothing but the seed.

From 6.131 on Hypothesis reads the source of every module that is loaded and is not installed, and
puts the constants it finds there into what it draws. So an import changes the cases, and there is
no setting for it. In :func:`without_local_constants` Hypothesis finds none.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PROVIDERS = "hypothesis.internal.conjecture.providers"


class NoConstants:
    """What stands in for the constants of a program: there are none of any type."""

    def set_for_type(self, kind: Any) -> tuple[()]:
        return ()

    __getitem__ = set_for_type


@contextmanager
def without_local_constants() -> Iterator[None]:
    """In the block, what Hypothesis draws is independent of the modules that are loaded.

    Nobody else may draw in another thread meanwhile: what is replaced is the whole process's.
    """
    providers: Any = sys.modules.get(PROVIDERS)  # loaded with Hypothesis, where it has constants
    if not hasattr(providers, "_get_local_constants"):
        yield
        return
    before = providers._get_local_constants, providers.CONSTANTS_CACHE
    providers._get_local_constants, providers.CONSTANTS_CACHE = NoConstants, {}
    try:
        yield
    finally:
        providers._get_local_constants, providers.CONSTANTS_CACHE = before
