"""`images build|push`: what is refused before docker is asked; tests/containers has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.cli.main import invoke

DIGEST = "sha256:" + "1" * 64
CONFIG = f"""
name: digits
task: image_classification
data: {{source: "sklearn:digits"}}
platforms:
  kubeflow: {{image: "r.example/digits@{DIGEST}"}}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "digits.yaml").write_text(CONFIG)
    return str(tmp_path / "digits.yaml")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("push", "--platform=kubeflow"), f"{DIGEST} is a digest; an image is pushed as a tag"),
        (("push", "--platform=vertex"), "where: platforms.vertex.image"),
        (("push",), "platforms.vertex.image is not set"),
        (("push", "--platform=nowhere"), "`nowhere` is not one of azureml, kubeflow"),
        (("push", "--set=platforms.vertex.image=r.example/x:1"), "there is no docker command here"),
        (("build",), "there is no docker command here"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_request_is_refused_with_its_fix(
    words: tuple[str, ...],
    said: str,
    config: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no docker
    verb, *options = words
    assert invoke(["images", verb, config, *options]) == 2
    assert said in capsys.readouterr().err
