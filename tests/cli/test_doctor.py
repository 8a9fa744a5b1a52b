"""`doctor`: what a platform needs, and what a config lacks for it."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACE = {
    "project": "my-project", "region": "europe-west4", "artifact_root": "gs://bucket/rekindle",
    "image": "a/b@sha256:0", "service_account": "me@my-project.iam.gserviceaccount.com",
}  # fmt: skip


def doctor(*words):
    return subprocess.run(
        [sys.executable, "-m", "rekindle.cli.main", "doctor", *words, "--platform", "vertex"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip


def place(**more):
    return [
        word
        for key, value in {**PLACE, **more}.items()
        for word in ("--set", f"platforms.vertex.{key}={value}")
    ]


def test_the_permissions_are_printed_without_a_config():
    done = doctor()
    assert done.returncode == 0
    assert "aiplatform.customJobs.create" in done.stdout
    assert "secretmanager" not in done.stdout, "nobody asked for a secret"


def test_a_config_that_is_ready_is_said_to_be():
    secret = '{"HF_TOKEN": "projects/p/secrets/hf/versions/1"}'
    done = doctor("configs/digits.yaml", *place(secrets=secret))
    assert done.returncode == 0, done.stderr
    assert "configs/digits.yaml is ready for vertex" in done.stdout
    assert "secretmanager.versions.access" in done.stdout
    assert "me@my-project.iam.gserviceaccount.com" in done.stdout


def test_all_that_a_config_lacks_is_said_at_once():
    done = doctor("configs/digits.yaml", "--json")
    assert done.returncode == 2
    where = {problem["where"] for problem in json.loads(done.stdout)["errors"]}
    assert where == {
        f"platforms.vertex.{n}" for n in ("project", "region", "artifact_root", "image")
    }
