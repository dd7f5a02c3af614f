"""The trace reader refuses what is no trace, in one sentence; the writer writes what it reads."""

import json
import os
from pathlib import Path

import pytest

from refcache.errors import InvalidArgument, InvalidTrace
from refcache.readers import BLOCK, TraceRequest, read_requests, write_requests
from refcache.replay.workload import prefix_bound, synthesize

FIRST = {"timestamp": 5, "input_length": 1025, "output_length": 3, "hash_ids": [0, 1, 2]}


def line(**changes: object) -> bytes:
    fields = {**FIRST, **changes}
    kept = {name: value for name, value in fields.items() if value is not ...}
    return json.dumps(kept).encode() + b"\n"


def trace_of(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    return path


def test_reads_requests(tmp_path: Path) -> None:
    path = trace_of(tmp_path, line() + line(timestamp=6, hash_ids=[0, 1, 9], extra="ignored"))
    requests = read_requests(path).requests
    assert requests[1] == TraceRequest(6, 1025, 3, (0, 1, 9))
    assert read_requests(path, limit=1).requests == requests[:1]
    tokens = requests[1].token_ids()
    assert len(tokens) == 1025
    assert tokens[1023:].tolist() == [1023, 9 * BLOCK]


def test_last_line_needs_no_newline(tmp_path: Path) -> None:
    assert len(read_requests(trace_of(tmp_path, line() + line()[:-1])).requests) == 2


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (b"", "input_length: got 0: expected an integer of 1"),
        (line()[:-9], "line 2: the file ends inside this line"),
        (b"{'a': 1}\n", "line 2: not JSON (Expecting property name"),
        (b"[1, 2]\n", "line 2: got [1, 2]: expected a JSON object"),
        (b"\n", "line 2: empty line"),
        (b"\x80\x02\x00\n", "line 2: not UTF-8 text (byte 0x80 at column 1): a binary file?"),
        (b"\x00\x00\n", "line 2: not JSON"),
        (b"[" * 100_000 + b"\n", "line 2: not JSON"),
        (b'{"timestamp": ' + b"1" * 5000 + b"}\n", "line 2: not JSON"),
        (line(input_length=...), "line 2, input_length: the field is missing"),
        (line(timestamp=5.5), "line 2, timestamp: got 5.5: expected an integer"),
        (line(timestamp=float("nan")), "line 2, timestamp: got nan: expected an integer"),
        (line(input_length="7"), "line 2, input_length: got '7': expected an integer"),
        (line(input_length=True), "line 2, input_length: got True: expected an integer"),
        (line(input_length=-1), "line 2, input_length: got -1: expected an integer"),
        (line(input_length=10**12), "line 2, input_length: got 1000000000000: expected"),
        (line(output_length=10**12), "line 2, output_length: got 1000000000000: expected"),
        (line(hash_ids=7), "line 2, hash_ids: got 7: expected a list"),
        (line(hash_ids=[0, 1]), "line 2, hash_ids: got 2 ids for an input_length of 1025: expect"),
        (line(hash_ids=[0, 1, 2, 3]), "line 2, hash_ids: got 4 ids"),
        (line(hash_ids=[0, "1", 2]), "line 2, hash_ids[1]: got '1': expected an integer"),
        (line(hash_ids=[0, 1, -2]), "line 2, hash_ids[2]: got -2: expected an integer"),
    ],
)
def test_bad_line(tmp_path: Path, second: bytes, words: str) -> None:
    content = line() + second if second else line(input_length=0)
    path = trace_of(tmp_path, content)
    with pytest.raises(InvalidTrace) as caught:
        read_requests(path)
    message = str(caught.value)
    assert message.startswith(f"{path}, line ")
    assert words in message
    assert "\n" not in message
    assert len(message) < len(str(path)) + 250


def test_bad_file(tmp_path: Path) -> None:
    for path, words in (
        (tmp_path / "absent.jsonl", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (trace_of(tmp_path, b""), "the file is empty"),
    ):
        with pytest.raises(InvalidTrace) as caught:
            read_requests(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert words in str(caught.value)


def test_a_line_without_end_is_not_read_whole() -> None:
    with pytest.raises(InvalidTrace, match="line 1: longer than 16,777,216 bytes"):
        read_requests("/dev/zero")


def test_synthetic_trace_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    requests = list(synthesize(300, seed=1))
    assert write_requests(path, iter(requests)) == 300
    assert list(read_requests(path).requests) == requests
    assert list(synthesize(300, seed=1)) == requests
    assert list(synthesize(300, seed=2)) != requests


def test_synthetic_trace_has_the_structure_it_claims() -> None:
    requests = list(synthesize(300, seed=0, system_prompts=3, system_tokens=2000, turns=4))
    starts = {request.hash_ids[: 2000 // BLOCK] for request in requests}
    assert len(starts) == 3
    longest: dict[int, TraceRequest] = {}  # by the first block that is a conversation's own
    later_turns = 0
    for request in requests:
        own = request.hash_ids[2000 // BLOCK]
        before = longest.get(own)
        if before is not None:
            later_turns += 1
            assert request.hash_ids[: len(before.hash_ids)] == before.hash_ids
            assert request.input_length > before.input_length + before.output_length
        longest[own] = request
    assert 300 / 2 < later_turns < 300
    bound = prefix_bound(requests)
    assert 0.5 < bound.hit_blocks / bound.blocks < 1


@pytest.mark.parametrize("bad", [{"turns": 0}, {"system_tokens": -1}, {"turn_tokens": 2**40}])
def test_synthesize_refuses(bad: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match=f"{next(iter(bad))}="):
        list(synthesize(1, seed=0, **bad))


def test_nothing_is_left_when_writing_fails(tmp_path: Path) -> None:
    def breaks() -> object:
        yield TraceRequest(0, 10, 1, (0,))
        yield TraceRequest(0, 10, 1, (0, 1))

    path = trace_of(tmp_path, b"what was there before")
    with pytest.raises(InvalidTrace, match="line 2, hash_ids: got 2 ids"):
        write_requests(path, breaks())
    assert path.read_bytes() == b"what was there before"
    assert os.listdir(tmp_path) == ["trace.jsonl"]
    with pytest.raises(InvalidTrace, match="cannot be written: Is a directory"):
        write_requests(tmp_path, synthesize(1, seed=0))
    with pytest.raises(InvalidTrace, match="cannot be written: No such file or directory"):
        write_requests(tmp_path / "absent" / "trace.jsonl", synthesize(1, seed=0))
    assert os.listdir(tmp_path) == ["trace.jsonl"]


def test_bound_is_computed_from_the_ids() -> None:
    requests = [TraceRequest(0, 1100, 1, ids) for ids in ((0, 1, 2), (0, 1, 3), (0, 1, 2))]
    assert prefix_bound(requests) == (5, 9)
    assert str(prefix_bound(requests)) == "5 of 9 blocks (55.56 %)"


def shared_trace() -> Path:
    here = Path(__file__).parents[2]
    default = here.parent / "shared" / "traces" / "conversation_trace.jsonl"
    path = Path(os.environ.get("REFCACHE_TRACE", default))
    if not path.is_file():
        pytest.skip(f"no trace at {path}; set REFCACHE_TRACE to Mooncake's conversation trace")
    return path


def test_conversation_trace() -> None:
    requests = read_requests(shared_trace()).requests
    assert len(requests) == 12_031
    assert sum(request.input_length for request in requests) == 144_793_823
    assert str(prefix_bound(requests)) == "105,710 of 288,500 blocks (36.64 %)"
