"""A distributed step in the definition: its launcher, the CustomJob inside, and what is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from kfp import dsl
from kfp.pipeline_spec import pipeline_spec_pb2

import rekindle
from rekindle.errors import SpecError
from rekindle.ir.compile import compile_function
from rekindle.ir.distribution import Distribution
from rekindle.ir.read.pipeline import read
from rekindle.launch.torchrun import PROFILE
from rekindle.platforms.vertex.compile import compile, launcher
from rekindle.platforms.vertex.limits import limits
from rekindle.platforms.vertex.section import VertexSpec
from tests.platforms.vertex.distributed import PLACE, container, ir


def lowered(label: str = "exec-fit", **place: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(container(label, **place)["args"][0])
    return found


def test_a_launcher_stands_in_place_of_the_step() -> None:
    made = compile(ir(), read(ir()), {}, VertexSpec(**PLACE))
    ((_, content),) = made.files.items()
    spec = json.loads(content)["pipelineSpec"]
    json_format.ParseDict(spec, pipeline_spec_pb2.PipelineSpec())
    tasks = spec["root"]["dag"]["tasks"]
    for name in ("fit", "shell", "fit-2"):
        assert tasks[name]["cachingOptions"] == {}
        assert tasks[name]["retryPolicy"]["maxRetryCount"] == 3
        launcher = spec["deploymentSpec"]["executors"][f"exec-{name}"]["container"]
        assert launcher.keys() == {"image", "command", "args"}
        assert launcher["image"] == PLACE["image"]
        assert launcher["command"] == ["python3", "-m", "rekindle.platforms.vertex.launcher"]
    assert [step.distribution for step in read(json.dumps(spec)).steps()] == [None] * 3
    again = compile(ir(), read(ir()), {}, VertexSpec(**PLACE))
    assert again == made, "the same input gives the same bytes"


def test_what_the_service_fills_in_stands_alone() -> None:
    args = container("exec-shell")["args"]
    assert "{{$" not in args[0]
    assert args[1:] == [
        "{{$}}",
        "pipeline_job_resource_name",
        "{{$.pipeline_job_resource_name}}",
        "pipeline_task_name",
        "{{$.pipeline_task_name}}",
        "pipeline_job_name",
        "{{$.pipeline_job_name}}",
    ]
    words = lowered("exec-shell")["task"]["args"]
    assert words[0] == {"ref": ["inputs", "artifacts", "data", "path"]}
    assert words[-1] == {"ref": ["run", "pipeline_job_name"]}


def test_every_field_of_the_section_reaches_the_job() -> None:
    name = "projects/p/secrets/hf/versions/3"
    told = lowered(secrets={"HF_TOKEN": name})
    pool = {
        "machineSpec": {"machineType": "e2-standard-4"},
        "containerSpec": {"imageUri": "python:3.11"},
        "replicaCount": 1,
    }
    assert told["job"] == {
        "displayName": "fits-fit",
        "jobSpec": {
            "workerPoolSpecs": [pool, pool],
            "scheduling": {"strategy": "STANDARD", "timeout": "7200s", "disableRetries": True},
            "serviceAccount": PLACE["service_account"],
            "network": PLACE["network"],
        },
        "labels": {"rekindle": "true", "team": "search"},
        "encryptionSpec": {"kmsKeyName": PLACE["kms_key"]},
    }
    assert told["task"]["secrets"] == {"HF_TOKEN": name}
    assert told["jobs"] == "gs://bucket/rekindle/jobs"
    again = lowered("exec-fit-2", max_preemptions=4)
    assert (again["failures"], again["preemptions"], again["spot"]) == (1, 4, True)
    assert again["job"]["jobSpec"]["scheduling"]["strategy"] == "SPOT"


def test_the_job_is_what_the_services_proto_takes() -> None:
    api = pytest.importorskip("google.cloud.aiplatform_v1", reason="a developer's dependency")
    for label in ("exec-fit", "exec-shell", "exec-fit-2"):
        json_format.ParseDict(lowered(label)["job"], api.CustomJob.pb(api.CustomJob()))
    for row in machines():
        if row[1]:
            api.AcceleratorType[row[2]]


def machines() -> list[list[Any]]:
    found: list[list[Any]] = limits()["custom_job"]["machines"]
    return found


@dsl.component(base_image="rekindle/train:0.1.0", install_kfp_package=False)
def train(save_to: str) -> bool:
    return True


@dsl.container_component
def without_command():  # type: ignore[no-untyped-def]
    return dsl.ContainerSpec(image="python:3.12-slim", args=["a"])


def of(place: dict[str, Any], cpu: str = "", on_task: str = "", **wish: Any) -> dict[str, Any]:
    """What a step with this distribution becomes."""

    @dsl.pipeline(name="p")
    def pipeline(save_to: str = "gs://b/c") -> None:
        task = train(save_to=save_to)
        rekindle.distribute(task, **{"nodes": 2, **wish})
        if cpu:
            task.set_cpu_limit(cpu)
        if on_task:
            task.set_accelerator_type(on_task).set_accelerator_limit(1)

    text = compile_function(pipeline)
    made = compile(text, read(text), {}, VertexSpec(**{**PLACE, **place}))
    executors = json.loads(*made.files.values())["pipelineSpec"]["deploymentSpec"]["executors"]
    found: dict[str, Any] = json.loads(executors["exec-train"]["container"]["args"][0])
    return found


SPOT = {"spot": True, "checkpoint": "save_to"}
MACHINES = {
    "8 H100": (
        {},
        {"gpus_per_node": 8, "accelerator": "H100"},
        ("a3-highgpu-8g", "NVIDIA_H100_80GB", 8),
    ),
    "the service's name": (
        {},
        {"gpus_per_node": 4, "accelerator": "NVIDIA_L4"},
        ("g2-standard-48", "NVIDIA_L4", 4),
    ),
    "the machine's name": (
        {},
        {"gpus_per_node": 1, "machine": "g2-standard-32"},
        ("g2-standard-32", "NVIDIA_L4", 1),
    ),
    "T4s beside n1": (
        {},
        {"gpus_per_node": 2, "accelerator": "T4"},
        ("n1-standard-16", "NVIDIA_TESLA_T4", 2),
    ),
    "small ones by spot": (
        {},
        {"gpus_per_node": 1, "accelerator": "H100", **SPOT},
        ("a3-highgpu-1g", "NVIDIA_H100_80GB", 1),
    ),
    "small ones by flex-start": (
        {"provisioning": "flex-start"},
        {"gpus_per_node": 1, "accelerator": "H100"},
        ("a3-highgpu-1g", "NVIDIA_H100_80GB", 1),
    ),
    "CPUs": ({}, {"cpu": "9"}, ("e2-standard-16",)),
    "a machine without GPUs": ({}, {"machine": "n2-standard-96"}, ("n2-standard-96",)),
}


@pytest.mark.parametrize("case", MACHINES)
def test_the_machine_is_the_first_that_fits(case: str) -> None:
    place, wish, wanted = MACHINES[case]
    pools = of(place, **wish)["job"]["jobSpec"]["workerPoolSpecs"]
    keys = ("machineType", "acceleratorType", "acceleratorCount")[: len(wanted)]
    wishes = [pool["machineSpec"] for pool in pools]
    assert wishes == [dict(zip(keys, wanted, strict=True))] * 2
    assert {pool["containerSpec"]["imageUri"] for pool in pools} == {PLACE["image"]}


def test_the_primary_is_alone_in_its_pool() -> None:
    counts = [
        [pool["replicaCount"] for pool in of({}, nodes=n)["job"]["jobSpec"]["workerPoolSpecs"]]
        for n in (1, 2, 9)
    ]
    assert counts == [[1], [1, 1], [1, 8]]


def test_flex_start_waits_as_long_as_the_config_says() -> None:
    wish = {"gpus_per_node": 8, "accelerator": "H200", "max_run_hours": 48.0}
    made = of({"provisioning": "flex-start", "max_wait_hours": 2}, **wish)
    assert made["job"]["jobSpec"]["scheduling"] == {
        "strategy": "FLEX_START",
        "timeout": "172800s",
        "disableRetries": True,
        "maxWaitDuration": "7200s",
    }
    standard = of({"provisioning": "standard"}, **SPOT, gpus_per_node=8, accelerator="H200")
    assert standard["job"]["jobSpec"]["scheduling"]["strategy"] == "STANDARD"


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no account": ({"service_account": ""}, {}, "needs an account to run as"),
    "no image": ({"image": None}, {}, "need an image with a digest"),
    "GPUs of no kind": ({}, {"gpus_per_node": 8}, "8 GPUs a node on a GPU of any kind"),
    "3 GPUs": ({}, {"gpus_per_node": 3, "accelerator": "H100"}, r"8 x H100 \(a3-highgpu-8g\)"),
    "an unknown GPU": ({}, {"gpus_per_node": 8, "accelerator": "H900"}, "there is L4, A100"),
    "another GPU": (
        {},
        {"gpus_per_node": 8, "accelerator": "H100", "machine": "a2-highgpu-8g"},
        "on a2-highgpu-8g H100",
    ),
    "an unknown machine": ({}, {"machine": "e2-standard-5"}, "take e2-standard-"),
    "a great many CPUs": ({}, {"cpu": "900"}, "that much CPU or memory"),
    "a small H100 on demand": (
        {},
        {"gpus_per_node": 1, "accelerator": "H100"},
        "as spot or flex-start only",
    ),
    "a T4 by flex-start": (
        {"provisioning": "flex-start"},
        {"gpus_per_node": 1, "accelerator": "T4"},
        "flex-start is for L4",
    ),
    "spot unasked": ({"provisioning": "spot"}, {}, "is not marked as interruptible"),
    "too long": ({}, {"max_run_hours": 200.0}, "longer than a job does, 168 h"),
    "accelerators of the task": ({}, {"on_task": "NVIDIA_L4"}, "say it in distribute"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_job_can_run_is_refused_with_a_fix(case: str) -> None:
    place, wish, says = REFUSED[case]
    with pytest.raises(SpecError, match=says) as caught:
        of(place, **wish)
    assert caught.value.problems[0].fix
    assert caught.value.problems[0].where


def test_a_container_without_a_command_cannot_be_a_node() -> None:
    @dsl.pipeline(name="p")
    def pipeline() -> None:
        rekindle.distribute(without_command(), nodes=2)

    text = compile_function(pipeline)
    with pytest.raises(SpecError, match="has no command"):
        compile(text, read(text), {}, VertexSpec(**PLACE))


def test_the_permissions_have_reasons_and_roles() -> None:
    text = (Path(__file__).parents[3] / "docs" / "vertex.md").read_text()
    rules = limits()
    for name, *_ in [*rules["permissions"], rules["secret_permission"]]:
        assert f"`{name}`" in text, name


def test_nodes_are_told_of_the_network_of_their_machines_and_a_single_one_is_not() -> None:
    step = next(step for step in read(ir()).steps() if step.name == "fit")
    for nodes, expected in ((2, "/usr/local/gib/scripts/set_nccl_env.sh"), (1, None)):
        over = Distribution(nodes, 8, machine="a3-ultragpu-8g")
        made = launcher(dataclasses.replace(step, distribution=over), "p", VertexSpec(**PLACE))
        assert json.loads(made["args"][0])["task"]["env"].get(PROFILE) == expected
