"""What opens KFP's own store has its endpoint and keys, without a Secret made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from rekindle.ir.compile import compile_function
from rekindle.ir.distribution import Distribution
from rekindle.ir.read.pipeline import read
from rekindle.platforms.kubeflow.compile import compile, launcher
from rekindle.platforms.kubeflow.section import KubeflowSpec
from tests.platforms.local.runs import module

ENDPOINT = {"name": "FSSPEC_MINIO_ENDPOINT_URL", "value": "http://seaweedfs.kubeflow:9000"}


def compiled(nodes: int, **place: Any) -> tuple[Any, Any, KubeflowSpec]:
    """The documents of a chain of steps, its first on so many nodes."""
    text = compile_function(module("behaviour").chain)
    graph = read(text)
    if nodes > 1:
        graph = graph.spread(graph.steps()[0].path, Distribution(nodes=nodes))
    section = KubeflowSpec(image="train:1", artifact_root="/mnt/r", **place)
    definition = compile(text, graph, {"folder": "x", "text": "a"}, section)
    spec, *settings = yaml.safe_load_all(definition.text)
    return spec, settings, section


def nodes_env(**place: Any) -> dict[str, Any]:
    """The variables of nodes, by name."""
    text = compile_function(module("behaviour").chain)
    graph = read(text)
    graph = graph.spread(graph.steps()[0].path, Distribution(nodes=2))
    step = graph.steps()[0]
    container = launcher(step, KubeflowSpec(image="train:1", **place))
    import json

    job = json.loads(container["args"][0])["job"]
    return {variable["name"]: variable for variable in job["spec"]["trainer"]["env"]}


def test_nodes_and_their_launcher_reach_it_by_default() -> None:
    env = nodes_env()
    assert env["FSSPEC_MINIO_ENDPOINT_URL"] == ENDPOINT
    for name, key in (("FSSPEC_MINIO_KEY", "accesskey"), ("FSSPEC_MINIO_SECRET", "secretkey")):
        reference = {"name": "mlpipeline-minio-artifact", "key": key, "optional": True}
        assert env[name]["valueFrom"] == {"secretKeyRef": reference}
    spec, (settings,), _ = compiled(2)
    (label,) = settings["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert ENDPOINT in spec["deploymentSpec"]["executors"][label]["container"]["env"]
    secrets = settings["platforms"]["kubernetes"]["deploymentSpec"]["executors"][label]
    assert [secret["optional"] for secret in secrets["secretAsEnv"]] == [True, True]


@pytest.mark.parametrize("root", ["s3://b/kfp", "gs://b/kfp"])
def test_another_store_is_opened_by_its_own_means(root: str) -> None:
    assert not [name for name in nodes_env(pipeline_root=root) if "MINIO" in name]


def test_what_the_config_says_wins() -> None:
    secrets = {"FSSPEC_MINIO_KEY": "mine/key", "FSSPEC_MINIO_ENDPOINT_URL": "mine/url"}
    env = nodes_env(secrets=secrets)
    assert env["FSSPEC_MINIO_KEY"]["valueFrom"]["secretKeyRef"]["name"] == "mine"
    assert "value" not in env["FSSPEC_MINIO_ENDPOINT_URL"]
    assert (
        nodes_env(store_endpoint="http://minio.store:9000")["FSSPEC_MINIO_ENDPOINT_URL"]["value"]
        == "http://minio.store:9000"
    )


def test_a_pipeline_without_such_a_step_is_left_as_it_is() -> None:
    spec, settings, _ = compiled(1)
    assert settings == []
    assert all("env" not in e["container"] for e in spec["deploymentSpec"]["executors"].values())


def test_checkpoints_in_it_are_reached_by_all_steps_in_our_image() -> None:
    text = compile_function(module("behaviour").chain).replace("python:3.11", "rekindle/train:1")
    section = KubeflowSpec(image="train:1", artifact_root="minio://mlpipeline/rekindle")
    arguments = {"folder": "x", "text": "a"}
    definition = compile(text, read(text), arguments, section)
    spec, settings = yaml.safe_load_all(definition.text)
    containers = [e["container"] for e in spec["deploymentSpec"]["executors"].values()]
    assert containers
    assert all(ENDPOINT in container["env"] for container in containers)
    labels = settings["platforms"]["kubernetes"]["deploymentSpec"]["executors"].keys()
    assert labels == spec["deploymentSpec"]["executors"].keys()


def test_nodes_reach_a_store_that_speaks_s3_at_its_endpoint() -> None:
    section = {"pipeline_root": "s3://b/kfp", "s3_endpoint": "http://minio.team-a:9000"}
    env = nodes_env(**section)
    assert env["AWS_ENDPOINT_URL_S3"]["value"] == "http://minio.team-a:9000"
    assert "AWS_DEFAULT_REGION" not in env, "none is named"
    assert not [name for name in env if "MINIO" in name]
    spec, _, _ = compiled(2, **section)
    with_endpoint = [
        label
        for label, executor in spec["deploymentSpec"]["executors"].items()
        if "AWS_ENDPOINT_URL_S3" in str(executor["container"].get("env"))
    ]
    assert len(with_endpoint) == 1, "its launcher"
