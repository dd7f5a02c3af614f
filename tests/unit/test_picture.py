"""The page of a failure: what is on it, that a browser draws it, and that it asks for nothing."""

import json
import re
import shutil
import subprocess

import pytest

from refcache.oracle import HiCacheDriver, TreeDriver, resolve
from refcache.picture import Picture, frame_of, trace_events, write_page, write_trace_events
from refcache.picture.timeline import timeline
from refcache.runtime.simulated.log import MachineLog
from refcache.testing.report import write_failure

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

RACE = [
    "from refcache.planted import plant",
    "plant('load-not-fenced')",
    "from refcache.oracle import HiCacheDriver, resolve",
    "d = HiCacheDriver(resolve('refcache'), size=10, host_size=11, write_policy='write_back')",
    "d.admit((2, 2))",
    "d.finish(0)",
    "d.insert((0, 1))",
    "d.insert((0, 0))",
    "d.insert((1, 0))",
    "d.insert((0, 0, 0, 0))",
    "d.admit((2, 2, 0))",
    "d.insert((0,))",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("failure") / "out"
    verdict = write_failure(path, "hicache.state", RACE)
    assert verdict["rule"] == "X5"
    return path


def data_of(path):
    text = path.read_text()
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])


def test_a_frame_shows_owners_tree_and_requests():
    driver = TreeDriver(resolve("refcache"), page_size=2, size=8)
    driver.admit((0, 1, 1))
    frame = frame_of(driver, "d.admit((0, 1, 1))")
    assert [cell["kind"] for cell in frame["device"]].count("request") == 2
    assert frame["requests"][0]["tokens"] == [0, 1, 1]
    assert frame["tree"] == []
    assert "host" not in frame
    driver.finish(0)
    frame = frame_of(driver, "d.finish(0)")
    assert [cell["kind"] for cell in frame["device"]].count("cached") == 1
    assert frame["tree"][0]["key"] == ["0", "1"]
    assert frame["tree"][0]["host"] is None
    assert "cached for [0, 1]" in frame["text"]


def test_a_frame_of_a_target_that_answers_nothing_has_the_words_alone():
    driver = TreeDriver(resolve("refcache"))
    driver.bench.tree = None
    frame = frame_of(driver, "d.evict(1)")
    assert "tree" not in frame
    assert frame["text"].startswith("free pages")


def test_the_race_is_the_missing_edge(folder):
    data = data_of(folder / "report.html")
    assert len(data["frames"]) == len(RACE) - 3
    spans = {(s["track"], s["number"]): s for s in data["timeline"]["spans"]}
    missing = data["timeline"]["missing"]
    first, second = (spans.get(tuple(missing[end])) for end in ("from", "to"))
    assert (first["name"], second["name"]) == ("attention", "load layer 0")
    assert second["ran"] is None  # it is reported before it touches anything
    assert data["frames"][-1]["host"][0]["kind"] == "cached"
    assert [s["step"] for s in data["timeline"]["spans"]] == sorted(
        s["step"] for s in data["timeline"]["spans"]
    )


def test_waits_are_edges_between_launches():
    driver = HiCacheDriver(resolve("refcache"), size=4, host_size=5)
    log = driver.bench.machine.log = MachineLog()
    driver.admit((0, 1))
    driver.finish(0)
    driver.wind_down()
    told = timeline(log)
    assert {"req_to_token.write", "set_kv_buffer"} <= {span["name"] for span in told["spans"]}
    assert all(span["ran"] is not None for span in told["spans"])
    names = {(span["track"], span["number"]): span["actor"] for span in told["spans"]}
    waits = {
        (names.get((edge["on"], edge["number"])), names.get((edge["track"], edge["after"] + 1)))
        for edge in told["edges"]
    }
    assert ("stream 'forward'", "stream 'write'") in waits


def test_trace_events_have_a_track_a_stream_and_flows_that_go_forward(folder):
    events = json.loads((folder / "machine.json").read_text())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"stream 'forward'", "stream 'load'", "stream 'default'"} <= {*tracks.values()}
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["tid"] for e in slices} == {*tracks}
    for event in slices:
        assert event["ts"] >= 0
        assert event["dur"] >= 1
    for track in tracks:  # slices of a track do not overlap
        ends = 0
        for event in sorted((e for e in slices if e["tid"] == track), key=lambda e: e["ts"]):
            assert event["ts"] >= ends
            ends = event["ts"] + event["dur"]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts
    assert starts.keys() == ends.keys()
    assert all(starts[i]["ts"] <= ends[i]["ts"] for i in starts)
    assert all(e["bp"] == "e" for e in ends.values())


def test_nothing_in_the_data_ends_the_page(tmp_path):
    evil = "</script><script>alert(1)</script><!--"
    picture = Picture(evil, evil, "P1", evil, evil, [evil], [{"step": evil, "text": evil}])
    write_page(picture, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert text.count("<script") == 2
    assert data_of(tmp_path / "page.html")["evidence"] == evil


def test_a_page_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(Exception, match="cannot be written"):
        write_page(Picture("", "", "", "", "", []), tmp_path / "no" / "page.html")
    with pytest.raises(Exception, match="cannot be written"):
        write_trace_events(trace_events(MachineLog()), tmp_path)


def test_a_violation_that_does_not_come_back_has_a_page_that_says_so(tmp_path):
    steps = ["from refcache.oracle import TreeDriver, resolve", "d = TreeDriver(resolve('naive'))"]
    write_failure(tmp_path / "out", "tree.state", steps)
    data = data_of(tmp_path / "out" / "report.html")
    assert data["rule"] == ""
    assert "did not fail" in data["evidence"]


def browse(page, *more):
    """The page as a browser has drawn it, and what it said on its console."""
    given = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", *more]
    run = subprocess.run(
        [CHROMIUM, *given, "--virtual-time-budget=2000", "--dump-dom", page],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return run.stdout, [line for line in run.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: install Debian's package chromium")
@pytest.mark.parametrize("width", [1400, 400])
def test_a_browser_draws_it_without_a_word(folder, width):
    page = (folder / "report.html").as_uri()
    dom, said = browse(page, f"--window-size={width},1000")
    assert said == []
    body = dom.split("<body>")[1].split("<script")[0]
    assert '<h1 id="rule">X5</h1>' in body
    assert body.count('class="missing"') == 1
    nodes = data_of(folder / "report.html")["frames"][-1]["tree"]
    assert body.count('class="box') == len(nodes) + 1
    assert f"{len(RACE) - 4} of {len(RACE) - 4}: d.insert((0,))" in body
    first, said = browse(page + "#0")
    assert said == []
    assert 'class="missing"' not in first.split("<script")[0]
    assert "0 of 8: d = HiCacheDriver" in first
