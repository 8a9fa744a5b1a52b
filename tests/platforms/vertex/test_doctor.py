"""What doctor asks a project on Google Cloud: google-auth's login and our reads, over TLS, against
one that is played here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle.answers import ReadinessCheck
from rekindle.ir.compile import compile_function
from rekindle.ir.read import read
from rekindle.platforms import reads
from rekindle.platforms.definition import Definition
from rekindle.platforms.vertex.compile import compile
from rekindle.platforms.vertex.doctor import checks
from rekindle.platforms.vertex.outline import gpus
from rekindle.spec.places import VertexSpec
from tests.platforms.local.runs import module
from tests.servers.google_project import ACCOUNT, DIGEST, HOSTS, Facts
from tests.servers.tls_hosts import Hosts
from tests.servers.vertex_rest import PROJECT, REGION, key_file

HF = f"projects/{PROJECT}/secrets/hf/versions/latest"
KEY = f"projects/{PROJECT}/locations/{REGION}/keyRings/r/cryptoKeys/k"
IMAGE = f"europe-docker.pkg.dev/{PROJECT}/r/train@{DIGEST}"
KWARGS: dict[str, Any] = {
    "project": PROJECT, "region": REGION, "artifact_root": "gs://lake/rekindle", "image": IMAGE,
    "service_account": ACCOUNT, "kms_key": KEY, "secrets": {"HF_TOKEN": HF},
}  # fmt: skip
METRIC = "custom_model_training_preemptible_nvidia_h100_gpus"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("tls")
    key_file(folder)
    with Hosts(folder, HOSTS, lambda asked: Facts().answer(asked)) as running:
        yield running


@pytest.fixture
def facts(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> Iterator[Facts]:
    """A project that has everything, and that this process finds, logged in with a key."""
    made = Facts()
    made.secrets[HF], made.keys[KEY], made.quotas[METRIC] = "ENABLED", "ENABLED", 16
    hosts.answer = made.answer
    for name, value in hosts.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(hosts.folder / "account.json"))
    monkeypatch.setattr(reads, "_PAUSE_SECONDS", 0.0)
    yield made
    assert hosts.strangers == []


@functools.cache
def definition() -> Definition:
    """Two nodes with eight GPUs each, on machines that may be taken away."""
    text = compile_function(module("behaviour").chain)
    graph = read(text)
    return compile(text, graph, {"folder": "x", "text": "a"}, VertexSpec(**KWARGS))


def asked(early: bool = False, **changes: Any) -> tuple[ReadinessCheck, ...]:
    return checks(VertexSpec(**{**KWARGS, **changes}), definition(), early)


def wrong(found: tuple[ReadinessCheck, ...]) -> list[str]:
    return [f"{check.said} | {check.fix}" for check in found if check.state == "problem"]


def test_a_project_that_has_everything_has_no_problem_and_is_only_asked(facts: Facts) -> None:
    found = asked()
    assert [c for c in found if c.state != "ok" and "not one of Google's" not in c.said] == []
    assert [check.name for check in found if check.name not in ("the account may", "image")] == [
        "credentials", "you may", "API", "region", "bucket", "account", "key", "secret HF_TOKEN",
    ]  # fmt: skip
    posts = {call.rpartition(":")[2] for call in facts.calls if call.startswith("POST")}
    assert posts == {"testIamPermissions", "troubleshoot"}
    assert {call.partition(" ")[0] for call in facts.calls} == {"GET", "HEAD", "POST"}
    assert facts.refused == []


def test_before_a_submission_little_is_asked(facts: Facts) -> None:
    found = asked(early=True)
    names = [check.name for check in found if check.state == "ok"]
    assert names == ["credentials", "you may", "region", "bucket", "image"]


Change = Callable[[Facts], Any]
WRONG: dict[str, tuple[Change, dict[str, Any], str]] = {
    "a bucket that is not there": (
        lambda f: f.buckets.clear(), {}, "there is no bucket lake | gcloud storage buckets create gs://lake",
    ),
    "a bucket of somebody else": (
        lambda f: f.buckets["lake"].update(of="somebody else"), {},
        "the bucket lake belongs to another project, or you may do nothing with it | name a bucket of yours",
    ),
    "a bucket that nobody shows": (
        lambda f: f.errors.update({"GET storage": 403}), {}, "the bucket lake belongs to another project",
    ),
    "a bucket elsewhere": (
        lambda f: f.buckets["lake"].update(location="US-CENTRAL1"), {},
        "the bucket lake is in us-central1, the pipeline in europe-west4 | name a bucket in europe-west4",
    ),
    "a project that is not there": (
        lambda f: f.projects.clear(), {}, "there is no project forge, or you may not see it | gcloud projects list",
    ),
    "somebody who may run nothing": (
        lambda f: f.denied.add("aiplatform.pipelineJobs.create"), {},
        "you may not aiplatform.pipelineJobs.create in forge | ask for roles/aiplatform.user",
    ),
    "an API that is off": (
        lambda f: f.apis.clear(), {}, "forge does not use aiplatform.googleapis.com | gcloud services enable",
    ),
    "a region that is not there": (
        lambda f: None, {"region": "europe-west5", "kms_key": ""},
        "Vertex AI is in no region `europe-west5` | such as europe-west",
    ),
    "an account that is not there": (lambda f: f.accounts.clear(), {}, f"there is no account {ACCOUNT} | gcloud iam"),
    "an account that is disabled": (
        lambda f: f.accounts[ACCOUNT].update(disabled=True), {}, f"the account {ACCOUNT} is disabled | gcloud iam",
    ),
    "somebody who may not act as the account": (
        lambda f: f.denied.add("iam.serviceAccounts.actAs"), {},
        f"you may not iam.serviceAccounts.actAs on {ACCOUNT} | ask for roles/iam.serviceAccountUser",
    ),
    "an account that may not write": (
        lambda f: f.denied.add("storage.objects.create"), {},
        f"{ACCOUNT} may not storage.objects.create | grant it roles/storage.objectUser on the bucket",
    ),
    "an image that is not there": (
        lambda f: f.images.clear(), {}, f"europe-docker.pkg.dev has no image forge/r/train {DIGEST} | push it",
    ),
    "a secret that is not there": (lambda f: f.secrets.clear(), {}, f"there is no secret {HF} | gcloud secrets"),
    "a secret that is disabled": (lambda f: f.secrets.update({HF: "DISABLED"}), {}, f"the secret {HF} is DISABLED | gcloud"),
    "a key that is not there": (lambda f: f.keys.clear(), {}, f"there is no key {KEY} | gcloud kms keys list"),
    "a key elsewhere": (
        lambda f: None, {"kms_key": KEY.replace(REGION, "us-central1")}, "the key is in us-central1, the pipeline in",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_a_project_lacks_is_said_with_its_fix(case: str, facts: Facts) -> None:
    change, settings, says = WRONG[case]
    change(facts)
    assert [line for line in wrong(asked(**settings)) if says in line]


def test_everything_that_is_wrong_is_said_at_once(facts: Facts) -> None:
    facts.buckets.clear(), facts.images.clear(), facts.accounts.clear(), facts.secrets.clear()
    assert len(wrong(asked())) == 4


def test_a_login_that_is_over_is_said_and_nothing_more_is_asked(facts: Facts) -> None:
    facts.login = 400, {
        "error": "invalid_grant", "error_description": "Token has been expired or revoked.",
    }  # fmt: skip
    found = asked()
    (said,) = wrong(found)
    assert "expired or revoked" in said
    assert "| gcloud auth application-default login" in said
    assert {check.said for check in found[1:]} == {"the login failed"}
    assert facts.calls == []


def test_no_credentials_are_said_to_be_none(
    facts: Facts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    (said,) = wrong(asked())
    assert "default credentials were not found" in said
    assert "| gcloud auth application-default login" in said


def test_what_cannot_be_asked_is_no_problem(facts: Facts) -> None:
    """APIs that the project does not use, and a registry that does not answer."""
    others = (
        "cloudresourcemanager",
        "serviceusage",
        "iam",
        "policytroubleshooter",
        "secretmanager",
        "cloudkms",
    )
    facts.errors = {f"{method} {service}": 403 for service in others for method in ("GET", "POST")}
    facts.errors |= {"HEAD europe-docker.pkg.dev": 0}
    facts.regions = []
    found = asked()
    assert wrong(found) == []
    assert {c.name for c in found if c.state == "ok"} == {"credentials", "bucket"}
    assert any("no answer from europe-docker.pkg.dev" in check.said for check in found)


@pytest.mark.parametrize(("limit", "enough"), [(16, True), (-1, True), (15, False), (0, False)])
def test_gpus_are_held_against_the_quota_of_their_kind(
    limit: int, enough: bool, facts: Facts
) -> None:
    from rekindle.errors import RequestError
    from rekindle.platforms.vertex import project

    there = project.Project(VertexSpec(**KWARGS))
    there.login()
    facts.quotas[METRIC] = limit
    if enough:
        assert METRIC in project.quota(there, METRIC, 16, "train")
        return
    with pytest.raises(
        RequestError, match=rf"wants 16 of {METRIC} in {REGION}, the project has {limit}"
    ):
        project.quota(there, METRIC, 16, "train")


def test_a_definition_says_which_gpus_it_wants() -> None:
    from rekindle.ir.distribution import Distribution

    text = compile_function(module("behaviour").chain)
    graph = read(text)
    step = graph.steps()[0].path
    wanted = Distribution(nodes=2, gpus_per_node=8, accelerator="H100")
    made = compile(
        text, graph.spread(step, wanted), {"folder": "x", "text": "a"}, VertexSpec(**KWARGS)
    )
    assert gpus(made) == {("NVIDIA_H100_80GB", False): (16, step)}
