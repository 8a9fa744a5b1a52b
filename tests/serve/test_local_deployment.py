"""Deployments on this machine with real processes, under load: no request is lost, bad versions go back."""

import collections
import dataclasses
import gzip
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from rekindle.errors import RequestError
from rekindle.launch.process import is_running
from rekindle.platforms.local.endpoint import LocalEndpoint
from rekindle.serve.messages import BOUNDS_MS, VERSION
from rekindle.serve.rollout import Rollout, RolloutLog
from rekindle.serve.wire import TOO_LARGE
from rekindle.spec.deploy import DeploySpec
from rekindle.spec.model import ColumnsSpec
from tests.ports import free_port
from tests.serve.models import OWN_TASK, made, own

FAST = DeploySpec(canary=(20, 50), step_minutes=0, min_requests=100)
POISONED = OWN_TASK.replace(
    "        if len(numbers) > 4:",
    '        if (numbers > 80).any():\n            raise ValueError("poisoned")\n        if len(numbers) > 4:',
)
DYING = OWN_TASK.replace(
    "        if len(numbers) > 4:",
    "        if (numbers == 85).any():\n            import os\n            os._exit(9)\n        if len(numbers) > 4:",
)


class Deployed:
    def __init__(self, folder):
        self.folder, self.port, self.events = folder, free_port(), []
        self.url = f"http://127.0.0.1:{self.port}"

    def rollout(self, spec=FAST):
        self.endpoint = LocalEndpoint(self.folder / "d", None, self.port, {"OMP_NUM_THREADS": "1"})
        log = RolloutLog(self.folder / "d" / "log", self.events.append)
        return Rollout(self.endpoint, log, spec, True, lambda event, traffic: None)

    def own(self, version, code=OWN_TASK):
        return own(self.folder / f"m{version}", code, version)

    def predict(self, number, **headers):
        body = {"instances": [{"text": str(number)}]}
        return httpx.post(f"{self.url}/predict", json=body, headers=headers, timeout=60)

    @property
    def servers(self):
        """Process ids of the servers."""
        pid = self.endpoint.status().pid
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]


@pytest.fixture
def deployed(tmp_path):
    made = Deployed(tmp_path)
    yield made
    LocalEndpoint(tmp_path / "d", None, made.port, {}).delete()


class Load:
    """Clients that ask one number after another, until `total` requests or the end of the block."""

    def __init__(self, url, total, clients=8):
        self.seen, self.left, self.open = collections.Counter(), iter(range(total)), True
        self.threads = [threading.Thread(target=self._ask, args=(url,)) for _ in range(clients)]
        self.lock = threading.Lock()

    def _ask(self, url):
        with httpx.Client(base_url=url, timeout=60) as client:
            while self.open:
                with self.lock:
                    number = next(self.left, None)
                if number is None:
                    return
                body = {"instances": [{"text": str(10 + number % 80)}]}
                try:
                    response = client.post("/predict", json=body)
                    kind = (response.status_code, response.headers.get(VERSION))
                except httpx.TransportError as error:
                    kind = (0, repr(error))
                with self.lock:
                    self.seen[kind] += 1

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def until(self, condition):
        give_up = time.monotonic() + 200  # also on a busy machine
        while not condition(self.seen):
            assert time.monotonic() < give_up, self.seen
            time.sleep(0.02)

    def __exit__(self, *error):
        self.open = False
        for thread in self.threads:
            thread.join()


def statuses(load):
    return {status for status, _ in load.seen}


@pytest.mark.slow
def test_a_stream_is_counted_at_its_end_and_as_failed_where_it_breaks_off(deployed):
    model = made(deployed.folder / "m1", "text-lm", seed=3)
    deployed.rollout().to(model)

    def streamed(tokens):
        body = {"model": model.name, "prompt": "once", "max_tokens": tokens, "stream": True}
        return httpx.stream("POST", f"{deployed.url}/v1/completions", json=body, timeout=60)

    def counted():
        return deployed.endpoint.status().versions[model.version].traffic

    before = counted()
    with streamed(100) as response:
        pieces = response.iter_lines()
        next(pieces)
        began = time.monotonic()
        assert counted().requests == before.requests
        assert list(pieces)[-2] == "data: [DONE]"
    rest = (time.monotonic() - began) * 1000  # in which nothing but the end was waited for
    after = counted()
    assert (after.requests, after.errors) == (before.requests + 1, before.errors)
    new = [now - then for now, then in zip(after.latencies, before.latencies, strict=True)]
    assert BOUNDS_MS[new.index(1)] > rest / 10, "not the time of its headers"
    with streamed(4_000) as response, pytest.raises(httpx.TransportError):  # noqa: PT012 - it breaks off as it is read
        for _ in response.iter_lines():
            for pid in deployed.servers:
                os.kill(pid, signal.SIGKILL)
    assert counted().errors == before.errors + 1
    with streamed(2) as response:  # once the version runs again, which may fail requests before
        assert "data: [DONE]" in response.read().decode()
    before = counted()
    with streamed(4_000) as response:
        next(response.iter_lines())
    with streamed(2) as response:
        response.read()
    assert counted().errors == before.errors, "a client that leaves blames no version"


HANGS_AS_IT_DIES = OWN_TASK.replace(
    "        if len(numbers) > 4:",
    """        dead = network.folder.parent / "dead"
        if (numbers == 13).any() and not dead.exists():
            import os
            import socket
            import stat

            dead.touch()
            for name in os.listdir("/proc/self/fd"):
                try:
                    if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                        socket.socket(fileno=os.dup(int(name))).shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
            time.sleep(1)
            os._exit(1)
        if len(numbers) > 4:""",
)


@pytest.mark.slow
def test_a_process_that_is_long_in_dying_does_not_use_up_the_tries_of_a_request(deployed):
    """Its sockets are closed a second before it is gone, as on a busy machine: the next process answers."""
    deployed.rollout().to(deployed.own("1", HANGS_AS_IT_DIES))
    began = time.monotonic()
    response = deployed.predict(13)
    assert response.status_code == 200, response.text
    assert time.monotonic() - began > 1, "it was the second process"


@pytest.mark.slow
def test_no_request_of_10_000_is_lost_in_roll_out_roll_back_and_the_death_of_a_server(deployed):
    deployed.rollout().to(deployed.own("1"))
    second = deployed.own("2")
    with Load(deployed.url, 1_000_000) as load:
        assert deployed.rollout().to(second).state == "settled"
        load.until(lambda seen: seen[200, "2"] > 300)
        for pid in deployed.servers:
            os.kill(pid, signal.SIGKILL)
        before = load.seen[200, "2"]
        load.until(lambda seen: seen[200, "2"] > before + 300)
        deployed.rollout().back("by hand")
        before = load.seen[200, "1"]
        load.until(lambda seen: seen[200, "1"] > before + 300 and sum(seen.values()) >= 10_000)
    assert statuses(load) == {200}, load.seen
    assert deployed.endpoint.status().answered == sum(load.seen.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "reason"), [(POISONED, "it failed"), (DYING, "its process ended by itself 2 times")]
)
def test_a_poisoned_version_goes_back_by_itself_and_clients_see_none_of_it(deployed, code, reason):
    deployed.rollout().to(deployed.own("1"))
    bad = deployed.own("2", code)
    with Load(deployed.url, 1_000_000) as load:
        event = deployed.rollout(FAST.model_copy(update={"min_requests": 5_000})).to(bad)
        assert event.state == "rolled_back"
        # a version that dies again and again may fail before it has died twice, and either may be too slow on a busy machine
        others = ("it failed", "of its answers took")
        assert any(each in event.reason for each in (reason, *others))
        before = load.seen[200, "1"]
        load.until(lambda seen: seen[200, "1"] > before + 100)
    assert load.seen[200, "2"] > 0
    assert statuses(load) == {200}, load.seen
    assert set(deployed.endpoint.status().versions) == {"1"}


@pytest.mark.slow
def test_a_canary_that_refuses_what_clients_send_goes_back_and_they_see_none_of_it(deployed):
    """Its column was renamed: without the question of how it is asked, as after a release that did not keep that."""
    deployed.rollout().to(deployed.own("1"))
    renamed = dataclasses.replace(deployed.own("2"), columns=ColumnsSpec(text="message"))
    with Load(deployed.url, 1_000_000) as load:
        event = deployed.rollout().to(renamed)
    assert event.state == "rolled_back"
    assert re.search(
        r"it refused (\d+) of \1 requests \(4xx\), and the version before refused 0 of",
        event.reason,
    )
    assert statuses(load) == {200}, load.seen
    assert set(deployed.endpoint.status().versions) == {"1"}


@pytest.mark.slow
def test_a_change_that_was_asked_for_is_answered_by_whichever_version_reads_the_request(deployed):
    deployed.rollout().to(deployed.own("1"))
    renamed = dataclasses.replace(deployed.own("2"), columns=ColumnsSpec(text="message"))
    spec = FAST.model_copy(
        update={"allow_other_inputs": True, "canary": (50,), "min_requests": 10, "alpha": 1e-6}
    )
    made = deployed.rollout(spec)
    made.wait = False
    assert made.to(renamed).state == "canary"

    def ask(instance):
        body = {"instances": [instance]}
        return httpx.post(f"{deployed.url}/predict", json=body, timeout=60)

    for _ in range(30):
        assert ask({"text": "1"}).headers[VERSION] == "1"
        assert ask({"message": "1"}).headers[VERSION] == "2"
        bad = ask({"neither": "1"})  # what both refuse is answered by the version before
        assert (bad.status_code, bad.headers[VERSION]) == (400, "1")
        assert "there is no column `text`" in bad.text
    before, canary = (deployed.endpoint.status().versions[v].traffic for v in "12")
    assert before.refused > 0 < canary.refused
    assert before.requests + canary.requests >= 90, "each request counts once"
    assert sum(canary.latencies) == canary.requests - canary.refused - canary.errors
    made = deployed.rollout(spec)
    assert made.to(renamed).state == "settled", "10 requests were answered by it"


@pytest.mark.slow
def test_a_version_that_says_that_it_is_not_ready_any_more_is_started_again(deployed):
    """It fails every request from one moment on, and its next process does not."""
    code = OWN_TASK.replace(
        "        if len(numbers) > 4:",
        "        if (numbers == 85).any():\n            network.broken = True\n"
        '        if getattr(network, "broken", False):\n            raise ValueError("no answer")\n'
        "        if len(numbers) > 4:",
    )
    deployed.rollout().to(deployed.own("1", code))
    (pid,) = deployed.servers
    assert deployed.predict(1).status_code == 200
    give_up = time.monotonic() + 200
    assert deployed.predict(85).status_code == 500
    while deployed.servers == [pid]:
        assert deployed.predict(1).status_code in (200, 500, 503)
        assert time.monotonic() < give_up
    while deployed.predict(1).status_code != 200:
        assert time.monotonic() < give_up
    assert deployed.endpoint.status().versions["1"].traffic.ends == 1


@pytest.mark.slow
def test_a_version_whose_folder_goes_answers_alike_and_is_not_ready_once_its_process_ends(deployed):
    holds = "    def hold(self, settings, assets):\n        pass\n\n    def build("
    model = deployed.own("1", OWN_TASK.replace("    def build(", holds))
    deployed.rollout().to(model)
    with Load(deployed.url, 2_000) as load:
        load.until(lambda seen: sum(seen.values()) > 300)
        folder = Path(model.path)
        folder.rename(folder.with_name("away"))
        load.until(lambda seen: sum(seen.values()) > 900)
        folder.with_name("away").rename(folder)
        (folder / "rekindle.json").write_bytes((folder / "rekindle.json").read_bytes() + b" ")
        load.until(lambda seen: sum(seen.values()) == 2_000)
    assert load.seen == {(200, "1"): 2_000}
    for pid in deployed.servers:
        os.kill(pid, signal.SIGKILL)
    give_up = time.monotonic() + 200

    def version():
        return deployed.endpoint.status().versions["1"]

    what = "the files of version 1 are not those that were registered"
    while what not in version().reason:
        assert version().state != "ready"
        assert time.monotonic() < give_up
        time.sleep(0.1)
    (folder / "rekindle.json").write_bytes((folder / "rekindle.json").read_bytes()[:-1])
    while version().state != "ready":
        assert time.monotonic() < give_up
        time.sleep(0.1)
    assert deployed.predict(1).status_code == 200


@pytest.mark.slow
def test_a_version_in_the_shadow_is_compared_and_not_seen(deployed):
    first, good = deployed.own("1"), deployed.own("2")
    bad = deployed.own("3", OWN_TASK.replace("[numbers, -numbers]", "[20 - numbers, numbers - 20]"))
    deployed.rollout().to(first)
    spec = FAST.model_copy(update={"shadow": 50, "max_disagreement": 0.02, "min_requests": 300})
    spec = spec.model_copy(update={"alpha": 1e-4})  # no roll back where chance made the canary slow
    with Load(deployed.url, 1_000_000) as load:
        for model in (bad, good):
            made = deployed.rollout(spec)
            made.before = first
            made.to(model)
            if model is bad:
                assert {version for _, version in load.seen} == {"1", "03"}
    assert statuses(load) == {200}, load.seen
    reasons = {event.state: event.reason for event in deployed.events if event.version == "3"}
    assert "in the shadow it answered" in reasons["rolled_back"]
    (told,) = (e.reason for e in deployed.events if (e.state, e.version) == ("create", "2"))
    assert re.search(
        "requests in the shadow, 0 otherwise than the version before, 0 failed; "
        r"p50 \d+ ms and p99 \d+ ms, of the version before \d+ ms and \d+ ms$",
        told,
    )
    assert set(deployed.endpoint.status().versions) == {"1", "2"}


@pytest.mark.slow
def test_a_router_that_is_killed_takes_its_servers_along_and_the_same_command_starts_it_again(
    deployed,
):
    first = deployed.own("1")
    deployed.rollout().to(first)
    status, servers = deployed.endpoint.status(), deployed.servers
    os.kill(status.pid, signal.SIGKILL)
    give_up = time.monotonic() + 30
    while any(map(is_running, [status.pid, *servers])):
        assert time.monotonic() < give_up, "a server outlived its router"
        time.sleep(0.05)
    assert deployed.endpoint.status() is None
    deployed.rollout().to(first)
    assert deployed.predict(1).status_code == 200
    assert deployed.endpoint.status().pid != status.pid


@pytest.mark.slow
def test_sigterm_answers_what_was_accepted_and_leaves_nothing(deployed):
    first = deployed.own("1")
    deployed.rollout().to(first)
    status, servers, answers = deployed.endpoint.status(), deployed.servers, []
    slow = threading.Thread(target=lambda: answers.append(deployed.predict(7).status_code))

    def batches():
        said = httpx.get(f"{deployed.url}/metrics").text
        return float(re.search(r"rekindle_batch_instances_count (\S+)", said)[1])

    before = batches()  # of the rows that prove it
    slow.start()  # it waits for the file `open`
    give_up = time.monotonic() + 30
    while batches() == before:
        assert time.monotonic() < give_up
        time.sleep(0.02)
    os.kill(status.pid, signal.SIGTERM)
    while deployed.predict(1).status_code != 503:
        time.sleep(0.02)
    assert not answers
    (deployed.folder / "m1" / "open").touch()
    slow.join()
    assert answers == [200]
    while any(map(is_running, [status.pid, *servers])):
        time.sleep(0.05)


@pytest.mark.slow
def test_a_version_with_other_answers_is_never_asked(deployed):
    """It is ready only once it has proven itself; here the evidence is of other weights."""
    first = deployed.own("1", OWN_TASK.replace("[numbers, -numbers]", "[-numbers, numbers]"))
    event = deployed.rollout().to(first)
    assert (event.state, event.previous) == ("rolled_back", "")
    assert "smoke: to row 1 of its test split the model answers label 'low'" in event.reason
    assert deployed.endpoint.status() is None


@pytest.mark.slow
def test_a_router_whose_folder_is_gone_says_so_once_and_goes_on(deployed):
    first = deployed.own("1")
    deployed.rollout().to(first)
    folder = deployed.folder / "d"
    log = (folder / "router.txt").open()
    shutil.rmtree(folder)
    time.sleep(1.5)  # it looks ten times a second
    assert log.read().count("wanted.json cannot be read") == 1
    assert deployed.predict(1).status_code == 200
    deployed.rollout().to(first)
    assert deployed.endpoint.status().versions["1"].state == "ready"
    (folder / "wanted.json").unlink()
    time.sleep(0.5)
    log.seek(0)
    assert log.read().count("wanted.json cannot be read") == 2


@pytest.mark.slow
def test_what_a_version_cannot_read_or_is_not_there_is_refused_at_once(deployed):
    """A body that is compressed passes as it came: were it read in between, its length would be another."""
    deployed.rollout().to(deployed.own("1"))
    body = gzip.compress(b'{"instances": [{"text": "1"}]}')
    packed = {"content-encoding": "gzip"}
    response = httpx.post(f"{deployed.url}/predict", content=body, headers=packed, timeout=10)
    assert response.status_code == 415
    assert "the body is compressed" in response.json()["error"]
    response = httpx.post(f"{deployed.url}/predict", content=b"a" * (17 << 20), timeout=30)
    assert (response.status_code, response.json()["error"]) == (413, TOO_LARGE)
    began = time.monotonic()
    response = deployed.predict(1, **{VERSION: "9"})
    assert (response.status_code, response.json()) == (404, {"error": "there is no version 9"})
    assert time.monotonic() < began + 10


@pytest.mark.slow
def test_what_fails_at_every_version_blames_none_more_for_its_small_share(deployed):
    """A request in a hundred fails anywhere; the router asks both, and only the first is judged."""
    deployed.rollout().to(deployed.own("1", POISONED))
    second = deployed.own("2", POISONED)
    # chance, and a machine that stalls, roll back by one in ten thousand; the blame would be tenfold
    few = {"canary": (10,), "max_error_rate": 0.001, "min_requests": 400, "alpha": 1e-4}
    spec = FAST.model_copy(update=few)
    done = threading.Event()

    def ask():
        with httpx.Client(base_url=deployed.url, timeout=60) as client:
            for number in itertools.count():
                if done.is_set():
                    return
                text = "85" if number % 25 == 0 else "11"
                client.post("/predict", json={"instances": [{"text": text}]})

    threads = [threading.Thread(target=ask) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        assert deployed.rollout(spec).to(second).state == "settled"
    finally:
        done.set()
        for thread in threads:
            thread.join()


@pytest.mark.slow
def test_a_request_that_names_a_version_gets_it_and_a_slow_one_an_end(deployed):
    for version in ("1", "2"):  # the first one stays, without a share of the requests
        deployed.rollout(FAST.model_copy(update={"canary": ()})).to(deployed.own(version))
    asked = {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["11"]}]}
    for version in ("1", "2"):
        path = f"{deployed.url}/v2/models/tickets/versions/{version}/infer"
        assert {httpx.post(path, json=asked).json()["model_version"] for _ in range(5)} == {version}
    path = f"{deployed.url}/v2/models/tickets/versions/9/infer"
    assert httpx.post(path, json=asked).status_code == 404
    with socket.create_connection(("127.0.0.1", deployed.port), timeout=60) as client:
        client.sendall(b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{")
        assert client.recv(100).startswith(b"HTTP/1.1 408 ")


@pytest.mark.slow
def test_after_its_router_was_started_again_a_version_may_fail_its_first_start(deployed):
    deployed.rollout().to(deployed.own("1"))
    os.kill(deployed.endpoint.status().pid, signal.SIGKILL)
    task, away = deployed.folder / "m1" / "model", deployed.folder / "away"
    task.rename(away)
    words = [sys.executable, "-P", "-m", "rekindle.serve.router", str(deployed.folder / "d")]
    router = subprocess.Popen(words)
    try:
        give_up = time.monotonic() + 200  # also on a busy machine
        while not (status := deployed.endpoint.status()) or not status.versions["1"].traffic.ends:
            assert time.monotonic() < give_up
            time.sleep(0.02)
        away.rename(task)
        assert deployed.predict(1).status_code == 200
    finally:
        router.terminate()
        router.wait()


def test_another_program_at_the_port_is_named(deployed):
    server = subprocess.Popen(
        [sys.executable, "-m", "http.server", str(deployed.port), "--bind", "127.0.0.1"],
        stderr=subprocess.DEVNULL,
        cwd=deployed.folder,
    )
    try:
        give_up = time.monotonic() + 30
        while time.monotonic() < give_up:
            try:
                httpx.get(deployed.url)
                break
            except httpx.TransportError:
                time.sleep(0.05)
        with pytest.raises(RequestError, match=f"another program listens at {deployed.url}"):
            deployed.rollout().to(deployed.own("1"))
    finally:
        server.kill()
        server.wait()
