"""The pytest plugin: options for :mod:`refcache.testing.suites`, loaded wherever refcache is.

    pytest --pyargs refcache.testing --refcache-target mine:MyTarget --refcache-xfails known.txt

An option is the environment variable of the same name for one session: ``--refcache-target`` is
``REFCACHE_TARGET``, and so on. The file of ``--refcache-xfails`` is that of ``refcache check
--xfails`` (:mod:`refcache.testing.xfails`): what it names is an xfail of pytest, and an xpass when
it does not fail. Without an option or a variable the plugin does nothing and imports nothing.
"""

import os
from functools import partial
from typing import Any

import pytest

OPTIONS = {
    "target": "what is on trial: pkg.module:factory, refcache or naive",
    "examples": "cases a suite tries",
    "seed": "the same seed tries the same cases",
    "xfails": "file with the violations that are expected, an id a line",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; ``pytest --help`` lists them under "refcache"."""
    group = parser.getgroup("refcache", "refcache: suites that judge a cache")
    for name, help in OPTIONS.items():
        kind: Any = int if name in ("examples", "seed") else str
        group.addoption(f"--refcache-{name}", type=kind, default=None, help=help)


def pytest_configure(config: pytest.Config) -> None:
    """Put the options into the environment until the session ends; refuse what is wrong there."""
    for name in OPTIONS:
        value, variable = config.getoption(f"refcache_{name}"), f"REFCACHE_{name.upper()}"
        if value is not None:
            before = os.environ.get(variable)
            os.environ[variable] = str(value)
            config.add_cleanup(partial(_put_back, variable, before))
    for name, least in (("EXAMPLES", 1), ("SEED", 0)):
        given = os.environ.get(f"REFCACHE_{name}", "1")
        if not given.isdecimal() or int(given) < least:
            raise pytest.UsageError(f"refcache: {name.lower()} {given!r}: expected {least} or more")
    if "REFCACHE_XFAILS" in os.environ:
        from refcache.errors import InvalidArgument
        from refcache.testing.registry import EXPLORED, SUITES
        from refcache.testing.xfails import read_xfails

        try:
            xfails = read_xfails(os.environ["REFCACHE_XFAILS"])
        except InvalidArgument as error:
            raise pytest.UsageError(f"refcache: {error}") from None
        for unmatched in xfails.unmatched({*SUITES, *EXPLORED}):
            message = f"refcache: xfail {unmatched} matches no suite and rule"
            config.issue_config_time_warning(pytest.PytestConfigWarning(message), stacklevel=2)


def _put_back(variable: str, before: str | None) -> None:
    if before is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = before
