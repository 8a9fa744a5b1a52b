"""The feature table: every feature that a pipeline can use has a row, and the rows are what the
documentation shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rekindle.catalog.features import as_markdown, table
from rekindle.errors import UnsupportedError
from rekindle.ir.features import Use, uses
from rekindle.ir.read import read
from rekindle.platforms.admission import admit
from tests.ir.test_corpus import CORPUS, files
from tests.ir.test_read import minimal

DOCS = Path(__file__).parents[2] / "docs" / "features.md"


def test_the_documentation_is_the_table() -> None:
    assert DOCS.read_text() == as_markdown(), "make generate"


def test_every_row_speaks_of_every_platform_and_gives_reasons() -> None:
    platforms = {frozenset(feature.on) for feature in table().values()}
    assert len(platforms) == 1
    for feature in table().values():
        for platform, carried in feature.on.items():
            assert carried.how or carried.verdict == "native", feature.name
            if carried.verdict == "refused" and platform != "local":
                assert carried.source, feature.name
            if carried.verdict == "ignored":
                assert platform == "local", feature.name


@pytest.mark.skipif(not CORPUS.exists(), reason="../shared/kfp-corpus is not here")
def test_no_pipeline_of_the_corpus_uses_a_feature_without_a_row() -> None:
    found = {use.feature for file in files() for use in uses(read(file.read_text()))}
    assert len(found) > 25
    assert found <= table().keys()


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
    assert {field.json_name for field in fields} - typed <= table().keys()
