"""`doctor` as a verb; what each platform is asked is in tests/platforms/*/test_doctor.py."""

import json
from pathlib import Path

import pytest

from rekindle.cli.main import invoke
from rekindle.outputs import Readiness
from tests.cli.world import ACCOUNT
from tests.cli.world import compiled as compiled
from tests.cli.world import served as served
from tests.cli.world import world as world

GOOD = """\
name: digits
task: image_classification
data: {source: "sklearn:digits"}
"""


def test_a_config_that_can_run_here_is_ready(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(GOOD)
    assert invoke(["doctor", "c.yaml"]) == 0
    looked, ready = capsys.readouterr().err.splitlines()
    assert looked.startswith(
        "ok        packages, files, task, first rows of the data, architecture"
    )
    assert ready == "local is ready"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.yaml"], "nothing is written"


def test_everything_that_is_wrong_is_said_at_once(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NOT_THERE", raising=False)
    wrong = "\nplatforms: {local: {secrets: {HF_TOKEN: env:NOT_THERE}}}\nregister: {tracking_uri: nowhere}\n"
    (tmp_path / "c.yaml").write_text(GOOD + wrong)
    assert invoke(["doctor", "c.yaml", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    errors = found["errors"]
    assert [error["where"] for error in errors] == [
        "platforms.local.secrets.HF_TOKEN",
        "register.tracking_uri",
    ]
    wrong = [check["name"] for check in found["checks"] if check["state"] == "problem"]
    assert wrong == ["secrets", "registry"]
    assert all(error["fix"] for error in errors)


def test_without_a_config_there_is_nothing_to_look_at_here(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invoke(["doctor"]) == 2
    assert "rekindle doctor CONFIG" in capsys.readouterr().err


HF = f"arn:aws:secretsmanager:eu-central-1:{ACCOUNT}:secret:hub"


def words(*more):
    """The world's config on AWS, with a secret."""
    secrets = ["--set", f"platforms.sagemaker.secrets={{HF_TOKEN: '{HF}'}}"]
    return ["doctor", "c.yaml", "--platform", "sagemaker", *secrets, *more]


@pytest.fixture
def facts(world):
    world.aws.secrets.add(HF)
    return world.aws


def test_a_platform_says_what_steps_need_and_that_a_config_is_ready(facts, capsys):
    assert invoke(words()) == 0
    told = capsys.readouterr()
    for said in ("secretsmanager:GetSecretValue", "arn:aws:s3:::bucket/r/*"):
        assert said in told.out
    assert "ok        bucket: bucket in eu-central-1\n" in told.err
    assert told.err.endswith("sagemaker is ready\n")
    assert sorted(path.name for path in Path().iterdir()) == ["c.yaml"], "nothing is written"


def test_every_question_is_listed_with_its_answer(facts, capsys):
    facts.buckets.clear()
    facts.errors = {"secretsmanager:*": (400, "AccessDeniedException")}
    assert invoke(words()) == 2
    told = capsys.readouterr()
    assert "ok        credentials: arn:aws:iam::123456789012:user/who-asks\n" in told.err
    assert "problem   bucket: there is no bucket bucket\n" in told.err
    assert (
        "not asked secret HF_TOKEN: as the test wants it, for secretsmanager:DescribeSecret\n"
        in told.err
    )
    fix = "  fix:   aws s3 mb s3://bucket --region eu-central-1, or name another\n"
    where = "  where: platforms.sagemaker.artifact_root\n"
    assert told.err.endswith(f"error: there is no bucket bucket\n{where}{fix}")
    assert invoke(words("--json")) == 2
    document = json.loads(capsys.readouterr().out)
    Readiness.model_validate(document)
    states = {check["name"]: check["state"] for check in document["checks"]}
    assert (states["image"], states["bucket"], states["secret HF_TOKEN"]) == (
        "ok",
        "problem",
        "not asked",
    )
    (problem,) = document["errors"]
    assert (problem["code"], problem["where"]) == ("E-REQUEST", "platforms.sagemaker.artifact_root")
    assert problem["fix"]


def test_what_could_not_be_asked_does_not_make_it_unready(facts, capsys):
    facts.errors = {"secretsmanager:*": (400, "AccessDeniedException")}
    assert invoke(words()) == 0
    assert "sagemaker is ready, but for 1 that could not be asked\n" in capsys.readouterr().err
    assert invoke(words("--json")) == 0
    assert json.loads(capsys.readouterr().out)["errors"] == []


def test_whoever_is_not_logged_in_reads_one_line_for_all_that_was_not_asked(facts, capsys):
    facts.errors = {"sts:*": (403, "ExpiredToken")}
    assert invoke(words()) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "not asked region, bucket, image, secret HF_TOKEN: the login failed" in lines
    assert {*facts.calls} == {"sts:GetCallerIdentity"}


def test_a_platform_that_nobody_could_ask_is_not_ready(facts, capsys):
    facts.errors = {"sts:*": (503, "ServiceUnavailable")}
    assert invoke(words()) == 1
    assert "error: sagemaker could not be asked: as the test wants it" in capsys.readouterr().err
    assert invoke(words("--json")) == 1
    (problem,) = json.loads(capsys.readouterr().out)["errors"]
    assert (problem["code"], problem["fix"]) == (
        "E-PLATFORM",
        "check the network, and retry the command",
    )


@pytest.mark.parametrize("platform", ["vertex", "sagemaker", "azureml"])
def test_all_that_a_config_lacks_for_a_platform_is_said_at_once(
    platform, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(GOOD)
    assert invoke(["doctor", "c.yaml", "--platform", platform, "--json"]) == 2
    where = {problem["where"] for problem in json.loads(capsys.readouterr().out)["errors"]}
    section = f"platforms.{platform}"
    assert {"register.tracking_uri", f"{section}.artifact_root", f"{section}.image"} <= where


@pytest.mark.parametrize("platform", ["vertex", "sagemaker", "azureml"])
def test_the_permissions_are_printed_without_a_config(platform, capsys):
    assert invoke(["doctor", "--platform", platform]) == 0
    assert capsys.readouterr().out.strip()
