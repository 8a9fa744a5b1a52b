"""A year of one operator, turn by turn: drift, a week of wrong labels, a roll back, a column with another name, a class more."""

import collections
import itertools
import json
import threading
import time

import httpx
import pytest
import yaml

import rekindle
from rekindle.serve.messages import VERSION
from tests.e2e.tickets import write_week
from tests.ports import free_port
from tests.servers.webhook import webhook

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2700)]
CONFIG = {
    "name": "tickets",
    "task": "text_classification",
    "data": {
        "source": "data/*.jsonl",
        "columns": {"text": "body", "label": "team", "key": "id", "time": "day"},
        "slices": ["product"],
        "split": {"by": "hash", "train": 0.7, "validation": 0.1, "test": 0.2},
        "max_length": 24,
    },
    "model": {
        "source": {
            "model_type": "distilbert",
            "dim": 32,
            "n_layers": 1,
            "n_heads": 2,
            "hidden_dim": 64,
            "max_position_embeddings": 24,
        },
        "tokenizer": {"vocab_size": 600},
    },
    "train": {"epochs": 6, "lr": 5e-3, "global_batch_size": 32},
    "evaluate": {"floor": {"accuracy": 0.6}, "gate": {"mode": "noninferiority", "margin": 0.03}},
    "triggers": {"new_rows": 300, "every": "3 months", "cooldown": "2 days"},
    "platforms": {"local": {"ranks": 1}},
    "deploy": {"after_promotion": True, "canary": []},
    "notify": {"webhook": "env:HOOK", "on": ["success", "refusal", "failure", "suggestion"]},
}


class Clients:
    """They send the column `body` all year, and count who answers what."""

    def __init__(self, url):
        self.url = url
        self.answers = collections.Counter()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._ask)

    def _ask(self):
        texts = ["the invoice is wrong", "my parcel was lost", "reset my password", "return it"]
        with httpx.Client(base_url=self.url, timeout=60) as client:
            for text in itertools.cycle(texts):
                answer = client.post("/predict", json={"instances": [{"body": text}]})
                self.answers[answer.headers.get(VERSION), answer.status_code] += 1
                if self.over.wait(0.05):
                    return

    def since(self):
        """What was answered since the last call, by version and status."""
        found, self.answers = self.answers, collections.Counter()
        return found

    def end(self):
        self.over.set()
        if self.thread.ident:
            self.thread.join()


class Operator:
    """Who writes the config and the data, and looks on days of the year."""

    def __init__(self, cli, address):
        self.cli, self.hook = cli, {"HOOK": address}
        self.data = cli.folder / "data"
        self.config = yaml.safe_load(json.dumps(CONFIG))
        self.write()

    def write(self):
        (self.cli.folder / "tickets.yaml").write_text(yaml.safe_dump(self.config))

    def week(self, *weeks, **how):
        for week in weeks:
            write_week(self.data, week, **how)

    def rename(self, column):
        """All weeks have their texts in this column from now on."""
        before = self.config["data"]["columns"]["text"]
        for path in self.data.glob("*.jsonl"):
            path.write_text(path.read_text().replace(f'"{before}":', f'"{column}":'))
        self.config["data"]["columns"]["text"] = column
        self.write()

    def runs(self):
        """Ids of all runs, the oldest first."""
        return [run.record.run_id for run in rekindle.runs(self.cli.folder / ".rekindle")]

    def wait_for_run(self):
        """Until one more run has begun."""
        known = set(self.runs())
        while set(self.runs()) == known:
            time.sleep(0.1)

    def look(self, day, *words, code=0):
        done = self.cli(
            "watch",
            "tickets.yaml",
            "--once",
            "--now",
            f"2026-{day}",
            *words,
            code=code,
            env=self.hook,
        )
        print(day, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def serving(self):
        status = self.cli.json("deploy", "status", "tickets")
        return [version for version, one in status["versions"].items() if one["share"] == 100]


@pytest.fixture
def told():
    with webhook() as (server, address):
        yield server.told, address


def test_a_year_is_decided_rightly_or_a_person_is_asked(cli, told):
    said, address = told
    desk = Operator(cli, address)
    port = free_port()
    clients = Clients(f"http://127.0.0.1:{port}")
    try:
        desk.week(1, 2, 3, 4)
        assert "promoted" in desk.look("02-02", "--set", "deploy.after_promotion=false")
        cli("deploy", "tickets.yaml", "--port", port)
        clients.thread.start()
        desk.week(5)
        assert "skipped because 150 new rows (due from 300)" in desk.look("02-09")
        desk.week(6)
        assert "promoted" in desk.look("02-16")
        assert desk.serving() == ["2"]
        assert "the data have not changed" in desk.look("02-20")

        # words of another kind, and a week whose labels are all the same: a person is asked
        desk.config["evaluate"]["gate"]["max_champion_drop"] = 0.05
        desk.write()
        desk.week(7, newer=True)
        desk.week(8, label="billing")
        refused = desk.look("03-02")
        assert "refused" in refused
        assert "max_champion_drop" in refused
        assert "champion" in said[-1]
        assert desk.serving() == ["2"]
        assert "the data have not changed" in desk.look("03-09")

        # who promotes and deploys it all the same takes it back by hand
        run_id = desk.runs()[-1]
        cli("promote", run_id, "--reason", "the labels look right")
        cli("deploy", "tickets.yaml")
        assert desk.serving() == ["3"]
        cli("rollback", "tickets", "--reason", "a week of wrong labels", "--yes")
        assert desk.serving() == ["2"]
        desk.week(9, 10)
        asked = desk.look("03-16", code=3)
        assert "a run is suggested because 300 new rows" in asked
        assert "version 3 was rolled back: a week of wrong labels" in asked
        assert "a week of wrong labels" in said[-1]
        told_before = len(said)
        desk.look("03-17", code=3)
        assert len(said) == told_before, "of a suggestion that stands it is told once"

        # the labels are corrected, and the column has another name: no client is refused
        answers = clients.since()
        assert {status for _, status in answers} == {200}
        desk.week(8)
        desk.rename("message")
        refused = cli("run", "tickets.yaml", code=2, env=desk.hook).stderr
        assert "clients of today would be refused" in refused
        assert "reads " in refused
        assert desk.serving() == ["2"]
        assert set(clients.since()) == {("2", 200)}

        # as before, and two looks at once
        desk.rename("body")
        first = cli.start("run", "tickets.yaml")
        desk.wait_for_run()
        assert "skipped" in desk.look("03-18")
        assert first.wait() == 0, (cli.folder / "out.txt").read_text()
        assert desk.serving() == ["5"]

        # a class and a field that older weeks lack: the field stops the look, the class asks
        desk.week(11, 12, technical=True, region=True)
        desk.config["data"]["slices"] = ["product", "region"]
        desk.write()
        for _ in range(2):
            lacking = desk.look("03-30", code=1)
            assert "there is no column `region`" in lacking
            assert "w01.jsonl" in lacking
        assert sum("there is no column `region`" in text for text in said) == 1
        desk.config["data"]["slices"] = ["product"]
        desk.write()
        other = desk.look("03-31")
        assert "refused" in other
        assert "technical" in other
        cli("promote", desk.runs()[-1], "--reason", "the class is wanted")
        assert cli.json("champion", "tickets")["version"] == "6"

        desk.week(13, 14, technical=True)
        assert "promoted" in desk.look("05-21")
        assert desk.serving() == ["7"]
    finally:
        clients.end()
        cli("deploy", "delete", "tickets", "--yes")
    assert {status for _, status in clients.answers} == {200}
    assert [version for version, _ in clients.answers][-1] == "7"
