"""Pipelines that are nearly KFP's: samples with a part cut out, or something else in its place, are
read and compiled, or refused with a place; nothing crashes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import yaml

from rekindle.errors import RekindleError, RequestError
from rekindle.ir.graph import Graph
from rekindle.ir.read.pipeline import read
from rekindle.platforms.azureml import compile as azureml
from rekindle.platforms.azureml.section import AzureMLSpec
from rekindle.platforms.feature_checks import admit
from rekindle.platforms.kubeflow import compile as kubeflow
from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.platforms.sagemaker import compile as sagemaker
from rekindle.platforms.vertex import compile as vertex
from tests.quick import first
from tests.support.conformance import AMAZON, AZURE, GOOGLE
from tests.support.conformance_broken import broken
from tests.support.samples import files, needs_samples
from tests.support.values import VALUES

pytestmark = needs_samples

MUTATIONS = 120


def compiled_everywhere(text: str, graph: Graph) -> Iterator[None]:
    given = {n: VALUES.get(p.type, {}) for n, p in graph.inputs.parameters.items() if p.required}
    for attempt in (
        lambda: admit(graph, "local"),
        lambda: kubeflow.compile(text, graph, given, KubeflowSpec()),
        lambda: vertex.compile(text, graph, given, GOOGLE),
        lambda: sagemaker.compile(text, graph, given, AMAZON),
        lambda: azureml.compile(text, graph, given, AzureMLSpec(image=AZURE)),
    ):
        try:
            attempt()
        except RequestError:
            continue
        yield


@pytest.mark.parametrize("seed", first(1, range(4)))
def test_a_broken_pipeline_is_refused_and_never_crashes(seed: int) -> None:
    chance = random.Random(seed)
    samples = [
        list(yaml.load_all(file.read_text(), yaml.CSafeLoader))
        for file in files()
        if file.stat().st_size < 16_000
    ]
    read_ones, made = 0, 0
    for _ in range(MUTATIONS):
        text = yaml.safe_dump_all(broken(chance.choice(samples), chance))
        try:
            graph = read(text)
        except RekindleError:
            continue
        read_ones += 1
        made += sum(1 for _ in compiled_everywhere(text, graph))
    assert read_ones > MUTATIONS / 5
    assert made > read_ones
