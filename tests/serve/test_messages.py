"""What the router and the platforms know of a server's answers."""

import pytest

from rekindle.serve.messages import STREAM_FAILED


@pytest.mark.parametrize(
    ("piece", "failed"),
    {
        b'data: {"error": {"message": "the model failed"}}\n\n': True,
        b'data: {"choices": []}\n\ndata: {"error": {}}\n\n': True,
        b'{"label": "low"}\n{"error": "instance 1: not finite"}\n': True,
        b"data: [DONE]\n\n": False,
        b'data: {"choices": [{"text": "{\\"error\\""}]}\n\n': False,
        b'{"label": "{\\n{\\"error\\""}\n': False,
    }.items(),
)
def test_a_stream_that_failed_says_so_at_the_beginning_of_a_line(piece, failed):
    assert bool(STREAM_FAILED.search(piece)) == failed
