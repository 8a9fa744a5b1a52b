"""What tests share with platforms/kubeflow/test_settings.py."""

import json
from collections.abc import Callable
from typing import Any

import yaml
from kfp import dsl
from kfp.dsl import PipelineTask

import rekindle
from rekindle.ir.compile import compile_function
from rekindle.ir.read.pipeline import read
from rekindle.platforms.kubeflow import trainjob
from rekindle.platforms.kubeflow.compile import compile
from rekindle.platforms.kubeflow.section import KubeflowSpec
from tests.servers.kubeflow.schema import problems

OWNER = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "run", "uid": "u-1"}


BARE = KubeflowSpec(image="example.com/launcher@sha256:0", pipeline_root="s3://b/kfp")


@dsl.component(base_image="example.com/work:1", install_kfp_package=False)
def work(of: str = "") -> int:
    return 1


def text_of(*wishes: Callable[[PipelineTask], Any], image: str = "", **distribution: Any) -> str:
    """The IR of a step on two nodes with these settings."""

    @dsl.pipeline(name="p")
    def pipeline():
        task = rekindle.distribute(work(), **{"nodes": 2, **distribution})
        for wish in wishes:
            wish(task)
        if image:
            task.container_spec.image = image

    return compile_function(pipeline)


def compiled(text: str, place: KubeflowSpec = BARE) -> tuple[Any, Any, Any]:
    """Pipeline, settings of the launcher, and what the launcher is told."""
    (content,) = compile(text, read(text), {}, place).files.values()
    spec, *rest = yaml.safe_load_all(content)
    label = next(label for label in spec["deploymentSpec"]["executors"] if "work" in label)
    container = spec["deploymentSpec"]["executors"][label]["container"]
    executors = rest[0]["platforms"]["kubernetes"]["deploymentSpec"]["executors"] if rest else {}
    return spec, executors.get(label, {}), json.loads(container["args"][0])


def pod_of(job: Any) -> dict[str, Any]:
    """What a TrainJob says of its pods: the patch, and the variables."""
    made = trainjob.manifest(
        job,
        name="work-1",
        identity="i",
        attempt=1,
        owner=OWNER,
        service_account="runner",
        result="s3://b/r.json",
        payload=["abc"],
        secret="work-1-5a5a",
    )
    assert problems("TrainJob", made) == []
    return {**trainjob._template_of(job["spec"]), "env": job["spec"]["trainer"]["env"]}


def by_hand(setting: str, value: Any) -> str:
    """The IR of a step on two nodes with a setting that kfp-kubernetes has no function for."""
    spec, settings = yaml.safe_load_all(text_of())
    executors = {"executors": {"exec-work": {setting: value}}}
    settings["platforms"]["kubernetes"] = {"deploymentSpec": executors}
    return yaml.safe_dump_all([spec, settings])
