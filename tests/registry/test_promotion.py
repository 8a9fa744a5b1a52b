"""Homes, hosts and a late server that promote at once: whoever becomes the champion was compared with the one before.

Each home is a process; the server is MLflow's, behind a proxy that holds requests back."""

import contextlib
import sqlite3
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from mlflow import MlflowClient

from rekindle.errors import RegistryError
from rekindle.registry import promotion
from rekindle.registry.models import Registry, champion_state
from rekindle.registry.promotion import promote
from rekindle.spec.model import RegisterSpec
from tests.registry.versions import model_in, registered, registry_in
from tests.servers.mlflow_server import Slow, mlflow_server

ALIAS = ("POST", "registered-models/alias")
SCRIPT = Path(__file__).with_name("promote_once.py")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as url:
        yield url


@pytest.fixture
def proxy(server):
    made = Slow(server)
    yield made
    made.close()


class Race:
    """A champion, version 1, and two candidates that were compared with it, versions 2 and 3."""

    def __init__(self, url, folder):
        name = f"m-{uuid.uuid4().hex[:8]}"
        self.where = Registry(RegisterSpec(tracking_uri=url), name, str(folder / "home"))
        promote(self.where, *registered(self.where, model_in(folder / "1", b"one")))
        first = champion_state(self.where)
        beaten = {"champion_version": "1", "champion_digest": first.digest}
        self.candidates = [
            registered(self.where, model_in(folder / n, n.encode()), **beaten) for n in ("2", "3")
        ]

    def start(self, number, url, lease=60, answer=20, in_time=60):
        registration, evidence = self.candidates[number]
        words = [
            sys.executable,
            str(SCRIPT),
            url,
            self.where.name,
            registration.version,
            str(evidence),
        ]
        return subprocess.Popen(
            [*words, str(lease), str(answer), str(in_time)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def champion(self):
        return champion_state(self.where).version


@pytest.fixture
def race(server, tmp_path):
    return Race(server, tmp_path)


def until(process, text):
    """Reads what a process prints up to a line with `text`."""
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(process.stderr.read())


@pytest.mark.slow
def test_who_comes_second_waits_and_is_held_against_the_new_champion(race, proxy, server):
    late = proxy.hold(*ALIAS)
    first = race.start(0, proxy.url)
    assert late.come.wait(60)
    second = race.start(1, server)
    until(second, "waiting for it")
    late.open.set()
    assert (first.communicate()[0].strip(), first.returncode) == ("promoted", 0)
    _, error = second.communicate()
    assert second.returncode == 1
    assert "the champion is now version 2, and the candidate was compared with version 1" in error
    assert race.champion() == "2"


@pytest.mark.slow
def test_who_only_looks_and_steps_back_stops_nobody(race, proxy, server):
    """The other's claim is there at one look at the claims, and gone at the next."""
    tag = proxy.hold("POST", "registered-models/set-tag", skip=1)
    first = race.start(0, proxy.url)
    assert tag.come.wait(60)
    next_look = proxy.hold("GET", "registered-models/get", skip=1)
    client, other = MlflowClient(server, server), f"{promotion.CLAIM}other"
    client.set_registered_model_tag(race.where.name, other, "version 3")
    tag.open.set()
    assert next_look.come.wait(60), "it did not look twice"
    client.delete_registered_model_tag(race.where.name, other)
    next_look.open.set()
    assert (first.communicate()[0].strip(), first.returncode) == ("promoted", 0)


@pytest.mark.slow
def test_a_request_without_an_answer_stops_all_promotions_until_it_is_done(race, proxy, server):
    late = proxy.hold(*ALIAS)
    first = race.start(0, proxy.url, answer=1)
    assert late.come.wait(60)
    _, error = first.communicate()
    assert "the registry gave no answer to promoting version 2, and may still do it" in error
    _, error = race.start(1, server, lease=0).communicate()
    assert "an earlier promotion had no answer from the registry" in error
    assert "delete the tag rekindle.promoting." in error
    assert race.champion() == "1"
    late.open.set()
    assert late.done.wait(60)
    assert race.champion() == "2"
    _, error = race.start(1, server, lease=0).communicate()
    assert "the champion is now version 2" in error
    assert race.champion() == "2"


@pytest.mark.slow
def test_a_slow_answer_is_waited_for(race, proxy):
    late = proxy.hold(*ALIAS)
    first = race.start(0, proxy.url, answer=3)
    assert late.come.wait(60)
    looks = proxy.hold("GET", "registered-models/get")
    assert looks.come.wait(60), "it gave up waiting for an answer"
    late.open.set()
    assert late.done.wait(60)
    looks.open.set()
    assert (first.communicate()[0].strip(), race.champion()) == ("promoted", "2")


@pytest.mark.slow
def test_the_claim_of_an_attempt_that_was_killed_holds_others_up_for_a_while_only(
    race, proxy, server
):
    claimed = proxy.hold("POST", "registered-models/set-tag", skip=1)
    first = race.start(0, proxy.url)
    assert claimed.come.wait(60)
    first.kill()
    first.communicate()
    second = race.start(1, server, lease=2)
    assert second.communicate()[0].endswith("promoted\n")
    assert race.champion() == "3"


def test_an_alias_of_a_version_that_is_gone_is_not_no_champion(tmp_path):
    where = registry_in(tmp_path / "home")
    promote(where, *registered(where, model_in(tmp_path / "1", b"one")))
    with contextlib.closing(sqlite3.connect(tmp_path / "home" / "mlflow.db")) as database, database:
        database.execute("update registered_model_aliases set version = 9")
    with pytest.raises(RegistryError, match="names version 9, which does not exist"):
        champion_state(where)


def test_a_version_of_a_registry_that_was_set_up_again_is_not_taken_for_the_one_before(tmp_path):
    before, after = (registry_in(tmp_path / name) for name in ("before", "after"))
    registration, evidence = registered(before, model_in(tmp_path / "a", b"one"))
    promote(before, registration, evidence)
    promote(after, *registered(after, model_in(tmp_path / "b", b"two")))
    with pytest.raises(RegistryError):
        promote(after, registration, evidence)


@pytest.mark.slow
@pytest.mark.parametrize("in_time", [3, 3600], ids=["by the clock", "by a clock that stood still"])
def test_an_attempt_that_was_held_up_for_longer_than_a_claim_counts_asks_for_nothing_more(
    in_time, race, proxy, server
):
    """The request before the last one is late: by then another version was promoted."""
    tag = proxy.hold("POST", "registered-models/set-tag", skip=1)
    first = race.start(0, proxy.url, in_time=in_time)
    assert tag.come.wait(60)
    second = race.start(1, server, lease=4)
    assert second.communicate()[0].endswith("promoted\n")
    tag.open.set()
    _, error = first.communicate()
    assert "not promoted" in error
    assert race.champion() == "3"


@pytest.mark.slow
def test_a_machine_that_was_paused_sees_that_another_is_about_to_promote(race, proxy, server):
    """Both have asked who the champion is, and the other's last request is on its way."""
    paused = proxy.hold("POST", "registered-models/set-tag", skip=1)
    first = race.start(0, proxy.url, in_time=3600)  # by a clock that stood still
    assert paused.come.wait(60)
    with contextlib.closing(Slow(server)) as other:
        late = other.hold(*ALIAS)
        second = race.start(1, other.url, lease=2)
        assert late.come.wait(60)
        paused.open.set()
        _, error = first.communicate()
        assert "another promotion began while this one was held up" in error
        late.open.set()
        assert second.communicate()[0].endswith("promoted\n")
    assert race.champion() == "3"


def candidates(folder):
    """A home with its own registry, whose champion is version 1, and two that were compared with it."""
    home = registry_in(folder / "home")
    promote(home, *registered(home, model_in(folder / "1", b"one")))
    beaten = {"champion_version": "1", "champion_digest": champion_state(home).digest}
    return home, [registered(home, model_in(folder / n, n.encode()), **beaten) for n in ("2", "3")]


def claims_in(home):
    with home.open("look") as client:
        return promotion.claims(client, home.name)


@pytest.mark.slow
def test_an_embedded_registry_respects_those_who_name_its_database(tmp_path, monkeypatch):
    home, (two, three) = candidates(tmp_path)
    address = f"sqlite:///{tmp_path}/home/mlflow.db"
    other = Registry(RegisterSpec(tracking_uri=address), home.name, str(tmp_path / "other"))
    monkeypatch.setattr(promotion, "LEASE", 0.5)
    request, asked = MlflowClient.set_registered_model_alias, []

    def while_another_home_promotes(self, name, alias, version):
        if alias == "champion" and version == "2":
            asked.append(claims_in(home))
            with pytest.raises(RegistryError, match="an earlier promotion had no answer"):
                promote(home, *three)
        return request(self, name, alias, version)

    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", while_another_home_promotes)
    assert promote(other, *two).decision == "promoted"
    assert len(asked[0]) == 1
    assert (champion_state(home).version, claims_in(home)) == ("2", {})
    with pytest.raises(RegistryError, match="the champion is now version 2"):
        promote(home, *three)


@pytest.mark.slow
def test_claims_that_killed_processes_left_in_an_embedded_registry_are_void_at_once(tmp_path):
    home, (two, _) = candidates(tmp_path)
    with home.open("leave a claim") as client:
        client.set_registered_model_tag(
            home.name, f"{promotion.CLAIM}left", f"{promotion.EMBEDDED}version 9"
        )
    began = time.monotonic()
    assert promote(home, *two).decision == "promoted"
    assert time.monotonic() - began < promotion.LEASE / 2
    assert claims_in(home) == {}
