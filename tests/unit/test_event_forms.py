"""KV events in each engine's form: read, judged with that engine's liberties, and shrunk."""

import base64
import json
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zstandard

from command_line import refused
from refcache.cli.main import main
from refcache.errors import InvalidTrace, UnknownName
from refcache.readers import read_events
from refcache.trace import TraceVerdict, judge_events, judge_file

STORED = {"type": "BlockStored", "block_hashes": [11], "token_ids": [1, 2], "block_size": 2}
CHILD = {**STORED, "block_hashes": [12], "parent_block_hash": 11, "token_ids": [3, 4]}
GONE = {"type": "BlockRemoved", "block_hashes": [11]}
MOVED = {**STORED, "token_ids": [], "block_size": 0, "medium": "CPU"}


def batch(*events: Any, **more: Any) -> dict[str, Any]:
    return {"ts": 1.0, "events": list(events), **more}


def judged(tmp_path: Path, *values: Any, **options: Any) -> TraceVerdict:
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return judge_file(path, **options)


def dynamo(number: int, data: Any, worker: int = 7) -> dict[str, Any]:
    return {"worker_id": worker, "event": {"event_id": number, "dp_rank": 0, "data": data}}


def trtllm(number: int, **data: Any) -> dict[str, Any]:
    return {"event_id": number, "data": data, "window_size": 256}


def rfc1527(number: int, kind: str, **more: Any) -> dict[str, Any]:
    return {"event_id": number, "event_type": kind, "backend_id": "n1", "medium": "cpu", **more}


DYNAMO_STORED = {"stored": {"parent_hash": None, "blocks": [{"block_hash": 1, "tokens_hash": 9}]}}
TRT_BLOCK = {"block_hash": 1, "tokens": [{"token_id": 5, "token_extra_id": 0}], "cache_level": 0}

LEGAL: dict[str, list[Any]] = {
    "copies": [batch(STORED, STORED), batch(GONE), batch(GONE)],
    "again": [
        batch(STORED),
        batch({**STORED, "block_hashes": [11, 12], "token_ids": [1, 2, 3, 4]}),
    ],
    "groups": [batch({**STORED, "group_idx": 0}, {**STORED, "group_idx": 1})],
    "ranks": [batch(STORED, data_parallel_rank=0), batch(STORED, data_parallel_rank=1)],
    "rank left out": [batch(STORED, data_parallel_rank=0), batch(GONE)],
    "lower tier": [batch(STORED), batch(MOVED), batch({**GONE, "medium": "CPU"}, GONE)],
    "parent below": [
        batch(STORED),
        batch({**STORED, "medium": "CPU"}, GONE),
        batch({**CHILD, "medium": "EXTERNAL"}),
    ],
    "parent removed": [batch(STORED, GONE, CHILD)],
    "hex": [batch({**STORED, "block_hashes": ["9f86d081884c7d65"]})],
    "256 bits": [batch({**STORED, "block_hashes": [2**255 + 5]})],
    "arrays": [[1.0, [["BlockStored", [11], None, [1, 2], 2, None, "GPU", None, [None]]], 0]],
    "bare array": [["BlockStored", [11], None, [1, 2], 2]],
    "wrapped": [{"recv_ts": 1.0, "seq": 0, "topic": "kv@a", "batch": batch(STORED)}],
    "two topics": [
        {"recv_ts": 1.0, "seq": 0, "topic": "a", "batch": batch(STORED)},
        {"recv_ts": 1.1, "seq": 0, "topic": "b", "batch": batch(STORED)},
    ],
    "numbered": [batch(STORED, seq=0), batch(GONE, seq=1)],
    "dynamo": [
        dynamo(1, DYNAMO_STORED),
        dynamo(1, DYNAMO_STORED, worker=8),
        dynamo(2, {"removed": {"block_hashes": [1]}}),
        dynamo(3, "cleared"),
    ],
    "trtllm": [
        trtllm(0, type="created", num_blocks_per_cache_level=[4, 0]),
        trtllm(1, type="stored", parent_hash=None, blocks=[TRT_BLOCK]),
        trtllm(2, type="updated", block_hash=1, cache_level={"old_value": 0, "new_value": 1}),
        trtllm(3, type="updated", block_hash=1, priority={"old_value": 35, "new_value": 40}),
        trtllm(4, type="removed", block_hashes=[1]),
    ],
    "trtllm, a list": [[trtllm(0, type="stored", parent_hash=None, blocks=[TRT_BLOCK])]],
    "mooncake": [
        rfc1527(1, "stored", seq_hashes=[1], parent_hash=None, block_size=2),
        rfc1527(2, "removed", seq_hashes=[1]),
        rfc1527(3, "cleared"),
    ],
}


@pytest.mark.parametrize("name", LEGAL)
def test_a_legal_stream(name: str, tmp_path: Path) -> None:
    verdict = judged(tmp_path, *LEGAL[name])
    assert verdict.verdict == "ok", verdict
    assert verdict.records >= 1


ILLEGAL: dict[str, tuple[list[Any], str, str]] = {
    "one copy too many removed": (
        [batch(STORED, STORED), batch(GONE, GONE), batch(GONE)],
        "N2",
        "removed page 11, which is not stored",
    ),
    "parent never announced": (
        [batch(STORED), batch({**CHILD, "parent_block_hash": 5})],
        "N2",
        "5",
    ),
    "another group": ([batch({**STORED, "group_idx": 0}, {**GONE, "group_idx": 1})], "N2", "11"),
    "another rank": (
        [batch(STORED, data_parallel_rank=0), batch(GONE, data_parallel_rank=1)],
        "N2",
        "11",
    ),
    "another tier": ([batch(STORED, {**GONE, "medium": "CPU"})], "N2", "not stored on CPU"),
    "too many tokens": ([batch({**STORED, "token_ids": [1] * 6})], "N3", "announced with 6 tokens"),
    "too many hashes": ([batch({**STORED, "block_hashes": [1, 2, 3]})], "N3", "3 blocks of 2"),
    "a gap": ([batch(STORED, seq=0), batch(GONE, seq=2)], "N4", "batch 2 follows batch 0: 1 are"),
    "a number again": ([batch(STORED, seq=0), batch(GONE, seq=0)], "N4", "does not come after"),
    "two adapters": (
        [batch({**STORED, "lora_name": "a"}), batch(GONE), batch({**STORED, "lora_name": "b"})],
        "N1",
        "page 11 is of adapter 'b', and was of adapter 'a'",
    ),
    "an adapter, then none": ([batch({**STORED, "lora_id": 3}, GONE, STORED)], "N1", "no adapter"),
    "two salts": (
        [batch({**STORED, "cache_salt": "x"}, GONE, {**STORED, "cache_salt": "y"})],
        "N1",
        "adapter 'y'",
    ),
    "two prefixes": (
        [batch(STORED, CHILD, {**STORED, "block_hashes": [12], "token_ids": [3, 4]})],
        "N1",
        "page 12 is [3, 4], and was [1, 2, 3, 4]",
    ),
    "after a kind that is not known": (
        [batch(STORED), batch({"type": "CacheStoreCommitted", "id": 1}), batch(GONE), batch(GONE)],
        "N2",
        "11",
    ),
    "dynamo removes twice": (
        [
            dynamo(1, DYNAMO_STORED),
            *(dynamo(n, {"removed": {"block_hashes": [1]}}) for n in (2, 3)),
        ],
        "N2",
        "1",
    ),
    "dynamo, another worker": (
        [dynamo(1, DYNAMO_STORED), dynamo(1, {"removed": {"block_hashes": [1]}}, worker=8)],
        "N2",
        "1",
    ),
    "dynamo loses an event": (
        [dynamo(1, DYNAMO_STORED), dynamo(3, {"removed": {"block_hashes": [1]}})],
        "N4",
        "batch 3 follows batch 1",
    ),
    "dynamo, other tokens": (
        [
            dynamo(1, DYNAMO_STORED),
            dynamo(2, {"stored": {"blocks": [{"block_hash": 1, "tokens_hash": 8}]}}),
        ],
        "N1",
        "page 1 is [8], and was [9]",
    ),
    "trtllm moves what is not there": (
        [trtllm(1, type="updated", block_hash=1, cache_level={"old_value": 0, "new_value": 1})],
        "N2",
        "moved page 1",
    ),
    "mooncake, wrong length": (
        [rfc1527(1, "stored", seq_hashes=[1], block_size=2, token_ids=[1])],
        "N3",
        "1 blocks of 2 tokens are announced with 1 tokens",
    ),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_an_illegal_stream_and_its_smallest_part(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values, rule, words = ILLEGAL[name]
    other = {**STORED, "block_hashes": [77], "token_ids": [7, 7]}
    noise = [batch(other, {**GONE, "block_hashes": [77]})] * 5
    if isinstance(values[0], dict) and "events" in values[0] and "seq" not in values[0]:
        values = [*noise, *values]
    verdict = judged(tmp_path, *values)
    assert (verdict.verdict, verdict.rule, verdict.n) == ("violation", rule, len(values)), verdict
    assert words in verdict.evidence
    assert main(["shrink", str(tmp_path / "events.jsonl")]) == 0
    small = tmp_path / "events.small.jsonl"
    again = judge_file(small)
    assert (again.rule, again.evidence) == (rule, verdict.evidence)
    assert again.records <= 5
    assert "77" not in small.read_text()


def test_the_unknown_kind_is_counted(tmp_path: Path) -> None:
    verdict = judged(tmp_path, batch(STORED), batch({"type": "New"}, {"type": "New"}), batch(GONE))
    assert verdict.verdict == "ok"
    assert "skipped: 2 of the unknown kind New" in verdict.notes


def test_engines_differ_in_their_liberties(tmp_path: Path) -> None:
    again = LEGAL["again"]
    assert judged(tmp_path, *again, engine="vllm").verdict == "ok"
    assert judged(tmp_path, *again, engine="sglang").rule == "N2"
    assert judged(tmp_path, *LEGAL["copies"], engine="dynamo").rule == "N2"
    assert judged(tmp_path, *LEGAL["parent removed"], engine="sglang").rule == "N2"
    assert "every engine's liberties" in judged(tmp_path, *again).notes[0]
    assert judged(tmp_path, batch(STORED, attn_dp_rank=0), batch(STORED)).rule == "N2"
    with pytest.raises(UnknownName, match="unknown engine 'vlm': did you mean 'vllm'"):
        judged(tmp_path, *again, engine="vlm")


def test_a_late_joiner_is_not_accused(tmp_path: Path) -> None:
    late = [batch(GONE, seq=7), batch(CHILD, seq=8)]
    verdict = judged(tmp_path, *late)
    assert verdict.verdict == "unknown"
    assert any("first batch has number 7; 2 events" in note for note in verdict.notes)
    seen = [batch(STORED, seq=7), batch(GONE, seq=8)]
    assert judged(tmp_path, *seen).verdict == "ok"
    assert judged(tmp_path, *seen, batch(GONE, seq=9)).rule == "N2"
    cleared = [batch({"type": "AllBlocksCleared"}, seq=7, data_parallel_rank=0)]
    assert judged(tmp_path, *cleared, batch(GONE, seq=8)).rule == "N2"


def packed(*values: Any) -> bytes:
    return b"".join(msgpack.packb(value) for value in values)


def test_frames(tmp_path: Path) -> None:
    path = tmp_path / "events.bin"
    digest = bytes(range(200, 232))
    stored = ["BlockStored", [digest], None, [1, 2], 2, None, "GPU"]
    frames = packed([1.5, [stored]], [2.0, [["BlockRemoved", [digest], "GPU"]]])
    for content in (frames, zstandard.ZstdCompressor().compress(frames)):
        path.write_bytes(content)
        assert (judge_file(path).verdict, judge_file(path).records) == ("ok", 2)
    cut = zstandard.ZstdCompressor().compressobj()
    path.write_bytes(cut.compress(frames) + cut.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
    verdict = judge_file(path)
    assert (verdict.verdict, verdict.records) == ("unknown", 2)
    assert "end inside a frame" in str(verdict.damage)
    path.write_bytes(packed([1.5, [stored]], [2.0, [["BlockRemoved", [b"no"], "GPU"]]]))
    verdict = judge_file(path)
    assert (verdict.rule, verdict.n) == ("N2", 2)
    assert b"no".hex() in verdict.evidence
    path.write_bytes(frames[:-3])
    assert judge_file(path).verdict == "unknown"
    assert "line 2: the file ends inside this value" in str(judge_file(path).damage)
    path.write_bytes(frames[:5])
    with pytest.raises(InvalidTrace, match="ends inside this value"):
        judge_file(path)


@pytest.mark.parametrize("inner", ["text", "bytes"])
def test_a_capture_of_payloads(inner: str, tmp_path: Path) -> None:
    payload = packed([1.5, [["BlockStored", [11], None, [1, 2], 2]]])
    path = tmp_path / "capture"
    if inner == "bytes":
        path.write_bytes(packed({"recv_ts": 1.0, "seq": 0, "topic": "a", "payload": payload}))
    else:
        text = base64.b64encode(payload).decode()
        path.write_text(json.dumps({"recv_ts": 1.0, "topic": "a", "payload": text}) + "\n")
    (only,) = read_events(path)
    assert only.events[0].hashes == (11,)
    assert only.source == "a"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"hello": 1}, "got {'hello': 1}: expected the header of a recorded trace, an event"),
        (3, "got 3: expected"),
        (batch({"type": 3}), "type: got {'type': 3}: expected an event with its type"),
        (batch({**STORED, "block_hashes": 3}), "block_hashes: got 3: expected a list"),
        (batch({**STORED, "block_hashes": [1.5]}), "block_hashes[0]: got 1.5: expected a hash"),
        (batch({**STORED, "token_ids": ["a"]}), "token_ids[0]: got 'a': expected a token"),
        (batch({**STORED, "block_size": -2}), "block_size: got -2: expected an integer"),
        (batch({**STORED, "medium": 3}), "medium: got 3: expected text"),
        (batch({**STORED, "group_idx": "x"}), "group_idx: got 'x': expected an integer"),
        (batch({**STORED, "lora_name": []}), "lora_name: got []: expected a number or text"),
        (batch(STORED, seq="x"), "seq: got 'x': expected an integer"),
        (batch(STORED, data_parallel_rank={}), "data_parallel_rank: got {}"),
        ({"ts": 1, "events": 4}, "events: got 4: expected a list of events"),
        (dynamo(1, {"stored": {"blocks": [{}]}}), "block_hash: the field is missing"),
        (dynamo(1, {"stored": {"blocks": [3]}}), "got 3: expected an object"),
        (dynamo(1, {"stored": None}), "got None: expected an object"),
        (trtllm(1, type="stored", blocks=[{"block_hash": 1, "tokens": 3}]), "tokens: got 3"),
        (trtllm(1, type="stored", blocks=[3]), "got 3: expected an object"),
        (rfc1527(1, "stored"), "block_hashes: the field is missing"),
        ({"recv_ts": 1.0, "payload": "%"}, "payload: got '%': expected base64"),
        ({"recv_ts": 1.0, "payload": "wQ=="}, "payload: not MessagePack"),
    ],
)
def test_bad_values(value: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidTrace) as caught:
        judged(tmp_path, value)
    message = str(caught.value)
    assert words in message
    assert message.startswith(f"{tmp_path / 'events.jsonl'}, line 1")
    assert "\n" not in message
    after = judged(tmp_path, batch(STORED), value) if value != 3 else None
    assert after is None or after.verdict == "unknown"


def test_a_form_that_is_insisted_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps(batch(STORED)) + "\n")
    assert main(["judge", str(path), "--format", "kv-events", "--engine", "sglang"]) == 0
    capsys.readouterr()
    assert "unknown format 'x'" in refused(["judge", str(path), "--format", "x"], capsys)
    assert "data: the field" in refused(["judge", str(path), "--format", "trtllm"], capsys)
    path.write_text("")
    with pytest.raises(InvalidTrace, match="the file is empty"):
        judge_events(path)
