"""`doctor` for this machine; tests/platforms/kubeflow has it for a cluster."""

import json

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
