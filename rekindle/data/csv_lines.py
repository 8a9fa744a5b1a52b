"""The line where each row of a CSV file begins, for messages: pyarrow counts rows only.

A row may go over several lines, because a quoted value may hold newlines."""

import codecs
import io
import re
import threading
from typing import BinaryIO

import numpy as np
import numpy.typing as npt


class RowLines(io.RawIOBase):
    """A CSV stream that knows the line where each row begins;
    pyarrow reads it in a thread."""

    def __init__(self, stream: BinaryIO, delimiter: str, line: int) -> None:
        self._row = _row_pattern(delimiter)
        self._stream = stream
        self._partial_row = b""
        self._line = line
        self._held_back = b""
        self._at_start = True
        self._lock = threading.Lock()
        # lines of the rows from `_first` on, and those
        # rows that are left out, the header first
        self._lines = np.empty(0, np.int64)
        self._first = 1
        self._skipped = [1]
        self.quote_at_the_end = 0
        """The line of a quote that takes all after it; 0 for none."""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """The next bytes, once the rows that end in them are known."""
        if size > 0:
            size -= len(self._held_back)
        piece = self._held_back + self._stream.read(size)
        self._held_back = b""
        # pyarrow drops a newline that begins a block
        # behind a carriage return, within quotes, too
        if len(piece) > 1 and piece.endswith(b"\r"):
            self._held_back = b"\r"
            piece = piece[:-1]
        text = self._partial_row + piece
        if self._partial_row and not piece:  # at the end of the file, which may lack a newline
            text += b"\n"
        if self._at_start:
            text = text.removeprefix(codecs.BOM_UTF8)
        self._at_start = False
        lengths, heights, is_filled = self._measured(text)
        self._partial_row = text[int(lengths.sum()) :]
        first_lines = (self._line + np.cumsum(heights) - heights)[is_filled]
        self._line += int(heights.sum())
        if not piece and self._partial_row:
            self.quote_at_the_end = self._line
            self._partial_row = b""
            first_lines = np.append(first_lines, self._line)
        with self._lock:
            self._lines = np.append(self._lines, first_lines)
        return piece

    def _measured(
        self, text: bytes
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Of the rows that end in `text`: their bytes, their lines, and whether they hold
        more than the end of a line."""
        ends = _ends_of_lines(text)
        if ends is None:
            rows = [row for row in self._row.findall(text) if row]
            lengths = np.array([len(row) for row in rows], np.int64)
            heights = np.array([row.count(b"\n") or 1 for row in rows], np.int64)
            is_filled = np.array([bool(row.strip(b"\r\n")) for row in rows], bool)
            return lengths, heights, is_filled
        lengths = np.diff(ends, prepend=0)
        is_filled = lengths > 1
        if b"\r" in text:
            before_newline = np.frombuffer(b"\n" + text, np.uint8)[ends - 1]
            is_filled = lengths > 1 + (before_newline == ord("\r"))
        return lengths, np.ones(len(ends), np.int64), is_filled

    def skip(self, row: int) -> int:
        """Leave out a row, 1 being the header; returns its line."""
        with self._lock:
            self._skipped.append(row)
            return int(self._lines[row - self._first])

    def take(self, count: int) -> npt.NDArray[np.int64]:
        """The lines of the next so many rows that are not left out."""
        with self._lock:
            rows = np.arange(self._first, self._first + count + len(self._skipped))
            rows = np.setdiff1d(rows, self._skipped, assume_unique=True)[:count]
            lines: npt.NDArray[np.int64] = self._lines[rows - self._first]
            after = int(rows[-1]) + 1 if count else self._first
            self._lines = self._lines[after - self._first :]
            self._first = after
            self._skipped = [row for row in self._skipped if row >= after]
            return lines

    def next_line(self) -> int:
        """The line of the row that `take` would begin with,
        which may still be incomplete."""
        with self._lock:
            rows = np.arange(self._first, self._first + len(self._lines))
            remaining_rows = np.setdiff1d(rows, self._skipped, assume_unique=True)
            if not len(remaining_rows):
                return self._line
            return int(self._lines[remaining_rows[0] - self._first])

    def unclosed(self) -> int:
        """At the end, the line of a last row whose quote is not closed; 0 for none."""
        return 0 if self._skipped else self.quote_at_the_end


def _row_pattern(delimiter: str) -> re.Pattern[bytes]:
    """A group that holds one row of a CSV file with the end of its line, and is empty for
    what follows the last row that ends; quotes within a quoted value are doubled."""
    delimiter = re.escape(delimiter)
    # possessive: a row that does not end is not tried again in shorter parts
    plain = f"[^{delimiter}\r\n]*+"
    quoted = '"(?:[^"]++|"")*+"'
    value = f'(?:(?!"){plain}|{quoted}{plain})'
    row = f"({value}(?:{delimiter}{value})*+(?:\r\n|\n|\r(?=.)))|.+"
    return re.compile(row.encode(), re.DOTALL)


def _ends_of_lines(text: bytes) -> npt.NDArray[np.int64] | None:
    """Where lines end, if each row is one:
    an even number of quotes is before each end."""
    if b"\r" in text and text.count(b"\r") != text.count(b"\r\n"):
        return None
    letters = np.frombuffer(text, np.uint8)
    # the fast way, for the many files without a newline in quotes
    ends = np.flatnonzero(letters == ord("\n"))
    if len(ends) and b'"' in text:
        quotes = (letters == ord('"')).view(np.uint8)[: ends[-1]]
        starts = np.append(0, ends[:-1] + 1)
        if np.bitwise_xor.reduceat(np.append(quotes, np.uint8(0)), starts).any():
            return None
    return ends + 1
