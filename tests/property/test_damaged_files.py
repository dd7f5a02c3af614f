"""Files of every form that were damaged: an answer or one line, never a traceback.

``REFCACHE_FUZZ`` sets how many damages each form gets; the nightly run draws ten thousand.
"""

import contextlib
import gzip
import io
import os
from pathlib import Path

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from refcache.cli.main import main

EXAMPLES = int(os.environ.get("REFCACHE_FUZZ", "25"))
fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)

REQUESTS = {
    "mooncake": b'{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [0, 1]}\n'
    * 3,
    "session": b'{"session_id": "s", "delay": 5, "input_length": 20, "hash_ids": [0]}\n' * 2,
    "qwen-bailian": b'{"chat_id": 0, "timestamp": 0.5, "input_length": 20, "output_length": 2, '
    b'"hash_ids": [0, 1]}\n',
    "azure": b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n",
    "burstgpt": b"Timestamp,Model,Request tokens,Response tokens\n5,ChatGPT,472,18\n",
    "sharegpt": b'[{"id": "c", "conversations": [{"from": "human", "value": "H\xc3\xb6"}, '
    b'{"from": "gpt", "value": "yes"}]}]',
    "gzip": gzip.compress(b'{"timestamp": 0, "input_length": 6, "hash_ids": [0]}\n', mtime=0),
}
STORED = b'{"type": "BlockStored", "block_hashes": [11], "token_ids": [1, 2], "block_size": 2}'
EVENTS = {
    "kv-events": b'{"seq": 0, "ts": 1, "events": [' + STORED + b"]}\n" + STORED + b"\n",
    "arrays": b'[1.0, [["BlockStored", [11], null, [1, 2], 2, null, "GPU"]], 0]\n' * 2,
    "dynamo": b'{"worker_id": 7, "event": {"event_id": 1, "data": {"stored": {"parent_hash": null, '
    b'"blocks": [{"block_hash": 1, "tokens_hash": 2}]}}}}\n',
    "trtllm": b'{"event_id": 1, "window_size": 4, "data": {"type": "stored", "parent_hash": null, '
    b'"blocks": [{"block_hash": 1, "tokens": [{"token_id": 1}], "cache_level": 0}]}}\n',
    "mooncake": b'{"event_id": 1, "event_type": "stored", "seq_hashes": [1], "block_size": 2}\n',
    "frames": msgpack.packb([1.0, [["BlockStored", [b"\xf0\xf1"], None, [1, 2], 2]]]),
}
VALUES = [
    b"null",
    b"-1",
    b"1e400",
    b"[]",
    b"{}",
    b'"x"',
    b"true",
    b"\xff",
    b"9" * 30,
    b"0.5",
    b"\n",
]


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Cut, flip, insert, delete or replace a token."""
    at = draw(st.integers(0, len(whole) - 1))
    how = draw(st.sampled_from(["cut", "flip", "insert", "delete", "value", "twice"]))
    if how == "cut":
        return whole[:at]
    if how == "flip":
        return whole[:at] + bytes([whole[at] ^ draw(st.integers(1, 255))]) + whole[at + 1 :]
    if how == "insert":
        return whole[:at] + draw(st.binary(min_size=1, max_size=4)) + whole[at:]
    if how == "delete":
        return whole[:at] + whole[at + draw(st.integers(1, 9)) :]
    if how == "value":
        end = at + draw(st.integers(1, 6))
        return whole[:at] + draw(st.sampled_from(VALUES)) + whole[end:]
    return whole + whole[at:]


def call(arguments: list[str]) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return code, err.getvalue()


def one_line(code: int, err: str, path: Path, codes: tuple[int, ...]) -> None:
    assert "Traceback" not in err
    assert "a fault of refcache" not in err, err
    assert code in codes, err
    if code == 2:
        assert err.count("\n") == 1
        assert str(path) in err or "nothing to shrink" in err, err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged")


@pytest.mark.parametrize("form", REQUESTS)
@given(data=st.data())
@fuzz
def test_a_damaged_request_trace(folder: Path, form: str, data: st.DataObject) -> None:
    path, out = folder / "trace", folder / "out.jsonl"
    path.write_bytes(data.draw(damaged(REQUESTS[form])))
    out.write_text("before")
    code, err = call(["convert", str(path), str(out)])
    one_line(code, err, path, (0, 2))
    assert code == 0 or out.read_text() == "before"


@pytest.mark.parametrize("form", EVENTS)
@given(data=st.data())
@fuzz
def test_a_damaged_stream_of_events(folder: Path, form: str, data: st.DataObject) -> None:
    path = folder / "events"
    path.write_bytes(data.draw(damaged(EVENTS[form])))
    one_line(*call(["judge", str(path)]), path, (0, 1, 2, 3))
    one_line(*call(["shrink", str(path), "--out", str(folder / "small")]), path, (0, 2))
