"""`compile`: the KFP YAML of the shipped pipeline, byte-stable, against a golden file."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("golden") / "digits.kubeflow.yaml"
WORDS = ["compile", "configs/digits.yaml", "--platform", "kubeflow", "--artifact-root", "/mnt/rekindle",
         "--set", "register.tracking_uri=https://mlflow.example.com"]  # fmt: skip


def compiled(folder, seed):
    environment = {**os.environ, "PYTHONHASHSEED": seed, "GIT_DIR": "/nowhere"}
    subprocess.run(
        [sys.executable, "-m", "rekindle.cli.main", *WORDS, "-o", str(folder)],
        cwd=ROOT,
        check=True,
        env=environment,
    )
    (file,) = folder.iterdir()
    return file.read_text()


def test_the_golden_file_is_what_compile_writes_every_time(tmp_path, request):
    text = compiled(tmp_path / "a", "1")
    assert text == compiled(tmp_path / "b", "2"), "the same input gives the same bytes"
    if request.config.getoption("--regenerate"):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), "run `make generate` and read the difference"


def test_kfp_loads_it():
    from kfp import components

    loaded = components.load_component_from_text(GOLDEN.read_text())
    assert set(loaded.component_spec.inputs) >= {"name", "task", "data", "artifact_root"}
