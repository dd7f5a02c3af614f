"""The page of arguments is of the methods that there are now."""

import importlib.util
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def script() -> Any:
    path = ROOT / "scripts" / "argument_table.py"
    spec = importlib.util.spec_from_file_location("argument_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_argument_has_a_row_and_the_page_is_that_of_the_numbers() -> None:
    written = json.loads((ROOT / "docs" / "arguments.json").read_text(encoding="utf-8"))
    found, table = script(), written["arguments"]
    assert {name for name in table if "." not in name.partition("(")[2]} == {*found.arguments()}
    page = (ROOT / "docs" / "arguments.md").read_text(encoding="utf-8")
    assert page == found.page(table, written["cases"])
