"""Settings whose values only the run knows, and nodes, as real processes, that see what settings
gave them."""

import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp import dsl, kubernetes

import rekindle
from rekindle.errors import RequestError, SpecError, UnsupportedError
from rekindle.ir.compile import compile_function
from rekindle.ir.read.pipeline import read
from rekindle.platforms.kubeflow.compile import compile
from rekindle.platforms.kubeflow.trainjob import MACHINE, _template_of, unpacked
from tests.platforms.kubeflow.launching import Step
from tests.platforms.kubeflow.launching import compiled as pipeline_of
from tests.quick import first
from tests.servers.kubeflow.kubernetes import FakeCluster
from tests.support.conformance_broken import broken
from tests.support.kubeflow_settings import BARE, by_hand, compiled, pod_of, work


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
            ("words", "first"): "hello", ("own", "k"): "of a secret", ("configmap", "c", "k"): "of a map",
        }  # fmt: skip
        cluster.start_run("run")
        yield cluster


NAMES = ["SECRET", "MAP", "ABSENT", "TEAM", "WORD"]


@dsl.pipeline(name="p")
def seeing(
    secret: str = "",
    claim: str = "",
    taints: list = [],  # noqa: B006 - how KFP writes the default of a list
    pool: dict = {},  # noqa: B006
    empty: str = None,  # noqa: RUF013 - how KFP writes an input that may be absent
):
    task = rekindle.distribute(see(names=NAMES), nodes=2, machine="m-8")
    kubernetes.use_secret_as_env(task, secret, {"k": "SECRET"})
    kubernetes.use_secret_as_env(task, empty, {"k": "LEFT_OUT"})
    kubernetes.use_config_map_as_env(task, empty, {"k": "LEFT_OUT"})
    kubernetes.use_secret_as_volume(task, empty, mount_path="/left-out-0")
    kubernetes.use_config_map_as_volume(task, empty, mount_path="/left-out-1")
    kubernetes.mount_pvc(task, pvc_name=empty, mount_path="/left-out-2")
    kubernetes.set_image_pull_secrets(task, [empty, secret])
    kubernetes.use_secret_as_env(task, "nowhere", {"k": "ABSENT"}, optional=True)
    kubernetes.use_config_map_as_env(task, "c", {"k": "MAP"})
    kubernetes.add_pod_label(task, "team", "a")
    kubernetes.use_field_path_as_env(task, "TEAM", "metadata.labels['team']")
    kubernetes.use_secret_as_volume(task, secret, mount_path="/secret")
    kubernetes.use_config_map_as_volume(task, "c", mount_path="/map")
    kubernetes.mount_pvc(task, pvc_name=claim, mount_path="/data")
    kubernetes.empty_dir_mount(task, "anything", "/scratch", size_limit="1Gi")
    kubernetes.add_toleration_json(task, taints)
    kubernetes.add_node_selector_json(task, pool)


def launched(folder: Path, cluster: FakeCluster, **values: Any) -> tuple[Step, int]:
    """The launcher of `see` with these values of the pipeline's parameters, as KFP's driver puts
    them into its ExecutorInput."""
    given = pipeline_of(seeing)["root"]["dag"]["tasks"]["see"]["inputs"]["parameters"]
    inputs = {
        one: values[said["componentInputParameter"]]
        for one, said in given.items()
        if said.get("componentInputParameter") in values
    }
    step = Step(folder, cluster, source=seeing, component="see", names=NAMES, **inputs)
    return step, step.pod().wait(60)


TAINT = {"key": "k", "operator": "Exists", "tolerationSeconds": 30.0}


def test_nodes_see_what_settings_gave_them(cluster: FakeCluster, tmp_path: Path) -> None:
    step, code = launched(
        tmp_path, cluster, secret="own", claim="data", taints=[TAINT], pool={"pool": "big"}
    )
    assert code == 0, step.said()
    assert step.output()["parameterValues"]["Output"] == {
        "env": {
            "SECRET": "of a secret", "MAP": "of a map", "ABSENT": "", "TEAM": "a", "WORD": "hello",
        },
        "files": {"secret/k": "of a secret", "map/k": "of a map"},
        "claims": {"data": "data"},
        "folders": ["data", "dev", "map", "scratch", "secret", "tmp"],
    }  # fmt: skip
    (job,) = cluster.jobs.values()
    pod = _template_of(job.object["spec"])["spec"]
    assert pod["tolerations"] == [{"key": "k", "operator": "Exists", "tolerationSeconds": 30}]
    assert pod["nodeSelector"] == {"pool": "big", MACHINE: "m-8"}
    assert pod["imagePullSecrets"] == [{"name": "own"}]
    assert "left-out" not in json.dumps(pod)
    trainer = job.object["spec"]["trainer"]
    assert "LEFT_OUT" not in str(trainer["env"])
    told = unpacked(trainer["args"])["executor_input"]["inputs"]["parameterValues"]
    assert told["names"] == NAMES
    assert "rekindle-setting" not in str(told), "what settings need is no input of the step"


@pytest.mark.parametrize(
    ("values", "what"),
    first(
        1,
        [
            ({"taints": [{"key": "k", "for": 3}]}, "a toleration has `for`"),
            ({"taints": [3]}, "`tolerations` is not as kfp-kubernetes writes it"),
            ({"pool": {"pool": 3.0}}, "the value of the label `pool` is not text"),
            ({"pool": {MACHINE: "m-4"}}, "would be both 'm-8' and 'm-4'"),
        ],
    ),
)
def test_a_value_that_is_no_setting_ends_the_step_before_a_job_is_made(
    values: dict[str, Any], what: str, cluster: FakeCluster, tmp_path: Path
) -> None:
    right = {"secret": "own", "claim": "data", "taints": [], "pool": {}}
    step, code = launched(tmp_path, cluster, **(right | values))
    assert code == 1
    assert what in step.said()
    assert "executors.exec-see" in step.said(), "the place in the IR"
    assert cluster.created == []


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


def test_values_of_the_run_reach_the_launcher_as_inputs_of_their_types() -> None:
    spec, own, told = compiled(compile_function(at_run_time))
    inputs = spec["components"]["comp-work"]["inputDefinitions"]["parameters"]
    task = spec["components"]["comp-condition-1"]["dag"]["tasks"]["work"]["inputs"]["parameters"]
    assert len([one for one in inputs if one.startswith("rekindle-setting-")]) == 4, "each once"
    found = {
        task[one]["componentInputParameter"]: inputs[one]
        for one in inputs if one.startswith("rekindle-setting-")
    }  # fmt: skip
    assert found == {
        "pipelinechannel--secret": {"parameterType": "STRING", "isOptional": True},
        "pipelinechannel--pool": {"parameterType": "STRUCT", "isOptional": True},
        "pipelinechannel--taints": {"parameterType": "LIST", "isOptional": True},
        "pipelinechannel--name-Output": {"parameterType": "STRING", "isOptional": True},
    }
    assert own == {
        "imagePullSecret": [
            {"secretNameParameter": {"componentInputParameter": "pipelinechannel--secret"}}
        ]
    }
    assert {setting["name"] for setting in told["late"]} == {
        "nodeSelector", "tolerations", "secretAsEnv", "imagePullSecret", "pvcMount",
    }  # fmt: skip
    volumes = pod_of(told["job"])["spec"]["volumes"]
    assert [volume["name"] for volume in volumes] == ["empty-0"], "what is known is written down"


def test_a_secret_of_the_run_in_a_variable_of_the_configs_is_a_contradiction() -> None:
    place = BARE.model_copy(update={"secrets": {"V": "hub/token"}})
    with pytest.raises(SpecError, match="secrets has `V` as well"):
        compiled(compile_function(at_run_time), place)


@pytest.mark.parametrize(
    ("binding", "named"),
    [
        ({"componentInputParameter": "absent"}, "absent"),
        ({"componentInputParameter": ["x"]}, "['x']"),
        ({"taskOutputParameter": {"producerTask": "t", "outputParameterKey": "o"}}, "t.o"),
        ({"taskOutputParameter": {"producerTask": "work", "outputParameterKey": {}}}, "work.{}"),
    ],
)
def test_a_name_that_is_not_in_the_pipeline_around_is_refused(
    binding: dict[str, Any], named: str
) -> None:
    claims = [{"mountPath": "/d", "pvcNameParameter": binding}]
    with pytest.raises(UnsupportedError) as caught:
        compiled(by_hand("pvcMount", claims))
    (problem,) = caught.value.problems
    assert f"reads `{named}`, which is not in the pipeline" in problem.what
    assert problem.where == "root.dag.tasks.work"


def test_a_broken_setting_is_refused_and_never_crashes() -> None:
    samples = [list(yaml.safe_load_all(compile_function(p))) for p in (seeing, at_run_time)]
    chance, made = random.Random(0), 0
    for _ in range(150):
        text = yaml.safe_dump_all(broken(chance.choice(samples), chance))
        with contextlib.suppress(RequestError):
            compile(text, read(text), {}, BARE)
            made += 1
    assert 20 < made < 140
