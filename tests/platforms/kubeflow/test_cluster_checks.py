"""What doctor says of a cluster: each thing that a run would miss, with its fix, and the lines
that the config should have."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from rekindle.app.readiness import write_settings
from rekindle.errors import RequestError
from rekindle.outputs import ReadinessCheck
from rekindle.platforms.checks import Needs, run_checks
from rekindle.platforms.kubeflow import store
from rekindle.platforms.kubeflow.doctor import checks
from rekindle.platforms.kubeflow.section import KubeflowSpec
from tests.servers.kubeflow.kubernetes import FakeCluster
from tests.servers.kubeflow.rest import TOKEN, Server, serving
from tests.support.kubeconfig import doctor, write_kubeconfig

# as the newest KFP installs it (manifests/kustomize/third-party/argo in 2.17.0)
ARGO = """\
spec:
  ttlStrategy: {secondsAfterCompletion: 3600}
  templateDefaults: {retryStrategy: {limit: "2", retryPolicy: OnError}}
"""
IN_ONE_KEY = yaml.safe_dump({"workflowDefaults": yaml.safe_load(ARGO)})


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    with FakeCluster(tmp_path / "cluster") as cluster:
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path, cluster.url, "admin")))
        yield cluster


def asked(needs: Needs | None = None, **section: Any) -> dict[str, ReadinessCheck]:
    """What all checks say of a config without a pipeline, by their names."""
    place = KubeflowSpec(**section)
    return {check.name: check for check in run_checks(checks(place, None, needs or Needs()))}


@dataclasses.dataclass(frozen=True)
class Case:
    """A cluster, what is asked of it, and what the check named `check` has to say."""

    check: str
    state: str
    said: str
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    section: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    change: Callable[[FakeCluster], object] = lambda _: None


def remove(kind: str, name: str) -> Callable[[FakeCluster], object]:
    return lambda cluster: cluster.objects[kind].pop(name)


def configure(**data: str) -> Callable[[FakeCluster], object]:
    """The ConfigMap of KFP's launcher."""
    return lambda cluster: cluster.configmaps.update({"kfp-launcher": {"data": data}})


def profile(cluster: FakeCluster) -> None:
    """The accounts of a profile of Kubeflow's."""
    cluster.objects["serviceaccounts"] = {"default-editor": {}, "rekindle-node": {}}


def inject(cluster: FakeCluster, **marks: str) -> None:
    labels = {"istio-injection": "enabled"}
    cluster.objects["namespaces"]["kubeflow"]["metadata"]["labels"] = labels
    if marks:
        spec = cluster.runtimes["rekindle"]["spec"]["template"]["spec"]
        pod = spec["replicatedJobs"][0]["template"]["spec"]["template"]
        pod["metadata"] = {"annotations": marks}


def change_runtime(cluster: FakeCluster) -> None:
    spec = cluster.runtimes["rekindle"]["spec"]["template"]["spec"]
    spec["failurePolicy"]["maxRestarts"] = 3
    spec["replicatedJobs"][0]["name"] = "other"


def forget_a_right(cluster: FakeCluster) -> None:
    """An older rbac.yaml: launchers list no events, and nodes may do nothing."""
    for user, rules in cluster.rules.items():
        if user.endswith(":rekindle-node"):
            rules.clear()
        rules[:] = [rule for rule in rules if rule["resources"] != ["events"]]


def own_keys(secret: str, access: str = "accesskey", secret_key: str = "secretkey") -> Any:
    return {"secretName": secret, "accessKeyKey": access, "secretKeyKey": secret_key}


def provider(scheme: str, reference: Any, **default: Any) -> str:
    credentials = {"fromEnv": reference is None, "secretRef": reference}
    return yaml.safe_dump({scheme: {"default": {**default, "credentials": credentials}}})


PATH = "platforms.kubeflow"
CASES: dict[str, Case] = {
    "accounts that are there": Case("accounts", "ok", "pipeline-runner, rekindle-node"),
    "a profile has another account": Case(
        "accounts",
        "problem",
        "no ServiceAccount pipeline-runner, and default-editor, which Kubeflow creates",
        {f"{PATH}.service_account": "default-editor"},
        change=profile,
    ),
    "no account of nodes": Case(
        "accounts",
        "problem",
        "the namespace kubeflow has no ServiceAccount rekindle-node",
        change=remove("serviceaccounts", "rekindle-node"),
    ),
    "rights that are there": Case("rights", "ok", "pipeline-runner, rekindle-node may do"),
    "a runtime of this release": Case("runtime", "ok", "rekindle, as this release has it"),
    "a runtime of another release": Case(
        "runtime",
        "problem",
        "is not that of this release: template.spec.failurePolicy.maxRestarts, "
        "template.spec.replicatedJobs[0].name",
        change=change_runtime,
    ),
    "no mesh": Case("mesh", "ok", "Istio does not inject into kubeflow"),
    "a mesh": Case("mesh", "ok", "nodes ask for no proxy", change=inject),
    "a mesh whose proxies nodes get": Case(
        "mesh",
        "problem",
        "Istio puts a proxy beside the pods of kubeflow, which never ends",
        change=lambda cluster: inject(cluster, other="mark"),
    ),
    "a queue that is not there": Case(
        "queue",
        "problem",
        "no LocalQueue gpus of Kueue",
        section={"queue": "gpus"},
    ),
    "a queue": Case(
        "queue",
        "ok",
        "gpus",
        section={"queue": "gpus"},
        change=lambda cluster: cluster.objects["localqueues"].update(gpus={}),
    ),
    "a Secret that is not there": Case(
        "secret",
        "problem",
        "the namespace kubeflow has no Secret hub: steps would never start",
        section={"secrets": {"HF_TOKEN": "hub/token"}},
    ),
    "a Secret": Case(
        "secret",
        "ok",
        "hub",
        section={"secrets": {"HF_TOKEN": "hub/token", "HF_USER": "hub/user"}},
        change=lambda cluster: cluster.secrets.update({("hub", "token"): "t"}),
    ),
    "Argo as KFP 2.17 installs it": Case(
        "retries",
        "ok",
        "(retryPolicy OnError): steps with set_retry try again in their pods, from "
        "platforms.kubeflow.version 2.17 on; pods and logs of a run go 3,600 s after its end",
        change=lambda cluster: cluster.configmaps.update(
            {"workflow-controller-configmap": {"data": {"workflowDefaults": ARGO}}}
        ),
    ),
    "Argo without defaults": Case(
        "retries",
        "ok",
        "Argo retries steps by its policy OnFailure",
        change=lambda cluster: cluster.configmaps.update({"workflow-controller-configmap": {}}),
    ),
    "KFP's own store": Case(
        "store", "ok", "minio://mlpipeline/v2/artifacts, at http://seaweedfs.kubeflow:9000"
    ),
    "KFP's own store by its long name": Case(
        "store",
        "ok",
        "at http://seaweedfs.kubeflow.svc.cluster.local:9000",
        section={"store_endpoint": "http://seaweedfs.kubeflow.svc.cluster.local:9000"},
        change=configure(
            providers=provider(
                "minio",
                own_keys("mlpipeline-minio-artifact"),
                endpoint="seaweedfs.kubeflow:9000",
                disableSSL=True,
            )
        ),
    ),
    "KFP's own store of an older release": Case(
        "store",
        "problem",
        "nodes would not open minio://mlpipeline/v2/artifacts as KFP's launcher does",
        {f"{PATH}.store_endpoint": "http://minio-service.kubeflow:9000"},
        change=remove("services", "seaweedfs"),
    ),
    "KFP's own store without its Secret": Case(
        "store",
        "problem",
        "the namespace kubeflow has no Secret none, with which nodes open minio://",
        section={"store_secret": "none"},
    ),
    "KFP's own store, elsewhere": Case(
        "store",
        "problem",
        "nodes would not open minio://mlpipeline/v2/artifacts as KFP's launcher does",
        {
            f"{PATH}.store_endpoint": "https://minio.team-a:9000",
            f"{PATH}.secrets.FSSPEC_MINIO_KEY": "keys/user",
            f"{PATH}.secrets.FSSPEC_MINIO_SECRET": "keys/password",
        },
        change=configure(
            providers=provider(
                "minio", own_keys("keys", "user", "password"), endpoint="minio.team-a:9000"
            )
        ),
    ),
    "a default of the cluster's": Case(
        "store",
        "ok",
        "gs://team/kfp",
        {f"{PATH}.pipeline_root": "gs://team/kfp"},
        change=configure(defaultPipelineRoot="gs://team/kfp"),
    ),
    "S3 without a provider": Case(
        "store",
        "ok",
        "at AWS: kfp-launcher names no other endpoint",
        section={"pipeline_root": "s3://b/kfp"},
    ),
    "S3 by the role of an account": Case(
        "store",
        "ok",
        "rekindle-node needs the same rights there as pipeline-runner",
        section={"pipeline_root": "s3://b/kfp"},
        change=configure(
            providers=provider("s3", None, endpoint="s3.amazonaws.com", region="eu-west-1")
        ),
    ),
    "a root that KFP cannot open": Case(
        "store",
        "problem",
        "its defaultPipelineRoot is 'azblob://b/x', which KFP cannot open",
        change=configure(defaultPipelineRoot="azblob://b/x"),
    ),
    "providers that are a list": Case(
        "store",
        "problem",
        "its providers should be a mapping, not ['a', 'b']",
        change=configure(providers="- a\n- b"),
    ),
    "providers that are no YAML": Case(
        "store", "problem", "its providers are not YAML", change=configure(providers="a: [")
    ),
    "a provider that is a text": Case(
        "store",
        "problem",
        "its default of a provider should be a mapping, not 'x'",
        change=configure(providers="minio: {default: x}"),
    ),
    "a root with a query": Case(
        "store",
        "problem",
        "nodes would not open s3://b/x?endpoint=minio:9000&disableSSL=true as KFP's launcher does",
        {
            f"{PATH}.s3_endpoint": "http://minio:9000",
            f"{PATH}.pipeline_root": "s3://b/x?endpoint=minio:9000&disableSSL=true",
        },
        change=configure(defaultPipelineRoot="s3://b/x?endpoint=minio:9000&disableSSL=true"),
    ),
    "Argo with its settings in one key": Case(
        "retries",
        "ok",
        "(retryPolicy OnError)",
        change=lambda cluster: cluster.configmaps.update(
            {"workflow-controller-configmap": {"data": {"config": IN_ONE_KEY}}}
        ),
    ),
    "a store that speaks S3": Case(
        "store",
        "problem",
        "nodes would not open s3://b/kfp as KFP's launcher does",
        {
            f"{PATH}.s3_endpoint": "http://minio.team-a:9000",
            f"{PATH}.s3_region": "home",
            f"{PATH}.secrets.AWS_ACCESS_KEY_ID": "keys/accesskey",
            f"{PATH}.secrets.AWS_SECRET_ACCESS_KEY": "keys/secretkey",
            f"{PATH}.pipeline_root": "s3://b/kfp",
        },
        change=configure(
            defaultPipelineRoot="s3://b/kfp",
            providers=provider(
                "s3",
                own_keys("keys"),
                endpoint="minio.team-a:9000",
                region="home",
                disableSSL=True,
            ),
        ),
    ),
    "a store that speaks S3, with its lines": Case(
        "store",
        "ok",
        "s3://b/kfp, at http://minio.team-a:9000",
        section={
            "pipeline_root": "s3://b/kfp",
            "s3_endpoint": "http://minio.team-a:9000",
            "secrets": {"AWS_ACCESS_KEY_ID": "k/a", "AWS_SECRET_ACCESS_KEY": "k/s"},
        },
        change=configure(
            providers=provider(
                "s3", own_keys("k"), endpoint="http://minio.team-a:9000", disableSSL=True
            )
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_check_says_what_the_cluster_has(name: str, cluster: FakeCluster) -> None:
    case = CASES[name]
    case.change(cluster)
    check = asked(**case.section)[case.check]
    assert (check.state, case.said in check.said) == (case.state, True), check
    assert check.settings == dict(case.settings)
    assert bool(check.fix) == (case.state == "problem")
    assert not cluster.secrets_read, "no value of a Secret is read"


def test_an_override_of_a_bucket_wins_over_the_default(cluster: FakeCluster) -> None:
    providers = yaml.safe_load(provider("minio", own_keys("a"), endpoint="a.kubeflow:9000"))
    credentials = {"fromEnv": False, "secretRef": own_keys("b")}
    providers["minio"]["overrides"] = [
        {"bucketName": "other", "endpoint": "c.kubeflow:9000", "credentials": credentials},
        {
            "bucketName": "mlpipeline",
            "keyPrefix": "v2",
            "endpoint": "b.kubeflow:9000",
            "disableSSL": True,
            "credentials": credentials,
        },
    ]
    configure(providers=yaml.safe_dump(providers))(cluster)
    assert asked()["store"].settings == {
        f"{PATH}.store_endpoint": "http://b.kubeflow:9000",
        f"{PATH}.store_secret": "b",
    }


def test_rights_that_are_missing_are_named_by_account(cluster: FakeCluster) -> None:
    forget_a_right(cluster)
    place = KubeflowSpec()
    results = run_checks(checks(place, None, Needs()))
    rights = {check.where: check.said for check in results if check.name == "rights"}
    assert rights == {
        "serviceaccount pipeline-runner": "pipeline-runner may not list events",
        "serviceaccount rekindle-node": "rekindle-node may not get workflows",
    }


def test_who_deploys_is_asked_about_with_what_the_config_uses(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked(Needs(deploys=True))["deploying"].state == "ok"
    assert "deploying" not in asked()
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path, cluster.url, "token-1")))
    deploying = asked(Needs(deploys=True))["deploying"]
    assert deploying.state == "problem"
    assert "create deployments" in deploying.said
    assert "inferenceservices" not in deploying.said
    assert "get pods/proxy" in deploying.said


def test_what_one_may_not_look_at_is_not_asked(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path, cluster.url, "token-1")))
    results = asked()
    assert results["cluster"].state == "ok"
    assert {check.state for name, check in results.items() if name != "cluster"} == {"not asked"}


def test_profiles_have_namespaces_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KFP_TOKEN", TOKEN)
    server = Server()
    server.multi_user = True
    with serving(server) as url:
        section = {"host": url, "token": "env:KFP_TOKEN"}
        (refused,) = run_checks(checks(KubeflowSpec(**section), None, Needs()), early=True)
        assert (refused.state, refused.where) == ("problem", f"{PATH}.namespace")
        place = KubeflowSpec(**section, namespace="team-a")
        (check,) = run_checks(checks(place, None, Needs()), early=True)
    assert check.state == "ok"
    assert check.said.endswith("for several users")


@pytest.mark.slow
def test_lines_that_the_cluster_asks_for_are_printed_and_written(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    profile(cluster)
    cluster.objects["services"].pop("seaweedfs")
    cluster.grant(
        Path("rekindle/platforms/kubeflow/manifests/rbac.yaml")
        .read_text()
        .replace("name: pipeline-runner\n", "name: default-editor\n")
    )
    config = tmp_path / "c.yaml"
    text = "# ours\nname: c\ntask: image_classification\ndata: {source: 'sklearn:digits'}\n"
    text += "register: {tracking_uri: 'https://mlflow.example.com'}\n"
    text += "resources: {nodes: 2}\n"
    text += f"platforms:\n  kubeflow:\n    image: r.example.com/t@sha256:{'0' * 64}  # pinned\n"
    text += "    artifact_root: minio://mlpipeline/r\n    host: http://127.0.0.1:9\n"
    config.write_text(text)
    lines = "    service_account: default-editor\n"
    lines += "    store_endpoint: http://minio-service.kubeflow:9000\n"

    done = doctor(cluster.url, tmp_path, "c.yaml")
    assert done.returncode == 2
    assert "lines for c.yaml, as the platform says; --write adds them:" in done.stderr
    assert "platforms:\n      kubeflow:\n        service_account: default-editor" in done.stderr
    assert config.read_text() == text

    done = doctor(cluster.url, tmp_path, "c.yaml", "--write", "--json")
    assert config.read_text() == text + lines
    answer = json.loads(done.stdout)
    assert answer["written"] == {
        f"{PATH}.service_account": "default-editor",
        f"{PATH}.store_endpoint": "http://minio-service.kubeflow:9000",
    }
    states = {check["name"]: check["state"] for check in answer["checks"]}
    assert (states["accounts"], states["store"], states["rights"]) == ("ok", "ok", "ok")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_value_that_the_config_does_not_take_leaves_it_as_it_was(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("name: c\ntask: image_classification\ndata: {source: 'sklearn:digits'}\n")
    before = config.read_text()
    config.chmod(0o640)
    with pytest.raises(RequestError):
        write_settings(config, {f"{PATH}.version": "3.0"}, ())
    assert config.read_text() == before
    write_settings(config, {f"{PATH}.version": "2.16.1"}, ())
    assert config.read_text() == before + "platforms:\n  kubeflow:\n    version: 2.16.1\n"
    assert config.stat().st_mode & 0o777 == 0o640


def test_a_file_that_is_read_only_or_has_two_names_stays_so(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("name: c\ntask: image_classification\ndata: {source: 'sklearn:digits'}\n")
    before = config.read_text()
    config.chmod(0o444)
    with pytest.raises(RequestError, match="is read-only, and was left as it is"):
        write_settings(config, {f"{PATH}.version": "2.16.1"}, ())
    assert config.read_text() == before
    config.chmod(0o644)
    other = tmp_path / "other.yaml"
    other.hardlink_to(config)
    write_settings(config, {f"{PATH}.version": "2.16.1"}, ())
    assert "version: 2.16.1" in other.read_text()


def test_nothing_is_written_without_a_config(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rekindle.cli.main", "doctor", "--platform", "kubeflow"]
    done = subprocess.run([*command, "--write"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--write has no config to write to" in done.stderr


def test_a_store_that_speaks_s3_is_named_to_what_opens_it() -> None:
    place = KubeflowSpec(
        pipeline_root="s3://b/kfp",
        artifact_root="s3://b/rekindle",
        s3_endpoint="http://minio.team-a:9000",
        s3_region="home",
    )
    assert store.variables(place) == {
        "AWS_ENDPOINT_URL_S3": "http://minio.team-a:9000",
        "AWS_DEFAULT_REGION": "home",
    }
    assert store.secrets(place) == {}
    assert store.keeps_checkpoints(place)
    aws = KubeflowSpec(pipeline_root="s3://b/kfp", artifact_root="s3://b/rekindle")
    assert (store.variables(aws), store.keeps_checkpoints(aws)) == ({}, False)
