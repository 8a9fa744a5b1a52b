"""Settings of kfp-kubernetes on a step of several nodes: each as its TrainJob has it, what of them the
launcher has, what is refused, and who contradicts whom."""

from collections.abc import Callable
from typing import Any

import pytest
from kfp import dsl, kubernetes
from kfp.dsl import PipelineTask

from rekindle.errors import SpecError, UnsupportedError
from rekindle.ir.compile import compile_function
from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.platforms.kubeflow.settings import Misfit, piece
from tests.platforms.kubeflow.launching import PLACE
from tests.support.kubeflow_settings import BARE, by_hand, compiled, pod_of, text_of, work

EXECUTOR = "platforms.kubernetes.deploymentSpec.executors.exec-work"


def mounted(mount: dict[str, Any], **volume: Any) -> dict[str, Any]:
    return {
        "spec": {
            "volumes": [{"name": mount["name"], **volume}],
            "containers": [{"name": "node", "volumeMounts": [mount]}],
        },
        "env": [],
    }


def variable(env: str, kind: str, **source: Any) -> dict[str, Any]:
    return {"spec": {}, "env": [{"name": env, "valueFrom": {kind: source}}]}


IN_POOL = [{"key": "pool", "operator": "In", "values": ["a", "b"]}]
NEEDED = {"nodeSelectorTerms": [{"matchExpressions": IN_POOL}]}
CARRIED: dict[str, tuple[Callable[[PipelineTask], Any], dict[str, Any]]] = {
    "a label of the node": (
        lambda task: kubernetes.add_node_selector(task, "pool", "big"),
        {"spec": {"nodeSelector": {"pool": "big"}}, "env": []},
    ),
    "labels of the node as JSON": (
        lambda task: kubernetes.add_node_selector_json(task, {"pool": "big"}),
        {"spec": {"nodeSelector": {"pool": "big"}}, "env": []},
    ),
    "a taint for half a minute, which is a whole number": (
        lambda task: kubernetes.add_toleration(
            task, key="k", operator="Exists", effect="NoExecute", toleration_seconds=30
        ),
        {
            "spec": {
                "tolerations": [
                    {
                        "key": "k",
                        "operator": "Exists",
                        "effect": "NoExecute",
                        "tolerationSeconds": 30,
                    },
                ]
            },
            "env": [],
        },
    ),
    "nodes that are needed": (
        lambda task: kubernetes.add_node_affinity(task, match_expressions=IN_POOL),
        {
            "spec": {
                "affinity": {
                    "nodeAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": NEEDED,
                    }
                }
            },
            "env": [],
        },
    ),
    "nodes that are wished for, and needed as JSON": (
        lambda task: [
            kubernetes.add_node_affinity(task, match_expressions=IN_POOL, weight=5),
            kubernetes.add_node_affinity_json(
                task, {"requiredDuringSchedulingIgnoredDuringExecution": NEEDED}
            ),
        ],
        {
            "spec": {
                "affinity": {
                    "nodeAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": NEEDED,
                        "preferredDuringSchedulingIgnoredDuringExecution": [
                            {"weight": 5, "preference": {"matchExpressions": IN_POOL}},
                        ],
                    }
                }
            },
            "env": [],
        },
    ),
    "a secret that may be missing, in a variable": (
        lambda task: kubernetes.use_secret_as_env(task, "s", {"k": "V"}, optional=True),
        variable("V", "secretKeyRef", name="s", key="k", optional=True),
    ),
    "a secret as files": (
        lambda task: kubernetes.use_secret_as_volume(task, "s", mount_path="/s"),
        mounted(
            {"name": "secret-0", "mountPath": "/s"}, secret={"secretName": "s", "optional": False}
        ),
    ),
    "a config map in a variable": (
        lambda task: kubernetes.use_config_map_as_env(task, "c", {"k": "W"}),
        variable("W", "configMapKeyRef", name="c", key="k"),
    ),
    "a config map as files": (
        lambda task: kubernetes.use_config_map_as_volume(task, "c", mount_path="/c", optional=True),
        mounted({"name": "config-0", "mountPath": "/c"}, configMap={"name": "c", "optional": True}),
    ),
    "a claim, part of it": (
        lambda task: kubernetes.mount_pvc(task, "data", mount_path="/d", sub_path="a"),
        mounted(
            {"name": "claim-0", "mountPath": "/d", "subPath": "a"},
            persistentVolumeClaim={"claimName": "data"},
        ),
    ),
    "a claim of each pod": (
        lambda task: kubernetes.add_ephemeral_volume(
            task,
            "scratch",
            "/e",
            ["ReadWriteOnce"],
            "5Gi",
            storage_class_name="fast",
            labels={"l": "m"},
        ),
        mounted(
            {"name": "ephemeral-0", "mountPath": "/e"},
            ephemeral={
                "volumeClaimTemplate": {
                    "metadata": {"labels": {"l": "m"}},
                    "spec": {
                        "accessModes": ["ReadWriteOnce"],
                        "storageClassName": "fast",
                        "resources": {"requests": {"storage": "5Gi"}},
                    },
                }
            },
        ),
    ),
    "an empty folder in memory": (
        lambda task: kubernetes.empty_dir_mount(task, "work", "/x", "Memory", "1Gi"),
        mounted(
            {"name": "empty-0", "mountPath": "/x"},
            emptyDir={"medium": "Memory", "sizeLimit": "1Gi"},
        ),
    ),
    "a field of the pod in a variable": (
        lambda task: kubernetes.use_field_path_as_env(task, "X", "status.hostIP"),
        variable("X", "fieldRef", fieldPath="status.hostIP"),
    ),
    "a label and an annotation of the pod": (
        lambda task: [
            kubernetes.add_pod_label(task, "team", "a"),
            kubernetes.add_pod_annotation(task, "n", "o"),
        ],
        {"metadata": {"labels": {"team": "a"}, "annotations": {"n": "o"}}, "spec": {}, "env": []},
    ),
    "secrets to pull the image with, each once": (
        lambda task: kubernetes.set_image_pull_secrets(task, ["p", "q", "p"]),
        {"spec": {"imagePullSecrets": [{"name": "p"}, {"name": "q"}]}, "env": []},
    ),
    "a user that is not root, without capabilities, as KFP has it": (
        lambda task: kubernetes.set_security_context(task, run_as_user=7, run_as_non_root=True),
        {
            "spec": {
                "containers": [
                    {
                        "name": "node",
                        "securityContext": {
                            "capabilities": {"drop": ["ALL"]},
                            "runAsUser": 7,
                            "runAsNonRoot": True,
                        },
                    }
                ]
            },
            "env": [],
        },
    ),
    "the pull policy that Kubernetes would have": (
        lambda task: kubernetes.set_image_pull_policy(task, "IfNotPresent"),
        {"spec": {}, "env": []},
    ),
}


@pytest.mark.parametrize("case", CARRIED)
def test_a_setting_is_in_the_trainjob_as_a_pod_has_it(case: str) -> None:
    wish, expected = CARRIED[case]
    _, _, told = compiled(text_of(wish))
    assert pod_of(told["job"]) == expected


WRITTEN_BY_HAND: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "the size of shared memory": (
        "enabledSharedMemory",
        {"volumeName": "shm", "size": "8Gi"},
        mounted(
            {"name": "memory-0", "mountPath": "/dev/shm"},
            emptyDir={"medium": "Memory", "sizeLimit": "8Gi"},
        ),
    ),
    "pods to be near to, and pods to be far from": (
        "podAffinity",
        [
            {"topologyKey": "zone", "matchPodLabels": {"a": "b"}, "namespaces": ["n"]},
            {
                "topologyKey": "host",
                "anti": True,
                "weight": 3.0,
                "matchNamespaceLabels": {"c": "d"},
            },
        ],
        {
            "spec": {
                "affinity": {
                    "podAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": [
                            {
                                "topologyKey": "zone",
                                "namespaces": ["n"],
                                "labelSelector": {"matchLabels": {"a": "b"}},
                            },
                        ]
                    },
                    "podAntiAffinity": {
                        "preferredDuringSchedulingIgnoredDuringExecution": [
                            {
                                "weight": 3,
                                "podAffinityTerm": {
                                    "topologyKey": "host",
                                    "namespaceSelector": {"matchLabels": {"c": "d"}},
                                },
                            },
                        ]
                    },
                }
            },
            "env": [],
        },
    ),
    "a claim as kfp-kubernetes 1 wrote it": (
        "pvcMount",
        [{"constant": "data", "mountPath": "/d"}],
        mounted(
            {"name": "claim-0", "mountPath": "/d"}, persistentVolumeClaim={"claimName": "data"}
        ),
    ),
    "a secret as kfp-kubernetes 1 wrote it": (
        "secretAsVolume",
        [{"secretName": "s", "mountPath": "/s"}],
        mounted(
            {"name": "secret-0", "mountPath": "/s"}, secret={"secretName": "s", "optional": False}
        ),
    ),
}


@pytest.mark.parametrize("case", WRITTEN_BY_HAND)
def test_a_setting_written_by_hand_is_in_the_trainjob_as_a_pod_has_it(case: str) -> None:
    setting, value, expected = WRITTEN_BY_HAND[case]
    _, _, told = compiled(by_hand(setting, value))
    assert pod_of(told["job"]) == expected


def test_all_of_them_together_are_one_pod_and_the_launcher_has_what_it_needs_of_them() -> None:
    wishes = [wish for case, (wish, _) in CARRIED.items() if case != "labels of the node as JSON"]
    _, own, told = compiled(text_of(*wishes))
    assert list(own) == ["imagePullSecret", "podMetadata", "securityContext"]
    pod = pod_of(told["job"])
    assert [one["name"] for one in pod["env"]] == ["V", "W", "X"]
    (node,) = pod["spec"]["containers"]
    volumes = [one["name"] for one in pod["spec"]["volumes"]]
    assert volumes == [one["name"] for one in node["volumeMounts"]]
    assert sorted(volumes) == ["claim-0", "config-0", "empty-0", "ephemeral-0", "secret-0"]
    assert set(pod["spec"]) == {
        "affinity",
        "containers",
        "imagePullSecrets",
        "nodeSelector",
        "tolerations",
        "volumes",
    }


SPOT = KubeflowSpec(
    pipeline_root="s3://b/kfp",
    image="i",
    secrets={"HF_TOKEN": "hub/token"},
    spot_nodes={"pool": "spot"},
    accelerator_nodes={"H100": {"gpu": "h100"}},
)
REFUSED: dict[str, tuple[str, str, str, KubeflowSpec]] = {
    "a setting that is new": (
        by_hand("somethingNew", 1),
        "rekindle knows nothing of it",
        "somethingNew",
        BARE,
    ),
    "a pull policy that is not the usual": (
        text_of(lambda task: kubernetes.set_image_pull_policy(task, "Always")),
        "`imagePullPolicy` Always has no field in a TrainJob",
        "imagePullPolicy",
        BARE,
    ),
    "a variable of Trainer's": (
        text_of(lambda task: kubernetes.use_field_path_as_env(task, "PET_NNODES", "metadata.name")),
        "`PET_NNODES` in the environment is Trainer's own",
        "fieldPathAsEnv",
        BARE,
    ),
    "a queue as a label": (
        text_of(lambda task: kubernetes.add_pod_label(task, "kueue.x-k8s.io/queue-name", "q")),
        "is for a whole TrainJob",
        "podMetadata",
        BARE,
    ),
    "a label that JobSet reads": (
        text_of(lambda task: kubernetes.add_pod_label(task, "jobset.sigs.k8s.io/jobset-name", "q")),
        "is not for a step to set",
        "podMetadata",
        BARE,
    ),
    "labels beside JSON": (
        text_of(
            lambda task: kubernetes.add_node_selector(task, "a", "b"),
            lambda task: kubernetes.add_node_selector_json(task, {"a": "b"}),
        ),
        "of which KFP drops the labels",
        "nodeSelector",
        BARE,
    ),
    "a toleration with a word of Python's": (
        by_hand("tolerations", [{"key": "k", "toleration_seconds": 3}]),
        "a toleration has `toleration_seconds`",
        "tolerations",
        BARE,
    ),
    "a volume without a path": (
        by_hand("emptyDirMounts", [{"volumeName": "x"}]),
        "is not as kfp-kubernetes writes it ('mountPath')",
        "emptyDirMounts",
        BARE,
    ),
    "claims that are no list": (
        by_hand("pvcMount", 3),
        "is not as kfp-kubernetes writes it",
        "pvcMount",
        BARE,
    ),
    "a name with a placeholder in it": (
        by_hand(
            "secretAsVolume",
            [
                {
                    "mountPath": "/s",
                    "secretNameParameter": {
                        "runtimeValue": {"constant": "{{$.inputs.parameters['x']}}-s"},
                    },
                }
            ],
        ),
        "which Kubeflow itself does not fill in there",
        "secretAsVolume",
        BARE,
    ),
    "two volumes at one path": (
        text_of(
            lambda task: kubernetes.mount_pvc(task, "data", mount_path="/x"),
            lambda task: kubernetes.empty_dir_mount(task, "e", "/x/"),
        ),
        "`spec.containers.node.volumeMounts` would have two of the name `/x`",
        "pvcMount",
        BARE,
    ),
    "two claims at one path": (
        text_of(
            lambda task: kubernetes.mount_pvc(task, "data", mount_path="/x"),
            lambda task: kubernetes.mount_pvc(task, "more", mount_path="/x"),
        ),
        "two volumes would be mounted at /x",
        "pvcMount",
        BARE,
    ),
    "one variable from two sources": (
        text_of(
            lambda task: kubernetes.use_config_map_as_env(task, "c", {"k": "V"}),
            lambda task: kubernetes.use_field_path_as_env(task, "V", "metadata.name"),
        ),
        "`env` would have two of the name `V`",
        "fieldPathAsEnv",
        BARE,
    ),
    "another secret than the config's": (
        text_of(lambda task: kubernetes.use_secret_as_env(task, "own", {"k": "HF_TOKEN"})),
        "`env` would have two of the name `HF_TOKEN`",
        "secretAsEnv[0].keyToEnv[0]",
        SPOT,
    ),
    "another pool than that of spot machines": (
        text_of(
            lambda task: kubernetes.add_node_selector(task, "pool", "big"),
            spot=True,
            checkpoint="of",
        ),
        "`spec.nodeSelector.pool` would be both 'spot' and 'big'",
        "nodeSelector",
        SPOT,
    ),
    "another GPU than that of the accelerator": (
        text_of(
            lambda task: kubernetes.add_node_selector(task, "gpu", "b200"),
            gpus_per_node=8,
            accelerator="H100",
        ),
        "`spec.nodeSelector.gpu` would be both 'h100' and 'b200'",
        "nodeSelector",
        SPOT,
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_nodes_cannot_have_is_refused_with_its_place(case: str) -> None:
    text, what, where, place = REFUSED[case]
    with pytest.raises((SpecError, UnsupportedError)) as caught:
        compiled(text, place)
    (problem,) = caught.value.problems
    assert what in problem.what
    assert problem.where == f"{EXECUTOR}.{where}"
    assert problem.fix


def test_a_variable_is_not_both_a_value_and_a_reference() -> None:
    def wish(task: PipelineTask) -> None:
        task.set_env_variable("HF_TOKEN", "x").set_env_variable("V", "y")
        kubernetes.use_config_map_as_env(task, "c", {"k": "V"})

    with pytest.raises(SpecError) as caught:
        compiled(text_of(wish), SPOT)
    assert [problem.where for problem in caught.value.problems] == ["root.dag.tasks.work"] * 2
    assert "`HF_TOKEN` is in its environment twice" in caught.value.problems[0].what


def test_spot_nodes_that_are_no_accelerator_nodes_are_a_contradiction() -> None:
    place = SPOT.model_copy(update={"accelerator_nodes": {"H100": {"pool": "h100"}}})
    text = text_of(gpus_per_node=8, accelerator="H100", spot=True, checkpoint="of")
    with pytest.raises(SpecError) as caught:
        compiled(text, place)
    (problem,) = caught.value.problems
    assert "`spec.nodeSelector.pool` would be both 'h100' and 'spot'" in problem.what
    assert problem.where == "platforms.kubeflow.spot_nodes"


def test_what_a_step_says_again_is_no_contradiction() -> None:
    text = text_of(
        lambda task: kubernetes.add_node_selector(task, "pool", "spot"),
        lambda task: kubernetes.use_secret_as_env(task, "hub", {"token": "HF_TOKEN"}),
        spot=True,
        checkpoint="of",
    )
    pod = pod_of(compiled(text, SPOT)[2]["job"])
    assert pod["spec"]["nodeSelector"] == {"pool": "spot"}
    assert len(pod["env"]) == 1


def test_a_step_on_one_node_may_not_take_another_secret_than_the_configs() -> None:
    @dsl.pipeline(name="one")
    def one():
        kubernetes.use_secret_as_env(work(), "own", {"k": "WORD"})

    with pytest.raises(
        SpecError, match="takes WORD from a secret, and the config from words/first"
    ):
        compiled(compile_function(one), PLACE)


def test_an_image_without_a_tag_is_pulled_always() -> None:
    for image in ("a/b", "a/b:latest", "host:5000/a"):
        assert piece("imagePullPolicy", "Always", image) == {}
    for image in ("a/b:1", "a/b@sha256:0", "host:5000/a:latest@sha256:0"):
        assert piece("imagePullPolicy", "IfNotPresent", image) == {}
        with pytest.raises(Misfit):
            piece("imagePullPolicy", "Always", image)


@pytest.mark.parametrize(
    ("root", "is_taken"),
    [
        ("s3://bucket/kfp", True),
        ("gs://bucket", True),
        ("minio://mlpipeline/v2", True),
        ("abfs://container/kfp", False),
        ("file:///mnt/kfp", False),
    ],
)
def test_a_pipeline_root_is_one_that_kfp_can_open(root: str, is_taken: bool) -> None:
    if is_taken:
        assert KubeflowSpec(pipeline_root=root).pipeline_root == root
    else:
        with pytest.raises(ValueError, match="pipeline_root"):
            KubeflowSpec(pipeline_root=root)
