"""The main job from the installed wheel, in an empty folder: `rekindle init`, `rekindle run`."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (made,) = folder.glob("*.whl")
    return made


def test_the_wheel_carries_pipeline_components_and_configs(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        "pipelines/continuous_training.py",
        "pipelines/continuous_deployment.py",
        "components/finetune.py",
        "configs/digits.yaml",
        "configs/data/reviews.jsonl",
    ):
        assert f"rekindle/shipped/{name}" in names
    assert "rekindle/py.typed" in names
    assert not any(
        part in name for name in names for part in ("tests/", "__pycache__", ".rekindle/")
    )


@pytest.mark.slow
def test_init_and_run_in_an_empty_folder(wheel, tmp_path):
    site, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            str(site),
            str(wheel),
        ],
        check=True,
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def rekindle(*words):
        code = "import rekindle, sys; assert 'site' in rekindle.__file__; from rekindle.cli.main import main; main(sys.argv[1:])"
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, *words],
            cwd=work,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "laid out" in rekindle("init", "--full")
    assert (work / "pipelines" / "continuous_training.py").is_file()
    result = json.loads(
        rekindle(
            "run",
            "configs/digits.yaml",
            "--json",
            "--set",
            "train.epochs=4",
            "--set",
            "evaluate.floor={accuracy: 0.9}",
        )
    )
    assert result["gate"]["promoted"] is True
    own = work / "pipelines" / "continuous_training.py"
    own.write_text(own.read_text().replace('name="continuous-training"', 'name="my-training"'))
    changed = json.loads(
        rekindle(
            "run",
            "configs/digits.yaml",
            "--json",
            "--set",
            "train.epochs=4",
            "--set",
            "pipeline=pipelines/continuous_training.py:continuous_training",
            "--set",
            "receives=all",
        )
    )
    assert changed["status"] == "succeeded"
    assert changed["model"]["created"] is False, "the same work is the same version"
