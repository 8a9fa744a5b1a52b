"""`doctor` for this machine; tests/platforms/kubeflow has it for a cluster."""

import json

import pytest

from rekindle.cli.main import invoke

GOOD = """\
name: digits
task: image_classification
data: {source: "sklearn:digits"}
"""


def test_a_config_that_can_run_here_is_ready(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(GOOD)
    assert invoke(["doctor", "c.yaml"]) == 0
    assert capsys.readouterr().err == "local is ready\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.yaml"], "nothing is written"


def test_everything_that_is_wrong_is_said_at_once(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NOT_THERE", raising=False)
    wrong = "\nplatforms: {local: {secrets: {HF_TOKEN: env:NOT_THERE}}}\nregister: {tracking_uri: nowhere}\n"
    (tmp_path / "c.yaml").write_text(GOOD + wrong)
    assert invoke(["doctor", "c.yaml", "--json"]) == 2
    errors = json.loads(capsys.readouterr().out)["errors"]
    assert [error["where"] for error in errors] == [
        "platforms.local.secrets.HF_TOKEN", "register.tracking_uri",
    ]  # fmt: skip
    assert all(error["fix"] for error in errors)


def test_without_a_config_there_is_nothing_to_look_at_here(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invoke(["doctor"]) == 2
    assert "rekindle doctor CONFIG" in capsys.readouterr().err


VERTEX = {
    "project": "my-project", "region": "europe-west4", "artifact_root": "gs://bucket/rekindle",
    "image": "a/b@sha256:0", "service_account": "me@my-project.iam.gserviceaccount.com",
    "secrets": "{HF_TOKEN: projects/p/secrets/hf/versions/1}",
}  # fmt: skip
SAGEMAKER = {
    "region": "eu-central-1", "role_arn": "arn:aws:iam::123456789012:role/me",
    "artifact_root": "s3://lake/rekindle",
    "image": "123456789012.dkr.ecr.eu-central-1.amazonaws.com/train@sha256:" + "0" * 64,
    "secrets": "{HF_TOKEN: 'arn:aws:secretsmanager:eu-central-1:123456789012:secret:hub'}",
}  # fmt: skip
AZURE = {
    "artifact_root": "abfs://c@a.dfs.core.windows.net/r",
    "image": "lake.azurecr.io/train@sha256:" + "0" * 64,
}  # fmt: skip


def asked(platform, place):
    words = [w for k, v in place.items() for w in ("--set", f"platforms.{platform}.{k}={v}")]
    return ["--platform", platform, "--set", "register.tracking_uri=https://m.example.com", *words]


@pytest.mark.parametrize(
    ("platform", "place", "says"),
    [
        ("vertex", VERTEX, ["secretmanager.versions.access", "me@my-project.iam.gserviceaccount.com"]),
        ("sagemaker", SAGEMAKER, ["secretsmanager:GetSecretValue", "arn:aws:s3:::lake/rekindle/*",
                                  "arn:aws:ecr:eu-central-1:123456789012:repository/train"]),
        ("azureml", AZURE, ["AcrPull", "lake.azurecr.io"]),
    ],
    ids=["vertex", "sagemaker", "azureml"],
)  # fmt: skip
def test_a_platform_says_what_steps_need_and_that_a_config_is_ready(
    platform, place, says, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(GOOD)
    assert invoke(["doctor", "c.yaml", *asked(platform, place)]) == 0
    told = capsys.readouterr()
    assert all(words in told.out for words in says), told.out
    assert f"{platform} is ready" in told.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.yaml"], "nothing is written"


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
