"""Sweeps of ``refcache replay``: rows, figure, strategies of one's own, refusals."""

import json
from pathlib import Path

import pytest

from command_line import refused
from refcache.cli.main import main
from refcache.readers import write_requests
from refcache.replay.workload import synthesize


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    write_requests(path, synthesize(12, seed=0, system_tokens=600, turn_tokens=90, output_tokens=4))
    return path


def test_a_sweep_and_its_figure(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    figure = trace.with_suffix(".svg")
    arguments = ["replay", str(trace), "--serial", "--sweep", "policy=lru,mru"]
    arguments += ["--sweep", "device-tokens=2048,8K", "--json"]
    assert main([*arguments, "--plot", str(figure)]) == 0
    answer = json.loads(capsys.readouterr().out)
    got = [(p["policy"], p["device-tokens"]) for p in answer["points"]]
    assert got == [("lru", 2048), ("lru", 8000), ("mru", 2048), ("mru", 8000)]
    for point in answer["points"]:
        assert 0 < point["hit_rate"] <= point["optimal_hit_rate"] <= answer["unlimited_hit_rate"]
    small, large = (answer["points"][i]["hit_rate"] for i in (0, 1))
    assert small < large
    assert b"<svg" in figure.read_bytes()
    kept = figure.read_bytes()
    assert main([*arguments, "--plot", str(figure)]) == 0
    assert figure.read_bytes() == kept
    capsys.readouterr()


def test_a_strategy_of_ones_own(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (trace.parent / "mine_sweep.py").write_text(
        "class Newest:\n    def get_priority(self, node):\n        return -node.last_access_time\n"
    )
    monkeypatch.syspath_prepend(str(trace.parent))
    arguments = ["replay", str(trace), "--serial", "--device-tokens", "2048", "--json"]
    assert main([*arguments, "--policy", "mine_sweep:Newest"]) == 0
    own = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--policy", "mru"]) == 0
    assert json.loads(capsys.readouterr().out)["hit_tokens"] == own["hit_tokens"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sweep", "sise=1,2"], "unknown axis 'sise'"),
        (["--sweep", "page-size"], "expected page-size=VALUE,VALUE,..."),
        (["--sweep", "page-size=1,,2"], "expected page-size=VALUE,VALUE,..."),
        (["--sweep", "page-size=x"], "got 'x': expected a whole number"),
        (["--sweep", "page-size=1.5"], "got '1.5': expected a whole number"),
        (["--sweep", "device-tokens=1e99"], "expected a whole number"),
        (["--sweep", "page-size=1", "--sweep", "page-size=2"], "page-size is swept twice"),
        (["--sweep", "policy=lru,nope"], "unknown policy 'nope'"),
        (["--sweep", "policy=lru", "--plot", "x.pdf"], "ends in .svg or .png"),
        (["--sweep", "policy=lru", "--plot", "no/such/x.svg"], "no/such/x.svg: cannot be written"),
        (["--sweep", "host-ratio=2,1e9"], "host_ratio=1000000000.0: expected a host tier of at"),
        (["--policy", "absent_module:Thing"], "policy 'absent_module:Thing': ModuleNotFoundError"),
        (["--policy", "builtins:int"], "expected a class with get_priority"),
    ],
)
def test_refusals(
    arguments: list[str], words: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(["replay", str(trace), *arguments], capsys)
    assert [p.name for p in trace.parent.iterdir()] == ["trace.jsonl"]
