"""docs/architecture.md names every room of the oracle with its files, and no other."""

import re
from pathlib import Path

import refcache.oracle

ROOT = Path(__file__).parents[2]


def test_the_oracle_s_rooms_and_their_files_are_all_named() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("## Inside the oracle\n")[2].partition("\n\nA *driver*")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \|.*?\|(.*)\|$", table, flags=re.MULTILINE))
    folder = Path(str(refcache.oracle.__file__)).parent
    rooms = {room.name: room for room in folder.iterdir() if (room / "__init__.py").exists()}
    assert rows.keys() == rooms.keys()
    for name, room in rooms.items():
        there = {path.stem for path in room.iterdir() if not path.name.startswith("_")}
        if name == "planted":  # the page has no list of what others list
            there = {"bug", "smoke"}
        named = re.findall(r"`(\w+)`", rows[name])
        assert {n for n in named if n != "refcache"} == there
