"""A small text must not fill the memory or take for ever."""

import json

import pytest
import yaml

from rekindle.errors import RequestError
from rekindle.ir.documents import MAX_LEVELS, MAX_VALUES, documents
from rekindle.ir.read import read


def bomb(levels=9, width=10):
    """Each list holds the one before, ten times: 10**9 values in a few hundred bytes."""
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
    return "\n".join(lines)


def nested(depth):
    """A pipeline of 1 + 10 + 100 + ... tasks, in components that name each other."""
    components = {}
    for level in range(depth):
        name = f"comp-c{level + 1}" if level + 1 < depth else "comp-leaf"
        tasks = {
            f"t{i}": {"componentRef": {"name": name}, "taskInfo": {"name": f"t{i}"}}
            for i in range(10)
        }
        components[f"comp-c{level}"] = {"dag": {"tasks": tasks}}
    components["comp-leaf"] = {"executorLabel": "exec-leaf"}
    return json.dumps({
        "schemaVersion": "2.1.0", "sdkVersion": "kfp-2", "pipelineInfo": {"name": "deep"},
        "components": components,
        "deploymentSpec": {"executors": {"exec-leaf": {"container": {"image": "x", "command": ["a"]}}}},
        "root": {"dag": {"tasks": {"t": {"componentRef": {"name": "comp-c0"}, "taskInfo": {"name": "t"}}}}},
    })  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        bomb(),
        "[" * 60_000,
        "a: " + "[" * 60_000 + "]" * 60_000,
        "{" + '"a":{' * 200_000,
        '{"a":' + "[" * 200_000 + "]" * 200_000 + "}",
        '{"a":' + "[" * (MAX_LEVELS + 1) + "]" * (MAX_LEVELS + 1) + "}",
        "a: [" + "x," * (MAX_VALUES + 1) + "x]",
        '{"a":[' + "1," * MAX_VALUES + "1]}",
    ],
    ids=["aliases", "open", "yaml", "open json", "json", "levels", "values", "json values"],
)
def test_a_text_that_would_fill_the_memory_is_refused(text):
    with pytest.raises(yaml.YAMLError):
        documents(text)
    with pytest.raises(RequestError, match="neither YAML nor JSON"):
        read(text)


def test_what_people_write_is_read():
    text = "a: &x {b: [1, 2]}\nc: *x\nd: *x\n---\ne: 1\n"
    assert documents(text) == [
        {"a": {"b": [1, 2]}, "c": {"b": [1, 2]}, "d": {"b": [1, 2]}},
        {"e": 1},
    ]


@pytest.mark.timeout(60)  # 10**9 tasks would take days
def test_pipelines_inside_of_pipelines_are_counted():
    with pytest.raises(RequestError, match="more than 10,000 tasks"):
        read(nested(9))
