"""A token is for the address that was asked: an answer that points elsewhere is not followed."""

import http.server
import json
import threading

import pytest

from rekindle.http import HttpError
from rekindle.platforms.vertex.rest import Google, Places


def served(answer):
    """A server that answers every request by `answer(handler)`, and the headers that it was sent."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, dict(self.headers)))
            answer(self)

        do_POST = do_GET

        def log_message(self, *_):
            """Quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, asked


def says(handler, content, status=200, **headers):
    text = json.dumps(content).encode()
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(text)))
    handler.end_headers()
    handler.wfile.write(text)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_bearer_token_follows_no_redirect(status):
    stranger, told = served(lambda handler: says(handler, {}))
    place = f"http://127.0.0.1:{stranger.server_port}/steal"

    def answer(handler):
        if "token" in handler.path:
            says(handler, {"access_token": "ya29.SECRET", "expires_in": 3600})
        else:
            says(handler, {}, status, Location=place)

    service, asked = served(answer)
    address = f"127.0.0.1:{service.server_port}"
    google = Google(Places("here", endpoint=f"http://{address}", metadata=address))
    with pytest.raises(HttpError, match=f"HTTP {status}"):
        google.get("aiplatform", "/v1/x", patience=1)
    assert asked[-1][1]["Authorization"] == "Bearer ya29.SECRET"
    assert told == []
    for server in (stranger, service):
        server.shutdown()
