"""Calls of the command line that must be refused."""

import pytest

from refcache.cli.main import main


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """The one line on stderr of a call that must be refused."""
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("refcache: ")
    return lines[0]
