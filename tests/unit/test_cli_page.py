"""docs/cli.md has every command and every option, with its default, and nothing else."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from refcache.cli.main import app

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## `refcache (\w+).*?`\n(.*?)(?=^## |\Z)", PAGE, flags=re.M | re.S))
COMMANDS: dict[str, Any] = getattr(typer.main.get_command(app), "commands")  # noqa: B009


def rows(command: str) -> dict[str, str]:
    """The table of a command: option -> its meaning."""
    return dict(re.findall(r"^\| `(--[a-z-]+)[^`]*` \| (.*) \|$", SECTIONS[command], flags=re.M))


def test_every_command_has_a_section() -> None:
    assert set(SECTIONS) == set(COMMANDS)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_option_has_a_row(command: str) -> None:
    options = {p.opts[0]: p for p in COMMANDS[command].params if p.param_type_name == "option"}
    assert set(rows(command)) == set(options)
    for name, meaning in rows(command).items():
        default = options[name].default
        if default not in (None, False, 0):
            shown = f"{int(default):,}" if str(default).isdecimal() else default
            assert f"({shown}" in meaning or f"`{shown}`" in meaning, (name, default, meaning)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_option_has_a_help_text(command: str) -> None:
    assert COMMANDS[command].help
    assert all(p.help for p in COMMANDS[command].params)
