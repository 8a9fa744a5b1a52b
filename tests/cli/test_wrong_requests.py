"""Wrong requests, over all verbs and platforms: each is refused with its code, its place and its fix,
before anything is made anywhere. The services are played; nothing but questions reaches them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rekindle.app.compile import _only_here
from rekindle.cli.main import invoke
from tests.cli.world import ACCOUNT, DIGEST, World
from tests.cli.world import compiled as compiled
from tests.cli.world import served as served
from tests.cli.world import world as world
from tests.servers.aws import account as aws_account
from tests.servers.azure.rest import SUBSCRIPTION, TENANT
from tests.servers.troubles import Fault
from tests.support.cli_compile import ROOT

pytest.importorskip("azure.ai.ml", reason="azure-ai-ml is a developer's dependency")

NOT_LOGGED_IN = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "GOOGLE_APPLICATION_CREDENTIALS")


@dataclasses.dataclass(frozen=True)
class Wrong:
    """A request: a verb, a platform, settings; what is different in the world; and what it comes to."""

    verb: str
    platform: str
    where: str
    fix: str
    settings: tuple[str, ...] = ()
    world: Callable[[World], Any] = lambda world: None
    environment: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    code: str = "E-REQUEST"
    exit: int = 2
    config: str = "c.yaml"

    @property
    def words(self) -> list[str]:
        sets = [word for setting in self.settings for word in ("--set", setting)]
        platform = ["--platform", self.platform] if self.platform else []
        yes = ["--yes"] if self.verb in ("submit", "schedule set") else []
        return [*self.verb.split(), *([self.config] if self.config else []), *platform, *yes, *sets]


def of(section: str, field: str) -> str:
    return f"platforms.{section}.{field}"


WEEKLY = "schedule={cron: 0 3 * * 1}"
DIGITS = str(ROOT / "configs" / "digits.yaml")
NODES = (
    "resources.nodes=2",
    "register.tracking_uri=https://m.example.com",
    of("azureml", "compute=cpus"),
    of("azureml", f"subscription={SUBSCRIPTION}"),
    of("azureml", "resource_group=rg"),
    of("azureml", "workspace=forge"),
    of("azureml", f"image=lake.azurecr.io/train@{DIGEST}"),
    of("azureml", "artifact_root=abfs://lake@acc.dfs.core.windows.net/r"),
)
REVOKED = {"error": "invalid_grant", "error_description": "Token has been expired or revoked."}
EXPIRED = {
    "error": "invalid_client",
    "error_description": "AADSTS7000222: The client secret keys are expired.",
}
GCLOUD = "gcloud auth application-default login"
NOBODY: dict[str, str | None] = dict.fromkeys(NOT_LOGGED_IN)

CASES: dict[str, Wrong] = {
    # schedules
    "cron with 7 fields": Wrong(
        "schedule set",
        "azureml",
        "--set schedule",
        "leave seconds and the year out",
        ("schedule={cron: 0 0 3 * * 1 2026}",),
        code="E-SPEC",
    ),
    "a minute that clocks do not have": Wrong(
        "schedule set",
        "vertex",
        "--set schedule",
        "write five fields",
        ("schedule={cron: 61 3 * * 1}",),
        code="E-SPEC",
    ),
    "an unknown time zone": Wrong(
        "schedule set",
        "sagemaker",
        "--set schedule",
        "did you mean `Europe/Berlin`?",
        ("schedule={cron: 0 3 * * 1, timezone: Europe/Berlinn}",),
        code="E-SPEC",
    ),
    "a schedule that the config has not": Wrong(
        "schedule set", "kubeflow", "schedule", "add schedule: {cron:"
    ),
    "days of the month on Azure": Wrong(
        "schedule set",
        "azureml",
        "schedule.cron",
        "",
        ("schedule={cron: 0 3 1 * *}",),
        code="E-UNSUPPORTED",
    ),
    "days of the month and of the week on Google": Wrong(
        "schedule set",
        "vertex",
        "schedule.cron",
        "write `*` for one",
        ("schedule={cron: 0 3 1 * 1}",),
        code="E-UNSUPPORTED",
    ),
    "another clock than the cluster's": Wrong(
        "schedule set",
        "kubeflow",
        "schedule.timezone",
        "write the line for that clock",
        ("schedule={cron: 0 3 * * 1, timezone: Europe/Berlin}",),
        code="E-UNSUPPORTED",
    ),
    "a schedule for a bucket of somebody else": Wrong(
        "schedule set",
        "sagemaker",
        of("sagemaker", "artifact_root"),
        "name a bucket of yours",
        (WEEKLY,),
        lambda w: w.aws.buckets.update(bucket=aws_account.Bucket(shared=False)),
    ),
    # AWS
    "no credentials for AWS": Wrong(
        "submit", "sagemaker", f"account {ACCOUNT} in", "aws sso login", environment=NOBODY
    ),
    "an expired token of AWS": Wrong(
        "submit",
        "sagemaker",
        f"account {ACCOUNT} in",
        "aws sso login",
        world=lambda w: w.aws.errors.update({"sts:*": (403, "ExpiredToken")}),
    ),
    "a role of another account": Wrong(
        "submit",
        "sagemaker",
        of("sagemaker", "role_arn"),
        "log in to 999999999999",
        (of("sagemaker", "role_arn=arn:aws:iam::999999999999:role/me"),),
    ),
    "no role at all": Wrong(
        "compile",
        "sagemaker",
        of("sagemaker", "role_arn"),
        "set platforms.sagemaker.role_arn",
        (of("sagemaker", "role_arn=''"),),
        code="E-SPEC",
    ),
    "a region that is not there": Wrong(
        "submit",
        "sagemaker",
        of("sagemaker", "region"),
        "such as eu-central-",
        (of("sagemaker", "region=eu-central-9"),),
    ),
    "a bucket in another region": Wrong(
        "submit",
        "sagemaker",
        of("sagemaker", "artifact_root"),
        "name a bucket in eu-central-1",
        world=lambda w: w.aws.buckets.update(bucket=aws_account.Bucket(region="us-east-1")),
    ),
    "a bucket of somebody else on AWS": Wrong(
        "submit",
        "sagemaker",
        of("sagemaker", "artifact_root"),
        "name a bucket of yours",
        world=lambda w: w.aws.buckets.update(bucket=aws_account.Bucket(shared=False)),
    ),
    "a bucket that is not there": Wrong(
        "submit",
        "sagemaker",
        of("sagemaker", "artifact_root"),
        "aws s3 mb s3://bucket",
        world=lambda w: w.aws.buckets.clear(),
    ),
    "an image that is not in ECR": Wrong(
        "submit",
        "sagemaker",
        of("sagemaker", "image"),
        "push it",
        world=lambda w: w.aws.images.update(train=[]),
    ),
    "an unknown machine type": Wrong(
        "compile",
        "sagemaker",
        "",
        "such as ml.m5",
        (of("sagemaker", "machine=ml.m5.huge"),),
        code="E-SPEC",
    ),
    "a role that is no ARN": Wrong(
        "submit",
        "sagemaker",
        "--set platforms.sagemaker.role_arn",
        "Role that jobs run as",
        (of("sagemaker", "role_arn=me"),),
        code="E-SPEC",
    ),
    # Google
    "no credentials for Google": Wrong(
        "submit", "vertex", of("vertex", "project"), GCLOUD, environment=NOBODY
    ),
    "a login to Google that is over": Wrong(
        "submit",
        "vertex",
        of("vertex", "project"),
        GCLOUD,
        world=lambda w: setattr(w.google, "login", (400, REVOKED)),
    ),
    "a project that is not there": Wrong(
        "submit",
        "vertex",
        of("vertex", "project"),
        "gcloud projects list",
        (of("vertex", "project=forgery"),),
    ),
    "a region that Google has not": Wrong(
        "submit",
        "vertex",
        of("vertex", "region"),
        "such as europe-west",
        (of("vertex", "region=europe-west5"),),
    ),
    "a bucket of somebody else on Google": Wrong(
        "submit",
        "vertex",
        of("vertex", "artifact_root"),
        "name a bucket of yours",
        world=lambda w: w.google.buckets["lake"].update(of="somebody else"),
    ),
    "an image that is not in Artifact Registry": Wrong(
        "submit",
        "vertex",
        of("vertex", "image"),
        "push it",
        world=lambda w: w.google.images.clear(),
    ),
    "an artifact root of another cloud": Wrong(
        "compile",
        "vertex",
        of("vertex", "artifact_root"),
        "gs://",
        (of("vertex", "artifact_root=s3://bucket/r"),),
        code="E-SPEC",
    ),
    # Azure
    "no login to Azure": Wrong(
        "submit",
        "azureml",
        of("azureml", "subscription"),
        "az login",
        environment={"MSI_SECRET": "of-another-machine"},
    ),
    "an expired secret of Azure": Wrong(
        "submit",
        "azureml",
        of("azureml", "subscription"),
        "az login",
        world=lambda w: setattr(w.azure, "login", EXPIRED),
        environment={"AZURE_TENANT_ID": TENANT, "AZURE_CLIENT_ID": "a", "AZURE_CLIENT_SECRET": "s"},
    ),
    "a workspace that is not there": Wrong(
        "submit",
        "azureml",
        of("azureml", "workspace"),
        "az ml workspace list",
        world=lambda w: setattr(w.azure, "there", False),
    ),
    "a compute cluster that is not there": Wrong(
        "submit",
        "azureml",
        of("azureml", "compute"),
        "az ml compute list",
        (of("azureml", "compute=gone"),),
    ),
    "2 nodes on a cluster of 1": Wrong(
        "submit",
        "azureml",
        of("azureml", "compute"),
        "az ml compute update --name cpus --max-instances 2",
        NODES,
        lambda w: setattr(w.azure.workspace, "most", 1),
        config=DIGITS,
    ),
    "a container that is not there": Wrong(
        "submit",
        "azureml",
        of("azureml", "artifact_root"),
        "az storage container create",
        world=lambda w: w.azure.containers.clear(),
    ),
    "an image that is not in Azure's registry": Wrong(
        "submit",
        "azureml",
        of("azureml", "image"),
        "push it",
        world=lambda w: w.azure.images.clear(),
    ),
    # Kubeflow
    "a token that is not set": Wrong(
        "submit",
        "kubeflow",
        of("kubeflow", "token"),
        "export KFP_TOKEN=",
        environment={"KFP_TOKEN": None},
        code="E-REQUEST",
    ),
    "a token that is not good": Wrong(
        "submit",
        "kubeflow",
        of("kubeflow", "token"),
        "export a token that is good",
        environment={"KFP_TOKEN": "old"},
    ),
    "a host that is not KFP's API": Wrong(
        "submit",
        "kubeflow",
        of("kubeflow", "host"),
        "name the address that ends before /apis",
        world=lambda w: w.kfp.faults.append(Fault("GET healthz", 404)),
    ),
    "no host": Wrong(
        "submit",
        "kubeflow",
        of("kubeflow", "host"),
        "set platforms.kubeflow.host",
        (of("kubeflow", "host=''"),),
    ),
    "a token in clear": Wrong(
        "submit",
        "kubeflow",
        "--set platforms.kubeflow.token",
        "keep the value out of the config",
        (of("kubeflow", "token=planted-in-clear"),),
        code="E-SPEC",
    ),
    "a server that refuses to make a run": Wrong(
        "submit",
        "kubeflow",
        "",
        "ask for the rights to run pipelines",
        world=lambda w: w.kfp.faults.append(Fault("POST", 403)),
        code="E-PLATFORM",
        exit=1,
    ),
    # anywhere
    "a secret in clear": Wrong(
        "run",
        "",
        "--set platforms.local.secrets",
        "keep the value out of the config",
        ("platforms.local.secrets={HF_TOKEN: planted-in-clear}",),
        code="E-SPEC",
    ),
    "a secret of the environment in clear": Wrong(
        "submit",
        "vertex",
        "--set arguments",
        "name an environment variable",
        ("arguments={n: 3, text: a-planted-in-clear-b}",),
        environment={"MY_API_KEY": "planted-in-clear"},
        code="E-SPEC",
    ),
    "a password in an address": Wrong(
        "compile",
        "vertex",
        "--set register.tracking_uri",
        "put it into the environment",
        ("register.tracking_uri=https://me:planted-in-clear@m.example.com",),
        code="E-SPEC",
    ),
    "a sqlite tracking URI on a cloud": Wrong(
        "submit",
        "azureml",
        "register.tracking_uri",
        "name a tracking server",
        (*NODES, "register.tracking_uri=sqlite:///mlflow.db"),
        config=DIGITS,
    ),
    "an unknown field": Wrong(
        "submit",
        "azureml",
        "--set train.epoch",
        "did you mean `epochs`?",
        ("train.epoch=1",),
        code="E-SPEC",
    ),
    "a setting without a value": Wrong(
        "doctor", "azureml", "--set", "--set train.lr=1e-4", ("train.lr",), code="E-SPEC"
    ),
    "a config that is not there": Wrong(
        "submit", "vertex", "", "check the path", config="none.yaml", code="E-SPEC"
    ),
    "a platform that is not there": Wrong(
        "submit", "slurm", "", "see `rekindle submit --help`", code="E-USAGE"
    ),
    "an unknown run": Wrong(
        "status nobody-knows", "", "", "`rekindle run CONFIG`, or name another --home", config=""
    ),
    "a log of an unknown run": Wrong(
        "logs nobody-knows", "", "", "`rekindle run CONFIG`, or name another --home", config=""
    ),
}


@pytest.mark.parametrize(
    ("uri", "here"),
    [
        ("sqlite:///mlflow.db", True),
        ("sqlite+pysqlite:///a", True),
        ("mlruns", True),
        ("file:///mnt/m", True),
        ("http://localhost:5000", True),
        ("http://127.0.0.1:5000", True),
        ("", True),
        ("https://m.example.com", False),
        ("postgresql://m.example.com/m", False),
        ("databricks", False),
    ],
)
def test_a_registry_that_only_this_machine_reaches_is_told_from_others(
    uri: str, here: bool
) -> None:
    assert bool(_only_here(uri)) == here


def test_there_are_at_least_thirty() -> None:
    assert len(CASES) >= 30


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_request_is_refused_with_its_fix_and_makes_nothing(
    case: str, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = CASES[case]
    wrong.world(world)
    for name, value in wrong.environment.items():
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
    exit_code = invoke([*wrong.words, "--json"])
    captured = capsys.readouterr()
    problems = json.loads(captured.out)["errors"]
    assert exit_code == wrong.exit, problems
    assert [
        problem
        for problem in problems
        if problem["code"] == wrong.code
        and problem["where"].startswith(wrong.where)
        and wrong.fix in problem["fix"]
    ], problems
    assert all(problem["what"] for problem in problems)
    assert "planted-in-clear" not in captured.out + captured.err
    assert world.made() == []
    left = {path.name for path in Path().iterdir()}
    assert left <= {"c.yaml", *([".rekindle"] if wrong.exit == 1 else [])}, "nothing is written"


@pytest.mark.parametrize("verb", ["submit", "schedule set"])
def test_without_a_terminal_and_without_yes_nothing_is_asked_of_a_platform(
    verb: str, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*verb.split(), "c.yaml", "--platform", "sagemaker", "--set", WEEKLY, "--json"]
    assert invoke(words) == 2
    (problem,) = json.loads(capsys.readouterr().out)["errors"]
    assert (problem["where"], problem["fix"]) == ("--yes", "pass --yes")
    assert world.aws.calls == []


@pytest.mark.parametrize("platform", ["kubeflow", "vertex"])
def test_a_right_request_is_not_refused(
    platform: str, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """The world above is one in which all of this would have worked."""
    with contextlib.suppress(SystemExit):
        assert invoke(["submit", "c.yaml", "--platform", platform, "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["id"]
    assert world.made() != []


def test_with_a_traceback_an_error_keeps_its_code_and_its_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert invoke(["submit", "none.yaml", "--platform", "vertex", "-v", "--json"]) == 2
    captured = capsys.readouterr()
    assert "Traceback (most recent call last)" in captured.err
    (problem,) = json.loads(captured.out)["errors"]
    assert problem["fix"] == "check the path; `rekindle init` writes example configs"
