"""The storage tier of SGLang 0.5.10 in known bug sequences, on a CPU and with its own threads; and
that of 0.5.23, which is right in most.

The same sequences are right here: ``tests/property/test_storage_sequences.py``.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from refcache.peers import releases

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "helpers" / "storage_on_release.py"


def seen(version, sequence):
    if version not in releases.unpacked():
        pytest.skip(f"sglang {version} is not unpacked: make peers")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "aliases")])
    ran = subprocess.run(
        [sys.executable, str(PROGRAM), version, sequence],
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_t01_a_torn_file_ends_the_thread_that_reads():
    assert seen("0.5.10", "torn_file") == {
        "torn becomes schedulable": False,
        "thread lives": False,
        "next becomes schedulable": False,
    }


@pytest.mark.nightly
def test_t02_a_split_before_the_acknowledgement_stores_the_lower_half_alone():
    assert seen("0.5.10", "split_before_ack") == {"stored": [False, True, True], "hit": 0}


@pytest.mark.nightly
def test_t03_a_split_while_pages_are_written_leaves_the_upper_half_to_anybody():
    assert seen("0.5.10", "split_while_written") == {"users of the upper half": 0}


@pytest.mark.nightly
def test_t04_namespaces_share_files():
    assert seen("0.5.10", "namespaces") == {"files of the first": 2, "files of both": 2}


def test_t05_a_detach_in_flight_frees_slots_twice():
    assert seen("0.5.10", "detach_in_flight") == {"free": 36, "size": 34}


def test_t06_a_reset_in_flight_leaves_a_thread_and_the_prefetch():
    assert seen("0.5.10", "reset_in_flight") == {
        "threads that read": 2,
        "going on": 1,
        "occupied": 6,
        "found after reset": 0,
    }


@pytest.mark.nightly
def test_t17_a_failed_attach_has_changed_the_policies():
    assert seen("0.5.10", "failed_attach") == {
        "ok": False,
        "before": ["best_effort", "write_through"],
        "after": ["timeout", "write_back"],
    }


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("sequence", "right"),
    [
        ("torn_file", {"torn becomes schedulable": True, "thread lives": True,
                       "next becomes schedulable": True}),
        ("split_before_ack", {"stored": [True, True, True], "hit": 3}),
        ("namespaces", {"files of the first": 2, "files of both": 4}),
        ("reset_in_flight", {"threads that read": 1, "going on": 0, "occupied": 0,
                             "found after reset": 0}),
        ("failed_attach", {"ok": False, "before": ["best_effort", "write_through"],
                           "after": ["best_effort", "write_through"]}),
    ],
)  # fmt: skip
def test_a_later_release_is_right(sequence, right):
    assert seen("0.5.23", sequence) == right
