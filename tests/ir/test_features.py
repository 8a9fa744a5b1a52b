"""The feature table: every feature that a pipeline can use has a row, and the rows are what the
documentation shows."""

import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp import dsl, kubernetes

from rekindle.catalog.tables import feature_rows
from rekindle.errors import UnsupportedError
from rekindle.ir.compile import compile_function
from rekindle.ir.features import Use, uses
from rekindle.ir.read.pipeline import read
from rekindle.platforms.feature_checks import admit
from tests.support.read_pipeline import minimal
from tests.support.samples import files, needs_samples
from tools.generate import feature_table

DOCS = Path(__file__).parents[2] / "docs" / "features.md"


def test_the_documentation_is_the_table() -> None:
    assert DOCS.read_text() == feature_table(), "make generate"


def test_every_row_speaks_of_every_platform_and_gives_reasons() -> None:
    platforms = {frozenset(feature.on) for feature in feature_rows().values()}
    assert len(platforms) == 1
    for feature in feature_rows().values():
        for platform, carried in feature.on.items():
            assert carried.how or carried.verdict == "native", feature.name
            if carried.verdict == "refused" and platform != "local":
                assert carried.source, feature.name
            if carried.verdict == "ignored":
                assert platform == "local", feature.name


@needs_samples
def test_no_pipeline_of_the_corpus_uses_a_feature_without_a_row() -> None:
    found = {use.feature for file in files() for use in uses(read(file.read_text()))}
    assert found
    assert found <= feature_rows().keys()


def test_an_unknown_setting_of_a_cluster_is_refused_with_its_place() -> None:
    executors = {"executors": {"exec-a": {"somethingNew": [{"x": 1}]}}}
    platform = {"platforms": {"kubernetes": {"deploymentSpec": executors}}}
    graph = read(yaml.safe_dump_all([minimal(), platform]))
    where = "platforms.kubernetes.deploymentSpec.executors.exec-a.somethingNew"
    assert Use("somethingNew", "a", where) in uses(graph)
    with pytest.raises(UnsupportedError, match="rekindle knows nothing of it") as caught:
        admit(graph, "local")
    assert [problem.where for problem in caught.value.problems] == [where]


PROJECT = "{{$.pipeline_google_cloud_project_id}}"


def constant(value: str) -> dict[str, Any]:
    """The pipeline whose step `a` is given a text."""
    spec = minimal()
    spec["components"]["comp-a"]["inputDefinitions"]["parameters"] = {
        "n": {"parameterType": "STRING"}
    }
    given = spec["root"]["dag"]["tasks"]["a"]["inputs"]["parameters"]
    given["n"] = {"runtimeValue": {"constant": value}}
    return spec


def default(value: str) -> dict[str, Any]:
    """The pipeline whose step `a` has a text as the default of its input."""
    spec = constant("")
    inputs = spec["components"]["comp-a"]["inputDefinitions"]["parameters"]
    inputs["n"] |= {"defaultValue": value, "isOptional": True}
    del spec["root"]["dag"]["tasks"]["a"]["inputs"]
    return spec


def argument(value: str) -> dict[str, Any]:
    """The pipeline that has a text as the default of its argument."""
    spec = minimal()
    inputs = {"p": {"parameterType": "STRING", "defaultValue": value, "isOptional": True}}
    spec["root"]["inputDefinitions"] = {"parameters": inputs}
    return spec


@pytest.mark.parametrize("place", [constant, default, argument])
@pytest.mark.parametrize(
    ("text", "feature"),
    [
        (PROJECT, "vertex_facts"),
        (f"{PROJECT}/x", "vertex_facts"),
        ("{{$.json_escape[1]}}", "vertex_facts"),
        ("{{$.workspace_path}}/x", "workspace"),
        ("{{$.pipeline_job_name}}", None),
    ],
)
def test_facts_of_one_platform_are_found_wherever_they_are_written(
    place: Callable[[str], dict[str, Any]], text: str, feature: str | None
) -> None:
    found = {use.feature for use in uses(read(yaml.safe_dump(place(text))))}
    assert found & {"vertex_facts", "workspace"} == ({feature} if feature else set())


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("nvidia.com/gpu", "cluster_accelerators"),
        ("NVIDIA_TESLA_T4", "accelerators"),
        ("NVIDIA_A100_80GB", "accelerators"),
        ("nvidia-l4", "accelerators"),
        ("amd.com/gpu", "other_accelerators"),
        ("nvidia.com/mig-1g.5gb", "other_accelerators"),
        ("cloud-tpus.google.com/v3", "other_accelerators"),
        ("TPU_V3", "other_accelerators"),
        ("{{$.inputs.parameters['kind-Output']}}", "accelerators"),
        ("NVIDIA_TESLA_K80", "other_accelerators"),
        ("nvidia-tesla-p100", "other_accelerators"),
    ],
)
def test_accelerators_are_told_apart_by_who_has_them(name: str, feature: str) -> None:
    spec = minimal()
    resources = {"accelerator": {"resourceType": name, "resourceCount": "1"}}
    spec["deploymentSpec"]["executors"]["exec-a"]["container"]["resources"] = resources
    found = {use.feature for use in uses(read(yaml.safe_dump(spec)))}
    assert {one for one in found if one.endswith("accelerators")} == {feature}


def test_every_setting_that_kfp_kubernetes_knows_has_a_row() -> None:
    from kfp.kubernetes import kubernetes_executor_config_pb2 as executors
    from kfp.pipeline_spec import pipeline_spec_pb2 as pipelines

    fields = [
        *executors.KubernetesExecutorConfig.DESCRIPTOR.fields,
        *pipelines.PipelineConfig.DESCRIPTOR.fields,
    ]
    typed = {"secretAsEnv", "activeDeadlineSeconds"}
    assert {field.json_name for field in fields} - typed <= feature_rows().keys()


def refused(
    made: Any, platform: str, arguments: dict[str, Any] | None = None
) -> set[tuple[str, str]]:
    """What `platform` refuses of a pipeline: place in the IR, and the reason."""
    try:
        admit(read(compile_function(made)), platform, arguments=arguments)
    except UnsupportedError as error:
        return {(p.where, p.what.partition(" refuses: ")[2]) for p in error.problems}
    return set()


def features(made: Any, arguments: dict[str, Any] | None = None) -> set[str]:
    return {use.feature for use in uses(read(compile_function(made)), arguments)}


component = dsl.component(base_image="python:3.11", install_kfp_package=False)


@component
def see(model: dsl.Input[dsl.Model]):
    print(model.uri)


@component
def say(text: str):
    print(text)


@pytest.mark.parametrize("platform", ["local", "vertex", "sagemaker", "azureml"])
def test_what_only_a_driver_on_kubernetes_does_is_refused_elsewhere(platform: str) -> None:
    @dsl.pipeline(name="volumes")
    def volumes() -> None:
        made = kubernetes.CreatePVC(
            access_modes=["ReadWriteOnce"], size="5Gi", pvc_name_suffix="-x"
        )
        kubernetes.DeletePVC(pvc_name=made.outputs["name"])

    assert "container_components" not in features(volumes)
    assert {where for where, _ in refused(volumes, platform)} == {
        "root.dag.tasks.createpvc",
        "root.dag.tasks.deletepvc",
    }
    assert not refused(volumes, "kubeflow")


@pytest.mark.parametrize("words", [{}, {"args": ["--flag"]}])
def test_a_step_without_a_command_runs_only_where_the_image_is_started_as_it_is(
    words: dict[str, Any],
) -> None:
    @dsl.container_component
    def starts():
        return dsl.ContainerSpec(image="ghcr.io/a/tool:1", **words)

    @dsl.pipeline(name="starting")
    def starting() -> None:
        starts()

    for platform in ("local", "kubeflow", "sagemaker", "azureml"):
        ((where, why),) = refused(starting, platform)
        assert where == "root.dag.tasks.starts"
        assert "write the command" in why
    assert not refused(starting, "vertex")


@dsl.pipeline(name="inner")
def inner(place: str) -> None:
    found = dsl.importer(artifact_uri=place, artifact_class=dsl.Model)
    see(model=found.output)


@dsl.pipeline(name="importing")
def importing(place: str = "oci://registry/model:1", root: str = "gs://b") -> None:
    inner(place=place)


@pytest.mark.parametrize(
    ("arguments", "feature"),
    [
        ({}, "importers_oci"),
        ({"place": "gs://b/m"}, "importers_gs"),
        ({"place": "s3://b/m"}, "importers_s3"),
        ({"place": "https://host/m"}, "importers"),
        ({"place": "/mnt/m"}, "importers"),
    ],
)
def test_what_an_importer_imports_is_known_once_the_arguments_are(
    arguments: dict[str, Any], feature: str
) -> None:
    assert features(importing, arguments) >= {"importers_at_run_time", feature}
    assert features(importing) & {"importers", "importers_gs", "importers_s3"} == set()
    on_vertex = refused(importing, "vertex", arguments)
    assert bool(on_vertex) == (feature != "importers_gs")
    assert not refused(importing, "local", arguments)
    assert bool(refused(importing, "kubeflow", arguments)) == (feature == "importers")


def test_an_importer_of_what_a_step_says_waits_for_it() -> None:
    @component
    def name() -> str:
        return "gs://b/m"

    @dsl.pipeline(name="late")
    def late() -> None:
        inner(place=name().output)

    assert not refused(late, "vertex", {})


@dsl.pipeline(name="clustered")
def clustered(
    claim: typing.Optional[str] = None,  # noqa: UP045 - KFP reads no other
    login: typing.Optional[str] = None,  # noqa: UP045
    labels: typing.Optional[dict] = None,  # noqa: UP045
):
    task = say(text="x")
    kubernetes.mount_pvc(task, pvc_name=claim, mount_path="/data")
    kubernetes.use_secret_as_env(task, secret_name=login, secret_key_to_env={"token": "TOKEN"})
    kubernetes.add_node_selector_json(task, node_selector_json=labels)


@pytest.mark.parametrize("platform", ["vertex", "sagemaker", "azureml"])
def test_settings_of_pods_whose_inputs_are_absent_are_left_out(platform: str) -> None:
    assert not refused(clustered, platform, {})
    assert len(refused(clustered, platform)) == 3
    ((where, _),) = refused(clustered, platform, {"claim": "data"})
    assert where.endswith(".pvcMount")
    ((where, _),) = refused(clustered, platform, {"login": "s"})
    assert ".secretAsEnv" in where
    ((where, _),) = refused(clustered, platform, {"labels": {"a": "b"}})
    assert where.endswith(".nodeSelector")
