"""What the properties of this folder are tried with does not depend on what is loaded."""

import importlib
from pathlib import Path

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st


def drawn() -> list[object]:
    """300 draws, as the oracle's machines make them."""
    made: list[object] = []

    @seed(0)
    @settings(max_examples=300)
    @given(st.integers(0, 254) | st.floats(0, 1))
    def draw(value: object) -> None:
        made.append(value)

    draw()
    return made


def test_an_import_changes_no_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = drawn()
    (tmp_path / "of_a_user.py").write_text(
        f"CONSTANTS = {[*range(100, 255), *(i / 499 for i in range(1, 499))]}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("of_a_user")
    assert drawn() == before
