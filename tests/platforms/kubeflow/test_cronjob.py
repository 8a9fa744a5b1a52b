"""docs/watch/cronjob.yaml is what Kubernetes takes, and does what its pod is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rekindle.spec.load import load_target
from tests.servers.kubeflow.deployments import unknown

ROOT = Path(__file__).parents[3]
FILE = ROOT / "docs" / "watch" / "cronjob.yaml"


@pytest.fixture
def objects() -> dict[str, dict]:
    return {one["kind"]: one for one in yaml.safe_load_all(FILE.read_text())}


def test_it_has_no_field_that_kubernetes_does_not_know(objects):
    for kind, one in objects.items():
        assert list(unknown(f"V1{kind}", one, kind)) == []
    broken = {**objects["CronJob"]["spec"], "concurrency": "Forbid"}
    assert list(unknown("V1CronJobSpec", broken, "spec")) == ['unknown field "spec.concurrency"']


def test_mounts_and_volumes_meet(objects):
    pod = objects["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert {one["name"] for one in container["volumeMounts"]} == set(volumes)
    assert volumes["config"]["configMap"]["name"] == objects["ConfigMap"]["metadata"]["name"]
    claim = volumes["home"]["persistentVolumeClaim"]["claimName"]
    assert claim == objects["PersistentVolumeClaim"]["metadata"]["name"]
    rules = objects["CronJob"]["spec"]["jobTemplate"]["spec"]["podFailurePolicy"]["rules"]
    named = [rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule]
    assert set(named) == {container["name"]}


@pytest.mark.slow
def test_its_command_runs_once_and_then_finds_nothing_due(objects, tmp_path):
    """As the pod has it, but for where its volumes are; the image is that of `make test-containers`."""
    pod = objects["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    places = {one["mountPath"]: str(tmp_path / one["name"]) for one in container["volumeMounts"]}
    for place in places.values():
        Path(place).mkdir()
    for name, text in objects["ConfigMap"]["data"].items():
        Path(places["/etc/rekindle"], name).write_text(text)
    Path(places["/etc/rekindle"]).chmod(0o555)
    load_target(Path(places["/etc/rekindle"], "config.yaml"), [])

    def placed(word: str) -> str:
        for path, place in places.items():
            if word == path or word.startswith(f"{path}/"):
                return place + word.removeprefix(path)
        return word

    program, *words = map(placed, container["args"])
    assert program == "rekindle"
    given = {one["name"]: placed(one["value"]) for one in container["env"]}
    kept = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    turns = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "rekindle.cli.main", *words],
            capture_output=True,
            text=True,
            cwd="/",
            env={**kept, **given, "HOME": places["/tmp"], "TMPDIR": places["/tmp"]},
        )
        assert done.returncode == 0, done.stderr
        turns.append(json.loads(done.stdout))
    assert [turn["decision"] for turn in turns] == ["ran", "skipped"]
    assert not [
        path for path in Path(places["/etc/rekindle"]).iterdir() if path.name != "config.yaml"
    ]
