"""A distributed step as a TrainJob: whole objects, names, and what is refused."""

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from kfp import components, dsl, kubernetes

import rekindle
from rekindle.errors import SpecError, StepError, UnsupportedError
from rekindle.ir.compile import compile_function
from rekindle.ir.edit.uris import PREFIX
from rekindle.ir.read.pipeline import read
from rekindle.platforms.kubeflow import trainjob
from rekindle.platforms.kubeflow.compile import RESULT_OUTPUT, compile
from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.platforms.kubeflow.settings import NODE
from rekindle.platforms.kubeflow.workflow import ending
from tests.platforms.kubeflow.launching import PLACE, pipeline
from tests.servers.kubeflow.kubernetes import MANIFESTS
from tests.servers.kubeflow.pods import problems as pod_problems
from tests.servers.kubeflow.pods import template_of
from tests.servers.kubeflow.schema import problems

GOLDEN = Path(__file__).with_name("golden") / "two-nodes.yaml"
OWNER = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "run", "uid": "u-1"}
RICH = KubeflowSpec(
    pipeline_root="s3://b/kfp",
    image="example.com/ours@sha256:1",
    queue="gpus",
    spot_nodes={"cloud.example.com/spot": "true"},
    accelerator_nodes={"H100": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}},
    secrets={"HF_TOKEN": "hub/token", "SECOND": "words/first"},
)


@dsl.component(base_image="rekindle/train:0.1.0", install_kfp_package=False)
def work(save_to: str = "", of: str = "") -> int:
    return 1


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def alone() -> str:
    return "s"


@dsl.pipeline(name="rich")
def rich():
    task = (
        work(save_to="s3://b/c").set_cpu_limit("64").set_cpu_request("32").set_memory_limit("900G")
    )
    rekindle.distribute(
        task,
        nodes=4,
        gpus_per_node=8,
        accelerator="H100",
        machine="a3-highgpu-8g",
        spot=True,
        checkpoint="save_to",
        max_run_hours=0.5,
    )
    kubernetes.use_secret_as_env(task, "own", {"key": "WORD"})
    kubernetes.mount_pvc(task, pvc_name="data", mount_path="/mnt/data", sub_path="a")
    kubernetes.add_node_selector(task, "pool", "big")
    kubernetes.add_toleration(task, key="big", operator="Exists", effect="NoSchedule")
    kubernetes.set_image_pull_secrets(task, ["pull"])


def step_of(source: Any) -> Any:
    return next(s for s in read(compile_function(source)).steps() if s.distribution)


def documents(source: Any, place: KubeflowSpec) -> list[Any]:
    text = compile_function(source)
    (content,) = compile(text, read(text), {}, place).files.values()
    return list(yaml.safe_load_all(content))


def test_all_that_a_step_asks_for_is_in_its_trainjob() -> None:
    template = trainjob.template(step_of(rich), RICH)
    made = trainjob.manifest(
        template,
        name="work-1",
        identity="u-1/run.root.work",
        attempt=2,
        owner=OWNER,
        service_account="runner",
        result="s3://b/r/work-1.json",
        payload=["abc"],
        secret="work-1-5a5a",
    )
    assert problems("TrainJob", made) == []
    assert made == {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {
            "name": "work-1",
            "labels": {
                "app.kubernetes.io/managed-by": "rekindle",
                "kueue.x-k8s.io/queue-name": "gpus",
                "rekindle.dev/step": trainjob.digest_of("u-1/run.root.work"),
                "rekindle.dev/attempt": "2",
            },
            "annotations": {
                "rekindle.dev/result": "s3://b/r/work-1.json",
                "rekindle.dev/identity": "u-1/run.root.work",
            },
            "ownerReferences": [OWNER],
        },
        "spec": {
            "suspend": True,
            "activeDeadlineSeconds": 1_800,
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": "rekindle",
            },
            "trainer": {
                "image": "example.com/ours@sha256:1",
                "command": ["python3", "-m", "rekindle.platforms.kubeflow.node"],
                "args": ["abc"],
                "numNodes": 4,
                "numProcPerNode": 8,
                "resourcesPerNode": {
                    "limits": {"cpu": "64", "memory": "900G", "nvidia.com/gpu": "8"},
                    "requests": {"cpu": "32", "memory": "900G", "nvidia.com/gpu": "8"},
                },
                "env": [
                    {
                        "name": "HF_TOKEN",
                        "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}},
                    },
                    {
                        "name": "SECOND",
                        "valueFrom": {"secretKeyRef": {"name": "words", "key": "first"}},
                    },
                    {"name": "WORD", "valueFrom": {"secretKeyRef": {"name": "own", "key": "key"}}},
                    {
                        "name": "REKINDLE_JOB_SECRET",
                        "valueFrom": {"secretKeyRef": {"name": "work-1-5a5a", "key": "secret"}},
                    },
                ],
            },
            "runtimePatches": [
                {
                    "manager": "rekindle.dev/launcher",
                    "trainingRuntimeSpec": {
                        "template": {
                            "spec": {
                                "replicatedJobs": [
                                    {
                                        "name": "node",
                                        "template": {
                                            "spec": {
                                                "template": {
                                                    "spec": {
                                                        "serviceAccountName": "runner",
                                                        "nodeSelector": {
                                                            "pool": "big",
                                                            "node.kubernetes.io/instance-type": "a3-highgpu-8g",
                                                            "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
                                                            "cloud.example.com/spot": "true",
                                                        },
                                                        "tolerations": [
                                                            {
                                                                "key": "cloud.example.com/spot",
                                                                "operator": "Equal",
                                                                "value": "true",
                                                            },
                                                            {
                                                                "key": "big",
                                                                "operator": "Exists",
                                                                "effect": "NoSchedule",
                                                            },
                                                        ],
                                                        "imagePullSecrets": [{"name": "pull"}],
                                                        "volumes": [
                                                            {
                                                                "name": "claim-0",
                                                                "persistentVolumeClaim": {
                                                                    "claimName": "data"
                                                                },
                                                            }
                                                        ],
                                                        "containers": [
                                                            {
                                                                "name": "node",
                                                                "volumeMounts": [
                                                                    {
                                                                        "name": "claim-0",
                                                                        "mountPath": "/mnt/data",
                                                                        "subPath": "a",
                                                                    }
                                                                ],
                                                            }
                                                        ],
                                                    }
                                                }
                                            }
                                        },
                                    }
                                ]
                            }
                        }
                    },
                }
            ],
        },
    }


def test_only_nodes_of_trainings_reach_nodes_by_the_labels_that_their_pods_have() -> None:
    text = (trainjob.__file__).replace("trainjob.py", "manifests/networkpolicy.yaml")
    (policy,) = yaml.safe_load_all(Path(text).read_text())
    nodes = {
        "matchExpressions": [
            {"key": "jobset.sigs.k8s.io/jobset-name", "operator": "Exists"},
            {"key": "jobset.sigs.k8s.io/replicatedjob-name", "operator": "In", "values": [NODE]},
        ]
    }
    assert policy["spec"] == {
        "podSelector": nodes,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": nodes}]}],
    }


def test_the_golden_file_is_what_a_step_on_two_nodes_becomes(
    request: pytest.FixtureRequest,
) -> None:
    text = compile_function(pipeline)
    (content,) = compile(text, read(text), {}, PLACE).files.values()
    if request.config.getoption("--regenerate"):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_bytes(content)
    assert content == GOLDEN.read_bytes(), "run `make generate` and read the difference"


@pytest.mark.slow
def test_the_same_input_gives_the_same_bytes_in_any_process_and_loads_nothing_heavy(
    tmp_path: Path,
) -> None:
    source = tmp_path / "p.yaml"
    source.write_text(compile_function(rich))
    code = (
        "import sys, pathlib, json\n"
        "from rekindle.ir.read.pipeline import read\n"
        "from rekindle.platforms.kubeflow.compile import compile\n"
        "from rekindle.platforms.kubeflow.section import KubeflowSpec\n"
        "text = pathlib.Path(sys.argv[1]).read_text()\n"
        "place = KubeflowSpec(**json.loads(sys.argv[2]))\n"
        "sys.stdout.buffer.write(*compile(text, read(text), {}, place).files.values())\n"
        "heavy = {'kfp', 'torch', 'kubernetes', 'fsspec', 'kubeflow_trainer_api'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)\n"
    )
    made = [
        subprocess.run(
            [sys.executable, "-c", code, str(source), RICH.model_dump_json()],
            cwd=folder,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed, folder in (("1", tmp_path), ("2", Path.cwd()), ("3", Path("/")))
    ]
    assert made[0]
    assert len(set(made)) == 1


def test_nodes_are_pods_of_the_standard_restricted_and_of_an_account_of_their_own() -> None:
    """As the Pod Security Standards have it in Kubernetes 1.34."""
    (command,) = [
        executor["container"]["args"]
        for executor in documents(pipeline, PLACE)[0]["deploymentSpec"]["executors"].values()
        if executor["container"]["command"][-1] == "rekindle.platforms.kubeflow.launcher"
    ]
    definition = json.loads(command[0])
    assert definition["account"] == "rekindle-node"
    made = trainjob.manifest(
        definition["job"],
        name="a-1",
        identity="i",
        attempt=1,
        owner=OWNER,
        service_account=definition["account"],
        result="s3://b/r",
        payload=["x"],
        secret="s",
    )
    runtime = yaml.safe_load((MANIFESTS / "runtime.yaml").read_text())
    template = template_of(runtime, made)
    assert list(pod_problems(template)) == []
    pod, (node,) = template["spec"], template["spec"]["containers"]
    assert pod["serviceAccountName"] == "rekindle-node"
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert node["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert all(set(volume) <= {"name", "emptyDir"} for volume in pod["volumes"])


def test_kfp_takes_it_and_nothing_of_the_extension_is_left() -> None:
    spec, settings = documents(pipeline, PLACE)
    components.load_component_from_text(yaml.safe_dump(spec))
    assert list(settings["platforms"]) == ["kubernetes"]
    graph = read(yaml.safe_dump_all([spec, settings]))
    launcher, maker, reader = (graph.find(name) for name in ("train", "make", "look"))
    assert launcher.distribution is None
    assert (launcher.cache, maker.cache, reader.cache) == (False, True, True)
    assert launcher.retry.count == 5
    assert launcher.retry.cap_seconds > 48 * 3_600
    assert launcher.inputs.artifacts == {}
    assert list(launcher.outputs.artifacts) == ["model", RESULT_OUTPUT]
    assert f"{PREFIX}data" in maker.outputs.parameters
    assert reader.inputs.artifacts.keys() == {"model"}
    assert launcher.container.resources.accelerator_type == ""
    word = ("WORD", "words", "first")
    for step in (maker, reader):
        assert [(s.env, s.name.value, s.key) for s in step.secrets] == [word]
    # the launcher opens KFP's own store, too
    own = "mlpipeline-minio-artifact"
    keys = [("FSSPEC_MINIO_KEY", own, "accesskey"), ("FSSPEC_MINIO_SECRET", own, "secretkey")]
    assert [(s.env, s.name.value, s.key) for s in launcher.secrets] == [word, *keys]


def test_a_launcher_has_of_the_settings_of_its_nodes_what_its_own_pod_needs() -> None:
    spec, settings = documents(rich, RICH)
    (executor,) = settings["platforms"]["kubernetes"]["deploymentSpec"]["executors"].values()
    assert list(executor) == ["imagePullSecret", "secretAsEnv"]
    assert [one["secretName"] for one in executor["secretAsEnv"]] == ["hub", "words"]
    container = spec["deploymentSpec"]["executors"]["exec-work"]["container"]
    assert container["image"] == RICH.image
    job = json.loads(container["args"][0])["job"]
    assert job["spec"]["trainer"]["image"] == RICH.image, "our own image stands for rekindle/train"


def test_secrets_reach_steps_on_one_node_beside_those_of_their_own() -> None:
    @dsl.pipeline(name="one")
    def one():
        kubernetes.use_secret_as_env(alone(), "own", {"key": "OWN"})
        work()

    spec, settings = documents(
        one, KubeflowSpec(image="i", secrets={"HF_TOKEN": "hub/token"}, pipeline_root="gs://b")
    )
    graph = read(yaml.safe_dump_all([spec, settings]))
    found = {s.name: [(x.env, x.name.value, x.key) for x in s.secrets] for s in graph.steps()}
    hub = ("HF_TOKEN", "hub", "token")
    assert found == {"alone": [("OWN", "own", "key"), hub], "work": [hub]}


@dsl.pipeline(name="p")
def run_time_resources(cpu: str = "4"):
    rekindle.distribute(work().set_cpu_limit(cpu), nodes=2)


@dsl.pipeline(name="p")
def spot():
    rekindle.distribute(work(save_to="x"), nodes=2, spot=True, checkpoint="save_to")


@dsl.pipeline(name="p")
def accelerator():
    rekindle.distribute(work(), nodes=2, gpus_per_node=8, accelerator="B200")


@dsl.pipeline(name="p")
def plain():
    rekindle.distribute(work(), nodes=2)


REFUSED = [
    (plain, KubeflowSpec(), "rekindle's image launches", "platforms.kubeflow.image"),
    (spot, PLACE, "nothing says which nodes these are", "platforms.kubeflow.spot_nodes"),
    (
        accelerator,
        PLACE,
        "nothing says which nodes have it",
        "platforms.kubeflow.accelerator_nodes.B200",
    ),
    (run_time_resources, PLACE, "resources depend on an input", "root.dag.tasks.work"),
]


@pytest.mark.parametrize(
    ("source", "place", "what", "where"), REFUSED, ids=lambda v: getattr(v, "name", "")
)
def test_what_a_trainjob_cannot_carry_is_refused_with_its_place(source, place, what, where) -> None:
    with pytest.raises((SpecError, UnsupportedError)) as caught:
        documents(source, place)
    (problem,) = caught.value.problems
    assert what in problem.what
    assert problem.where == where
    assert problem.fix


@given(st.text(max_size=80), st.text(min_size=1), st.integers(1, 10_000))
@example("train" * 20, "run", 9_999)
@example("9-to-5", "run", 1)
def test_a_name_leaves_room_for_the_names_of_its_pods(
    step: str, identity: str, attempt: int
) -> None:
    name = trainjob.job_name(step, identity, attempt)
    body = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {"runtimeRef": {"name": "r"}},
    }
    assert problems("TrainJob", body) == []
    assert name == trainjob.job_name(step, identity, attempt)
    assert name != trainjob.job_name(step, identity, attempt + 1)
    assert name != trainjob.job_name(step, f"{identity}x", attempt)


def test_the_worked_example_of_a_name() -> None:
    digest = trainjob.digest_of("u/run.root.train")
    assert trainjob.job_name("train", "u/run.root.train", 1) == f"train-{digest}"
    assert trainjob.job_name("Train_it!", "u/run.root.train", 2) == f"train-it-{digest}-2"


@given(st.dictionaries(st.text(), st.text() | st.lists(st.integers())))
def test_what_is_packed_is_what_is_unpacked(task: dict[str, Any]) -> None:
    words = trainjob.packed(task)
    assert all(len(word) <= 65_536 and "$" not in word for word in words)
    assert trainjob.unpacked(words) == task


def test_a_task_may_fill_several_arguments_but_not_the_whole_store() -> None:
    import random

    noise = random.Random(0).randbytes(150_000).hex()
    words = trainjob.packed({"source": noise})
    assert len(words) > 2
    assert trainjob.unpacked(words) == {"source": noise}
    with pytest.raises(StepError, match="pass what is large as an artifact"):
        trainjob.packed({"source": random.Random(0).randbytes(1_000_000).hex()})


AT_TEN = datetime.datetime(2026, 11, 22, 10, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"metadata": {"uid": "other"}}, "its Workflow is gone"),
        (
            {"metadata": {"uid": "u", "deletionTimestamp": "2026-11-22T09:00:00Z"}},
            "its Workflow is being deleted",
        ),
        ({"spec": {"shutdown": "Stop"}}, "it was shut down (Stop)"),
        ({"spec": {"activeDeadlineSeconds": 0}}, "it was terminated"),
        ({"spec": {"activeDeadlineSeconds": 3_600}}, "its 3600 s are over"),
        ({"spec": {"activeDeadlineSeconds": 3_601}}, ""),
        ({"status": {"phase": "Failed"}}, "it is over (Failed)"),
        ({"status": {"phase": "Pending"}}, ""),
    ],
)
def test_when_a_run_is_ending(changes: dict[str, Any], reason: str) -> None:
    workflow = {
        "metadata": {"uid": "u"},
        "spec": {},
        "status": {"phase": "Running", "startedAt": "2026-11-22T09:00:00Z"},
        **changes,
    }
    assert ending(workflow, "u", AT_TEN) == reason


def test_a_run_whose_workflow_is_gone_is_ending() -> None:
    assert ending(None, "u", AT_TEN) == "its Workflow is gone"


def test_the_shipped_runtime_is_one_that_trainer_takes() -> None:
    manifests = Path(trainjob.__file__).with_name("manifests")
    runtime = yaml.safe_load((manifests / "runtime.yaml").read_text())
    assert problems("ClusterTrainingRuntime", runtime) == []
    assert runtime["metadata"]["name"] == KubeflowSpec().runtime
    spec = runtime["spec"]["template"]["spec"]
    assert spec["failurePolicy"]["maxRestarts"] > 0
    assert "ttlSecondsAfterFinished" not in json.dumps(runtime)
    (job,) = spec["replicatedJobs"]
    assert job["name"] == NODE
    pod = job["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["name"] == NODE
    assert {"medium": "Memory"} in [volume["emptyDir"] for volume in pod["volumes"]]
    broken = json.loads(json.dumps(runtime).replace("failurePolicy", "failurePolicie"))
    assert problems("ClusterTrainingRuntime", broken)
