"""docs/architecture.md names every module of the oracle, and no other."""

import re
from pathlib import Path

import refcache.oracle

ROOT = Path(__file__).parents[2]


def test_the_oracle_s_modules_are_all_named() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("## Inside the oracle\n")[2].partition("\n## ")[0]
    folder = Path(str(refcache.oracle.__file__)).parent
    there = {path.stem for path in folder.iterdir() if not path.name.startswith("_")}
    assert set(re.findall(r"`(\w+)`", table)) == there
