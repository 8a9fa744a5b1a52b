"""A real S3 protocol on this machine (moto)."""

import re
import subprocess
import sys
import threading

import pytest


def s3_server():
    """A fresh S3 with a bucket: its process, and the environment that reaches it."""
    pytest.importorskip("moto", reason="moto[server] is a developer's dependency")
    import fsspec

    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    server = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    url = next(m[0] for line in server.stderr if (m := re.search(r"http://127\.0\.0\.1:\d+", line)))
    # it says a line of every request, and waits where none reads them
    threading.Thread(target=server.stderr.read, daemon=True).start()
    fsspec.filesystem("s3", key="x", secret="x", endpoint_url=url, skip_instance_cache=True).mkdir(
        "lake"
    )
    return server, {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }
