"""What doctor asks three clouds: their own logins and clients and our reads, against ones that are
played here. What submitting asks first is in tests/cli/test_wrong_requests.py, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rekindle.app.prepared import prepare_for
from rekindle.app.readiness import needs_of
from rekindle.outputs import ReadinessCheck
from rekindle.platforms.api import platform_of
from rekindle.platforms.checks import Needs, run_checks
from rekindle.spec.load import load_target
from tests.cli.world import ACCOUNT, DIGEST, World
from tests.cli.world import compiled as compiled
from tests.cli.world import served as served
from tests.cli.world import world as world
from tests.quick import only
from tests.servers.google.rest import PROJECT
from tests.servers.troubles import Fault

pytest.importorskip("azure.ai.ml", reason="azure-ai-ml is a developer's dependency")

SECRETS = {
    "sagemaker": f"arn:aws:secretsmanager:eu-central-1:{ACCOUNT}:secret:hub",
    "vertex": f"projects/{PROJECT}/secrets/hf/versions/latest",
    "azureml": "https://my-vault.vault.azure.net/secrets/hub",
}
AWS, GOOGLE, AZURE = SECRETS.values()
OLD = f"{AZURE}/{'1' * 32}"
READS = ("Get", "Describe", "List", "Head")


@pytest.fixture
def full(world: World) -> World:
    """Platforms that have everything."""
    world.aws.secrets.add(AWS)
    world.google.secrets[GOOGLE] = "ENABLED"
    world.azure.secrets["hub"] = ["0" * 32]
    return world


def asked(platform: str, early: bool = False, **settings: str) -> tuple[ReadinessCheck, ...]:
    """The checks of the world's config with a secret."""
    if platform in SECRETS:
        settings = {"secrets": f"{{HF_TOKEN: '{SECRETS[platform]}'}}", **settings}
    sets = tuple(f"platforms.{platform}.{name}={value}" for name, value in settings.items())
    spec = load_target(Path("c.yaml"), sets)
    definition = prepare_for(platform, spec, Path("home")).definition
    return run_checks(platform_of(platform, spec.platforms).checks(definition, Needs()), early)


def needing(platform: str, needs: Needs) -> tuple[ReadinessCheck, ...]:
    """The checks of the world's config that has no secret and needs more rights."""
    return run_checks(
        platform_of(platform, load_target(Path("c.yaml")).platforms).checks(None, needs)
    )


def wrong(found: tuple[ReadinessCheck, ...]) -> list[str]:
    return [f"{check.said} | {check.fix}" for check in found if check.state == "problem"]


EARLY = {
    "sagemaker": ["credentials", "region", "bucket", "image"],
    "vertex": ["credentials", "you may", "region", "bucket", "image"],
    "azureml": ["credentials", "workspace", "container", "image", "compute"],
    "kubeflow": ["API"],
}
ALL = {
    "sagemaker": [*EARLY["sagemaker"], "secret HF_TOKEN"],
    "vertex": ["credentials", "you may", "API", "region", "bucket", "image", "secret HF_TOKEN"],
    "azureml": [*EARLY["azureml"][:-1], "secret HF_TOKEN"],
}


@pytest.mark.parametrize("platform", ALL)
def test_a_platform_that_has_everything_has_no_problem_and_is_only_asked(
    platform: str, full: World
) -> None:
    found = asked(platform)
    assert [(check.name, check.state) for check in found] == [(n, "ok") for n in ALL[platform]]
    assert all(call.partition(":")[2].startswith(READS) for call in full.aws.calls)
    posts = [c for c in (*full.google.calls, *full.azure.calls) if c.startswith("POST")]
    assert all(call.endswith((":testIamPermissions", "/exchange", "/token")) for call in posts)
    assert [*full.aws.refused, *full.google.refused, *full.azure.refused] == []
    assert full.made() == []


@pytest.mark.parametrize("platform", EARLY)
def test_before_a_submission_little_is_asked(platform: str, full: World) -> None:
    more = {"compute": "cpus"} if platform == "azureml" else {}
    found = asked(platform, early=True, **more)
    assert [(check.name, check.state) for check in found] == [(n, "ok") for n in EARLY[platform]]


Change = Callable[[World], Any]
# a platform, what is different there and in the config, and what is reported
WRONG: dict[str, tuple[str, Change, dict[str, str], str]] = {
    "a repository that is not there": (
        "sagemaker",
        lambda w: w.aws.images.clear(),
        {},
        "ECR has no repository train | aws ecr create-repository",
    ),
    "an image elsewhere": (
        "sagemaker",
        lambda w: None,
        {"image": f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/train@{DIGEST}"},
        "the image is in us-east-1, the jobs are in eu-central-1 | push it to ECR in eu-central-1",
    ),
    "a secret that is not on AWS": (
        "sagemaker",
        lambda w: w.aws.secrets.clear(),
        {},
        f"there is no secret {AWS} | aws",
    ),
    "a bucket that is not there": (
        "vertex",
        lambda w: w.google.buckets.clear(),
        {},
        "there is no bucket lake | gcloud storage buckets create gs://lake",
    ),
    "a bucket that one may not look at": (
        "vertex",
        lambda w: w.google.errors.update({"GET storage": 403}),
        {},
        "the bucket lake belongs to another project",
    ),
    "a bucket elsewhere": (
        "vertex",
        lambda w: w.google.buckets["lake"].update(location="US-CENTRAL1"),
        {},
        "the bucket lake is in us-central1, the pipeline in europe-west4 | name a bucket in europe-west4",
    ),
    "an account that may run nothing": (
        "vertex",
        lambda w: w.google.denied.add("aiplatform.pipelineJobs.create"),
        {},
        f"you may not aiplatform.pipelineJobs.create in {PROJECT} | ask for roles/aiplatform.user",
    ),
    "an API that is off": (
        "vertex",
        lambda w: w.google.apis.clear(),
        {},
        f"{PROJECT} does not use aiplatform.googleapis.com | gcloud services enable",
    ),
    "a secret that is not on Google": (
        "vertex",
        lambda w: w.google.secrets.clear(),
        {},
        f"there is no secret {GOOGLE} | gcloud secrets",
    ),
    "a secret that is disabled": (
        "vertex",
        lambda w: w.google.secrets.update({GOOGLE: "DISABLED"}),
        {},
        f"the secret {GOOGLE} is DISABLED | gcloud",
    ),
    "a workspace that one may not see": (
        "azureml",
        lambda w: w.azure.errors.update({f"GET management.azure.com{w.azure.root}": 403}),
        {},
        "there is no workspace forge in rg, or you may not see it | az ml workspace list",
    ),
    "a container of another tenant": (
        "azureml",
        lambda w: w.azure.containers.update({"acc/lake": 401}),
        {},
        "the container lake of acc.dfs.core.windows.net belongs to another tenant",
    ),
    "a container that the user may not read, where steps act as the user": (
        "azureml",
        lambda w: w.azure.containers.update({"acc/lake": 403}),
        {"identity": "user"},
        "or you may not read it | name one of yours",
    ),
    "a secret that is not on Azure": (
        "azureml",
        lambda w: w.azure.secrets.clear(),
        {},
        f"there is no secret {AZURE} | az keyvault secret list",
    ),
    "a version of a secret that is not there": (
        "azureml",
        lambda w: None,
        {"secrets": f"{{HF_TOKEN: '{OLD}'}}"},
        f"there is no secret {OLD} | az",
    ),
    "a token without rights": (
        "kubeflow",
        lambda w: w.kfp.faults.append(Fault("GET healthz", 403)),
        {},
        "the token has no right there: HTTP 403",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_a_platform_lacks_is_said_with_its_fix(case: str, full: World) -> None:
    platform, change, settings, says = WRONG[case]
    change(full)
    assert [line for line in wrong(asked(platform, **settings)) if says in line]


def test_everything_that_is_wrong_is_said_at_once(full: World) -> None:
    full.aws.buckets.clear(), full.aws.images.clear(), full.aws.secrets.clear()
    full.google.apis.clear(), full.google.images.clear(), full.google.secrets.clear()
    full.azure.containers.clear(), full.azure.images.clear(), full.azure.secrets.clear()
    assert [len(wrong(asked(platform))) for platform in ALL] == [3, 3, 3]


BOTH = Needs("c", deploys=True, publishes=True)
SERVES = "aiplatform.endpoints.deploy"
IN_AZURE = "Microsoft.MachineLearningServices/workspaces"
# a platform, what may not be done there, and what is reported
LACKED: dict[str, tuple[str, Change, str]] = {
    "an endpoint on SageMaker": (
        "sagemaker",
        lambda w: w.aws.denied.add("sagemaker:CreateEndpoint"),
        f"you may not sagemaker:CreateEndpoint | have arn:aws:iam::{ACCOUNT}:user/who-asks allowed it on "
        f"arn:aws:sagemaker:eu-central-1:{ACCOUNT}:endpoint/c",
    ),
    "the role on SageMaker": (
        "sagemaker",
        lambda w: w.aws.denied.add("iam:PassRole"),
        f"you may not iam:PassRole | have arn:aws:iam::{ACCOUNT}:user/who-asks allowed it on arn:aws:iam::{ACCOUNT}:role/me",
    ),
    "a version in SageMaker's registry": (
        "sagemaker",
        lambda w: w.aws.denied.add("sagemaker:UpdateModelPackage"),
        f"you may not sagemaker:UpdateModelPackage | have arn:aws:iam::{ACCOUNT}:user/who-asks allowed it on "
        f"arn:aws:sagemaker:eu-central-1:{ACCOUNT}:model-package/c/*",
    ),
    "an endpoint on Vertex AI": (
        "vertex",
        lambda w: w.google.denied.add(SERVES),
        f"you may not {SERVES} | ask for roles/aiplatform.user in the project forge",
    ),
    "counts on Vertex AI": (
        "vertex",
        lambda w: w.google.denied.add("monitoring.timeSeries.list"),
        "you may not monitoring.timeSeries.list | ask for roles/monitoring.viewer in the project forge",
    ),
    "an alias on Vertex AI": (
        "vertex",
        lambda w: w.google.denied.add("aiplatform.models.update"),
        "you may not aiplatform.models.update | ask for roles/aiplatform.user in the project forge",
    ),
    "a deployment on Azure ML": (
        "azureml",
        lambda w: w.azure.roles[0]["notActions"].append(f"{IN_AZURE}/onlineEndpoints/*/write"),
        f"you may not {IN_AZURE}/onlineEndpoints/deployments/write | ask for `AzureML Data Scientist` on forge",
    ),
    "counts on Azure ML": (
        "azureml",
        lambda w: w.azure.roles.pop(),
        "you may not Microsoft.Insights/metrics/read | ask for `Monitoring Reader` on forge",
    ),
    "a model on Azure ML": (
        "azureml",
        lambda w: w.azure.roles[0]["notActions"].append(f"{IN_AZURE}/MODELS/write"),
        f"you may not {IN_AZURE}/models/write | ask for `AzureML Data Scientist` on forge",
    ),
}


@pytest.mark.parametrize(
    "case",
    only({"the role on SageMaker", "counts on Vertex AI", "a deployment on Azure ML"}, LACKED),
)
def test_a_right_that_deploying_or_publishing_needs_is_missed_only_where_the_config_does_it(
    case: str, full: World
) -> None:
    platform, change, says = LACKED[case]
    names = ["you may deploy", "you may publish", "steps may publish"]
    found = {check.name: check.state for check in needing(platform, BOTH)}
    assert {name: found.get(name, "ok") for name in names} == dict.fromkeys(names, "ok")
    assert set(found) >= {*names[:2]}
    change(full)
    assert wrong(needing(platform, Needs())) == []
    assert says in wrong(needing(platform, BOTH))


def test_a_step_that_deploys_on_sagemaker_needs_the_rights_in_its_role(full: World) -> None:
    role, needs = f"arn:aws:iam::{ACCOUNT}:role/me", Needs("c", deploys_in_steps=True)
    full.aws.denied.add((role, "sagemaker:InvokeEndpoint"))
    assert wrong(needing("sagemaker", needs)) == [
        f"the role of the steps may not sagemaker:InvokeEndpoint | have {role} allowed it on "
        f"arn:aws:sagemaker:eu-central-1:{ACCOUNT}:endpoint/c"
    ]
    there = platform_of("sagemaker", load_target(Path("c.yaml")).platforms)
    printed = [there.permissions(one) for one in (needs, Needs("c", deploys=True))]
    assert ['"sagemaker:InvokeEndpoint"' in one for one in printed] == [True, False]


def test_what_iam_cannot_say_is_no_problem(full: World) -> None:
    full.aws.caller = f"arn:aws:sts::{ACCOUNT}:assumed-role/team/me"
    full.aws.depends.add("sagemaker:CreateModel")
    states = {check.name: check.state for check in needing("sagemaker", BOTH)}
    assert states["you may deploy"] == "ok"
    full.aws.errors["iam:SimulatePrincipalPolicy"] = 403, "AccessDenied"
    states = {check.name: check.state for check in needing("sagemaker", BOTH)}
    assert states["you may deploy"] == "not asked"


def test_a_config_says_what_it_needs_beyond_training() -> None:
    digits = Path(__file__).parents[2] / "configs" / "digits.yaml"
    assert needs_of(load_target(digits), "vertex") == Needs("digits")
    spec = load_target(digits, ["deploy.after_promotion=true"])
    assert needs_of(spec, "vertex") == Needs("digits", deploys=True, deploys_in_steps=True)
    published = spec.registration.model_copy(update={"publish": ("vertex",)})
    spec = spec.model_copy(update={"registration": published})
    assert [needs_of(spec, one).publishes for one in ("vertex", "sagemaker")] == [True, False]


UNASKED: dict[str, tuple[Change, set[str]]] = {
    "sagemaker": (
        lambda w: w.aws.errors.update(
            {f"{s}:*": (400, "AccessDeniedException") for s in ("ecr", "secretsmanager")}
        ),
        {"credentials", "region", "bucket"},
    ),
    "vertex": (  # APIs that the project does not use, and a registry that does not answer
        lambda w: w.google.errors.update(
            {
                **{
                    f"{m} {s}": 403
                    for m in ("GET", "POST")
                    for s in ("cloudresourcemanager", "serviceusage", "aiplatform", "secretmanager")
                },
                "HEAD europe-docker.pkg.dev": 0,
            }
        ),
        {"credentials", "bucket"},
    ),
    "azureml": (
        lambda w: w.azure.errors.update(
            dict.fromkeys(("HEAD acc.dfs", "POST lake.azurecr.io", "GET my-vault"), 403)
        ),
        {"credentials", "workspace"},
    ),
}


@pytest.mark.parametrize("platform", UNASKED)
def test_what_cannot_be_asked_is_no_problem(platform: str, full: World) -> None:
    change, known = UNASKED[platform]
    change(full)
    found = asked(platform)
    assert {check.name for check in found if check.state == "ok"} == known
    assert {check.state for check in found} == {"ok", "not asked"}
    unasked = [check.said for check in found if check.state == "not asked"]
    assert all(
        said.startswith(("HTTP 403", "as the test wants it", "no answer")) for said in unasked
    )
