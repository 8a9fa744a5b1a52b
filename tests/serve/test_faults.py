"""What goes wrong while a server runs, with a task whose `logits` waits, fails or gives NaN as it is told: see
models.OWN_TASK."""

import contextlib
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from rekindle.serve.messages import ASK_SHADOW
from tests.serve import models
from tests.serve.servers import Running, running

pytestmark = pytest.mark.slow


@pytest.fixture
def model(tmp_path):
    return models.own(tmp_path)


def release(model):
    (Path(model.path).parent / "open").touch()


def test_it_lives_before_the_model_is_there_and_is_ready_with_it(model):
    hold = Path(model.path).parent / "hold"
    hold.touch()
    server = Running.of(model)
    try:
        server.live()
        ready, asked = server.client.get("/health/ready"), server.predict("1", column="text")
        assert (ready.status_code, ready.json()["state"]) == (503, "loading")
        assert (asked.status_code, asked.headers["retry-after"]) == (503, "1")
        hold.unlink()
        server.ready()
        assert server.predict("1", column="text").status_code == 200
    finally:
        server.stop()


def test_sigterm_ends_it_before_the_model_is_there(model):
    (Path(model.path).parent / "hold").touch()
    server = Running.of(model)
    try:
        server.live().process.send_signal(signal.SIGTERM)
        assert server.ended() == 0, server.log.read_text()
    finally:
        server.stop()


def test_a_batch_that_does_not_fit_is_halved_once_and_scores_that_are_nan_are_an_error(model):
    with running(model) as server:
        ask = lambda *texts: server.predict(*texts, column="text")  # noqa: E731
        assert [one["label"] for one in ask(*"12345689").json()["predictions"]] == ["high"] * 8
        response = ask(*(str(i) for i in range(10, 26)))
        assert (response.status_code, response.json()["error"]) == (
            500,
            "instance 0: the model ran out of memory",
        )
        assert server.figure('rekindle_refused_total{reason="out_of_memory"}') == 1
        response = ask("1", "nan")
        assert (response.status_code, response.json()["error"]) == (
            500,
            "instance 1: the model's scores are not finite",
        )
        assert server.figure('rekindle_refused_total{reason="not_finite"}') == 1
        response = ask("1", "no number")
        assert response.status_code == 500
        assert "could not convert string to float" in server.log.read_text()
        assert ask("-1").json()["predictions"][0]["label"] == "low"


def test_a_full_queue_refuses_and_answers_the_rest(model):
    with running(model) as server, ThreadPoolExecutor(8) as clients:
        waits = clients.submit(server.predict, "7", column="text")
        server.until(
            lambda: server.figure("rekindle_batch_instances_sum") == 2
        )  # one was the proof
        many = [clients.submit(server.predict, *["1"] * 256, column="text") for _ in range(4)]
        server.until(lambda: server.figure("rekindle_waiting_instances") == 1024)
        full = server.predict("1", column="text")
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        release(model)
        assert waits.result().status_code == 200
        # batches of more than four are halved once, and fail here
        assert {one.result().status_code for one in many} == {500}
        assert server.predict("1", column="text").status_code == 200


def test_what_a_client_that_went_away_had_asked_is_dropped(model):
    with running(model) as server, ThreadPoolExecutor(2) as clients:
        waits = clients.submit(server.predict, "7", column="text")
        server.until(lambda: server.figure("rekindle_batch_instances_sum") == 2)
        body = b'{"instances": [{"text": "1"}, {"text": "2"}]}'
        head = f"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as gone:
            gone.sendall(head + body)
            server.until(lambda: server.figure("rekindle_waiting_instances") == 2)
        server.until(lambda: server.figure("rekindle_dropped_total") == 2)
        release(model)
        assert waits.result().status_code == 200
        assert server.predict("1", column="text").status_code == 200
        assert server.figure("rekindle_batch_instances_sum") == 3


def test_sigterm_answers_what_was_accepted_and_nothing_new(model):
    with running(model) as server, ThreadPoolExecutor(2) as clients:
        waits = clients.submit(server.predict, "7", column="text")
        server.until(lambda: server.figure("rekindle_batch_instances_sum") == 2)
        server.process.send_signal(signal.SIGTERM)
        server.until(lambda: server.client.get("/health/ready").json()["state"] == "draining")
        assert server.client.get("/health/live").status_code == 200
        body = {"instances": [{"text": "1"}]}
        for _ in range(50):  # also on connections that are new
            refused = httpx.post(f"{server.url}/predict", json=body)
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        release(model)
        assert waits.result().json()["predictions"][0]["label"] == "high"
        assert server.ended() == 0


def test_no_request_is_lost_when_the_server_ends_under_load(model):
    """Each client counts what it sent and what came back: an answer, or a refusal that says to come again."""
    with running(model) as server:
        counts, stop = [], threading.Event()

        def client():
            sent = answered = refused = 0
            with one_by_one(server) as ask:
                while not stop.is_set():
                    sent += 1
                    status = ask()
                    answered, refused = answered + (status == 200), refused + (status == 503)
                    if status == 503:
                        break
            counts.append((sent, answered, refused))

        threads = [threading.Thread(target=client) for _ in range(4)]
        for thread in threads:
            thread.start()
        server.until(lambda: server.figure("rekindle_batch_instances_sum") > 200)
        server.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(60)
        stop.set()
        assert server.ended() == 0
        assert len(counts) == 4
        assert all(sent == answered + refused for sent, answered, refused in counts), counts
        assert sum(sent for sent, _, _ in counts) > 200


@contextlib.contextmanager
def one_by_one(server):
    """A client on one connection; a server that ended took nothing of what it could not connect for."""
    with httpx.Client(base_url=server.url, timeout=60) as client:

        def ask():
            try:
                return client.post("/predict", json={"instances": [{"text": "1"}]}).status_code
            except httpx.ConnectError:
                return 503

        yield ask


def test_a_port_that_is_taken_is_a_wrong_request(model):
    with running(model) as first:
        second = Running.of(model, port=int(first.url.rpartition(":")[2]))
        assert second.process.wait(60) == 2
        assert "Address already in use" in second.log.read_text()
        assert "pass another --port, or 0 for any free one" in second.log.read_text()
        second.client.close()


def test_what_the_shadow_answers_is_counted_and_nobody_sees_it(model, tmp_path):
    code = models.OWN_TASK.replace(
        "        if len(numbers) > 4:",
        """        if (numbers > 80).any():
            raise ValueError("poisoned")
        numbers = torch.where(numbers > 50, -numbers, numbers)
        if len(numbers) > 4:""",
    )
    shadow = models.own(tmp_path / "next", code, "4")

    def counted(server):
        body = {"instances": [ASK_SHADOW]}
        return server.client.post("/predict", json=body).json()["predictions"][0]

    server = Running.of(model.with_shadow(shadow)).ready()
    try:
        before = counted(server)
        for number in ("10", "60", "85", "not a number"):
            server.client.post("/predict", json={"instances": [{"text": number}]})
        server.until(lambda: counted(server)["answered"] == before["answered"] + 3)
        after = counted(server)
        assert (after["failed"], after["differed"], after["spared"]) == (1, 1, 0)
        assert after["replica"] == before["replica"]
        assert before["took_ms"] == before["before_ms"] == []
        for half, most in (after["took_ms"], after["before_ms"]):
            assert 0 < half <= most < 60_000
    finally:
        server.stop()
    with running(model) as server:
        assert counted(server) == {}


def test_a_text_that_names_the_shadow_is_an_input_as_any_other(model):
    lines = {"content-type": "application/jsonlines"}
    server = Running.of(model).ready()
    try:
        ask = server.client.post
        named = b'{"text": "1", "note": "rekindle/shadow"}'
        assert ask("/invocations", content=named, headers=lines).status_code == 200
        for body in (b'["rekindle/shadow"]', b'{"rekindle/shadow": 1}', b"rekindle/shadow\xff"):
            assert ask("/predict", content=body).status_code == 400
        assert 'status="400"} 3.0' in server.client.get("/metrics").text
    finally:
        server.stop()
