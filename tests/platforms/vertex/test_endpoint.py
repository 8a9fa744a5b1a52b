"""Deployments on Vertex AI: the roll-out on an endpoint that is played, and what any interruption leaves."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil

import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import _registry

from rekindle.errors import PlatformError, RequestError, StepError
from rekindle.platforms.vertex import client
from rekindle.platforms.vertex import endpoint as module
from rekindle.platforms.vertex.endpoint import VertexEndpoint
from rekindle.platforms.vertex.section import VertexSpec
from rekindle.records import Evidence
from rekindle.serve.rollout import Rollout, RolloutLog, serving
from rekindle.serve.smoke import prove
from rekindle.spec.deploy import DeploySpec
from tests.platforms.shadowing import goes_through_the_shadow
from tests.quick import first
from tests.serve.models import made, own
from tests.serve.servers import contained
from tests.servers.google.endpoints import Endpoints
from tests.servers.google.rest import HOSTS, PROJECT, REGION, Refused, api, key_file, parsed
from tests.servers.tls_hosts import Hosts
from tests.servers.troubles import Fault

FAST = DeploySpec(canary=(10, 50), step_minutes=0, min_requests=100)
PLACE = VertexSpec(
    project=PROJECT,
    region=REGION,
    artifact_root="gs://lake/rekindle",
    labels={"team": "search"},
    image="europe-docker.pkg.dev/forge/r/train@sha256:1",
    service_account="s@forge.iam",
    secrets={"HF_TOKEN": "projects/forge/secrets/hf/versions/1"},
)
QUESTION = {"instances": [{"text": "1"}]}
CALLS = ("create", "ask", "split", "observe", "retain", "delete")


class Killed(BaseException):
    pass


class Cut(VertexEndpoint):
    """It is killed at the nth call, "before" or "after"."""

    poll_seconds = 0.0

    def __init__(self, world):
        super().__init__(PLACE, FAST, "tickets")
        self.world = world

    def __getattribute__(self, name):
        found = object.__getattribute__(self, name)
        return found if name not in CALLS else lambda *given: self.world.called(name, found, given)


class World:
    def __init__(self, service, folder, models):
        self.service, self.folder, self.models = service, folder, models
        self.calls, self.kill, self.spec = [], (0, ""), FAST

    def called(self, name, call, given):
        self.calls.append(name)
        number = len(self.calls)
        if self.kill == (number, "before"):
            raise Killed
        answer = call(*given)
        if self.kill == (number, "after"):
            raise Killed
        return answer

    def rollout(self, wait=True):
        log = RolloutLog(self.folder / "log", lambda event: None)
        return Rollout(Cut(self), log, self.spec, wait, lambda event, traffic: None)

    def to(self, version, wait=True):
        return self.rollout(wait).to(self.models[version])

    def states(self):
        return [event.state for event in self.rollout().log.events()]

    @property
    def end(self):
        last, standing = self.rollout().log.last(), Cut(self).standing()
        shares = {version: share for version, (_, share) in standing.items() if share}
        models = sorted(name.split("-")[1] for name in self.service.models)
        return (
            last.state,
            serving(last),
            shares,
            set(standing),
            sorted(self.service.endpoints),
            models,
        )


def settled(version, *before):
    kept = sorted([version, *before])
    return "settled", version, {version: 100}, {*kept}, ["tickets"], [f"v{one}" for one in kept]


BACK = ("rolled_back", "1", {"1": 100}, {"1"}, ["tickets"], ["v1"])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = own(tmp_path_factory.mktemp("own"))
    return {version: dataclasses.replace(made, version=version) for version in "1234"}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Google's hosts; `holder.service` is the project behind them."""
    folder = tmp_path_factory.mktemp("tls")
    with Hosts(folder, HOSTS, lambda asked: made.service.answer(asked)) as made:
        made.key = str(key_file(folder))
        yield made
        assert made.strangers == []


@pytest.fixture
def world(hosts, tmp_path, models, monkeypatch):
    for name, value in hosts.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", hosts.key)
    monkeypatch.setattr(client, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(module, "LAG_SECONDS", -60)
    return fresh(hosts, tmp_path, models, monkeypatch)


def fresh(hosts, folder, models, monkeypatch):
    bucket = folder / "bucket"

    class Mounted(LocalFileSystem):
        protocol, cachable = ("gs",), False

        def __init__(self, **settings):
            super().__init__(**{**settings, "auto_mkdir": True})

        @classmethod
        def _strip_protocol(cls, path):
            return super()._strip_protocol(str(path).replace("gs://", f"{bucket}/"))

    monkeypatch.setitem(_registry, "gs", Mounted)
    hosts.service = Endpoints(bucket)
    return World(hosts.service, folder, models)


def test_the_first_version_is_proven_on_an_endpoint_of_its_own_and_gets_all_requests(world):
    assert world.to("1").state == "settled"
    assert world.states() == ["create", "smoke", "live", "settled"]
    assert world.end == settled("1")
    assert world.service.smoked == ["1"]
    assert [one for one in world.service.refused if not one.startswith("GET")] == []
    (found,) = world.service.endpoints.values()
    (deployed,) = found.deployed_models
    assert (found.labels["rekindle"], found.labels["team"]) == ("tickets", "search")
    assert deployed.dedicated_resources.machine_spec.machine_type == "e2-standard-4"
    assert deployed.service_account == "s@forge.iam"
    assert deployed.id[0] == "1"
    assert len(deployed.id) == 6
    (model,) = world.service.models.values()
    assert list(model.container_spec.args) == ["serve"]
    assert model.artifact_uri.startswith("gs://lake/rekindle/deployments/tickets/v1-")
    assert Cut(world).address.endswith(
        "/v1/projects/forge/locations/europe-west4/endpoints/tickets:predict"
    )


@pytest.mark.slow
def test_a_canary_gets_more_and_more_and_the_version_before_stays(world):
    for version in "123":
        world.to(version)
    events = world.rollout().log.events()
    shares = [event.shares for event in events if event.state == "canary" and event.version == "3"]
    assert shares == [{"3": 10, "2": 90}, {"3": 50, "2": 50}]
    assert world.end == settled("3", "2")
    assert world.service.smoked == ["1", "2", "3"]


@pytest.mark.slow
def test_too_few_requests_wait_and_a_repeated_call_counts_on(world):
    world.to("1")
    world.service.requests = 99
    assert world.to("2", wait=False).state == "canary"
    since = world.service.endpoints["tickets"].labels["rekindle-since"]
    assert world.to("2", wait=False).shares == {"2": 10, "1": 90}
    assert world.service.endpoints["tickets"].labels["rekindle-since"] == since
    assert Cut(world).observe()["2"].requests == 99
    world.service.requests = 100
    assert world.to("2", wait=False).state == "settled"


@pytest.mark.parametrize(
    ("code", "refused"),
    [("400", True), ("4xx", True), ("429", False), ("404", False), ("2xx", False), ("500", False)],
)
def test_codes_say_whether_the_version_refused(code, refused):
    assert module._is_refusal(code) == refused


@pytest.mark.slow
def test_what_came_within_the_lag_is_not_counted(world, monkeypatch):
    world.to("1")
    assert Cut(world).observe()["1"].requests == 500
    monkeypatch.setattr(module, "LAG_SECONDS", 240)
    assert Cut(world).observe()["1"].requests == 0


@pytest.mark.slow
def test_a_version_that_never_becomes_ready_is_rolled_back_with_the_reason_and_its_log(world):
    world.to("1")
    world.service.broken = {"2": "Model server never became ready"}
    reason = world.to("2").reason
    assert "version 2 is not ready: Model server never became ready" in reason
    assert "in tickets: ValueError: no tokenizer" in reason
    assert reason.index("starting") < reason.index("ValueError"), "the oldest line is the first"
    assert world.end == BACK
    world.service.broken, world.service.log_denied = {"3": "no space left"}, True
    assert "no space left" in world.to("3").reason


def test_a_canary_that_fails_requests_is_rolled_back(world):
    world.to("1")
    world.service.fails = {"2": 0.2}
    assert "it failed 100 of 500 requests" in world.to("2").reason
    assert world.end == BACK


@pytest.mark.slow
def test_a_version_that_answers_wrongly_is_rolled_back_before_it_has_a_share(world):
    world.to("1")
    world.service.wrong = {"2"}
    event = world.to("2")
    assert "smoke: to row 1 of its test split the model answers label 'other'" in event.reason
    assert "canary" not in world.states()
    assert world.end == BACK


@pytest.mark.slow
def test_one_command_goes_back_by_hand_and_one_ends_it_all(world):
    for version in "12":
        world.to(version)
    world.rollout().back("slow")
    assert world.end == BACK
    world.rollout().delete()
    assert world.end == ("deleted", "", {}, set(), [], [])
    assert world.to("1").state == "settled", "and it can be deployed again"


@pytest.mark.slow
@pytest.mark.parametrize("kind", first(1, ["models", "endpoints"]))
def test_what_another_made_under_our_name_is_left_alone(world, kind):
    world.to("1")
    made = world.service.kinds[kind]
    name = next(iter(made))
    made[name].labels = {"rekindle": "other"}
    calls = world.service.calls.copy()
    with pytest.raises(RequestError, match=f"{kind}/{name} was not made by rekindle"):
        Cut(world).create(world.models["1"], 1)
    if kind == "endpoints":
        for call in (Cut(world).delete, lambda: Cut(world).split({"1": 100}, 9)):
            with pytest.raises(RequestError):
                call()
    assert {name for name in world.service.calls - calls if not name.startswith("GET")} == set()


def test_without_an_image_nothing_is_made(world):
    made = VertexEndpoint(PLACE.model_copy(update={"image": None}), FAST, "tickets")
    with pytest.raises(RequestError) as caught:
        made.create(world.models["1"], 1)
    assert caught.value.problems[0].where == "platforms.vertex.image"
    assert not world.service.bucket.exists()
    assert world.service.endpoints == world.service.models == {}


@pytest.mark.slow
def test_a_quota_and_a_missing_permission_are_named_with_a_way_out(world):
    world.service.quota = (
        "The following quotas are exceeded: CustomModelServingCPUsPerProjectPerRegion"
    )
    with pytest.raises(
        PlatformError, match=r"CustomModelServingCPUs[^:]*\n.*\n.*ask for more of this quota"
    ):
        Cut(world).create(world.models["1"], 1)
    world.service.quota, world.service.faults = "", [Fault("POST endpoints:deployModel", 403)]
    with pytest.raises(PlatformError, match="rekindle doctor CONFIG --platform vertex"):
        Cut(world).create(world.models["1"], 1)
    Cut(world).create(world.models["1"], 1)


@pytest.mark.slow
def test_a_change_beside_others_is_tried_again_so_often_and_no_more(world):
    world.to("1")
    world.service.rivals = 3
    Cut(world).split({"1": 100}, 90)
    assert world.service.endpoints["tickets"].labels["rekindle-split"] == "90"
    world.service.rivals = 99
    with pytest.raises(StepError, match="the shares are not what was asked for after 5 tries"):
        Cut(world).split({"1": 100}, 91)
    with pytest.raises(StepError, match="version 4 does not run"):
        Cut(world).split({"4": 100}, 92)


FAULTS = {
    "too many calls": (429, False),
    "a service that is away": (503, False),
    "a connection that breaks": (0, False),
    "an answer that is lost": (0, True),
    "a gateway that gave up too early": (504, True),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FAULTS)
def test_whatever_befalls_any_call_is_waited_out(world, case):
    status, after = FAULTS[case]
    for version in "12":
        world.service.faults = [
            Fault(call, status, after=after)
            for call in (
                "POST models:upload",
                "GET models",
                "POST endpoints:deployModel",
                "GET endpoints",
                "POST endpoints:predict",
                "POST endpoints:undeployModel",
                "PATCH endpoints",
                "GET operations",
                "DELETE endpoints",
                "POST endpoints",
                *(["GET timeSeries"] if version == "2" else []),
            )
        ]
        assert world.to(version).state == "settled"
        assert world.service.faults == []
    assert world.end == settled("2", "1")


STORIES = {
    "next": (("1",), "2", {}),
    "rolled back": (("1",), "2", {"2": 0.5}),
    "deleted": (("1", "2"), "", {}),
    "by hand": (("1", "2"), "back", {}),
}


def tell(world, target):
    """The command of a story, as often as it is killed."""
    while True:
        try:
            if target == "":
                return world.rollout().delete()
            return world.rollout().back("slow") if target == "back" else world.to(target)
        except Killed:
            world.kill = (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("story", STORIES)
def test_a_command_killed_before_or_after_any_call_is_completed_by_the_same_command(
    world, hosts, models, monkeypatch, story
):
    before, target, fails = STORIES[story]

    first = fresh(hosts, world.folder / "first", models, monkeypatch)
    first.service.polls = 1
    for version in before:
        first.to(version)

    def prepared(name):
        made = fresh(hosts, world.folder / name, models, monkeypatch)
        shutil.copytree(first.folder, made.folder)
        made.service.polls, made.service.fails = 1, fails
        made.spec = FAST.model_copy(update={"canary": (50,)})
        made.service.kinds = copy.deepcopy(first.service.kinds)
        return made

    plain = prepared("plain")
    tell(plain, target)
    end, states = plain.end, plain.states()
    for at in range(1, len(plain.calls) + 1):
        for when in ("before", "after"):
            killed = prepared(f"{at}-{when}")
            killed.kill = (at, when)
            tell(killed, target)
            assert killed.kill == (0, ""), "it was not killed"
            assert (killed.end, killed.states()) == (end, states)


@pytest.mark.slow
def test_a_method_that_ended_at_any_request_is_completed_by_the_same_one(
    world, hosts, models, monkeypatch
):
    methods = {
        "create": lambda made: made.create(models["2"], 1),
        "ask": lambda made: made.ask(models["2"], QUESTION),
        "split": lambda made: made.split({"2": 100}, 2),
        "retain": lambda made: made.retain({"2"}, 2),
        "delete": lambda made: made.delete(),
    }

    def looks(world):
        standing = Cut(world).standing()
        return standing, sorted(world.service.endpoints), sorted(world.service.models)

    world.to("1")
    expected = {}
    for name, method in methods.items():
        method(Cut(world))
        expected[name] = looks(world)
    assert len(expected["ask"][1]) == 2, "a version without a share has an endpoint of its own"
    assert expected["split"][1] == ["tickets"]
    for after in (False, True):
        world = fresh(hosts, world.folder / str(after), models, monkeypatch)
        world.to("1")
        for name, method in methods.items():
            at = 0
            while True:  # each request is the last one of a command, the next command goes on
                world.service.cut = (at, after)
                try:
                    method(Cut(world))
                except PlatformError:
                    at += 1
                else:
                    break
            world.service.cut = None
            assert looks(world) == expected[name], name


@pytest.mark.slow
def test_a_version_that_is_still_being_deployed_is_removed_too(world):
    world.to("1")
    before, at = Cut(world).standing(), 0
    while True:
        world.service.cut = (at, True)
        try:
            Cut(world).create(world.models["2"], 1)
        except PlatformError:
            Cut(world).retain({"1"}, 1)
            assert (Cut(world).standing(), list(world.service.endpoints)) == (before, ["tickets"])
            at += 1
        else:
            return


def test_a_machine_is_taken_with_its_gpus_and_at_its_price(world):
    place = PLACE.model_copy(update={"region": "us-central1"})
    deploy = FAST.model_copy(update={"machine": "g2-standard-4", "replicas": 2})
    words, usd = VertexEndpoint(place, deploy, "tickets").usd_per_day()
    assert (words, round(usd, 2)) == ("2 x g2-standard-4", 33.93)
    assert (
        VertexEndpoint(
            place, FAST.model_copy(update={"machine": "n1-standard-2"}), "t"
        ).usd_per_day()[1]
        is None
    )
    made = VertexEndpoint(PLACE, deploy, "tickets")
    made.poll_seconds = 0.0
    made.create(world.models["1"], 1)
    spec = world.service.endpoints["tickets"].deployed_models[0].dedicated_resources
    assert (spec.machine_spec.accelerator_count, spec.min_replica_count) == (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["3d_parts.v2", "9", "a" * 63])
def test_a_name_that_the_service_does_not_take_becomes_one_that_it_takes(world, name):
    model = dataclasses.replace(world.models["1"], name=name)
    made = VertexEndpoint(PLACE, FAST, name)
    made.poll_seconds = 0.0
    made.create(model, 1)
    assert made.standing() == {"1": ("ready", 0)}
    assert [one for one in world.service.refused if not one.startswith("GET")] == []


def test_the_service_refuses_what_the_protos_do_not_have():
    with pytest.raises(Refused, match="no field named"):
        parsed(api.Endpoint, b'{"shares": {}}')


@pytest.mark.slow
def test_a_version_goes_through_the_shadow_of_the_one_before(world, models):
    world.to("1")
    shadowed = world.service.answering.shadowed
    goes_through_the_shadow(world.rollout, models["1"], models["2"], shadowed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "text-lm", "image"])
def test_google_s_client_asks_the_real_server_behind_the_endpoint(world, hosts, tmp_path, kind):
    """Numbers of a request come as floats: as many tokens as are asked for, and the pixels of an image."""
    from google.cloud import aiplatform_v1
    from google.protobuf import json_format, struct_pb2

    model = made(tmp_path / "made", kind)
    rows, platform = (
        Evidence.read(model.evidence).smoke.rows,
        VertexEndpoint(PLACE, FAST, "tickets"),
    )
    platform.poll_seconds = 0.0
    platform.create(model, 1)
    (placed,) = world.service.models.values()
    folder = world.service.bucket / placed.artifact_uri.removeprefix("gs://")
    with contained(tmp_path, AIP_STORAGE_URI=str(folder)) as server:
        world.service.containers["3"] = server.url
        prove(model, lambda body: platform.ask(model, body))
        platform.split({"3": 100}, 2)
        client = aiplatform_v1.PredictionServiceClient(
            transport="rest", client_options={"api_endpoint": f"{REGION}-aiplatform.googleapis.com"}
        )

        def ask(instances, **parameters):
            value = json_format.ParseDict(parameters, struct_pb2.Value()) if parameters else None
            return client.predict(
                endpoint=f"projects/{PROJECT}/locations/{REGION}/endpoints/tickets",
                instances=[json_format.ParseDict(one, struct_pb2.Value()) for one in instances],
                parameters=value,
            )

        if kind == "image":
            import base64
            import io

            from PIL import Image

            files = [io.BytesIO(base64.b64decode(row.content)) for row in rows]
            pixels = [[[int(v) for v in line] for line in np.asarray(Image.open(f))] for f in files]
            instances = [{"image": one} for one in pixels]
        elif kind == "text":
            instances = [{"body": row.content} for row in rows]
        else:
            instances = [{"body": json.loads(row.content)[0][1]} for row in rows]
        more = {"max_new_tokens": 8, "seed": 1} if kind == "text-lm" else {}
        found = ask(instances, **more)
        assert found.deployed_model_id
        name = "text" if kind == "text-lm" else "label"
        assert [dict(one)[name] for one in found.predictions] == [r.answer[name] for r in rows]
        with pytest.raises(Exception, match="there is no column"):
            ask([{"wrong": "a"}])


@pytest.mark.slow
def test_the_champion_is_the_default_version_of_a_model_that_no_deployment_removes(world):
    there, service = Cut(world), world.service
    first = there.publish(world.models["1"], {"run_key": "abc", "seed": ""})
    assert first.endswith("/models/tickets@1")
    assert there.publish(world.models["1"], {}) == first
    second = there.publish(world.models["2"], {"run_key": "def"})
    assert second.endswith("/models/tickets@2")

    def aliases():
        return [list(one.version_aliases) for one in service.versions["tickets"]]

    assert aliases() == [[], ["default"]]
    one = service.versions["tickets"][0]
    assert (one.version_description, one.labels["team"]) == ("run_key: abc", "search")
    assert there.publish(world.models["1"], {}) == first
    assert aliases() == [["default"], []]
    assert world.to("3").state == "settled"
    there.delete()
    assert (len(service.versions["tickets"]), [*service.models]) == (2, ["tickets"])
    service.models["tickets"].labels.pop(module.PUBLISHED)
    with pytest.raises(RequestError, match="was not made by rekindle"):
        there.publish(world.models["2"], {})


def test_a_version_whose_upload_has_no_answer_is_published_once(world):
    there, service = Cut(world), world.service
    for number in (1, 2):
        service.faults = [Fault("POST models:upload", 0, after=True)]
        named = there.publish(world.models[str(number)], {})
        assert service.faults == []
        assert named.endswith(f"/tickets@{number}")
        assert len(service.versions["tickets"]) == number
