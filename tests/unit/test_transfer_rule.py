"""Transfer rules as data: what applies, how tables are kept, how they are made of measurements."""

import json
from pathlib import Path

import pytest
import torch

from command_line import refused
from refcache.controller.tuning import ENGINE, Cost, Moved, Way, rules_from
from refcache.errors import InvalidArgument
from refcache.pool import transfer_rule
from refcache.pool.transfer_rule import RULES, RULES_FILE, TransferRule, rules_for, save


@pytest.fixture(autouse=True)
def no_saved_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RULES_FILE, raising=False)
    transfer_rule._saved.cache_clear()


def test_every_table_ends_with_a_rule_for_everything() -> None:
    for table in RULES.values():
        for to_host in (False, True):
            assert any(
                r.applies(to_host=to_host, copy_bytes=1, total=1, phase="decode") for r in table
            )


def test_unknown_cards_get_the_general_table() -> None:
    assert rules_for("NVIDIA H200") == RULES["NVIDIA H200"]
    assert rules_for("a card of tomorrow") == RULES[""]


def test_saved_tables_win_and_stay_beside_each_other(tmp_path: Path) -> None:
    path, mine = tmp_path / "rules.json", (TransferRule(True, "kernel", 5, phase="decode"),)
    save(path, "mine", mine)
    save(path, "other", RULES[""])
    assert set(json.loads(path.read_text())) == {"mine", "other"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RULES_FILE, str(path))
        assert rules_for("mine") == mine
        assert rules_for("other") == RULES[""]
        assert rules_for("NVIDIA H200") == RULES["NVIDIA H200"]


@pytest.mark.parametrize("text", ["[]", "{", '{"card": [1]}', '{"card": [{"to_host": true}]}'])
def test_a_file_that_is_none_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    path.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RULES_FILE, str(path))
        with pytest.raises(InvalidArgument, match=r"rules\.json.*refcache tune"):
            rules_for("card")


WHOLE, SMALL = 2 << 30, 1 << 29


def test_rules_are_made_of_what_the_model_felt() -> None:
    """At 16 KiB the engine is cheap but slow; with little to move it loses; writes: cap 1."""
    kernels = {("kernel", 1): Cost(9, 20), ("kernel", 2): Cost(4, 40), ("kernel", 3): Cost(5, 50)}

    def engine(ms: float, gbps: float) -> dict[Way, Cost]:
        return {ENGINE: Cost(ms, gbps)}

    costs = {
        Moved(False, 65536, WHOLE): engine(3, 54) | kernels,
        Moved(False, 65536, SMALL): engine(3, 54)
        | {way: Cost(ms / 4, gbps) for way, (ms, gbps) in kernels.items()},
        Moved(False, 32768, WHOLE): engine(4, 50),
        Moved(False, 16384, WHOLE): engine(3, 24),
        Moved(False, 8192, WHOLE): engine(3, 50),  # by chance: longer copies are worse
        Moved(True, 65536, WHOLE): engine(2, 50)
        | {("kernel", 1): Cost(1, 40), ("kernel", 2): Cost(4, 50)},
    }
    assert rules_from(costs) == (
        TransferRule(False, "direct", copy_bytes=32768, min_bytes=2 * SMALL),
        TransferRule(False, "kernel", 2),
        TransferRule(True, "kernel", 1),
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_tuning_needs_a_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(["tune", "--output", str(tmp_path / "rules.json")], capsys)
    assert "without a CUDA device" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["damaged.json", "absent/rules.json", "."])
def test_tune_refuses_its_file_before_it_measures(
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measured(say: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a card")
    monkeypatch.setattr("refcache.controller.tuning.measure", measured)
    (tmp_path / "damaged.json").write_text("{")
    line = refused(["tune", "--output", str(tmp_path / where)], capsys)
    assert "transfer rules in" in line
    assert [p.name for p in tmp_path.iterdir()] == ["damaged.json"]


def test_rules_are_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rules.json"
    save(path, "mine", RULES[""])
    before = path.read_bytes()

    def full(self: Path, text: str, encoding: str) -> int:
        with open(self, "w", encoding=encoding) as file:
            file.write(text[:9])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(InvalidArgument, match="No space left on device"):
        save(path, "other", RULES[""])
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["rules.json"]
