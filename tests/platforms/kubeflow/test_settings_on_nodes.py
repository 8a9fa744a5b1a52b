"""Nodes, as real processes, that see what settings gave them, and settings that depend on inputs."""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from kfp import dsl, kubernetes

import rekindle
from rekindle.errors import RequestError
from rekindle.ir.compile import compile_function
from rekindle.ir.read.pipeline import read
from rekindle.platforms.kubeflow.compile import compile
from rekindle.platforms.kubeflow.trainjob import MACHINE, _template_of
from tests.platforms.kubeflow.launching import Step
from tests.servers.kubeflow.kubernetes import FakeCluster
from tests.support.conformance_broken import broken
from tests.support.kubeflow_settings import BARE, compiled, work


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def name() -> str:
    return "n"


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def see(names: list) -> dict:
    """What node 0 finds in its environment and on its disks."""
    import os
    from pathlib import Path

    root = Path(os.environ["POD_ROOT"])
    files = [path for path in root.rglob("*") if path.is_file()]
    claims = [path for path in root.iterdir() if path.is_symlink()]
    return {
        "env": {name: os.environ.get(name, "") for name in names},
        "files": {str(path.relative_to(root)): path.read_text() for path in files},
        "claims": {path.name: path.resolve().name for path in claims},
        "folders": sorted(path.name for path in root.iterdir()),
    }


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeCluster]:
    with FakeCluster(tmp_path / "cluster") as cluster:
        cluster.secrets |= {
            ("words", "first"): "hello",
            ("own", "k"): "of a secret",
            ("configmap", "c", "k"): "of a map",
        }
        cluster.start_run("run")
        yield cluster


TAINT = {"key": "k", "operator": "Exists"}
NAMES = ["SECRET", "MAP", "ABSENT", "TEAM", "WORD"]


@dsl.pipeline(name="p")
def seeing():
    task = rekindle.distribute(see(names=NAMES), nodes=2, machine="m-8")
    kubernetes.use_secret_as_env(task, "own", {"k": "SECRET"})
    kubernetes.set_image_pull_secrets(task, ["own"])
    kubernetes.use_secret_as_env(task, "nowhere", {"k": "ABSENT"}, optional=True)
    kubernetes.use_config_map_as_env(task, "c", {"k": "MAP"})
    kubernetes.add_pod_label(task, "team", "a")
    kubernetes.use_field_path_as_env(task, "TEAM", "metadata.labels['team']")
    kubernetes.use_secret_as_volume(task, "own", mount_path="/secret")
    kubernetes.use_config_map_as_volume(task, "c", mount_path="/map")
    kubernetes.mount_pvc(task, pvc_name="data", mount_path="/data")
    kubernetes.empty_dir_mount(task, "anything", "/scratch", size_limit="1Gi")
    kubernetes.add_toleration_json(task, [TAINT])
    kubernetes.add_node_selector_json(task, {"pool": "big"})


@pytest.mark.slow
def test_nodes_see_what_settings_gave_them(cluster: FakeCluster, tmp_path: Path) -> None:
    step = Step(tmp_path, cluster, source=seeing, component="see", names=NAMES)
    assert step.pod().wait(60) == 0, step.said()
    assert step.output()["parameterValues"]["Output"] == {
        "env": {
            "SECRET": "of a secret",
            "MAP": "of a map",
            "ABSENT": "",
            "TEAM": "a",
            "WORD": "hello",
        },
        "files": {"secret/k": "of a secret", "map/k": "of a map"},
        "claims": {"data": "data"},
        "folders": ["data", "dev", "map", "scratch", "secret", "tmp"],
    }
    (job,) = cluster.jobs.values()
    pod = _template_of(job.object["spec"])["spec"]
    assert pod["tolerations"] == [TAINT]
    assert pod["nodeSelector"] == {"pool": "big", MACHINE: "m-8"}
    assert pod["imagePullSecrets"] == [{"name": "own"}]


@dsl.pipeline(name="p")
def at_run_time(
    pool: dict = {"pool": "big"},  # noqa: B006 - how KFP writes the default of a dict
    taints: list = [],  # noqa: B006
    secret: str = "s",
    go: str = "y",
):
    claim = name()
    with dsl.If(go == "y"):
        task = rekindle.distribute(work(), nodes=2)
        kubernetes.add_node_selector_json(task, pool)
        kubernetes.add_toleration_json(task, taints)
        kubernetes.add_toleration(task, key="always", operator="Exists")
        kubernetes.use_secret_as_env(task, secret, {"k": "V"})
        kubernetes.set_image_pull_secrets(task, [secret])
        kubernetes.mount_pvc(task, pvc_name=claim.output, mount_path="/d")
        kubernetes.empty_dir_mount(task, "e", "/e")


def test_settings_that_depend_on_an_input_are_refused() -> None:
    with pytest.raises(RequestError) as caught:
        compiled(compile_function(at_run_time))
    said = {problem.what.partition(", and ")[2] for problem in caught.value.problems}
    assert said == {
        f"`{name}` depends on an input"
        for name in (
            "nodeSelectorJson",
            "tolerationJson",
            "secretNameParameter",
            "pvcNameParameter",
        )
    }
    assert {problem.fix for problem in caught.value.problems} == {"write it down"}


def test_a_broken_setting_is_refused_and_never_crashes() -> None:
    samples = [list(yaml.safe_load_all(compile_function(p))) for p in (seeing, at_run_time)]
    chance, made = random.Random(0), 0
    for _ in range(150):
        text = yaml.safe_dump_all(broken(chance.choice(samples), chance))
        with contextlib.suppress(RequestError):
            compile(text, read(text), {}, BARE)
            made += 1
    assert 20 < made < 140
