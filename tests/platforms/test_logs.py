"""Logs of which each machine has a stream are read from where the last piece ended."""

from collections.abc import Mapping

from rekindle.platforms.logs import LogPiece, read_streams


class Streams:
    """Lines that machines printed so far; a position is how many of them were read."""

    def __init__(self, **lines: list[str]) -> None:
        self.lines = lines

    def read_since(self, stream: str, position: int) -> tuple[list[str], int]:
        return self.lines[stream][position:], len(self.lines[stream])

    def read(self, machines: Mapping[str, str], cursor: str) -> LogPiece:
        return read_streams(machines, cursor, 0, self.read_since)


def test_a_log_goes_on_where_the_cursor_is_also_with_a_machine_that_came_later() -> None:
    streams = Streams(a=["one"])
    piece = streams.read({"a": "node 0"}, "")
    assert piece == LogPiece("one\n", '{"a": 1}')
    streams.lines["a"] += ["two"]
    streams.lines["b"] = ["three", "four"]
    machines = {"a": "node 0", "b": "node 1"}
    piece = streams.read(machines, piece.cursor)
    assert piece.text == "[node 0] two\n[node 1] three\n[node 1] four\n"
    assert streams.read(machines, piece.cursor) == LogPiece("", piece.cursor)


def test_a_log_without_streams_keeps_its_cursor() -> None:
    assert Streams().read({}, '{"a": 3}') == LogPiece("", '{"a": 3}')
