"""Champions over time: the history, the way back, and a person's word against it; on the embedded registry."""

import dataclasses
import shutil

import pytest
from mlflow import MlflowClient

from rekindle.errors import RegistryError
from rekindle.registry import models
from rekindle.registry.history import champion_of
from rekindle.registry.models import Registry, champion_state, fetch_model
from rekindle.registry.promotion import promote, roll_back
from rekindle.spec.model import RegisterSpec
from tests.quick import first
from tests.registry.versions import model_in, registered, registry_in


class Champions:
    """Versions 1 to `count`, each champion after the one before."""

    def __init__(self, folder, count):
        self.where = Registry(RegisterSpec(), "digits", str(folder / "home"))
        self.folder, self.runs = folder, {}
        if count:
            registry_in(folder / "home")
        for number in range(1, count + 1):
            self.promoted(str(number))

    def promoted(self, name, reason=""):
        registration = self.registered(name)
        return promote(self.where, registration, self.runs[name][1], reason)

    def registered(self, name):
        """Register the model called so (again), compared with the champion of now."""
        state = champion_state(self.where)
        beaten = (
            {"champion_version": state.version, "champion_digest": state.digest} if state else {}
        )
        folder = self.folder / name
        model = folder if folder.exists() else model_in(folder, name.encode())
        self.runs[name] = registered(self.where, model, **beaten)
        return self.runs[name][0]

    @property
    def version(self):
        return champion_state(self.where).version


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Champions(tmp_path_factory.mktemp("three"), 3)


@pytest.fixture
def three(made, tmp_path):
    """A copy, as a home may be moved."""
    shutil.copytree(made.folder, tmp_path, dirs_exist_ok=True)
    copied = Champions(tmp_path, 0)
    for name, (registration, evidence) in made.runs.items():
        copied.runs[name] = registration, tmp_path / evidence.relative_to(made.folder)
    return copied


@pytest.mark.slow
def test_the_history_says_who_was_champion_and_why(three):
    found = champion_of(three.where)
    assert [change.version for change in found.history] == ["1", "2", "3"]
    assert {change.how for change in found.history} == {"gate"}
    assert (found.version, found.beaten, found.change.reason) == ("3", "2", "judged")
    assert not found.unfinished


@pytest.mark.slow
def test_a_roll_back_leads_to_the_champion_before_and_further_back_the_next_time(three):
    assert roll_back(three.where, "answers are slow") == ("3", "2")
    assert three.version == "2"
    assert roll_back(three.where, "so are these") == ("2", "1")
    history = champion_of(three.where).history
    assert [(one.version, one.how, one.reason) for one in history[3:]] == [
        ("2", "rollback", "answers are slow"),
        ("1", "rollback", "so are these"),
    ]
    with pytest.raises(RegistryError, match="all before were rolled back"):
        roll_back(three.where, "none is left")


@pytest.mark.slow
def test_named_versions_are_rolled_back_to_once(three):
    assert roll_back(three.where, "slow", "1") == ("3", "1")
    assert roll_back(three.where, "slow", "1") == ("1", "1")
    assert len(champion_of(three.where).history) == 4


@pytest.mark.slow
def test_a_rolled_back_model_is_not_promoted_again_by_an_exact_rerun(three):
    roll_back(three.where, "answers are slow")
    again = three.registered("3")
    assert (again.version, again.created, again.decision) == ("3", False, "rolled_back")
    with pytest.raises(RegistryError, match="it was rolled back: answers are slow"):
        promote(three.where, again, three.runs["3"][1])
    assert three.version == "2"


@pytest.mark.slow
def test_a_reason_promotes_what_was_rolled_back_and_what_was_compared_with_another(three):
    roll_back(three.where, "answers are slow")
    promote(three.where, *three.runs["3"], "the slow disk was it")
    assert three.version == "3"
    promote(three.where, *three.runs["1"], "for the audit")
    found = champion_of(three.where)
    assert (found.version, found.change.how, found.change.reason) == (
        "1",
        "reason",
        "for the audit",
    )
    assert roll_back(three.where, "audit is over") == ("1", "3")


@pytest.mark.slow
def test_a_reason_promotes_nothing_that_the_gate_refused(three):
    bad = registered(three.where, model_in(three.folder / "bad", b"bad"), better=False)
    with pytest.raises(RegistryError, match="the gate refused it"):
        promote(three.where, *bad, "please")
    with pytest.raises(RegistryError, match="version 4 of digits was never champion"):
        roll_back(three.where, "please", "4")


@pytest.mark.slow
def test_a_version_that_is_gone_or_damaged_is_not_rolled_back_to(three):
    with three.where.open("damage version 2") as client:
        client.delete_model_version(three.where.name, "2")
    with pytest.raises(RegistryError, match="version 2 of digits does not exist, or was deleted"):
        roll_back(three.where, "slow")
    first = fetch_model(three.where, "1", champion_of_digest(three, "1"))
    (first / "model.safetensors").write_bytes(b"other")
    with pytest.raises(RegistryError, match="are not those that were registered"):
        roll_back(three.where, "slow", "1")
    assert three.version == "3"


def champion_of_digest(champions, version):
    with champions.where.open("look") as client:
        return client.get_model_version(champions.where.name, version).tags["rekindle.model_digest"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    first(1, ["set_registered_model_alias", "set_registered_model_tag", "set_model_version_tag"]),
)
@pytest.mark.parametrize("done", first(1, [False, True]))
def test_a_roll_back_that_was_killed_at_any_request_is_completed_by_the_same_command(
    three, monkeypatch, call, done
):
    """The command names the version, as scripts should."""
    asked = getattr(MlflowClient, call)

    class Killed(BaseException):
        pass

    def killed(*arguments, **named):
        if done:
            asked(*arguments, **named)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, call, killed)
        with pytest.raises(Killed):
            roll_back(three.where, "slow", "2")
    after = roll_back(three.where, "slow", "2")[1]
    assert after == three.version == "2"
    history = champion_of(three.where)
    assert [one.version for one in history.history] == ["1", "2", "3", "2"]
    assert not history.unfinished
    assert three.registered("3").decision == "rolled_back"


@pytest.mark.slow
def test_a_registry_from_before_the_history_goes_back_to_the_version_that_was_beaten(three):
    with three.where.open("forget") as client:
        for key in client.get_registered_model(three.where.name).tags:
            client.delete_registered_model_tag(three.where.name, key)
    found = champion_of(three.where)
    assert (found.version, found.change, found.history) == ("3", None, ())
    assert roll_back(three.where, "slow") == ("3", "2")


@pytest.mark.slow
def test_who_lost_the_champion_meanwhile_changes_nothing(three, monkeypatch):
    fetched = models.fetch_model

    def meanwhile(*arguments):
        with three.where.open("move") as client:
            client.set_registered_model_alias(three.where.name, "champion", "1")
        return fetched(*arguments)

    monkeypatch.setattr(models, "fetch_model", meanwhile)
    with pytest.raises(RegistryError, match="version 3 of digits is no longer the champion"):
        roll_back(three.where, "slow")
    assert three.version == "1"


@pytest.mark.slow
def test_no_champion_is_a_named_error(tmp_path):
    where = dataclasses.replace(registry_in(tmp_path / "home"), name="none")
    for ask in (champion_of, lambda where: roll_back(where, "slow")):
        with pytest.raises(RegistryError, match="none has no champion"):
            ask(where)
