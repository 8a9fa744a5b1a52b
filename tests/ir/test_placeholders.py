"""Placeholders are parsed once, known ones only, and rendered without being read a second time."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.errors import UnsupportedError
from rekindle.ir.placeholders import lower, parse, parse_argument, parse_value
from rekindle.launch.shim import TaskError, render

TASK: dict[str, Any] = {
    "run": {"pipeline_job_name": "job-7"},
    "executor_input": {
        "inputs": {
            "parameterValues": {"s": "it's", "n": 3, "f": 2.5, "b": True, "l": [1, "a"]},
            "artifacts": {
                "data": {"artifacts": [{"uri": "/d", "metadata": {"rows": 3, "name": "x"}}]},
                "moved": {"artifacts": [{"uri": "/d", "customPath": "/e", "metadata": {}}]},
            },
        },
        "outputs": {
            "parameters": {"out": {"outputFile": "/o/out"}},
            "artifacts": {"model": {"artifacts": [{"uri": "/o/model", "metadata": {}}]}},
            "outputFile": "/o/executor_output.json",
        },
    },
}


def rendered(text: str) -> list[str]:
    return render(lower(parse_argument(text, "here")), TASK)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain {x} {{y}} $.z", "plain {x} {{y}} $.z"),
        ("", ""),
        ("--s={{$.inputs.parameters['s']}}!", "--s=it's!"),
        ("{{$.inputs.parameters['n']}}/{{$.inputs.parameters['f']}}", "3/2.5"),
        ("{{$.inputs.parameters['b']}}", "true"),
        ("{{$.inputs.parameters['l']}}", '[1,"a"]'),
        ("{{$.inputs.artifacts['data'].path}}", "/d"),
        ("{{$.inputs.artifacts['moved'].path}}", "/e"),
        ("{{$.inputs.artifacts['data'].uri}}", "/d"),
        ("{{$.inputs.artifacts['data'].metadata}}", '{"name":"x","rows":3}'),
        ("{{$.inputs.artifacts['data'].metadata['rows']}}", "3"),
        ("{{$.outputs.artifacts['model'].path}}", "/o/model"),
        ("{{$.outputs.parameters['out'].output_file}}", "/o/out"),
        ("{{$.outputs.output_file}}", "/o/executor_output.json"),
        ("{{$.outputMetadataUri}}", "/o/executor_output.json"),
        ("{{$.pipeline_job_name}}", "job-7"),
    ],
)
def test_known_placeholders_render(text: str, expected: str) -> None:
    assert rendered(text) == [expected]


def test_the_executor_input_renders_as_json() -> None:
    import json

    assert json.loads(rendered("{{$}}")[0]) == TASK["executor_input"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"Concat": ["a", "{{$.inputs.parameters[\'n\']}}", "c"]}', ["a3c"]),
        (
            '{"IfPresent": {"InputName": "s", "Then": ["--s", "{{$.inputs.parameters[\'s\']}}"]}}',
            ["--s", "it's"],
        ),
        ('{"IfPresent": {"InputName": "no", "Then": "x"}}', []),
        ('{"IfPresent": {"InputName": "no", "Then": "x", "Else": ["y", "z"]}}', ["y", "z"]),
        ('{"Concat": ["a", {"IfPresent": {"InputName": "no", "Then": "x"}}, "b"]}', ["ab"]),
        (
            '{"IfPresent": {"InputName": "data", "Then": '
            '[{"Concat": ["=", "{{$.inputs.artifacts[\'data\'].path}}"]}]}}',
            ["=/d"],
        ),
        ('{"Concat": []}', [""]),
        ('{"other": 1}', ['{"other": 1}']),
    ],
)
def test_concat_and_if_present_render(text: str, expected: list[str]) -> None:
    assert rendered(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "{{$.pipeline_color}}",
        "{{$.inputs.parameters[0]}}",
        "{{$.inputs.parameters['x'].path}}",
        "{{$.inputs.artifacts['x'].name}}",
        "{{$.outputs.parameters['x']}}",
        "{{$.json_escape[2]}}",
        "{{$x}}",
        '{"Concat": "a"}',
        '{"IfPresent": {"InputName": "x"}}',
        '{"Concat": ["a"], "IfPresent": {}}',
        '{"Concat": [',
    ],
)
def test_unknown_placeholders_are_refused_with_their_place(text: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        parse_argument(text, "deploymentSpec.executors.x.container.args[0]")
    assert caught.value.problems[0].where == "deploymentSpec.executors.x.container.args[0]"


def test_a_list_of_artifacts_renders_whole() -> None:
    several = [{"uri": "/a"}, {"uri": "/b"}]
    task = {**TASK, "executor_input": {"inputs": {"artifacts": {"x": {"artifacts": several}}}}}
    (text,) = render(lower(parse("{{$.inputs.artifacts['x']}}", "here")), task)
    assert json.loads(text) == several


@pytest.mark.parametrize("fact", ["workspace_path", "pipeline_google_cloud_project_id"])
def test_what_only_one_platform_knows_is_read_and_is_missing_elsewhere(fact: str) -> None:
    with pytest.raises(TaskError, match=f"{fact}`, which does not exist here"):
        render(lower(parse("{{$." + fact + "}}", "here")), TASK)


@given(st.text())
def test_a_value_is_never_read_a_second_time(value: str) -> None:
    task = {
        **TASK,
        "executor_input": {"inputs": {"parameterValues": {"s": value}, "artifacts": {}}},
    }
    template = lower(parse("<{{$.inputs.parameters['s']}}>", "here"))
    assert render(template, task) == [f"<{value}>"]


@given(st.text().filter(lambda text: "{{$" not in text))
def test_text_without_placeholders_stays_as_it_is(text: str) -> None:
    assert parse(text, "here").literal == text


def test_a_missing_value_is_an_error() -> None:
    with pytest.raises(TaskError, match="`gone`"):
        rendered("{{$.inputs.parameters['gone']}}")


def test_constants_may_refer_to_parameters_only() -> None:
    assert parse_value({"a": ["x", 1]}, "here") == {"a": ["x", 1]}
    with pytest.raises(UnsupportedError, match="refers to an artifact"):
        parse_value(["{{$.outputs.artifacts['x'].path}}"], "here")
