"""docs/reading.md: its files are there, the evening is an evening, every word is explained once."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")
EVENING, TRIAL, RULE, OPS, WORDS = PAGE.split("\n## ")[1:]


def lines_of(file: str) -> int:
    return len((ROOT / "src" / file).read_text(encoding="utf-8").splitlines())


def test_every_file_that_is_named_is_there() -> None:
    for name in re.findall(r"`((?:refcache|ops|tests|scripts)/[\w/]+\.py)`", PAGE):
        below = ROOT if name.startswith(("tests", "scripts")) else ROOT / "src"
        assert (below / name).is_file(), name


def test_the_cache_can_be_read_in_one_evening() -> None:
    rows = re.findall(r"^\| `(\S+)` \| (\d+) \|", EVENING, flags=re.MULTILINE)
    assert len(rows) > 10
    assert sum(lines_of(file) for file, _ in rows) <= 3500
    for file, said in rows:
        assert "oracle" not in file
        assert abs(lines_of(file) - int(said)) <= 10 + 0.1 * int(said), file


def test_five_files_put_a_cache_on_trial() -> None:
    assert len(re.findall(r"^\| `refcache/\S+\.py` \|", TRIAL, flags=re.MULTILINE)) == 5


def test_the_rule_that_is_shown_is_a_rule() -> None:
    source = (ROOT / "src/refcache/oracle/rules/tree.py").read_text(encoding="utf-8")
    shown = re.search(r"```python\n(@invariant.*?\n.*?)\n", RULE)
    assert shown is not None
    assert shown[1] in source


def test_an_op_is_shown_from_definition_to_caller() -> None:
    files = re.findall(r"^\| `(\S+\.py)` \|", OPS, flags=re.MULTILINE)
    assert {file.split("/")[0] for file in files} == {"refcache", "ops"}
    assert "ops/alloc_extend/kernel.py" in files


def test_the_words_are_in_order_and_each_has_one_meaning() -> None:
    words = re.findall(r"^\| ([a-z ]+) \| .+ \|$", WORDS, flags=re.MULTILINE)[1:]
    assert len(words) >= 20
    assert words == sorted(set(words))
