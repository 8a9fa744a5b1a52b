"""Deployments on SageMaker: boto3 itself, over HTTP, against a strict service that is played here, with S3 as moto has
it; the roll-out is the real one."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle.app.champion import publish
from rekindle.app.deploy import DeployOptions, deploy, roll_back
from rekindle.errors import PlatformError, RequestError, StepError, UnreachableError
from rekindle.platforms.sagemaker.endpoint import SageMakerEndpoint
from rekindle.platforms.sagemaker.platform import SageMaker
from rekindle.platforms.sagemaker.section import SageMakerSpec
from rekindle.records import Evidence
from rekindle.serve.messages import ServedModel
from rekindle.serve.rollout import Rollout, RolloutLog, serving
from rekindle.serve.smoke import prove
from rekindle.spec.deploy import DeploySpec
from rekindle.spec.model import Spec
from tests.platforms.shadowing import goes_through_the_shadow
from tests.quick import first
from tests.serve.models import champion, made, own
from tests.serve.servers import contained
from tests.servers.aws import hosting
from tests.servers.aws.hosting import Hosting
from tests.servers.troubles import Fault
from tests.support.cli import rekindle
from tests.support.cli_compile import ROOT
from tests.support.moto import aws as aws
from tests.support.moto import s3 as s3
from tests.support.sagemaker_compile import PLACE

FAST = DeploySpec(canary=(10, 50), step_minutes=0, min_requests=100, machine="ml.m5.xlarge")
SHORT = FAST.model_copy(update={"canary": (50,)})

CALLS = ("create", "ask", "split", "observe", "retain", "delete")
STORIES: dict[str, tuple[tuple[str, ...], str, dict[str, float]]] = {
    "first": ((), "1", {}),
    "next": (("1",), "2", {}),
    "rolled back": (("1",), "2", {"2": 0.5}),
    "deleted": (("1", "2"), "", {}),
    "by hand": (("1", "2"), "back", {}),
}


class Killed(BaseException):
    pass


class Killable:
    """The endpoint, of which the nth call from now is killed before or after it."""

    def __init__(self, endpoint: SageMakerEndpoint) -> None:
        self.endpoint, self.calls, self.kill = endpoint, [], (0, "")

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.endpoint, name)
        if name not in CALLS:
            return method

        def called(*arguments: Any) -> Any:
            if name == "observe" and self.calls[-1:] == ["observe"]:  # as often as metrics are late
                return method(*arguments)
            self.calls.append(name)
            if self.kill == (len(self.calls), "before"):
                raise Killed
            answer = method(*arguments)
            if self.kill == (len(self.calls), "after"):
                raise Killed
            return answer

        return called


class World:
    """A deployment of `tickets`, and the account that it is in."""

    def __init__(
        self, account: Hosting, folder: Path, spec: DeploySpec = FAST, **place: Any
    ) -> None:
        self.account, self.folder, self.spec = account, folder, spec
        endpoint = SageMaker(SageMakerSpec(**{**PLACE, **place})).endpoint(spec, "tickets")
        endpoint.poll_seconds = 0.0
        self.platform = Killable(endpoint)

    def rollout(self, wait: bool = True) -> Rollout:
        log = RolloutLog(self.folder / "log", lambda event: None)
        return Rollout(self.platform, log, self.spec, wait, lambda event, traffic: None)

    def states(self) -> list[str]:
        return [event.state for event in self.rollout().log.events()]

    @property
    def end(self) -> Any:
        last, things = self.rollout().log.last(), self.account.things
        kept = [sorted(things[kind]) for kind in ("endpoint", "model")]
        return (
            last.state,
            serving(last),
            self.platform.standing(),
            kept,
            len(things["endpoint-config"]),
        )


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ServedModel]:
    return {v: own(tmp_path_factory.mktemp(f"v{v}"), version=v) for v in "123"}


@pytest.fixture
def account(aws: str, s3: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosting]:
    import s3fs
    from botocore.retries.standard import ExponentialBackoff

    made = Hosting(s3)
    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda *_: 0.0)
    with hosting.serving(made) as url:
        services = ("SAGEMAKER", "SAGEMAKER_RUNTIME", "CLOUDWATCH", "CLOUDWATCH_LOGS")
        for name, value in {
            **{f"AWS_ENDPOINT_URL_{service}": url for service in services},
            "AWS_ENDPOINT_URL_S3": aws,
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_DEFAULT_REGION": "eu-central-1",
        }.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        yield made


@pytest.fixture
def world(account: Hosting, tmp_path: Path) -> World:
    return World(account, tmp_path)


def test_the_first_version_gets_all_requests_once_it_is_proven(world, versions) -> None:
    assert world.rollout().to(versions["1"]).state == "settled"
    assert world.states() == ["create", "smoke", "live", "settled"]
    name = f"tickets-v1-{versions['1'].digest[:8]}"
    assert world.end == ("settled", "1", {"1": ("ready", 100)}, [["tickets"], [name]], 1)
    body = world.account.things["model"][name]["body"]
    source = body["PrimaryContainer"]["ModelDataSource"]["S3DataSource"]["S3Uri"]
    assert source == f"s3://lake/rekindle/deployments/tickets/v1-{versions['1'].digest[:8]}/"
    assert world.platform.address.endswith(
        "eu-central-1.amazonaws.com/endpoints/tickets/invocations"
    )
    assert world.account.calls["InvokeEndpoint"] == 1
    assert [r for r in world.account.refused if "Could not find" not in r] == []


def test_the_next_one_gets_more_and_more_and_the_one_before_stays(world, versions) -> None:
    world.rollout().to(versions["1"])
    for version in "23":
        world.rollout().to(versions[version])
    events = world.rollout().log.events()
    shares = [event.shares for event in events if event.state == "canary" and event.version == "3"]
    assert shares == [{"3": 10, "2": 90}, {"3": 50, "2": 50}]
    assert world.platform.standing() == {"2": ("ready", 0), "3": ("ready", 100)}
    assert len(world.account.things["model"]) == 2
    assert len(world.account.things["endpoint-config"]) == 1


@pytest.mark.slow
def test_an_update_keeps_the_instances_that_a_variant_was_scaled_to(world, versions) -> None:
    world.rollout().to(versions["1"])
    world.account.per_minute = 0
    variants = world.account.endpoint["variants"]
    variants[f"tickets-v1-{versions['1'].digest[:8]}"]["count"] = 3
    world.rollout(wait=False).to(versions["2"])
    assert [one["count"] for one in world.account.endpoint["variants"].values()] == [3, 1]
    assert world.platform.standing() == {"1": ("ready", 90), "2": ("ready", 10)}


@pytest.mark.slow
def test_only_minutes_are_counted_of_which_requests_and_errors_are_known(world, versions) -> None:
    world.rollout().to(versions["1"])
    world.account.per_minute = 0
    world.rollout(wait=False).to(versions["2"])
    since = int(world.account.endpoint["tags"]["rekindle-split"].split(" ")[1])
    world.account.per_minute, world.account.fails = 1_000, {"2": 0.5}
    world.account.ahead += 900
    seen = world.platform.observe()
    known = (world.account.clock - 260) // 60 - (-(-since // 60))
    assert 0 < seen["2"].requests <= known * 100
    assert seen["1"].requests <= known * 900
    assert seen["2"].errors * 2 == seen["2"].requests
    assert seen["2"].latencies == ()
    tags = dict(world.account.endpoint["tags"])
    world.platform.split({"2": 10, "1": 90}, int(tags["rekindle-split"].split(" ")[0]))
    assert world.account.endpoint["tags"] == tags, "the same split does not count from zero"
    world.platform.split({"2": 10, "1": 90}, 99)
    assert all(one.requests <= 2_000 for one in world.platform.observe().values())
    assert world.platform.observe()["2"].requests < seen["2"].requests


@pytest.mark.slow
def test_too_few_requests_wait_and_the_next_call_goes_on(world, versions) -> None:
    world.rollout().to(versions["1"])
    world.account.per_minute = 0
    for _ in range(2):
        assert world.rollout(wait=False).to(versions["2"]).shares == {"2": 10, "1": 90}
    world.account.per_minute = 2_000
    assert world.rollout().to(versions["2"]).state == "settled"


@pytest.mark.parametrize("silent", first(1, [False, True]))
def test_a_version_that_never_becomes_ready_leaves_the_one_before_alone(
    world, versions, silent
) -> None:
    world.rollout().to(versions["1"])
    world.account.broken, world.account.silent = {"2"}, silent
    event = world.rollout().to(versions["2"])
    assert event.state == "rolled_back"
    why = "does not say why" if silent else "did not pass the ping health check"
    assert why in event.reason
    assert "the files of version 2 are not those that were judged" in event.reason
    assert "an older one" not in event.reason
    name = f"tickets-v1-{versions['1'].digest[:8]}"
    assert world.end == ("rolled_back", "1", {"1": ("ready", 100)}, [["tickets"], [name]], 1)


@pytest.mark.slow
def test_a_first_version_that_never_becomes_ready_leaves_nothing_and_can_be_tried_again(
    world, versions
) -> None:
    world.account.broken, world.account.streams = {"1"}, 0  # the image was not pulled
    event = world.rollout().to(versions["1"])
    assert "did not pass the ping health check" in event.reason
    assert world.end == ("rolled_back", "", {}, [[], []], 0)
    world.account.broken = set()
    assert world.rollout().to(versions["1"]).state == "settled"


@pytest.mark.parametrize("how", first(1, ["fails", "dying"]))
def test_a_canary_that_fails_is_rolled_back_with_its_reason(world, versions, how) -> None:
    world.rollout().to(versions["1"])
    setattr(world.account, how, {"2": 0.2})
    event = world.rollout().to(versions["2"])
    assert "1.0% are allowed" in event.reason
    assert world.platform.standing() == {"1": ("ready", 100)}
    assert len(world.account.things["model"]) == 1


@pytest.mark.parametrize("how", first(1, ["wrong", "crashing"]))
def test_a_version_that_answers_wrongly_gets_no_requests(world, versions, how) -> None:
    world.rollout().to(versions["1"])
    setattr(world.account, how, {"2"})
    event = world.rollout().to(versions["2"])
    assert event.state == "rolled_back"
    assert {"wrong": "was judged by 'high'", "crashing": "CUDA error"}[how] in event.reason
    assert "canary" not in world.states()
    assert world.platform.standing() == {"1": ("ready", 100)}


def test_one_command_goes_back_and_another_ends_all(world, versions) -> None:
    for version in "12":
        world.rollout().to(versions[version])
    assert world.rollout().back("slow").reason == "slow"
    assert world.platform.standing() == {"1": ("ready", 100)}
    world.rollout().delete()
    assert world.end == ("deleted", "", {}, [[], []], 0)
    assert [r for r in world.account.refused if "Could not find" not in r] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", first(1, ["endpoint", "model"]))
def test_what_is_not_ours_is_left_alone(world, versions, kind) -> None:
    other = World(world.account, world.folder / "other")
    other.rollout().to(versions["1"])
    (found,) = world.account.things[kind].values()
    found["tags"] = {"team": "search"}
    if kind == "model":
        world.account.things["endpoint"].clear()
        world.account.things["endpoint-config"].clear()
    before = copy.deepcopy(world.account.things)
    with pytest.raises(RequestError, match=f"(?i){kind} tickets.* was not made by rekindle"):
        world.rollout().to(versions["1"])
    if kind == "endpoint":
        with pytest.raises(RequestError, match="was not made by rekindle"):
            world.rollout().delete()
    assert world.account.things == before


def test_without_an_image_nothing_is_made(account, versions, tmp_path) -> None:
    with pytest.raises(RequestError, match=r"platforms\.sagemaker\.image"):
        World(account, tmp_path / "a", image=None).rollout().to(versions["1"])
    assert not account.calls


@pytest.mark.slow
def test_network_key_and_tags_go_into_what_is_made(account, versions, tmp_path) -> None:
    place = {
        "subnets": ("subnet-1",),
        "security_groups": ("sg-1",),
        "kms_key": "alias/mine",
        "tags": {"team": "search"},
    }
    World(account, tmp_path, **place).rollout().to(versions["1"])
    (made,), (config,) = (
        account.things["model"].values(),
        account.things["endpoint-config"].values(),
    )
    assert made["body"]["VpcConfig"] == {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}
    assert config["body"]["KmsKeyId"] == "alias/mine"
    tags = {"team": "search", "rekindle": "tickets"}
    assert made["tags"] == config["tags"] == tags
    assert account.endpoint["tags"].items() > tags.items()


@pytest.mark.slow
def test_a_quota_is_said_and_the_version_before_stays(world, versions) -> None:
    world.rollout().to(versions["1"])
    world.account.quota = 1
    event = world.rollout().to(versions["2"])
    assert "Service Quotas" in event.reason
    assert world.platform.standing() == {"1": ("ready", 100)}


def test_a_missing_permission_is_said(world, versions) -> None:
    world.account.faults = [Fault("CreateModel", 400, "AccessDeniedException")]
    assert "rekindle doctor" in world.rollout().to(versions["1"]).reason
    world.account.faults = [Fault("DescribeEndpoint", 400, "AccessDeniedException")] * 9
    with pytest.raises(PlatformError, match="rekindle doctor"):
        world.rollout().to(versions["1"])


def test_the_role_and_the_bill_are_known(account, tmp_path) -> None:
    spec = FAST.model_copy(update={"replicas": 2})
    usual = World(account, tmp_path, spec, region="us-east-1").platform.usd_per_day()
    assert usual == ("2 x ml.m5.xlarge", pytest.approx(24 * 2 * 0.23))
    dear = World(account, tmp_path, spec.model_copy(update={"machine": "ml.g9.xlarge"}))
    assert dear.platform.usd_per_day() == ("2 x ml.g9.xlarge", None)


@pytest.mark.slow
def test_another_image_is_taken_for_a_version_that_never_ran(world, versions) -> None:
    world.rollout().to(versions["1"])
    world.platform.endpoint.place = SageMakerSpec(**{**PLACE, "image": f"{PLACE['image'][:-1]}1"})
    world.platform.kill = (len(world.platform.calls) + 1, "before")
    with pytest.raises(Killed):
        world.rollout().to(versions["2"])
    name = f"tickets-v2-{versions['2'].digest[:8]}"
    stale = copy.deepcopy(next(iter(world.account.things["model"].values())))
    world.account.things["model"][name] = stale
    world.rollout().to(versions["2"])
    image = world.account.things["model"][name]["body"]["PrimaryContainer"]["Image"]
    assert image.endswith("1")


@pytest.mark.slow
def test_a_service_that_does_not_answer_rolls_nothing_back(world, versions) -> None:
    world.rollout().to(versions["1"])
    world.account.faults = [Fault("GetMetricStatistics", 503)] * 5
    with pytest.raises(UnreachableError):
        world.rollout().to(versions["2"])
    assert world.states()[-1] == "canary"
    assert world.rollout().to(versions["2"]).state == "settled"


ASKED = (
    "CreateModel",
    "CreateEndpointConfig",
    "CreateEndpoint",
    "DescribeEndpoint",
    "DescribeModel",
    "ListTags",
    "DescribeEndpointConfig",
    "UpdateEndpoint",
    "UpdateEndpointWeightsAndCapacities",
    "AddTags",
    "InvokeEndpoint",
    "GetMetricStatistics",
    "ListModels",
    "ListEndpointConfigs",
    "DeleteModel",
    "DeleteEndpointConfig",
)
TROUBLES = {
    "too many calls": {"status": 400, "code": "ThrottlingException"},
    "a service that is away": {"status": 503},
    "connections that break": {"status": 0},
    "answers that are lost": {"status": 0, "after": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", TROUBLES)
def test_whatever_befalls_a_call_the_end_is_the_same(world, versions, case) -> None:
    world.spec, world.account.late = SHORT, True
    world.account.faults = [Fault(name, **TROUBLES[case]) for name in ASKED for _ in "12"]
    for version in "123":
        assert world.rollout().to(versions[version]).state == "settled"
    names = [f"tickets-v{v}-{versions[v].digest[:8]}" for v in "23"]
    standing = {"2": ("ready", 0), "3": ("ready", 100)}
    assert world.end == ("settled", "3", standing, [["tickets"], names], 1)
    world.account.faults += [Fault("DeleteEndpoint", **TROUBLES[case]) for _ in "12"]
    world.rollout().delete()
    assert world.end == ("deleted", "", {}, [[], []], 0)
    assert world.account.faults == []


@pytest.mark.slow
@pytest.mark.parametrize("story", STORIES)
def test_a_command_killed_before_or_after_any_call_is_completed_by_the_same_command(
    account, versions, tmp_path, story
) -> None:
    before, target, fails = STORIES[story]
    start = World(account, tmp_path / "start", SHORT)
    for version in before:
        start.rollout().to(versions[version])
    things, history = copy.deepcopy(account.things), list(account.history)
    events = start.rollout().log.events()

    def prepared(name: str) -> World:
        account.things.update(copy.deepcopy(things))
        account.history, account.fails = list(history), fails
        made = World(account, tmp_path / name, SHORT)
        made.platform.endpoint.account = start.platform.endpoint.account
        for event in events:
            storage = made.rollout().log.storage
            storage.put_new(f"{event.number:06}.json", event.to_json().encode())
        return made

    def told(world: World) -> None:
        while True:
            try:
                rollout = world.rollout()
                if target == "":
                    return rollout.delete()
                return rollout.back("slow") if target == "back" else rollout.to(versions[target])
            except Killed:
                world.platform.kill = (0, "")

    plain = prepared("plain")
    told(plain)
    end, states = plain.end, plain.states()
    for at in range(1, len(plain.platform.calls) + 1):
        for when in ("before", "after"):
            world = prepared(f"{at}-{when}")
            world.platform.kill = (at, when)
            told(world)
            assert world.platform.kill == (0, ""), "it was not killed"
            assert (world.end, world.states()) == (end, states)


@pytest.mark.slow
def test_a_version_goes_through_the_shadow_of_the_one_before(world, versions):
    world.rollout().to(versions["1"])
    shadowed = world.account.answering.shadowed
    goes_through_the_shadow(world.rollout, versions["1"], versions["2"], shadowed)


@pytest.mark.slow
def test_the_step_of_a_pipeline_deploys_the_champion(world: World, tmp_path: Path) -> None:
    from components.deploy import deploy

    champion(tmp_path / "home", made(tmp_path / "made", "text"))
    config = {
        "name": "tickets",
        "task": "text_classification",
        "deploy": {"canary": []},
        "register": {"tracking_uri": f"sqlite:///{tmp_path}/home/mlflow.db"},
        "data": {"source": "x", "columns": {"text": "body"}},
        "platforms": {"sagemaker": PLACE},
    }
    world.account.wrong.add("1")
    with pytest.raises(StepError, match="version 1 was rolled back, no version answers: smoke"):
        deploy.python_func(config=json.dumps(config), artifact_root=PLACE["artifact_root"])
    world.account.wrong.clear()
    for _ in range(2):  # the second time it is there
        done = deploy.python_func(config=json.dumps(config), artifact_root=PLACE["artifact_root"])
        assert done == (world.platform.address, "1")
    assert world.platform.standing() == {"1": ("ready", 100)}


@pytest.mark.slow
def test_boto3_asks_the_real_server_behind_the_endpoint(world, account, s3, tmp_path) -> None:
    """What was staged in S3 is downloaded, as the service does, and served by what the container runs."""
    import boto3

    model = made(tmp_path / "made", "text")
    rows = Evidence.read(model.evidence).smoke.rows
    world.platform.create(model, 1)
    (placed,) = account.things["model"].values()
    uri = placed["body"]["PrimaryContainer"]["ModelDataSource"]["S3DataSource"]["S3Uri"]
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    folder = tmp_path / "opt-ml-model"
    for one in s3.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]:
        place = folder / one["Key"].removeprefix(prefix)
        place.parent.mkdir(parents=True, exist_ok=True)
        s3.download_file(bucket, one["Key"], str(place))
    with contained(tmp_path, REKINDLE_MODEL=str(folder)) as server:
        account.containers["3"] = server.url
        prove(model, lambda body: world.platform.ask(model, body))
        runtime = boto3.client("sagemaker-runtime")

        def invoke(content: str | bytes, media: str, **more: str) -> str:
            found = runtime.invoke_endpoint(
                EndpointName="tickets", Body=content, ContentType=media, **more
            )
            assert found["InvokedProductionVariant"] == f"tickets-v3-{model.digest[:8]}"
            assert found["ContentType"].startswith(media.partition(";")[0])
            return found["Body"].read().decode()

        instances, labels = [{"body": r.content} for r in rows], [r.answer["label"] for r in rows]
        body = json.dumps({"instances": instances})
        for more in ({}, {"Accept": "application/json"}, {"Accept": "application/json, */*;q=0.5"}):
            found = json.loads(invoke(body, "application/json", **more))["predictions"]
            assert [one["label"] for one in found] == labels
        lines = "".join(json.dumps(one) + "\n" for one in instances)
        found = invoke(lines, "application/jsonlines").splitlines()
        assert [json.loads(line)["label"] for line in found] == labels
        cells = "\n".join(f'"{row.content}"' for row in rows)
        found = invoke(cells, "text/csv; charset=utf-8").splitlines()
        assert [line.split(",")[0] for line in found] == labels
        with pytest.raises(
            runtime.exceptions.ModelError, match="there is no column `body`"
        ) as error:
            invoke(json.dumps({"instances": [{"text": "a"}]}), "application/json")
        assert error.value.response["OriginalStatusCode"] == 400


def test_the_champion_alone_is_an_approved_package_of_its_group(world, versions) -> None:
    there, packages = world.platform, world.account.packages
    lineage = {
        "run_key": "k" * 300,
        "registry": "https://mlflow",
        "seed": "",
        "reason": "0.9 (of 1)",
    }
    first = there.publish(versions["1"], lineage)
    assert (there.publish(versions["1"], lineage), len(packages)) == (first, 1)
    assert packages[first]["CustomerMetadataProperties"] == {
        "run_key": "k" * 256,
        "registry": "https://mlflow",
        "reason": "0.9  of 1 ",
    }
    second = there.publish(versions["2"], lineage)
    third = there.publish(versions["3"], lineage)

    def states() -> list[str]:
        return [packages[arn]["ModelApprovalStatus"] for arn in (first, second, third)]

    assert states() == ["PendingManualApproval", "PendingManualApproval", "Approved"]
    packages[second]["ModelApprovalStatus"] = "Rejected"  # by a person
    another = {**packages[third], "ModelPackageArn": f"{third}0", "token": ""}
    packages[f"{third}0"] = {k: v for k, v in another.items() if k != "ModelPackageDescription"}
    assert there.publish(versions["1"], lineage) == first
    assert states() == ["Approved", "Rejected", "PendingManualApproval"]
    world.account.things["model-package-group"]["tickets"]["tags"] = {}
    with pytest.raises(RequestError, match="was not made by rekindle"):
        there.publish(versions["2"], lineage)
    assert states() == ["Approved", "Rejected", "PendingManualApproval"]


@pytest.mark.slow
def test_what_is_published_is_noted_in_our_registry(world: World, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    home, tracking = tmp_path / "home", f"sqlite:///{tmp_path}/home/mlflow.db"
    champion(home, made(tmp_path / "made", "text"))
    config = {
        "name": "tickets",
        "task": "text_classification",
        "data": {"source": "x", "columns": {"text": "body"}},
        "register": {"tracking_uri": tracking, "publish": ["sagemaker"]},
        "platforms": {"sagemaker": PLACE},
    }
    for _ in range(2):
        publish(Spec.model_validate(config), home)
    ((arn, package),) = world.account.packages.items()
    assert package["CustomerMetadataProperties"]["run_key"] == "k"
    tags = MlflowClient(tracking, tracking).get_model_version("tickets", "1").tags
    assert tags["rekindle.published.sagemaker"] == arn


@pytest.mark.slow
def test_a_run_publishes_what_its_gate_let_pass(world: World, tmp_path: Path) -> None:
    """The steps are processes of their own, which ask the same service."""
    words = [
        w for key, value in PLACE.items() for w in ("--set", f"platforms.sagemaker.{key}={value}")
    ]
    words += ["--set", "register.publish=[sagemaker]", "--home", str(tmp_path / "home")]
    rekindle("run", "configs/digits.yaml", *words, cwd=ROOT)
    ((arn, package),) = world.account.packages.items()
    assert package["ModelApprovalStatus"] == "Approved"
    assert package["CustomerMetadataProperties"]["version"] == "1"
    rekindle("run", "configs/digits.yaml", *words, cwd=ROOT)  # all of it is there
    assert [*world.account.packages] == [arn]


@pytest.mark.slow
def test_a_deployment_that_goes_back_is_followed_in_the_registry_of_the_platform(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SageMakerEndpoint, "poll_seconds", 0.0)
    home, account = tmp_path / "home", world.account
    config = {
        "name": "tickets",
        "task": "text_classification",
        "deploy": {"canary": []},
        "data": {"source": "x", "columns": {"text": "body"}},
        "register": {"publish": ["sagemaker"]},
        "platforms": {"sagemaker": PLACE},
    }
    spec, options = Spec.model_validate(config), DeployOptions(platform="sagemaker", wait=True)
    champion(home, made(tmp_path / "first", "text"))
    deploy(spec, home, options)
    publish(spec, home)
    second = made(tmp_path / "second", "text", seed=1)
    champion(home, second, reason="another")
    publish(spec, home)
    account.wrong.add("2")
    account.faults.append(Fault("ListModelPackages", 400, "AccessDeniedException"))
    with pytest.raises(
        StepError, match=r"(?s)version 2 was rolled back, version 1 .* not published"
    ) as e:
        deploy(spec, home, options)
    assert "rekindle rollback tickets --to 1" in e.value.problems[0].fix
    roll_back(spec, home, "as before", "1", options)
    states = [one["ModelApprovalStatus"] for one in account.packages.values()]
    assert states == ["Approved", "PendingManualApproval"]
