"""`compile`: the shipped pipeline for every platform, byte-stable, against golden files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("golden")
TRACKED = ["--set", "register.tracking_uri=https://mlflow.example.com"]
IMAGE = "europe-docker.pkg.dev/p/r/train@sha256:" + "0" * 64
ECR = "123456789012.dkr.ecr.eu-central-1.amazonaws.com/train@sha256:" + "0" * 64
PLATFORMS = {
    "kubeflow": (["--artifact-root", "/mnt/rekindle"], "continuous-training.yaml"),
    "vertex": (
        [word for value in ("project=my-project", "region=europe-west4", "artifact_root=gs://bucket/rekindle", f"image={IMAGE}")
         for word in ("--set", f"platforms.vertex.{value}")],
        "continuous-training.vertex.json",
    ),
    "sagemaker": (
        [word for value in ("region=eu-central-1", "role_arn=arn:aws:iam::123456789012:role/me", "artifact_root=s3://bucket/rekindle", f"image={ECR}")
         for word in ("--set", f"platforms.sagemaker.{value}")],
        "continuous-training.sagemaker.json",
    ),
}  # fmt: skip


def rekindle(*words, seed="1", check=True):
    environment = {**os.environ, "PYTHONHASHSEED": seed, "GIT_DIR": "/nowhere"}
    return subprocess.run(
        [sys.executable, "-m", "rekindle.cli.main", *map(str, words)],
        cwd=ROOT, check=check, env=environment, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_golden_file_is_what_compile_writes_every_time(platform, tmp_path, request):
    words, name = PLATFORMS[platform]
    asked = ("compile", "configs/digits.yaml", "--platform", platform, *words, *TRACKED)
    texts = []
    for seed in ("1", "2"):
        rekindle(*asked, "-o", tmp_path / seed, seed=seed)
        texts.append((tmp_path / seed / name).read_text())
        names = {path.name for path in (tmp_path / seed).iterdir()}
        assert names == {name, *(["bundles"] if platform == "sagemaker" else [])}
    assert texts[0] == texts[1], "the same input gives the same bytes"
    golden = GOLDEN / f"digits.{platform}{Path(name).suffix}"
    if request.config.getoption("--regenerate"):
        golden.write_text(texts[0])
    assert texts[0] == golden.read_text(), "run `make generate` and read the difference"


def test_several_platforms_come_with_a_table_of_how_each_carries_it(tmp_path):
    (kubeflow, first), (vertex, second) = PLATFORMS["kubeflow"], PLATFORMS["vertex"]
    done = rekindle(
        "compile", "configs/digits.yaml", "--platform", "kubeflow,vertex", *kubeflow, *vertex, *TRACKED,
        "-o", tmp_path, "--json",
    )  # fmt: skip
    names = {first, second, "parity.md"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert {Path(path).name for path in json.loads(done.stdout)["files"]} == names
    table = (tmp_path / "parity.md").read_text()
    assert "| step | kubeflow | vertex |" in table
    assert "| finetune | native | native |" in table


def test_a_pipeline_by_itself_is_compiled_and_its_limits_are_named(tmp_path):
    source = tmp_path / "mine.py"
    source.write_text(
        "from kfp import dsl, kubernetes\n"
        "@dsl.component(base_image='python:3.11', install_kfp_package=False)\n"
        "def say(text: str):\n    print(text)\n"
        "@dsl.pipeline(name='mine')\n"
        "def mine(text: str = 'a'):\n"
        "    kubernetes.mount_pvc(say(text=text), pvc_name='data', mount_path='/data')\n"
    )
    rekindle("compile", f"{source}:mine", "--platform", "kubeflow", "-o", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.yaml"]
    again = rekindle(
        "compile",
        tmp_path / "out" / "mine.yaml",
        "--platform",
        "kubeflow",
        "-o",
        tmp_path / "again",
    )
    assert again.returncode == 0
    words, _ = PLATFORMS["vertex"]
    done = rekindle(
        "compile", f"{source}:mine", "--platform", "kubeflow,vertex", *words, "-o", tmp_path / "no",
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "persistent volume claims, which vertex refuses" in done.stderr
    assert not (tmp_path / "no").exists()


def test_a_platform_that_there_is_not_is_named(tmp_path):
    done = rekindle(
        "compile", "configs/digits.yaml", "--platform", "kubeflow,mars", "-o", tmp_path / "no",
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "`mars` is none of kubeflow, sagemaker, vertex" in done.stderr


def test_kfp_loads_it():
    from kfp import components

    loaded = components.load_component_from_text((GOLDEN / "digits.kubeflow.yaml").read_text())
    assert set(loaded.component_spec.inputs) >= {"name", "task", "data", "artifact_root"}
