"""From the first run to a deployment that follows the champion: the command line, real processes, requests by HTTP."""

import os
import signal
import threading
import time

import httpx
import pytest

from rekindle.app.champion import registry_of
from rekindle.app.deploy import DeployOptions, deploy
from rekindle.errors import RolledBackError
from rekindle.launch.process import owned
from rekindle.platforms.local.endpoint import LocalEndpoint
from rekindle.records import Evidence
from rekindle.registry import promotion
from rekindle.serve.messages import VERSION
from rekindle.spec.load import load_target
from tests.e2e.digits import CONFIG, WEAK, write_digits
from tests.ports import free_port
from tests.servers.webhook import webhook

pytestmark = pytest.mark.slow
QUICK = "deploy: {canary: [50], step_minutes: 0, min_requests: 100}\n"


class Asking:
    """A client that asks all the time, while the block lasts."""

    def __init__(self, url):
        self.url, self.open, self.versions = url, True, []
        self.thread = threading.Thread(target=self._ask)

    def _ask(self):
        body = {"instances": [{"image": [[0] * 8] * 8}]}
        with httpx.Client(base_url=self.url, timeout=60) as client:
            while self.open:
                response = client.post("/predict", json=body)
                assert response.status_code == 200, response.text
                self.versions.append(response.headers[VERSION])

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.open = False
        self.thread.join()


@pytest.fixture(scope="module", autouse=True)
def _config(cli):
    write_digits(cli.folder)
    (cli.folder / "digits.yaml").write_text(CONFIG + QUICK)


def test_a_deployment_follows_the_champion_there_and_back(cli):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    cli.json("run", "digits.yaml", *WEAK)
    with webhook() as (_, address):
        taken = address.rpartition(":")[2].partition("/")[0]
        refused = cli("deploy", "digits.yaml", "--port", taken, code=2)
        assert "another program listens" in refused.stderr
        assert "starting" not in refused.stderr
        assert "is not deployed" in cli("deploy", "status", "digits", code=2).stderr
    first = cli.json("deploy", "digits.yaml", "--port", port)
    try:
        assert [event["state"] for event in first["events"]] == [
            "create",
            "smoke",
            "live",
            "settled",
        ]
        assert cli.json("champion", "digits")["serves_at"] == [url]
        cli.json("run", "digits.yaml")
        waiting = cli.json("deploy", "digits.yaml")
        assert waiting["events"][-1]["shares"] == {"2": 50, "1": 50}
        killed = cli.start("deploy", "digits.yaml", "--wait")
        time.sleep(2)  # anywhere: it waits for requests
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        with Asking(url) as clients:
            done = cli.json("deploy", "digits.yaml", "--wait")
            # beside the platforms lies what a precision lost
            (cli.folder / ".rekindle/deployments/digits/precision").mkdir()
            assert done["events"][-1]["state"] == "settled"
            assert {v: one["share"] for v, one in done["versions"].items()} == {"1": 0, "2": 100}
            cli("rollback", "digits", "--reason", "wrong labels", "--yes")
            back = cli.json("deploy", "status", "digits")
            assert (back["events"][-1]["state"], set(back["versions"])) == ("rolled_back", {"1"})
            assert back["events"][-1]["reason"] == "wrong labels"
        assert set(clients.versions) == {"1", "2"}
        assert cli.json("champion", "digits")["version"] == "1"
        assert cli.json("run", "digits.yaml")["gate"]["decision"] == "rolled_back"
        assert httpx.get(f"{url}/v2/models/digits").json()["versions"] == ["1"]
    finally:
        cli("deploy", "delete", "digits", "--yes")
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_a_canary_that_never_starts_moves_the_alias_back_and_is_told_of_once(cli):
    """Its server cannot even write its log; any failure of the start will do."""
    home, port = "damaged", free_port()
    cli("run", "digits.yaml", "--home", home, *WEAK)
    cli("deploy", "digits.yaml", "--home", home, "--port", port)
    try:
        cli("run", "digits.yaml", "--home", home)
        log = cli.folder / home / "deployments" / "digits" / "local" / "version-2.txt"
        log.mkdir()
        with webhook() as (server, address):
            words, hook = ["--home", home, "--set", "notify={webhook: env:HOOK}"], {"HOOK": address}
            failed = cli("deploy", "digits.yaml", *words, code=1, env=hook)
            assert "version 2 was rolled back, version 1 answers" in failed.stderr
            cli("deploy", "digits.yaml", *words, env=hook)
        (told,) = server.told
        assert told.startswith("digits: version 2 was rolled back, version 1 answers: ")
        champion = cli.json("champion", "digits", "--home", home)
        assert (champion["version"], champion["change"]["how"]) == ("1", "rollback")
        again = cli.json("deploy", "digits.yaml", "--home", home)
        assert set(again["versions"]) == {"1"}
    finally:
        cli("deploy", "delete", "digits", "--home", home, "--yes")


def test_a_command_goes_by_who_is_champion_when_it_acts(cli):
    """One that goes back leaves a champion that came meanwhile, and one that waited rolls out no version that went back."""
    home, place = "meanwhile", cli.folder / "meanwhile"
    folder, spec = place / "deployments/digits/local", load_target(cli.folder / "digits.yaml")
    cli("run", "digits.yaml", "--home", home, *WEAK)
    cli("deploy", "digits.yaml", "--home", home, "--port", free_port())
    try:
        cli("run", "digits.yaml", "--home", home)
        (folder / "version-2.txt").mkdir()  # it cannot start

        def another(machines, usd, new):
            lenient = "evaluate.gate={mode: noninferiority, margin: 0.5}"
            cli("run", "digits.yaml", "--home", home, "--set", "train.epochs=5", "--set", lenient)
            return True

        with pytest.raises(RolledBackError, match="version 2 was rolled back, version 1 answers"):
            deploy(spec, place, DeployOptions(may=another))
        champion = cli.json("champion", "digits", "--home", home)
        assert (champion["version"], champion["change"]["how"]) == ("3", "gate")
        with owned(folder, lambda: None):
            waiting = cli.start("deploy", "digits.yaml", "--home", home)
            give_up = time.monotonic() + 60
            while "waiting for it" not in (cli.folder / "out.txt").read_text():
                assert time.monotonic() < give_up
                time.sleep(0.05)
            promotion.roll_back(registry_of(spec, place), "looked at again", "1")
        assert waiting.wait(60) == 0, (cli.folder / "out.txt").read_text()
        status = cli.json("deploy", "status", "digits", "--home", home)
        assert set(status["versions"]) == {"1"}
        assert "3" not in {event["version"] for event in status["events"]}
        os.kill(LocalEndpoint(folder, None, None, {}).status().pid, signal.SIGKILL)
        assert cli.json("champion", "digits", "--home", home)["serves_at"] == []
    finally:
        cli("deploy", "delete", "digits", "--home", home, "--yes")


def test_a_run_ends_with_a_deployment_of_what_its_gate_let_pass(cli):
    home, port = "loop", free_port()
    after = [
        "--home",
        home,
        "--set",
        "deploy.after_promotion=true",
        "--set",
        "deploy.canary=[]",
        "--set",
        "deploy.precision=int8",
    ]
    cli("deploy", "digits.yaml", "--home", home, "--port", port, code=2)  # there is no champion yet
    try:
        first = cli("run", "digits.yaml", *after, *WEAK)
        assert "version 1 gets all requests" in first.stderr
        refused = cli("run", "digits.yaml", *after, *WEAK, "--set", "train.lr=1e-6")
        assert "starting version" not in refused.stderr
        second = cli("run", "digits.yaml", *after)
        assert "version 3 gets all requests" in second.stderr
        status = cli.json("deploy", "status", "digits", "--home", home)
        assert {v: one["share"] for v, one in status["versions"].items()} == {"1": 0, "3": 100}
        kept = [*(cli.folder / home / "deployments/digits/precision").glob("*-int8.json")]
        checks = [Evidence.read(file).checks[-1] for file in kept]
        assert [check.name for check in checks] == ["precision_int8"] * 2
        assert all(check.value <= 0.005 for check in checks)
        answer = httpx.post(
            f"{status['address']}/predict", json={"instances": [{"image": [[0] * 8] * 8}]}
        )
        assert answer.json()["model"]["version"] == "3"
    finally:
        cli("deploy", "delete", "digits", "--home", home, "--yes")
