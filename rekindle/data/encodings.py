"""Text files in other encodings than UTF-8: decoded while they are read, so that readers
see UTF-8 and the same lines; and what the beginning of a file says of its encoding."""

import codecs
import contextlib
import io
from typing import Any, BinaryIO

_PIECE_BYTES = 1 << 20


class _AsUtf8(io.RawIOBase):
    """A stream as UTF-8. Bytes that the encoding lacks are kept: their row is refused."""

    def __init__(self, stream: BinaryIO, encoding: str) -> None:
        self._stream = stream
        self._encoding = encoding
        self._decoded = b""  # as UTF-8, and not read yet
        self._ended = False
        self._decoder = codecs.getincrementaldecoder(encoding)("surrogateescape")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        # a piece may end within a character, and decode to nothing yet
        while not self._decoded and not self._ended:
            piece = self._stream.read(_PIECE_BYTES)
            self._ended = not piece
            try:
                text = self._decoder.decode(piece, self._ended)
                self._decoded = text.encode(errors="surrogateescape")
            except UnicodeError as error:
                raise OSError(f"it is not {self._encoding}: {error}") from None
        count = min(len(buffer), len(self._decoded))
        buffer[:count] = self._decoded[:count]
        self._decoded = self._decoded[count:]
        return count


def as_utf8(stream: BinaryIO, encoding: str) -> BinaryIO:
    """The stream, decoded from `encoding`, as UTF-8.
    Reading raises OSError for another."""
    if encoding == "utf-8":
        return stream
    return io.BufferedReader(_AsUtf8(stream, encoding), _PIECE_BYTES)


def encoding_of(head: bytes) -> str:
    """The value of `data.encoding` that a file which is not UTF-8 seems to have."""
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)) or head[:4].count(0) > 2:
        return "utf-32"
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if b"\0" in head[:4]:  # of Latin letters in UTF-16 one byte of two is 0
        return "utf-16-be" if head.startswith(b"\0") else "utf-16-le"
    with contextlib.suppress(UnicodeDecodeError):
        head.decode("cp1252")
        return "cp1252"
    return "latin-1"
