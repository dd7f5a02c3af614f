"""Trace files: written line by line, read strictly. A path that ends in ``.zst`` is compressed.

What stands in the lines is :mod:`refcache.trace.format`.
"""

from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import zstandard

from refcache.errors import InvalidTrace
from refcache.readers.source import DAMAGE, MAX_LINE, Source, open_source
from refcache.trace.format import FORMAT, VERSION, End, Header, Line

FLUSH_EVERY = 64  # lines: what a killed recording loses at most


class Closes:
    """A context manager whose end is ``close``."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class TraceWriter(Closes):
    """Writes a trace; ``close`` (or leaving its context) writes the last line.

    Raises:
        InvalidTrace: the file cannot be written.
    """

    def __init__(self, path: str | Path, header: Header) -> None:
        self.path = path
        self._encoder = msgspec.json.Encoder()
        self._lines = self._last = 0
        try:
            self._raw = open(path, "wb")  # noqa: SIM115
        except OSError as error:
            raise InvalidTrace(path, None, None, f"cannot be written: {error.strerror}") from None
        self._file: Any = self._raw
        if str(path).endswith(".zst"):
            self._file = zstandard.ZstdCompressor().stream_writer(self._raw, closefd=False)
        self._put(header)

    def write(self, line: Line) -> None:
        self._lines += 1
        self._last = line.n
        self._put(line)
        if self._lines % FLUSH_EVERY == 0:
            self._file.flush()

    def _put(self, item: Any) -> None:
        self._file.write(self._encoder.encode(item) + b"\n")

    def close(self) -> None:
        if self._raw.closed:
            return
        self._put(Line(n=self._last + 1, call=End(lines=self._lines)))
        if self._file is not self._raw:
            self._file.close()
        self._raw.close()


def read_lines(file: BufferedIOBase) -> Iterator[bytes | str]:
    """The lines of a file; a string is the damage that ends it."""
    while True:
        try:
            raw = file.readline(MAX_LINE)
        except DAMAGE as error:
            yield f"cannot be read: {error}"
            return
        if not raw:
            return
        if not raw.endswith(b"\n"):
            yield (
                f"longer than {MAX_LINE:,} bytes"
                if len(raw) == MAX_LINE
                else "the file ends inside this line"
            )
            return
        yield raw


def is_recorded(path: str | Path) -> bool:
    """Whether a file starts with the header of a recorded trace, and not with something else."""
    source = Source(path)
    try:
        first = source.json(next(source.lines(1)))
    except InvalidTrace:
        return False
    return isinstance(first, dict) and "format" in first


class TraceReader:
    """Reads a trace line by line, strictly; iterate once.

    Attributes:
        header: the first line.
        damage: after the iteration: what is wrong with the rest of the file, or None.

    Raises:
        InvalidTrace: there is no header that this version reads.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self.damage: str | None = None
        self._file = open_source(path)
        self._lines = read_lines(self._file)
        try:
            self.header = self._read_header()
        except InvalidTrace:
            self._file.close()
            raise

    def _read_header(self) -> Header:
        """The first line, which must be a header of this format and version."""
        first = next(self._lines, "the file is empty")
        if isinstance(first, str):
            raise InvalidTrace(self.path, 1, None, first)
        try:
            header = msgspec.json.decode(first, type=Header)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidTrace(self.path, 1, None, f"no trace header: {error}") from None
        if header.format != FORMAT or header.version != VERSION:
            raise InvalidTrace(
                self.path,
                1,
                None,
                f"format {header.format!r} version {header.version}: expected {FORMAT!r} "
                f"version {VERSION}",
            )
        for name in ("size", "host_size"):
            size = getattr(header, name)
            if size is not None and (size < header.page_size or size % header.page_size):
                raise InvalidTrace(
                    self.path, 1, name, f"got {size}: expected whole pages of {header.page_size}"
                )
        return header

    def __iter__(self) -> Iterator[Line]:
        """The lines up to ``End`` or the damage."""
        decoder = msgspec.json.Decoder(Line)
        last = 0
        try:
            for number, raw in enumerate(self._lines, start=2):
                if isinstance(raw, str):
                    self.damage = f"line {number}: {raw}"
                    return
                try:
                    line = decoder.decode(raw)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    self.damage = f"line {number}: {error}"
                    return
                if line.n != last + 1 and not (self.header.excerpt and line.n > last):
                    self.damage = f"line {number}: record {line.n} comes after record {last}"
                    return
                if isinstance(line.call, End):
                    self.damage = None
                    return
                last = line.n
                yield line
            self.damage = f"the file ends after record {last} without an end record: cut off"
        finally:
            self._file.close()


def read_trace(path: str | Path) -> tuple[Header, list[Line], str | None]:
    """A whole trace in memory: header, lines, and the damage that ends it."""
    reader = TraceReader(path)
    return reader.header, list(reader), reader.damage


def write_trace(path: str | Path, header: Header, lines: list[Line]) -> None:
    """Write a whole trace."""
    with TraceWriter(path, header) as writer:
        for line in lines:
            writer.write(line)
