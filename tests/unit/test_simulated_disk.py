"""The simulated disk: what may be lost, and that nothing else is; the journal of a directory."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from refcache.oracle.drivers.backend.medium import Change, Medium
from refcache.oracle.drivers.backend.watch import Died, Watch


def medium(*changes):
    made = Medium()
    for change in changes:
        made.apply(change)
    return made


def images(*changes):
    return {frozenset(image.items()) for image in medium(*changes).images()}


def image(**files):
    return frozenset(files.items())


CREATE = Change("name", 1, "a")
WRITE = Change("bytes", 1, data=b"data")
SYNC = Change("sync", 1)
NAMES = Change("sync", 0)
RENAME = Change("name", 1, "b", "a")


def test_a_name_without_a_sync_of_the_directory_may_be_lost():
    assert images(CREATE, WRITE, SYNC) == {image(), image(a=b"data")}
    assert images(CREATE, WRITE, SYNC, NAMES) == {image(a=b"data")}


def test_bytes_without_a_sync_of_the_file_may_be_lost_or_torn():
    seen = images(CREATE, WRITE, NAMES)
    torn = [b"", b"data", b"da", b"dat", b"\0\0\0\0", b"da\0\0"]
    assert seen == {image(a=data) for data in torn}


def test_a_rename_may_last_whose_data_did_not():
    seen = images(CREATE, NAMES, WRITE, RENAME)
    assert image(b=b"\0\0\0\0") in seen
    assert image(b=b"") in seen
    assert image(a=b"data") in seen
    assert not any(len(one) != 1 for one in seen)


def test_a_rename_may_last_whose_older_name_did_not():
    assert images(CREATE, WRITE, SYNC, RENAME) == {image(), image(a=b"data"), image(b=b"data")}


def test_what_was_replaced_comes_back_whole():
    old = (Change("name", 2, "b"), Change("bytes", 2, data=b"old"), Change("sync", 2), NAMES)
    seen = images(*old, CREATE, WRITE, SYNC, RENAME)
    assert {dict(one)["b"] for one in seen} == {b"old", b"data"}


def test_removals_are_lost_one_by_one():
    made = [c for i in (1, 2) for c in (Change("name", i, f"f{i}"), Change("sync", i))]
    gone = [Change("remove", i, f"f{i}") for i in (1, 2)]
    names = {frozenset(dict(one)) for one in images(*made, NAMES, *gone)}
    assert names == {frozenset(n) for n in ((), ("f1",), ("f2",), ("f1", "f2"))}
    assert images(*made, NAMES, *gone, NAMES) == {image()}


def test_many_pending_changes_are_not_tried_in_every_combination():
    made = medium(*(Change("name", i, f"f{i}") for i in range(1, 13)))
    assert len(list(made.images())) < 100


def test_a_sync_of_another_file_makes_nothing_last():
    assert images(CREATE, WRITE, Change("sync", -1)) == images(CREATE, WRITE)


def journal(path, function):
    seen = []
    watch = Watch(str(path), seen.append)
    with watch.watching():
        function()
    return [(c.kind, c.name or c.file, c.old, c.data) for c in seen]


def test_the_journal_of_a_careful_writer(tmp_path):
    def write():
        handle = os.open(tmp_path / "t", os.O_CREAT | os.O_WRONLY)
        os.writev(handle, [b"da", b"ta"])
        os.fsync(handle)
        os.close(handle)
        os.replace(tmp_path / "t", tmp_path / "p")
        folder = os.open(tmp_path, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        (tmp_path / "p").unlink()

    assert journal(tmp_path, write) == [
        ("name", "t", "", b""),
        ("bytes", 1, "", b"data"),
        ("sync", 1, "", b""),
        ("name", "p", "t", b""),
        ("sync", 0, "", b""),
        ("remove", "p", "", b""),
    ]


def test_the_journal_of_writers_that_know_nothing_of_it(tmp_path):
    def write():
        np.arange(3, dtype=np.uint8).tofile(tmp_path / "n")
        (tmp_path / "p").write_bytes(b"x")

    told = journal(tmp_path, write)
    assert ("bytes", 1, "", b"\0\1\2") in told
    assert ("bytes", 2, "", b"x") in told
    assert not any(kind == "sync" for kind, *_ in told)


def test_other_directories_and_the_real_functions_are_as_before(tmp_path):
    before = os.open, os.fsync, os.replace, open

    def write():
        with tempfile.TemporaryDirectory() as other:
            Path(other, "x").write_bytes(b"y")

    assert journal(tmp_path, write) == []
    assert before == (os.open, os.fsync, os.replace, open)


def test_a_killed_process_changes_nothing_more(tmp_path):
    watch = Watch(str(tmp_path), lambda change: None)
    watch.left = 1

    def write():
        handle = os.open(tmp_path / "a", os.O_CREAT | os.O_WRONLY)
        try:
            os.rename(tmp_path / "a", tmp_path / "b")
        finally:
            os.close(handle)

    with watch.watching(), pytest.raises(Died):
        write()
    assert os.listdir(tmp_path) == ["a"]
