"""Deployments in a workspace that is played: what is asked of it over TLS, in which order, and that a roll-out which is
killed anywhere, or meets any trouble, ends in the same state."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import os
import shutil

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from rekindle.errors import PlatformError, RequestError, StepError, UnreachableError
from rekindle.platforms.azureml import endpoint as module
from rekindle.platforms.azureml.endpoint import AzureMLEndpoint
from rekindle.serve.messages import Traffic
from rekindle.serve.rollout import Rollout, RolloutLog, serving
from rekindle.serve.smoke import prove
from rekindle.spec.deploy import DeploySpec
from tests.platforms.shadowing import goes_through_the_shadow
from tests.quick import first
from tests.serve.models import made, own
from tests.serve.servers import contained
from tests.servers.azure import endpoints
from tests.servers.troubles import Fault
from tests.support.azureml_client import PLACE

CALLS = ("create", "ask", "split", "observe", "retain", "delete")
FAST = DeploySpec(canary=(10,), step_minutes=0, min_requests=100)
ROOT = "abfs://lake@acc.dfs.core.windows.net/rekindle"
SETTINGS = PLACE.model_copy(update={"artifact_root": ROOT})


class Killed(BaseException):
    pass


class Lake(LocalFileSystem):
    """abfs:// in a folder, as ACCOUNT/CONTAINER."""

    protocol, folder = "abfs", ""
    cachable = False

    def __init__(self, **more):
        super().__init__(auto_mkdir=True)

    @classmethod
    def _strip_protocol(cls, path):
        text = os.fspath(path)
        if text.startswith("abfs://"):
            container, _, rest = text.removeprefix("abfs://").partition("@")
            host, _, below = rest.partition("/")
            text = f"{cls.folder}/{host.partition('.')[0]}/{container}/{below}"
        return super()._strip_protocol(text)


class Killing(AzureMLEndpoint):
    """Counts calls, and kills the command before or after the n-th. Connections are kept, to be quick."""

    calls, kill, clients = [], (0, ""), {}

    def _client(self, resource):
        if resource not in Killing.clients:
            Killing.clients[resource] = super()._client(resource)
        return Killing.clients[resource]

    def __getattribute__(self, name):
        found = object.__getattribute__(self, name)
        if name not in CALLS:
            return found

        def called(*arguments):
            Killing.calls.append(name)
            at, when = Killing.kill
            if at == len(Killing.calls) and when == "before":
                raise Killed
            answer = found(*arguments)
            if at == len(Killing.calls) and when == "after":
                raise Killed
            return answer

        return called


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {v: own(tmp_path_factory.mktemp(f"own-{v}"), version=v) for v in "123"}


class World:
    """One deployment; `restart` begins another one in the same workspace and lake."""

    def __init__(self, service, models, folder):
        self.service, self.models, self.folder = service, models, folder
        self.there, self.settings = service.endpoints, SETTINGS
        self.there.lake = folder / "lake"
        self.restart("log")

    def restart(self, name):
        self.log = self.folder / name
        there = self.there
        for part in (there.there, there.changes, there.points, there.fails, there.broken):
            part.clear()
        Killing.calls, Killing.kill = [], (0, "")

    def endpoint(self):
        made = Killing(self.settings, FAST, "tickets")
        made.poll_seconds = 0.0
        return made

    def rollout(self, wait=True):
        log = RolloutLog(self.log, lambda event: None)
        return Rollout(self.endpoint(), log, FAST, wait, lambda event, traffic: None)

    def to(self, version, wait=True):
        return self.rollout(wait).to(self.models[version])

    def name(self, version):
        return f"tickets-v{version}-{self.models[version].digest[:8]}"

    @property
    def traffic(self):
        (one,) = (found for path, found in self.there.there.items() if path.count("/") == 1)
        names = {self.name(version): version for version in self.models}
        return {names[name]: share for name, share in one["properties"]["traffic"].items()}

    @property
    def end(self):
        events = self.rollout().log.events()
        runs = {name for names in self.there.names.values() for name in names} - {"deployments"}
        return (
            events[-1].state,
            serving(events[-1]),
            self.traffic if self.there.names else {},
            runs,
            len(self.there.names),
            [event.state for event in events],
        )


@pytest.fixture
def world(service, models, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LAG_MINUTES", -5)  # a test has no minutes
    monkeypatch.setitem(module.client.PATIENCE, "retry_backoff_factor", 0)
    monkeypatch.setattr(Lake, "folder", str(tmp_path / "lake"))
    fsspec.register_implementation("abfs", Lake, clobber=True)
    Killing.clients.clear()
    return World(service, models, tmp_path)


def test_the_first_version_gets_all_requests_once_it_is_proven(world):
    world.to("1")
    name = world.name("1")
    states = ["create", "smoke", "live", "settled"]
    assert world.end == ("settled", "1", {"1": 100}, {name}, 1, states)
    (made,) = (found for path, found in world.there.there.items() if "/deployments/" in path)
    assert made["tags"] == {"rekindle": "tickets", "rekindle-version": "1"}
    assert made["sku"] == {"name": "Default", "capacity": 1}
    assert made["properties"]["model"].endswith(f"/models/{name}/versions/1")
    assert world.there.folder(made).name == f"v1-{world.models['1'].digest[:8]}"
    environment = made["properties"]["environmentId"].removeprefix(f"{world.service.root}/")
    properties = world.service.assets[environment]["properties"]
    assert properties["image"] == SETTINGS.image
    assert properties["inferenceConfig"]["scoringRoute"] == {"path": "/predict", "port": 8080}
    point = world.endpoint()
    assert point.standing() == {"1": ("ready", 100)}
    assert (
        point.address
        == f"https://{next(iter(world.there.names))}.westeurope.inference.ml.azure.com/predict"
    )
    assert world.service.refused == [
        f"{one}" for one in world.service.refused if "there is no" in one
    ]


def test_the_next_one_gets_more_and_more_and_the_one_before_stays(world):
    for version in "123":
        world.to(version)
    assert world.end[:4] == ("settled", "3", {"3": 100}, {world.name("2"), world.name("3")})
    events = world.rollout().log.events()
    shares = [event.shares for event in events if event.state == "canary" and event.version == "3"]
    assert shares == [{"3": 10, "2": 90}]


@pytest.mark.slow
def test_a_version_that_never_becomes_ready_says_why_and_leaves_the_one_before_alone(world):
    world.to("1")
    world.there.broken = {world.name("2"): "the image was not found"}
    event = world.to("2")
    assert "the image was not found\nstarting\nerror: the end of its log" in event.reason
    assert world.end[:5] == ("rolled_back", "1", {"1": 100}, {world.name("1")}, 1)


@pytest.mark.slow
def test_a_first_version_that_never_starts_leaves_nothing_and_can_be_tried_again(world):
    world.there.broken = {world.name("1"): "no"}
    assert world.to("1").state == "rolled_back"
    assert world.end[:5] == ("rolled_back", "", {}, set(), 0)
    world.there.broken = {}
    assert world.to("1").state == "settled"


def test_a_version_that_answers_otherwise_than_it_was_judged_goes_back(world):
    world.to("1")
    world.there.wrong = {world.name("2")}
    assert "the model answers label 'low', and was judged by 'high'" in world.to("2").reason
    assert world.end[:4] == ("rolled_back", "1", {"1": 100}, {world.name("1")})


def test_a_canary_whose_container_fails_requests_is_rolled_back(world):
    world.to("1")
    world.there.fails = {world.name("2"): 0.2}
    assert "it failed 100 of 500 requests" in world.to("2").reason
    assert world.end[:4] == ("rolled_back", "1", {"1": 100}, {world.name("1")})


@pytest.mark.slow
def test_requests_that_are_wrong_themselves_fail_no_version(world):
    world.there.model_status = "400"
    world.there.fails = {world.name("1"): 0.2, world.name("2"): 0.2}
    world.to("1")
    event = world.to("2")
    assert event.state == "settled", event.reason


@pytest.mark.slow
def test_a_version_that_refuses_what_the_one_before_answers_is_rolled_back(world):
    world.to("1")
    world.there.model_status = "400"
    world.there.fails = {world.name("2"): 0.2}
    assert "it refused 100 of 500 requests (4xx)" in world.to("2").reason
    assert world.end[:4] == ("rolled_back", "1", {"1": 100}, {world.name("1")})


FAILED = {
    ("200", "200"): False,
    ("424", "500"): True,
    ("424", "503"): True,
    ("424", "422"): False,
    ("424", "null"): True,
    ("408", ""): True,
    ("429", ""): False,
    ("500", ""): True,
    ("503", ""): True,
    ("401", ""): False,
    ("400", ""): False,
}


@pytest.mark.parametrize("status", FAILED)
def test_statuses_say_whether_the_version_failed(status):
    assert module._failed(*status) == FAILED[status]


@pytest.mark.parametrize(
    ("status", "refused"),
    [
        (("424", "400"), True),
        (("424", "415"), True),
        (("424", "429"), False),
        (("424", "500"), False),
        (("424", "null"), False),
        (("401", ""), False),
        (("429", ""), False),
        (("200", "200"), False),
    ],
)
def test_statuses_say_whether_the_version_refused(status, refused):
    assert module._refused(*status) == refused


@pytest.mark.slow
def test_only_whole_minutes_since_the_shares_changed_count_that_the_metrics_have_for_certain(
    world, monkeypatch
):
    world.to("1")
    monkeypatch.setattr(module, "LAG_MINUTES", 3)
    world.there.points.clear()
    assert world.endpoint().observe() == {"1": Traffic(0, 0, ())}
    (one,) = (found for path, found in world.there.there.items() if path.count("/") == 1)
    then = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=30)
    one["tags"]["rekindle-split"] = f"3 {then.isoformat()}"
    for minutes, count in ((-31, 1), (-30, 2), (-20, 40), (-10, 50), (-2, 4), (0, 8)):
        world.there.happened(world.name("1"), "200", "200", minutes, count)
    world.there.happened(world.name("1"), "500", "", -20, 5)
    assert world.endpoint().observe() == {"1": Traffic(95, 5, ())}


@pytest.mark.slow
def test_the_same_split_again_counts_on_and_another_begins_from_zero(world):
    world.to("1")
    (one,) = (found for path, found in world.there.there.items() if path.count("/") == 1)
    point, put = world.endpoint(), world.service.calls["PUT onlineEndpoints"]
    tag = one["tags"]["rekindle-split"]
    point.split({"1": 100}, int(tag.split()[0]))
    assert world.service.calls["PUT onlineEndpoints"] == put
    point.split({"1": 100}, 99)
    (one,) = (found for path, found in world.there.there.items() if path.count("/") == 1)
    assert one["tags"]["rekindle-split"].startswith("99 ")
    assert one["tags"]["rekindle"] == "tickets"


@pytest.mark.slow
def test_shares_that_do_not_stay_are_said_after_a_few_tries(world, monkeypatch):
    world.to("1")
    monkeypatch.setattr(module, "TRIES", 3)
    world.service.faults = [Fault("PUT onlineEndpoints", 409) for _ in range(4)]
    with pytest.raises(PlatformError, match="the endpoint does not keep the shares"):
        world.endpoint().split({"1": 100}, 99)
    world.service.faults = [Fault("PUT onlineEndpoints", 409) for _ in range(2)]
    world.endpoint().split({"1": 100}, 99)
    with pytest.raises(StepError, match="version 2 does not run any more"):
        world.endpoint().split({"2": 100}, 100)


def test_one_goes_back_by_hand_and_deletes(world):
    for version in "12":
        world.to(version)
    assert world.rollout().back("slow").reason == "slow"
    assert world.end[:4] == ("rolled_back", "1", {"1": 100}, {world.name("1")})
    world.rollout().delete()
    assert world.end[:5] == ("deleted", "", {}, set(), 0)
    assert world.endpoint().standing() == {}
    assert world.to("1").state == "settled"


def test_an_endpoint_of_others_is_not_touched(world):
    world.to("1")
    (one,) = (found for path, found in world.there.there.items() if path.count("/") == 1)
    one["tags"] = {}
    calls = dict(world.service.calls)
    for ask in (
        lambda: world.to("2"),
        world.endpoint().standing,
        world.endpoint().delete,
        lambda: world.endpoint().split({"1": 100}, 9),
    ):
        with pytest.raises(RequestError, match="was not made by rekindle"):
            ask()
    changed = {name for name, count in world.service.calls.items() if count > calls.get(name, 0)}
    assert {name.split()[0] for name in changed} == {"GET"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deployments", "models", "environments", "datastores"])
def test_what_others_called_as_ours_is_not_used(world, kind):
    world.to("1")
    world.there.there = {
        p: o
        for p, o in world.there.there.items()
        if "/deployments/" not in p or kind == "deployments"
    }
    for path, one in {**world.there.there, **world.service.assets}.items():
        if f"{kind}/" in path:
            one["tags"] = one["properties"]["tags"] = {"rekindle": "another"}
    with pytest.raises(RequestError, match=rf"{kind}/\S+ was not made by rekindle"):
        world.endpoint().create(world.models["1"], 1)


def test_a_name_that_is_taken_in_the_region_and_fields_that_lack_change_nothing(world):
    world.there.taken = {world.endpoint().path.rpartition("/")[2]}
    with pytest.raises(RequestError, match="needs to be unique within a region"):
        world.to("1")
    for field, value in {"image": None, "artifact_root": "s3://bucket/rekindle"}.items():
        world.settings = SETTINGS.model_copy(update={field: value})
        with pytest.raises(RequestError, match=rf"platforms\.azureml\.{field}"):
            world.endpoint().create(world.models["1"], 1)
    assert (world.there.there, world.service.assets) == ({}, {})


def test_a_quota_that_is_too_small_rolls_back_with_its_reason(world):
    world.there.quota = 0
    assert "Not enough quota available" in world.to("1").reason
    assert world.end[:5] == ("rolled_back", "", {}, set(), 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "call", first(1, ["PUT deployments", "PUT onlineEndpoints", "POST score", "GET metrics"])
)
def test_a_missing_permission_rolls_nothing_back_and_the_same_command_continues(world, call):
    world.to("1")
    for status in (403, 401):
        world.service.faults = [Fault(call, status)]
        with pytest.raises(RequestError, match="az login, and ask for the roles"):
            world.to("2")
    assert world.to("2").state == "settled"


def test_a_workspace_that_there_is_not_is_named(world):
    world.settings = SETTINGS.model_copy(update={"workspace": "another"})
    with pytest.raises(PlatformError, match=r"platforms\.azureml names the right subscription"):
        world.endpoint().create(world.models["1"], 1)


def test_what_a_version_costs_a_day_is_known_where_the_price_is(world, monkeypatch):
    assert world.endpoint().usd_per_day() == ("1 x Standard_D4s_v5", None)
    monkeypatch.setattr(Killing, "_location", "eastus")
    big = Killing(SETTINGS, DeploySpec(replicas=2), "tickets")
    machines, usd = big.usd_per_day()
    assert (machines, round(usd, 3)) == ("2 x Standard_D4s_v5", round(2 * 24 * 0.192, 3))


def test_names_are_such_as_azure_takes(world):
    for name in ("a" * 63, "7.days_of-x", "a-" * 20 + "b"):
        made = AzureMLEndpoint(SETTINGS, FAST, name)
        assert world.there.names == {}
        short = made.path.rpartition("/")[2]
        assert 3 <= len(short) <= 32
        assert short[0].isalpha()
        assert "--" not in short


STORIES = {
    "next": ("1", "2", {}),
    "rolled back": ("1", "2", {"2": 0.5}),
    "deleted": ("12", "", {}),
    "by hand": ("12", "back", {}),
}


def tell(world, story):
    """The command of a story, as often as it is killed."""
    target = STORIES[story][1]
    while True:
        try:
            rollout = world.rollout()
            if target == "":
                return rollout.delete()
            return rollout.back("slow") if target == "back" else world.to(target)
        except Killed:
            Killing.kill = (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("story", STORIES)
def test_a_command_killed_before_or_after_any_call_is_completed_by_the_same_command(
    world, story, monkeypatch
):
    before, _, fails = STORIES[story]
    monkeypatch.setattr(endpoints, "POLLS", 0)

    for version in before:
        world.to(version)
    world.there.fails = {world.name(version): share for version, share in fails.items()}
    kept = copy.deepcopy(world.there.there)

    def prepared(name):
        world.there.there, world.there.changes = copy.deepcopy(kept), {}
        shutil.copytree(world.folder / "log", world.folder / name)
        world.log, Killing.calls, Killing.kill = world.folder / name, [], (0, "")

    prepared("plain")
    tell(world, story)
    plain, calls = world.end, len(Killing.calls)
    for at in range(1, calls + 1):
        for when in ("before", "after"):
            prepared(f"{at}-{when}")
            Killing.kill = (at, when)
            tell(world, story)
            assert Killing.kill == (0, ""), "it was not killed"
            assert world.end == plain


TROUBLES = {
    "429": lambda call: [Fault(call, 429, headers={"Retry-After": "0"})],
    "503": lambda call: [Fault(call, 503), Fault(call, 503)],
    "dropped": lambda call: [Fault(call, 0)],
    "lost": lambda call: [Fault(call, 0, after=True)],
}


@pytest.mark.slow
@pytest.mark.parametrize("trouble", TROUBLES)
def test_whatever_happens_to_a_call_ends_in_the_same_state(world, trouble, monkeypatch):
    monkeypatch.setattr(endpoints, "POLLS", 0)

    def told(name, calls):
        world.restart(name)
        for part in world.service.assets, world.service.calls:
            part.clear()
        world.service.faults = [fault for call in calls for fault in TROUBLES[trouble](call)]
        world.to("1")
        world.to("2")
        world.rollout().back("slow")
        world.rollout().delete()
        assert world.service.faults == []
        return world.end

    plain, calls = told("plain", []), sorted(world.service.calls)
    assert {
        "PUT onlineEndpoints",
        "PUT deployments",
        "DELETE deployments",
        "POST score",
        "GET metrics",
        "DELETE onlineEndpoints",
        "PUT models",
        "PUT environments",
        "PUT datastores",
    } <= {*calls}
    assert told("troubled", calls) == plain


@pytest.mark.slow
def test_a_platform_that_does_not_answer_rolls_nothing_back(world):
    world.to("1")
    world.service.faults = [Fault("GET metrics", 503) for _ in range(4)]
    with pytest.raises(UnreachableError):
        world.to("2")
    assert world.to("2").state == "settled"


def test_a_version_goes_through_the_shadow_of_the_one_before(world, models):
    world.to("1")
    goes_through_the_shadow(world.rollout, models["1"], models["2"], world.there.answering.shadowed)


@pytest.mark.slow
def test_the_real_server_answers_behind_the_endpoint(world, tmp_path):
    model = made(tmp_path / "made", "text")
    platform = world.endpoint()
    platform.create(model, 1)
    (path,) = (path for path in world.there.there if "/deployments/" in path)
    folder = world.there.folder(world.there.there[path])
    with contained(tmp_path, AZUREML_MODEL_DIR=str(folder.parent)) as server:
        world.there.containers[path.rpartition("/")[2]] = server.url
        prove(model, lambda body: platform.ask(model, body))
        assert server.figure("rekindle_batch_instances_count") == 2  # its own proof, and this one


def test_the_champion_is_the_version_in_production(world):
    there, assets = world.endpoint(), world.service.assets
    lineage = {"run_key": "k" * 300, "seed": ""}
    named = [there.publish(world.models[version], lineage) for version in "112"]
    paths = [f"models/tickets/versions/{version}" for version in "112"]
    assert [name.removeprefix(f"{world.service.root}/") for name in named] == paths

    def stages():
        return [assets[path]["properties"]["stage"] for path in paths[1:]]

    assert stages() == ["Archived", "Production"]
    tags = assets[paths[0]]["properties"]["tags"]
    assert (tags["run_key"], tags["rekindle"], "seed" in tags) == ("k" * 256, "tickets", False)
    there.publish(world.models["1"], lineage)
    assert stages() == ["Production", "Archived"]
    other = dataclasses.replace(world.models["2"], digest="0" * 64)
    with pytest.raises(RequestError, match="is another model there"):
        there.publish(other, lineage)
    assets[paths[1]]["properties"]["tags"] = {}
    with pytest.raises(RequestError, match="was not made by"):
        there.publish(world.models["1"], lineage)
