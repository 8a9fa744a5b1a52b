"""A registry that ends, and files that go with it, while a model of it is served: the same answers, and a clear error for a server that starts after it."""

import shutil
import time

import httpx
import pytest

from tests.e2e.digits import CONFIG, WEAK, write_digits
from tests.ports import free_port
from tests.servers.mlflow_server import mlflow_server

pytestmark = pytest.mark.slow
BODY = {"instances": [{"image": [[row * column for column in range(8)] for row in range(8)]}]}


def answer_of(url):
    response = httpx.post(f"{url}/predict", json=BODY, timeout=30)
    assert response.status_code == 200, response.text
    return response.json()["predictions"]


def wait_until_ready(url, process, seconds=120):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert process.poll() is None, "the server ended"
        try:
            if httpx.get(f"{url}/health/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"not ready within {seconds} s")


def test_a_registry_that_is_gone_changes_no_answer(cli, tmp_path):
    write_digits(cli.folder)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with mlflow_server(tmp_path) as tracking:
        (cli.folder / "digits.yaml").write_text(f"{CONFIG}register: {{tracking_uri: {tracking}}}\n")
        cli("run", "digits.yaml", *WEAK)
        process = cli.start("serve", "digits.yaml", "--port", port)
        wait_until_ready(url, process)
        before = answer_of(url)
    try:
        shutil.rmtree(tmp_path)
        shutil.rmtree(cli.folder / ".rekindle" / "fetched")
        for _ in range(20):
            assert answer_of(url) == before
        assert httpx.get(f"{url}/health/ready").status_code == 200
    finally:
        process.terminate()
        process.wait()
    again = cli("serve", "digits.yaml", "--port", port, code=1)
    assert tracking in again.stderr
    assert "Traceback" not in again.stderr
