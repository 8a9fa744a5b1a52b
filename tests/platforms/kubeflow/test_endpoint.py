"""`rekindle deploy --platform kubeflow` against the cluster that servers/kubeflow plays: what is made, what is refused, and
that a command killed before or after any change is completed by the same command."""

import dataclasses
from pathlib import Path

import pytest

from rekindle.errors import RequestError, UnreachableError
from rekindle.platforms.kubeflow import cluster_checks
from rekindle.platforms.kubeflow import endpoint as module
from rekindle.platforms.kubeflow.cluster import ApiServer
from rekindle.platforms.kubeflow.endpoint import KubeflowEndpoint
from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.platforms.kubeflow.serving import counters, named
from rekindle.serve.messages import BOUNDS_MS
from rekindle.serve.rollout import Rollout, RolloutLog
from rekindle.spec.deploy import DeploySpec
from tests.platforms.shadowing import goes_through_the_shadow
from tests.quick import first
from tests.serve.models import own
from tests.servers.kubeflow.kubernetes import FakeCluster, Trouble
from tests.support.kubeconfig import write_kubeconfig

IMAGE = f"registry.example.com/cpu@sha256:{'0' * 64}"
FAST = DeploySpec(canary=(10,), step_minutes=0, min_requests=100)
AT_ONCE = DeploySpec(canary=())
ROUTES = "/apis/gateway.networking.k8s.io/v1/namespaces/kubeflow/httproutes"


class Killed(BaseException):
    pass


@dataclasses.dataclass(frozen=True)
class Killable(ApiServer):
    """A cluster whose client is killed at its n-th request that changes something (`state["at"]`), before or after it."""

    state: dict = dataclasses.field(default_factory=lambda: {"at": 0, "when": "", "calls": 0})

    def answer(self, method, path, *words):
        changes = method != "GET" and "/proxy/" not in path
        self.state["calls"] += changes
        now = changes and self.state["calls"] == self.state["at"]
        if now and self.state["when"] == "before":
            raise Killed
        try:
            return super().answer(method, path, *words)
        finally:
            if now:
                raise Killed


class World:
    def __init__(self, fake, models, folder, spec=FAST, gateway="infra/public", **more):
        self.fake, self.models, self.folder, self.spec = fake, models, folder, spec
        root = f"file://{folder}/store"
        self.place = KubeflowSpec(artifact_root=root, image=IMAGE, gateway=gateway, **more)
        self.cluster = Killable(fake.url, "deployer", patience_seconds=1.5)

    @property
    def endpoint(self):
        made = KubeflowEndpoint(self.place, self.spec, "tickets", self.cluster)
        made.poll_seconds = 0.0
        return made

    def rollout(self):
        log = RolloutLog(self.folder / "log", self.on_event)
        return Rollout(self.endpoint, log, self.spec, True, lambda event, traffic: None)

    def on_event(self, event):
        pass

    def asked(self, version, requests=200, **more):
        """Requests come to both versions as soon as the shares change."""

        def watching(event, traffic):
            if event.number not in seen:
                seen.add(event.number)
                self.fake.served.traffic(version, requests, **more)
                self.fake.served.traffic(event.previous, requests)

        seen = set()
        made = self.rollout()
        made.on_traffic = watching
        return made

    def to(self, version, **more):
        return self.asked(version, **more).to(self.models[version])

    @property
    def states(self):
        return [event.state for event in self.rollout().log.events()]

    @property
    def end(self):
        """What is there, but for names that the cluster gives."""
        objects = self.fake.served.objects
        made = {kind: sorted(one) for kind, one in objects.items()}
        refs = [
            r for o in objects["HTTPRoute"].values() for r in o["spec"]["rules"][0]["backendRefs"]
        ]
        service = objects["Service"].get("tickets", {"spec": {"selector": {}}})["spec"]["selector"]
        weights = {ref["name"]: ref["weight"] for ref in refs}
        return made, weights, service, self.states, self.rollout().endpoint.standing()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {version: own(folder / version, version=version) for version in "123"}


@pytest.fixture
def fake(tmp_path):
    with FakeCluster(tmp_path / "cluster") as fake:
        yield fake


@pytest.fixture
def world(fake, models, tmp_path):
    return World(fake, models, tmp_path)


def name_of(models, version):
    return f"tickets-v{version}-{models[version].digest[:8]}"


def test_the_first_version_runs_as_its_user_and_gets_all_requests(world, fake, models):
    event = world.to("1")
    assert (event.state, event.shares) == ("settled", {"1": 100})
    name, served = name_of(models, "1"), fake.served.objects
    assert (sorted(served["Deployment"]), sorted(served["Service"])) == ([name], ["tickets", name])
    spec = served["Deployment"][name]["spec"]
    pod = spec["template"]["spec"]
    assert pod["securityContext"]["runAsUser"] == 10001
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == (
        "rekindle-node",
        False,
    )
    (container,) = pod["containers"]
    assert (container["image"], container["args"]) == (IMAGE, ["serve"])
    assert {
        probe: container[probe]["httpGet"]["path"] for probe in ("readinessProbe", "livenessProbe")
    } == {
        "readinessProbe": "/health/ready",
        "livenessProbe": "/health/live",
    }
    staged = f"deployments/tickets/v1-{models['1'].digest[:8]}"
    assert container["env"][1]["value"].endswith(staged)
    assert world.endpoint.standing() == {"1": ("ready", 100)}
    route = served["HTTPRoute"]["tickets"]["spec"]
    assert route["parentRefs"] == [{"name": "public", "namespace": "infra"}]
    assert world.endpoint.address == "/kubeflow/tickets of the Gateway infra/public"


def test_a_canary_gets_its_share_by_the_route_and_then_all(world, models):
    world.to("1")
    assert world.to("2").state == "settled"
    canary = [e for e in world.rollout().log.events() if e.state == "canary"]
    assert [event.shares for event in canary] == [{"2": 10, "1": 90}]
    made, weights, service, _, standing = world.end
    assert weights == {name_of(models, "2"): 100}
    assert service == {"rekindle": "tickets", "rekindle.dev/version": "2"}
    assert standing == {"1": ("ready", 0), "2": ("ready", 100)}
    assert made["Deployment"] == sorted(name_of(models, v) for v in "12")
    world.to("3")
    assert sorted(world.endpoint.standing()) == ["2", "3"]


def test_counts_are_those_since_the_split_and_a_restart_is_an_end(world, fake):
    world.to("1")
    fake.served.traffic("1", 40)
    world.endpoint.split({"1": 100}, 99)
    assert world.endpoint.observe()["1"].requests == 0
    fake.served.traffic("1", 30, errors=5, seconds=0.2)
    world.endpoint.split({"1": 100}, 99)  # the same command again counts on
    found = world.endpoint.observe()["1"]
    assert (found.requests, found.errors, found.ends) == (30, 5, 0)
    (at,) = [i for i, count in enumerate(found.latencies) if count]
    assert found.latencies[at] == 25
    assert BOUNDS_MS[at - 1] < 200 <= BOUNDS_MS[at]
    for pod in fake.pods.values():
        pod["status"]["containerStatuses"][0]["restartCount"] += 1
    fake.served.traffic("1", 7)
    found = world.endpoint.observe()["1"]
    assert (found.requests, found.ends) == (8, 1)  # with the one that it proved itself by


def test_buckets_of_an_older_server_count_at_the_bound_that_is_certain():
    lines = [
        'rekindle_request_seconds_bucket{route="/predict",status="200",le="0.1"} 3',
        'rekindle_request_seconds_bucket{route="/predict",status="200",le="+Inf"} 4',
        'rekindle_request_seconds_count{route="/predict",status="200"} 4',
        'rekindle_request_seconds_count{route="/openapi.json",status="200"} 9',
    ]
    text = "# TYPE rekindle_request_seconds histogram\n" + "\n".join(lines) + "\n"
    at = min(i for i, bound in enumerate(BOUNDS_MS) if bound >= 100)
    assert counters(text) == {"requests": 4, str(at): 3, str(len(BOUNDS_MS)): 1}


@pytest.mark.parametrize(
    ("route", "requests"),
    {
        "/predict": 5,
        "/invocations": 5,
        "/v1/chat/completions": 5,
        "/v2/models/{name}/versions/{version}/infer": 5,
        "/v1/models": 0,
        "/v1/models/{name}": 0,
        "/v2/models/{name}": 0,
        "/openapi.json": 0,
    }.items(),
)
def test_requests_that_ask_about_the_model_say_nothing_of_its_predictions(route, requests):
    lines = [
        f'rekindle_request_seconds_bucket{{route="{route}",status="200",le="+Inf"}} 5',
        f'rekindle_request_seconds_count{{route="{route}",status="200"}} 5',
    ]
    text = "# TYPE rekindle_request_seconds histogram\n" + "\n".join(lines) + "\n"
    assert counters(text).get("requests", 0) == requests


def test_what_a_version_refuses_is_counted_apart_and_is_no_answer():
    lines = [
        line
        for status, count in (("200", 5), ("400", 3), ("429", 2), ("500", 1))
        for line in (
            f'rekindle_request_seconds_bucket{{route="/predict",status="{status}",le="+Inf"}} {count}',
            f'rekindle_request_seconds_count{{route="/predict",status="{status}"}} {count}',
        )
    ]
    text = "# TYPE rekindle_request_seconds histogram\n" + "\n".join(lines) + "\n"
    answered = {str(len(BOUNDS_MS)): 7}
    assert counters(text) == {"requests": 11, "errors": 1, "refused": 3, **answered}


@pytest.mark.parametrize(
    ("fate", "reason"),
    [
        ("crash", "its container ended 2 times, with exit code 1 (Error)\nE: smoke: to row 1"),
        ("image", "ImagePullBackOff: Back-off pulling image: not found"),
    ],
)
def test_a_version_that_never_starts_goes_back_with_the_reason(world, fake, models, fate, reason):
    world.to("1")
    fake.served.fates = {"2": fate}
    event = world.to("2")
    assert event.state == "rolled_back"
    assert reason in event.reason
    assert world.endpoint.standing() == {"1": ("ready", 100)}
    assert sorted(fake.served.objects["Service"]) == ["tickets", name_of(models, "1")]


def test_a_version_that_no_node_takes_is_waited_for_and_then_goes_back(world, fake, monkeypatch):
    monkeypatch.setattr(module.serving, "READY_SECONDS", 0.5)
    fake.served.fates = {"1": "nowhere"}
    event = world.to("1")
    assert "did not start: no node takes its pod: 0/3 nodes are available" in event.reason
    assert not any(fake.served.objects.values())


def test_a_quota_says_nothing_of_the_version_and_the_same_command_goes_on(world, fake):
    fake.served.fates = {"1": "quota"}
    with pytest.raises(RequestError, match="exceeded quota: team-a"):
        world.to("1")
    assert world.states == ["create"]
    fake.served.fates = {}
    assert world.to("1").state == "settled"


def test_other_answers_than_it_was_judged_by_go_back(world, fake):
    world.to("1")
    fake.served.wrong = {"2"}
    event = world.to("2")
    assert event.state == "rolled_back"
    assert "to row 1 of its test split the model answers label 'another'" in event.reason


def test_a_canary_that_fails_or_is_slow_goes_back(world):
    world.to("1")
    event = world.to("2", errors=100)
    assert (event.state, event.shares) == ("rolled_back", {"1": 100})
    assert "it failed 100 of 200 requests" in event.reason
    assert "of its answers took more than" in world.to("3", seconds=0.5).reason
    assert world.endpoint.standing() == {"1": ("ready", 100)}


def test_one_command_goes_back_and_one_deletes_only_what_is_ours(world, fake):
    fake.served.objects["Service"]["theirs"] = {"metadata": {"labels": {"rekindle": "other"}}}
    world.to("1")
    world.to("2")
    assert world.rollout().back("slow").shares == {"1": 100}
    assert world.endpoint.standing() == {"1": ("ready", 100)}
    world.rollout().delete()
    assert world.states[-1] == "deleted"
    made = {kind: sorted(one) for kind, one in fake.served.objects.items()}
    assert made == {
        "Deployment": [],
        "Service": ["theirs"],
        "HTTPRoute": [],
        "InferenceService": [],
    }


@pytest.mark.parametrize("kind", ["Service", "HTTPRoute"])
def test_what_is_anothers_is_left_alone(world, fake, kind):
    meta = {"name": "tickets", "labels": {}, "generation": 1}
    theirs = {
        "metadata": meta,
        "spec": {"parentRefs": [{"name": "x", "namespace": "y"}], "rules": [{"backendRefs": []}]},
    }
    fake.served.objects[kind]["tickets"] = theirs
    with pytest.raises(RequestError, match=f"{kind} tickets in kubeflow was not made by rekindle"):
        world.to("1")
    made = [name for one in fake.served.objects.values() for name in one]
    assert made == ["tickets"]


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"image": None}, "platforms.kubeflow.image"),
        ({"artifact_root": ""}, "platforms.kubeflow.artifact_root"),
        ({"artifact_root": "/models"}, "platforms.kubeflow.artifact_root"),
        ({"gateway": ""}, "deploy.canary"),
    ],
)
def test_a_setting_that_is_missing_is_named_before_anything_is_made(world, fake, change, where):
    world.place = world.place.model_copy(update=change)
    for call in (world.endpoint.usd_per_day, lambda: world.to("1")):
        with pytest.raises(RequestError) as caught:
            call()
        assert caught.value.problems[0].where == where
    assert not any(fake.served.objects.values())


def test_a_cluster_without_the_gateway_api_has_no_canary(world, fake):
    fake.served.gateway = None
    with pytest.raises(RequestError, match="the cluster has no Gateway API"):
        world.to("1")


def test_a_gateway_that_does_not_take_the_route_is_said(world, fake, monkeypatch):
    monkeypatch.setattr(module, "ROUTE_SECONDS", 0.3)
    fake.served.refuses = "NotAllowedByListeners"
    with pytest.raises(RequestError, match="does not take the route: NotAllowedByListeners"):
        world.to("1")
    fake.served.refuses = ""
    world.fake.served.objects["HTTPRoute"]["tickets"]["status"] = {}
    assert world.to("1").state == "settled"


def test_without_a_gateway_the_service_is_switched_at_once(fake, models, tmp_path):
    fake.served.gateway = None
    world = World(fake, models, tmp_path, AT_ONCE, gateway="")
    assert world.endpoint.address == "http://tickets.kubeflow.svc"
    world.to("1")
    assert world.to("2").state == "settled"
    assert world.endpoint.standing() == {"1": ("ready", 0), "2": ("ready", 100)}
    assert world.rollout().back("slow").shares == {"1": 100}
    world.to("2")
    with pytest.raises(RequestError, match="nothing can share requests: no gateway is named"):
        world.endpoint.split({"1": 50, "2": 50}, 99)


def test_machines_claims_and_secrets_are_those_of_the_config(fake, models, tmp_path):
    nodes = {"H100": {"nvidia.com/gpu.product": "H100"}}
    more = {
        "accelerator_nodes": nodes,
        "secrets": {"AWS_SECRET_ACCESS_KEY": "store/key"},
        "claim": "models",
    }
    spec = AT_ONCE.model_copy(update={"machine": "H100", "replicas": 2})
    world = World(fake, models, tmp_path, spec, gateway="", **more)
    world.place = world.place.model_copy(update={"artifact_root": str(tmp_path / "mounted")})
    assert world.endpoint.usd_per_day() == ("2 pods on H100", None)
    world.to("1")
    spec = fake.served.objects["Deployment"][name_of(models, "1")]["spec"]
    pod = spec["template"]["spec"]
    assert (spec["replicas"], pod["nodeSelector"]) == (2, nodes["H100"])
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert pod["volumes"][1]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    reference = {"secretKeyRef": {"name": "store", "key": "key"}}
    assert {"name": "AWS_SECRET_ACCESS_KEY", "valueFrom": reference} in pod["containers"][0]["env"]
    assert world.endpoint.observe()["1"].requests == 0


def test_a_missing_permission_is_named_and_changes_nothing(world, fake):
    rules = fake.rules["deployer@example.com"]
    role = next(rule for rule in rules if rule["resources"] == ["deployments"])
    role["verbs"].remove("create")
    with pytest.raises(RequestError, match='cannot create resource "deployments"') as caught:
        world.to("1")
    assert "rekindle-deployer" in caught.value.problems[0].fix
    role["verbs"].append("create")
    assert world.to("1").state == "settled"


def test_a_cluster_that_does_not_answer_rolls_nothing_back(world, fake):
    world.to("1")
    fake.troubles.append(Trouble("GET .*deployments", times=50, status=503))
    with pytest.raises(UnreachableError, match="the API server does not answer"):
        world.to("2")
    fake.troubles.clear()
    assert world.to("2").state == "settled"


@pytest.mark.parametrize(
    "call",
    first(
        1,
        [
            "POST .*deployments",
            "POST .*services$",
            "PUT .*services",
            "PUT .*httproutes",
            "POST .*httproutes",
            "POST .*predict",
            "GET .*metrics",
            "DELETE .*deployments",
            "GET .*pods\\?",
            "DELETE .*services",
            "GET .*httproutes",
        ],
    ),
)
def test_answers_that_are_refused_or_lost_are_asked_for_again(fake, models, tmp_path, call):
    world = World(fake, models, tmp_path)
    failures = [{"status": 429}, {"status": 503}, {"lose": True}]
    for version, trouble in zip("123", failures, strict=True):
        fake.troubles.append(Trouble(call, **trouble))
        assert world.to(version).state == "settled"
    assert world.endpoint.standing() == {"2": ("ready", 0), "3": ("ready", 100)}
    assert len(fake.served.objects["Deployment"]) == 2


def test_another_who_changes_the_route_meanwhile_is_read_again(world, fake):
    world.to("1")
    route = fake.served.objects["HTTPRoute"]["tickets"]
    original, times = fake.served._put, [0]

    def put(kind, name, body):
        if kind == "HTTPRoute" and times[0] < 2:
            times[0] += 1
            fake.served._changed(route)
        return original(kind, name, body)

    fake.served._put = put
    assert world.to("2").state == "settled"
    assert times == [2]


def test_weights_that_another_changed_are_those_of_the_log_again(world, fake, models):
    world.to("1")
    route = fake.served.objects["HTTPRoute"]["tickets"]
    route["spec"]["rules"][0]["backendRefs"][0]["weight"] = 1
    world.to("1")
    assert world.end[1] == {name_of(models, "1"): 100}


def test_another_image_is_waited_for_where_the_version_runs_already(world, fake):
    world.to("1")
    other = IMAGE.replace("0", "1")
    world.place = world.place.model_copy(update={"image": other})
    world.to("1")
    (pod,) = fake.pods.values()
    assert pod["spec"]["containers"][0]["image"] == other
    assert pod["status"]["containerStatuses"][0]["ready"]


STORIES = {
    "first": ((), "1", {}),
    "next": (("1",), "2", {}),
    "rolled back": (("1",), "2", {"errors": 100}),
    "by hand": (("1", "2"), "back", {}),
    "deleted": (("1", "2"), "", {}),
}


@pytest.mark.parametrize("serving", first(1, ["deployment", "kserve"]))
@pytest.mark.parametrize("story", first(1, STORIES))
def test_a_command_killed_before_or_after_any_change_is_completed_by_the_same(
    tmp_path, models, story, serving
):
    before, target, more = STORIES[story]

    def told(folder, at, when):
        with FakeCluster(folder / "cluster") as fake:
            fake.served.kserve = serving == "kserve"
            world = World(fake, models, folder, serving=serving)
            for version in before:
                world.to(version)
            world.cluster.state.update(at=at, when=when, calls=0)
            while True:
                try:
                    if target in models:
                        world.to(target, **more)
                    else:
                        made = world.rollout()
                        made.back("slow") if target == "back" else made.delete()
                    break
                except Killed:
                    world.cluster.state["at"] = 0
            calls = world.cluster.state["calls"]
            assert at == 0 or world.cluster.state["at"] == 0, "it was not killed"
            return world.end, calls

    plain, calls = told(tmp_path / "plain", 0, "")
    for at in range(1, calls + 1):
        for when in ("before", "after"):
            end, _ = told(tmp_path / f"{at}-{when}", at, when)
            assert end == plain


def test_the_cluster_is_that_of_kubectls_context(world, fake, tmp_path, monkeypatch):
    kubeconfig = str(write_kubeconfig(tmp_path, fake.url, "deployer"))
    monkeypatch.setenv("KUBECONFIG", kubeconfig)
    from kubernetes.config import kube_config

    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", kubeconfig)
    world.to("1")
    assert KubeflowEndpoint(world.place, world.spec, "tickets").standing() == {"1": ("ready", 100)}
    fake.tokens["deployer"] = fake.tokens["admin"]
    cluster = ApiServer.configured(patience_seconds=3.0)
    assert cluster_checks.gateway(world.place, cluster).startswith("infra/public")
    elsewhere = world.place.model_copy(update={"gateway": "infra/other"})
    with pytest.raises(RequestError, match="the cluster has no Gateway infra/other"):
        cluster_checks.gateway(elsewhere, cluster)


@pytest.fixture
def inferring(fake, models, tmp_path):
    """With KServe in the cluster, and in the config."""
    fake.served.kserve = True
    return World(fake, models, tmp_path, serving="kserve")


def test_kserve_makes_the_deployments_of_versions_and_the_route_shares_requests(inferring, models):
    served = inferring.fake.served
    assert inferring.to("1").state == inferring.to("2").state == "settled"
    assert [e.shares for e in inferring.rollout().log.events() if e.state == "canary"] == [
        {"2": 10, "1": 90}
    ]
    assert len(served.objects["InferenceService"]) == len(served.objects["Deployment"]) == 2
    made, weights, service, _, standing = inferring.end
    assert all(
        name.removesuffix("-predictor") in made["InferenceService"] for name in made["Deployment"]
    )
    assert weights == {name_of(models, "2"): 100}
    assert service == {"rekindle": "tickets", "rekindle.dev/version": "2"}
    assert standing == {"1": ("ready", 0), "2": ("ready", 100)}
    inferring.to("3")
    assert sorted(inferring.endpoint.standing()) == ["2", "3"]
    assert len(served.objects["InferenceService"]) == 2
    inferring.rollout().delete()
    assert not any(served.objects.values())


@pytest.mark.parametrize(
    ("fate", "reason"),
    [
        ("crash", "its container ended 2 times, with exit code 1 (Error)"),
        ("image", "ImagePullBackOff: Back-off pulling image: not found"),
    ],
)
def test_with_kserve_a_version_that_never_starts_goes_back_with_the_reason(inferring, fate, reason):
    inferring.to("1")
    inferring.fake.served.fates = {"2": fate}
    assert reason in inferring.to("2").reason
    assert inferring.endpoint.standing() == {"1": ("ready", 100)}


def test_with_kserve_a_quota_and_all_replicas_are_seen_in_what_it_made(fake, models, tmp_path):
    fake.served.kserve, fake.served.fates = True, {"1": "quota"}
    world = World(fake, models, tmp_path, FAST.model_copy(update={"replicas": 3}), serving="kserve")
    with pytest.raises(RequestError, match="exceeded quota: team-a"):
        world.to("1")
    fake.served.fates = {}
    assert world.to("1").state == "settled"
    assert len(fake.pods) == 3


def test_a_cluster_without_kserve_and_versions_of_another_kind_are_refused(world, inferring, fake):
    fake.served.kserve = False
    with pytest.raises(RequestError, match="the cluster has no KServe") as caught:
        inferring.to("1")
    assert caught.value.problems[0].where == "platforms.kubeflow.serving"
    fake.served.kserve = True
    world.to("1")
    with pytest.raises(RequestError, match="versions of tickets run there as Deployment"):
        inferring.endpoint.usd_per_day()
    world.rollout().delete()
    inferring.to("1")
    with pytest.raises(RequestError, match="versions of tickets run there as InferenceService"):
        world.endpoint.usd_per_day()


def test_names_of_kserve_leave_room_for_its_own(fake, models, tmp_path):
    fake.served.kserve = True
    world = World(fake, models, tmp_path, serving="kserve")
    model = dataclasses.replace(models["1"], name="tickets" * 9)
    made = KubeflowEndpoint(world.place, world.spec, model.name, world.cluster)
    made.poll_seconds = 0.0
    made.create(model, 1)
    assert made.standing() == {"1": ("ready", 0)}


def test_names_are_those_that_services_may_have():
    assert named("my_model.de", "-v3-1a2b3c4d") == "my-model-de-v3-1a2b3c4d"
    assert named("3d") == "m-3d"
    assert len(named("a" * 63, "-v12-1a2b3c4d")) == 63
    assert Path(named("x" * 62 + "-y")).name == "x" * 62


def test_a_version_goes_through_the_shadow_of_the_one_before(world, models):
    world.to("1")
    shadowed = world.fake.served.answering.shadowed
    goes_through_the_shadow(world.rollout, models["1"], models["2"], shadowed)
