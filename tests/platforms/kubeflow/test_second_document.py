"""The second document of a pipeline is parsed as KFP's server parses it, which leaves out all of it
where one field is unknown: with what its own protos say."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from kfp.kubernetes import kubernetes_executor_config_pb2
from kfp.pipeline_spec import pipeline_spec_pb2

from rekindle.errors import RequestError, UnsupportedError
from rekindle.ir.compile import compile_function
from rekindle.ir.read.pipeline import read
from rekindle.platforms.kubeflow.compile import compile
from rekindle.platforms.kubeflow.second_document import refused_fields
from rekindle.platforms.kubeflow.section import KubeflowSpec
from tests.platforms.local.runs import module
from tests.support.recorded import SHARED
from tests.support.values import arguments

EVERY_KIND: dict[str, Any] = {
    "platforms": {
        "kubernetes": {
            "deploymentSpec": {
                "executors": {
                    "exec-a": {
                        "nodeSelector": {"labels": {"zone": "a"}},
                        "tolerations": [{"key": "k", "operator": "Exists", "tolerationSeconds": 5}],
                        "secretAsEnv": [
                            {
                                "keyToEnv": [{"envVar": "A", "secretKey": "a"}],
                                "optional": False,
                                "secretNameParameter": {"runtimeValue": {"constant": "s"}},
                            }
                        ],
                        "podMetadata": {"labels": {"a": "b"}},
                    }
                }
            },
            "pipelineConfig": {"resourceTtlOnCompletion": 60, "activeDeadlineSeconds": 5},
        }
    }
}


def is_taken(document: Any) -> bool:
    """Whether KFP's own protos take a document, as its server parses it."""
    platforms = document["platforms"]
    try:
        spec = json_format.ParseDict(
            platforms["kubernetes"], pipeline_spec_pb2.SinglePlatformSpec()
        )
        for executor in spec.deployment_spec.executors.values():
            settings = json_format.MessageToDict(executor)
            message = kubernetes_executor_config_pb2.KubernetesExecutorConfig()
            json_format.ParseDict(settings, message)
    except (json_format.ParseError, TypeError):  # Python's asks for no mapping before it reads one
        return False
    return True


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every mapping and scalar in a document."""
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from places(item, (*path, index))


PLACES = [path for path in places(EVERY_KIND) if len(path) > 1]


def test_a_document_of_every_kind_is_taken() -> None:
    assert is_taken(EVERY_KIND)
    assert list(refused_fields(EVERY_KIND)) == []


@given(
    st.sampled_from(PLACES),
    st.sampled_from(["text", "7", 7, 2.0, 2.5, True, None, [], ["a"], {}, {"unknownField": 1}]),
    st.booleans(),
)
def test_what_the_protos_refuse_is_refused_and_nothing_else(
    path: tuple[Any, ...], value: Any, beside: bool
) -> None:
    document = copy.deepcopy(EVERY_KIND)
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    original = None if beside else parent[path[-1]]
    if beside and isinstance(parent, dict):
        parent["semaphoreKey"] = value
    else:
        parent[path[-1]] = value
    if document["platforms"].get("kubernetes") is None:
        return
    if value == [] and not isinstance(original, list):
        return  # Python's protobuf takes an empty list for an empty message, and Go's does not
    assert (list(refused_fields(document)) == []) is is_taken(document)


def test_a_refusal_names_the_field_and_what_would_be_lost() -> None:
    document = copy.deepcopy(EVERY_KIND)
    document["platforms"]["kubernetes"]["pipelineConfig"]["mutexName"] = "m"
    (problem,) = refused_fields(document)
    assert problem.where == "platforms.kubernetes.pipelineConfig.mutexName"
    assert "would leave out all settings of Kubernetes" in problem.fix


def documents() -> Iterator[tuple[str, str]]:
    """Pipelines with a second document: KFP's corpus, where it lies beside the checkout."""
    for file in sorted((SHARED / "kfp-corpus").rglob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        if "\n---\n" in text and "platforms:" in text:
            yield file.stem, text


@pytest.mark.skipif(not (SHARED / "kfp-corpus").exists(), reason="KFP's corpus is not here")
def test_the_corpus_is_taken_or_refused_as_the_protos_do() -> None:
    taken = 0
    for name, text in documents():
        _, settings = yaml.safe_load_all(text)
        if "kubernetes" not in settings["platforms"]:
            continue
        assert (list(refused_fields(settings)) == []) is is_taken(settings), name
        taken += is_taken(settings)
    assert taken > 8


@pytest.mark.skipif(not (SHARED / "kfp-corpus").exists(), reason="KFP's corpus is not here")
def test_what_is_compiled_from_the_corpus_is_taken() -> None:
    compiled = 0
    for name, text in documents():
        try:
            graph = read(text)
            definition = compile(text, graph, arguments(graph), KubeflowSpec(image="train:1"))
        except RequestError:
            continue
        settings = [*yaml.safe_load_all(definition.text)][1:]
        assert all(is_taken(document) for document in settings), name
        compiled += len(settings)
    assert compiled > 8


def test_what_an_older_kfp_does_not_have_is_refused() -> None:
    text = compile_function(module("behaviour").chain)
    settings = {"platforms": {"kubernetes": {"pipelineConfig": {"resourceTtlOnCompletion": 60}}}}
    text = f"{text}---\n{yaml.safe_dump(settings)}"
    graph = read(text)
    given_arguments = {"folder": "x", "text": "a"}
    assert compile(text, graph, given_arguments, KubeflowSpec(version="2.17"))
    with pytest.raises(UnsupportedError, match=r"its release 2\.16\.0 does not have it"):
        compile(text, graph, given_arguments, KubeflowSpec(version="2.16.0"))
