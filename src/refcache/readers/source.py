"""A file as bytes, lines and JSON values, with the errors that every reader shares.

Lines are read one at a time and are at most ``MAX_LINE`` bytes long, so that no file can ask for
more memory than that.
"""

import io
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import zstandard

from refcache.errors import InvalidTrace

MAX_LINE = 2**24  # bytes
PACKED = 2**8  # compressed bytes at a time: a block of four can stand for 128 KiB
DAMAGE = (OSError, EOFError, zlib.error, zstandard.ZstdError)
"""What reading a compressed or a failing file raises."""
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
SHOWN = 60  # characters of a value in a message


def open_source(path: str | Path) -> io.BufferedIOBase:
    """A file to read from its start, decompressed if its first bytes say that it is compressed.

    Raises:
        InvalidTrace: it cannot be opened.
    """
    import gzip

    try:
        raw = open(path, "rb")  # noqa: SIM115
        magic = raw.read(4)
        if raw.seekable():
            raw.seek(0)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidTrace(path, None, None, str(reason)) from None
    if magic.startswith(GZIP):
        return gzip.open(raw)
    if magic.startswith(ZSTD):
        return io.BufferedReader(_Frames(raw), MAX_LINE >> 8)
    return raw


class _Frames(io.RawIOBase):
    """What a file of zstandard frames holds; zstandard's own reader takes a cut frame for the end.

    Raises:
        EOFError: the file ends inside a frame.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._packed, self._content = b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        """Fills ``target`` as far as the content at hand goes; 0 at the end of the last frame."""
        while not self._content:
            self._packed = self._packed or self._raw.read(PACKED)
            if not self._packed:
                if self._frame is None:
                    return 0
                raise EOFError("the compressed data end inside a frame: truncated?")
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._content = self._frame.decompress(self._packed)
            self._packed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(target), len(self._content))
        target[:count], self._content = self._content[:count], self._content[count:]
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class Source:
    """The place in a file where a reader stands: makes its errors.

    Attributes:
        path: of the file. line: number of the line (or frame) that was read last, from 1.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self.line = 0

    def refuse(self, field: str | None, problem: str) -> InvalidTrace:
        """The error for the present line."""
        return InvalidTrace(self.path, self.line or None, field, problem)

    def guarded(self, read: Callable[[], bytes]) -> bytes:
        """``read()``, where what the decompressor or the disk says becomes our error."""
        try:
            return read()
        except DAMAGE as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise self.refuse(None, f"cannot be read: {reason}") from None

    def lines(self, limit: int | None = None) -> Iterator[bytes]:
        """The lines, each with its end, the last perhaps without; ``line`` counts them.

        Raises:
            InvalidTrace: the file cannot be read, is empty, or has a line longer than MAX_LINE.
        """
        with open_source(self.path) as file:
            while limit is None or self.line < limit:
                raw = self.guarded(lambda: file.readline(MAX_LINE))
                if not raw:
                    break
                self.line += 1
                if len(raw) == MAX_LINE and not raw.endswith(b"\n"):
                    raise self.refuse(None, f"longer than {MAX_LINE:,} bytes: not a trace?")
                yield raw
        if self.line == 0 and limit != 0:
            raise self.refuse(None, "the file is empty")

    def text(self, raw: bytes) -> str:
        """A line as text, without its end."""
        try:
            return raw.decode("utf-8-sig" if self.line == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            at = f"byte {raw[error.start]:#04x} at column {error.start + 1}"
            raise self.refuse(None, f"not UTF-8 text ({at}): a binary file?") from None

    def json(self, raw: bytes) -> Any:
        """A line as a JSON value."""
        text = self.text(raw)
        if not text.strip():
            raise self.refuse(None, "empty line: expected a JSON object")
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            if not raw.endswith(b"\n"):
                raise self.refuse(None, "the file ends inside this line: truncated?") from None
            problem = f"not JSON ({error.msg} at column {error.pos + 1})"
            raise self.refuse(None, problem) from None
        except (RecursionError, ValueError) as error:
            raise self.refuse(None, f"not JSON of a trace ({shown(str(error))})") from None

    def object(self, raw: bytes) -> dict[str, Any]:
        """A line as a JSON object."""
        value = self.json(raw)
        if not isinstance(value, dict):
            raise self.refuse(None, f"got {shown(value)}: expected a JSON object")
        return value

    def integer(self, data: dict[str, Any], name: str, low: int, high: int, unit: str = "") -> int:
        """A field that is an integer of ``low`` to ``high``."""
        if name not in data:
            raise self.refuse(name, "the field is missing")
        value: int = data[name]
        if type(value) is not int or not low <= value <= high:
            problem = f"got {shown(value)}: expected an integer of {low} to {high}{unit}"
            raise self.refuse(name, problem)
        return value


def shown(value: object) -> str:
    """A value in a message, cut to one short line."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
