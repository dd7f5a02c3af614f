"""``refcache replay``: what it prints, what it refuses, and that a violation is exit code 1."""

import json
from pathlib import Path

import pytest

import refcache.replay.loop
from command_line import refused
from refcache.cli.main import main
from refcache.oracle import Violation
from refcache.readers import TraceRequest, write_requests
from refcache.replay.workload import prefix_bound, synthesize


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    requests = synthesize(12, seed=0, system_tokens=600, turn_tokens=100, output_tokens=10)
    write_requests(path, requests)
    return path


def result_of(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> dict:
    assert main(["replay", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_counts_of_two_requests(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_requests(path, [TraceRequest(0, 1030, 3, (0, 1, 2)), TraceRequest(0, 1024, 2, (0, 1))])
    arguments = [str(path), "--serial", "--device-tokens", "4096", "--check", "every"]
    result = result_of(arguments, capsys)
    assert result["verdict"] == "ok"
    assert result["requests"] == 2
    assert result["prompt_tokens"] == 2054
    assert result["hit_tokens"] == 960  # all but the last token of 1024, in whole pages of 64
    assert result["computed_tokens"] == 1030 + 64
    assert result["output_tokens"] == 5
    assert result["rows_checked"] > 0
    assert result["kv_kept"]
    assert result["bound"] == {"hit_blocks": 2, "blocks": 5, "computed_from": "ids"}
    assert result_of([*arguments, "--page-size", "1"], capsys)["hit_tokens"] == 1023
    assert result_of([*arguments, "--no-decode"], capsys)["output_tokens"] == 2
    assert result_of([*arguments, "--limit", "1"], capsys)["requests"] == 1
    assert result_of([*arguments, "--check", "off"], capsys)["rows_checked"] == 0


def test_pressure(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(trace), "--serial", "--device-tokens", "2048", "--check", "every"]
    lru = result_of(arguments, capsys)
    assert lru["requests"] == 12
    assert lru["evicted_tokens"] > 0
    mru = result_of([*arguments, "--policy", "mru"], capsys)
    assert mru["hit_tokens"] != lru["hit_tokens"]


def test_a_restart_costs_no_hit_where_storage_has_every_page(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(trace), "--serial", "--device-tokens", "2048", "--host-ratio", "3"]
    arguments += ["--check", "every", "--storage"]
    one = result_of([*arguments, str(tmp_path / "one")], capsys)
    two = result_of([*arguments, str(tmp_path / "two"), "--restart", "6"], capsys)
    assert one["hit_tokens"] == two["hit_tokens"] > 0
    assert two["hits_before"] + two["hits_after"] == two["hit_tokens"]
    assert two["storage_hit_tokens"] > one["storage_hit_tokens"]
    assert two["bytes_to_storage"] > 0
    lost = result_of([*arguments[:-1], "--restart", "6"], capsys)
    assert lost["hit_tokens"] < two["hit_tokens"]


@pytest.mark.parametrize("arguments", [["--storage", "d"], ["--restart", "0"]])
def test_storage_and_restart_are_refused_where_they_make_no_sense(
    trace: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert arguments[0].removeprefix("--") in refused(["replay", str(trace), *arguments], capsys)


def test_prints_what_it_did(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(trace), "--device-tokens", "unlimited"]) == 0
    out = capsys.readouterr().out
    for word in ("requests", "hits", "evicted", "computed", "checks", "time"):
        assert f"\n{word}" in f"\n{out}"
    assert "no KV bytes are kept without a bound" in out
    bound = prefix_bound(synthesize(12, seed=0, system_tokens=600, turn_tokens=100))
    assert f"of {bound.blocks} blocks" in out
    assert "computed from the ids" in out


def test_a_violation(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*args: object) -> None:
        raise Violation("P1", "page 3 has two owners")

    monkeypatch.setattr(refcache.replay.loop, "replay", breaks)
    assert main(["replay", str(trace)]) == 1
    assert "P1: page 3 has two owners" in capsys.readouterr().out
    found = result_of([str(trace)], capsys, code=1)
    assert found["verdict"] == "violation"
    assert found["violation"]["rule"] == "P1"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trace.jsonl", "--page-size", "0"], "page_size=0: expected at least 1"),
        (["trace.jsonl", "--page-size", "-64"], "page_size=-64: expected at least 1"),
        (["trace.jsonl", "--page-size", "x"], "Invalid value for '--page-size'"),
        (["trace.jsonl", "--device-tokens", "63"], "device_tokens=63: expected at least 64"),
        (["trace.jsonl", "--device-tokens", "640"], "device_tokens=640: request"),
        (["trace.jsonl", "--device-tokens", "0"], "--device-tokens 0: expected 1 to"),
        (["trace.jsonl", "--device-tokens", "-5"], "--device-tokens -5: expected 1 to"),
        (["trace.jsonl", "--device-tokens", "10000000000000"], "this machine's memory"),
        (["trace.jsonl", "--device-tokens", "many"], "--device-tokens many: expected"),
        (["trace.jsonl", "--policy", "nope"], "unknown policy 'nope': expected one of fifo"),
        (["trace.jsonl", "--check", "nope"], "unknown check 'nope': expected one of every"),
        (["trace.jsonl", "--policy", "lruu"], "did you mean 'lru'? Expected one of fifo"),
        (["trace.jsonl", "--host-ratio", "1e300"], "host_ratio=1e+300: expected a host tier of at"),
        (["trace.jsonl", "--host-ratio", "inf"], "host_ratio=inf: expected a finite number above"),
        (["trace.jsonl", "--host-ratio", "1"], "host_ratio=1.0: expected a finite number above 1"),
        (["trace.jsonl", "--limit", "0"], "Invalid value for '--limit'"),
        (["trace.jsonl", "--nope"], "No such option: --nope"),
        ([], "Missing argument"),
        (["absent.jsonl"], "absent.jsonl: No such file or directory"),
        (["."], ".: Is a directory"),
        (["empty"], "empty: the file is empty"),
        (["binary"], "binary, line 1: not UTF-8 text"),
        (["truncated"], "truncated, line 12: the file ends inside this line"),
    ],
)
def test_wrong_call(
    arguments: list[str],
    words: str,
    trace: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = trace.parent
    monkeypatch.chdir(folder)
    (folder / "empty").touch()
    (folder / "binary").write_bytes(bytes(range(128, 256)))
    (folder / "truncated").write_bytes(trace.read_bytes()[:-10])
    assert words in refused(["replay", *arguments], capsys)
    assert len(list(folder.iterdir())) == 4
