"""From IR to Graph: what is understood, what is refused, what is no pipeline at all."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import yaml

from rekindle.errors import RequestError, UnsupportedError
from rekindle.ir.edit.rewrite import rewritten
from rekindle.ir.graph import (
    Constant,
    FinalStatus,
    FromInput,
    FromTask,
    Graph,
    Importer,
    Loop,
    Retry,
    Step,
    SubDag,
)
from rekindle.ir.placeholders import Reference
from rekindle.ir.read.pipeline import read
from tests.support.read_pipeline import executor, looped, minimal, nested


def changed(path: str, value: Any) -> str:
    """The minimal pipeline as text with the value at the dotted `path` replaced, or added."""
    spec = copy.deepcopy(minimal())
    place: Any = spec
    *parents, last = path.split(".")
    for key in parents:
        place = place.setdefault(key, {})
    place[last] = value
    return yaml.safe_dump(spec)


def step(graph: Graph, name: str) -> Step:
    node = graph.dag.nodes[name]
    assert isinstance(node, Step)
    return node


def test_a_small_pipeline_reads_as_it_is() -> None:
    graph = read(yaml.safe_dump(minimal()))
    a, b = graph.steps()
    assert (a.path, b.path) == ("a", "b")
    assert (a.where, a.component) == ("root.dag.tasks.a", "a")
    assert a.parameters == {"n": Constant(3)}
    assert isinstance(a.parameters["n"].value, int)
    assert b.parameters == {"n": FromTask("a", "Output")}
    assert b.upstream == ("a",)
    assert (a.cache, b.cache) == (True, False)
    assert a.timeout_seconds is None


def test_json_is_read_as_json_and_not_as_yaml() -> None:
    spec = minimal()
    spec["components"]["comp-a"]["inputDefinitions"]["parameters"]["x"] = {
        "parameterType": "NUMBER_DOUBLE",
        "defaultValue": 1e-7,
        "isOptional": True,
    }
    spec["pipelineInfo"]["description"] = "an emoji: \U0001f600"
    text = json.dumps(spec, indent="\t")
    assert r"\ud83d\ude00" in text
    graph = read(text)
    assert graph.dag.nodes["a"].inputs.parameters["x"].default == 1e-7
    assert rewritten(text, {}, None)[0] == spec


@pytest.mark.parametrize(
    ("info", "name"),
    [
        ({"name": "small"}, "small"),
        ({"name": "small", "displayName": "../Größe (1)"}, "small"),
        ({"displayName": "../Größe / (1)"}, "Größe-(1)"),
        ({"displayName": "/"}, "pipeline"),
        ({"name": None}, "pipeline"),
    ],
)
def test_a_pipeline_has_a_name_that_a_file_can_have(info: dict[str, Any], name: str) -> None:
    assert read(json.dumps({**minimal(), "pipelineInfo": info})).name == name


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden"])
def test_a_name_that_is_a_path_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match="a plain name belongs") as caught:
        read(json.dumps({**minimal(), "pipelineInfo": {"name": name}}))
    assert caught.value.problems[0].where == "pipelineInfo.name"


def test_json_reads_as_yaml_does() -> None:
    assert read(json.dumps(minimal())) == read(yaml.safe_dump(minimal()))


@pytest.mark.parametrize(
    ("kind", "raw", "value"),
    [
        ("NUMBER_INTEGER", 3.0, 3),
        ("NUMBER_DOUBLE", 3, 3.0),
        ("LIST", [1.0, 2.5, ["a", 3.0]], [1, 2.5, ["a", 3]]),
        ("STRUCT", {"a": 1.0, "b": {"c": True}}, {"a": 1, "b": {"c": True}}),
        ("STRING", "3.0", "3.0"),
        ("BOOLEAN", False, False),
    ],
)
def test_numbers_become_what_their_type_says(kind: str, raw: Any, value: Any) -> None:
    definition = {"parameterType": kind, "defaultValue": raw, "isOptional": True}
    graph = read(changed("root.inputDefinitions.parameters.x", definition))
    default = graph.inputs.parameters["x"].default
    assert default == value
    assert repr(default) == repr(value)


@pytest.mark.parametrize("raw", ["3", True, [3]])
def test_a_default_of_another_type_is_no_pipeline(raw: Any) -> None:
    definition = {"parameterType": "NUMBER_INTEGER", "defaultValue": raw}
    with pytest.raises(RequestError) as caught:
        read(changed("root.inputDefinitions.parameters.x", definition))
    assert caught.value.problems[0].where == "root.inputDefinitions.parameters.x.defaultValue"


def test_retries_caching_env_and_resources_are_read() -> None:
    spec = minimal()
    task = spec["root"]["dag"]["tasks"]["a"]
    task["retryPolicy"] = {"maxRetryCount": 2, "backoffDuration": "10s", "backoffFactor": 3.0}
    task["cachingOptions"] = {"enableCache": True, "cacheKey": "mine"}
    spec["deploymentSpec"]["executors"]["exec-a"] = executor(
        env=[{"name": "A", "value": "b"}],
        resources={
            "cpuLimit": 2.0,
            "resourceCpuLimit": "2000m",
            "memoryLimit": 4.0,
            "accelerator": {
                "type": "T4",
                "count": "1",
                "resourceType": "nvidia.com/gpu",
                "resourceCount": "2",
            },
        },
    )
    a = step(read(yaml.safe_dump(spec)), "a")
    assert a.retry == Retry(2, 10.0, 3.0, 3600.0)
    assert [a.retry.pause_before(attempt) for attempt in (2, 3)] == [10.0, 30.0]
    assert a.cache_key == "mine"
    assert a.container.env["A"].literal == "b"  # type: ignore[union-attr]
    resources = a.container.resources
    assert (resources.cpu_limit, resources.memory_limit) == ("2000m", "4G")
    assert (resources.accelerator_type, resources.accelerator_count) == ("nvidia.com/gpu", "2")


def test_a_timeout_comes_from_the_second_document() -> None:
    executors = {"executors": {"exec-b": {"activeDeadlineSeconds": "90"}}}
    platform = {"platforms": {"kubernetes": {"deploymentSpec": executors}}}
    graph = read(yaml.safe_dump_all([minimal(), platform]))
    assert [s.timeout_seconds for s in graph.steps()] == [None, 90.0]


def test_nested_pipelines_have_paths_and_places() -> None:
    spec = nested("int(inputs.parameter_values['n']) == 1")
    graph = read(yaml.safe_dump(spec))
    assert [s.path for s in graph.steps()] == ["inner/a", "inner/b"]
    inner = graph.find("inner")
    assert isinstance(inner, SubDag)
    assert inner.condition is not None
    assert str(inner.condition.expression) == "n == 1"
    assert graph.steps()[0].where == "components.comp-inner.dag.tasks.a"
    assert graph.steps()[0].parameters == {"n": FromInput("n")}
    assert inner.dag.parameters == {"out": (FromTask("b", "Output"),)}


def test_caching_off_for_a_nested_pipeline_is_off_for_its_steps() -> None:
    spec = nested()
    assert [s.cache for s in read(yaml.safe_dump(spec)).steps()] == [True, False]
    spec["root"]["dag"]["tasks"]["inner"]["cachingOptions"] = {}
    assert [s.cache for s in read(yaml.safe_dump(spec)).steps()] == [False, False]


@pytest.mark.parametrize(("name", "path"), [("inner/a", "inner/a"), ("b", "inner/b")])
def test_steps_are_found_by_path_or_last_name(name: str, path: str) -> None:
    assert read(yaml.safe_dump(nested())).find(name).path == path


@pytest.mark.parametrize(
    ("name", "says"), [("x", "no step `x`; there are"), ("inne", "did you mean `inner`")]
)
def test_what_is_not_found_names_what_there_is(name: str, says: str) -> None:
    with pytest.raises(KeyError, match=says):
        read(yaml.safe_dump(nested())).find(name)


REFUSALS = {
    "root.dag.tasks.a.parameterIterator": {"itemInput": "n", "items": {"raw": "[1]"}},
    "root.dag.tasks.a.triggerPolicy.strategy": "SOMETIMES",
    "root.dag.tasks.a.inputs.parameters.n.parameterExpressionSelector": "parseJson(x).y",
    "root.dag.tasks.a.inputs.parameters.n.runtimeValue.runtimeParameter": "x",
    "root.dag.tasks.a.somethingNew": {"x": 1},
    "root.somethingNew": 1,
    "somethingNew": "x",
    "components.comp-a.singlePlatformSpecs": [{"platform": "x"}],
    "components.comp-a.inputDefinitions.parameters.n.parameterType": "TASK_WISH",
    "components.comp-a.outputDefinitions.artifacts.x.isArtifactList": True,
    "deploymentSpec.executors.exec-a.customJob": {"customJob": {}},
    "deploymentSpec.executors.exec-a.resolver": {},
    "deploymentSpec.executors.exec-a.container.volumes": [{"name": "x"}],
    "deploymentSpec.executors.exec-a.container.args": ["{{$.inputs.parameters['other']}}"],
}


@pytest.mark.parametrize("path", REFUSALS)
def test_what_is_not_supported_is_refused_with_its_place_and_a_way_out(path: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        read(changed(path, REFUSALS[path]))
    problem = caught.value.problems[0]
    assert path.startswith(problem.where) or problem.where.startswith(path)
    assert problem.fix
    assert caught.value.exit_code == 2


def on_kubernetes(**executors: Any) -> dict[str, Any]:
    """A second document with these settings for exec-a."""
    return {"platforms": {"kubernetes": {"deploymentSpec": {"executors": {"exec-a": executors}}}}}


def test_settings_of_a_cluster_keep_their_names_and_places() -> None:
    wishes = on_kubernetes(tolerations=[{"key": "x"}], podMetadata={"labels": {"a": "b"}})
    a = step(read(yaml.safe_dump_all([minimal(), wishes])), "a")
    places = {setting.name: setting.where.rpartition("executors.")[2] for setting in a.settings}
    assert places == {"podMetadata": "exec-a.podMetadata", "tolerations": "exec-a.tolerations"}
    assert a.settings[1].value == [{"key": "x"}]


def test_secrets_in_the_environment_are_typed() -> None:
    pair = {"secretKey": "token", "envVar": "TOKEN"}
    named = {"secretNameParameter": {"runtimeValue": {"constant": "login"}}, "secretName": "login"}
    a = step(
        read(
            yaml.safe_dump_all(
                [minimal(), on_kubernetes(secretAsEnv=[{**named, "keyToEnv": [pair]}])]
            )
        ),
        "a",
    )
    (secret,) = a.secrets
    assert (secret.env, secret.name, secret.key) == ("TOKEN", Constant("login"), "token")


def test_loops_over_constants_and_over_inputs_are_read() -> None:
    inner = read(yaml.safe_dump(looped(items={"raw": "[1, 2.5, 3.0]"}))).find("inner")
    assert isinstance(inner, SubDag)
    assert inner.loop == Loop((1, 2.5, 3), "n", at_once=2)
    spec = looped(items={"inputParameter": "many"})
    task = spec["root"]["dag"]["tasks"]["inner"]
    task["inputs"]["parameters"]["many"] = {"runtimeValue": {"constant": [1.0]}}
    inner = read(yaml.safe_dump(spec)).find("inner")
    assert isinstance(inner, SubDag)
    assert inner.loop == Loop("many", "n", at_once=2)
    assert inner.parameters["many"] == Constant([1.0])


def test_elements_of_structs_are_read() -> None:
    spec = nested()
    bound = spec["components"]["comp-inner"]["dag"]["tasks"]["a"]["inputs"]["parameters"]["n"]
    bound["parameterExpressionSelector"] = 'parseJson(string_value)["a b"]["c"]'
    assert read(yaml.safe_dump(spec)).steps()[0].parameters["n"] == FromInput("n", ("a b", "c"))


def test_exit_tasks_wait_for_the_end_and_not_for_success() -> None:
    spec = minimal()
    task = spec["root"]["dag"]["tasks"]["b"]
    task["triggerPolicy"] = {"strategy": "ALL_UPSTREAM_TASKS_COMPLETED"}
    task["inputs"]["parameters"]["s"] = {"taskFinalStatus": {"producerTask": "a"}}
    status = {"parameterType": "TASK_FINAL_STATUS"}
    component = copy.deepcopy(spec["components"]["comp-b"])
    component["inputDefinitions"]["parameters"]["s"] = status
    spec["components"]["comp-b"] = component
    b = step(read(yaml.safe_dump(spec)), "b")
    assert b.always
    assert b.parameters["s"] == FinalStatus("a")
    assert b.upstream == ("a",)


def test_importers_are_nodes_of_their_own() -> None:
    spec = minimal()
    del spec["root"]["dag"]["tasks"]["b"]
    spec["components"]["comp-a"]["outputDefinitions"] = {
        "artifacts": {"artifact": {"artifactType": {"schemaTitle": "system.Dataset"}}}
    }
    spec["deploymentSpec"]["executors"]["exec-a"] = {
        "importer": {
            "artifactUri": {"runtimeParameter": "n"},
            "reimport": True,
            "metadata": {"from": "{{$.inputs.parameters['n']}}", "kind": "x"},
        }
    }
    graph = read(yaml.safe_dump(spec))
    (node,) = graph.leaves()
    assert graph.steps() == ()
    assert isinstance(node, Importer)
    assert node.uri.parts == (Reference(("inputs", "parameters", "n")),)
    assert node.metadata["from"].parts == node.uri.parts
    (made,) = node.outputs.artifacts.values()
    assert (node.metadata["kind"], made.schema_title) == ("x", "system.Dataset")


def test_all_refusals_come_at_once_and_each_once() -> None:
    spec = minimal()
    spec["components"]["comp-b"]["executorLabel"] = "exec-a"
    spec["deploymentSpec"]["executors"]["exec-a"]["container"]["volumes"] = [{"x": 1}]
    spec["root"]["dag"]["tasks"]["a"]["new"] = 1
    spec["other"] = 1
    with pytest.raises(UnsupportedError) as caught:
        read(yaml.safe_dump(spec))
    assert [problem.where for problem in caught.value.problems] == [
        "deploymentSpec.executors.exec-a.container.volumes",
        "root.dag.tasks.a.new",
        "other",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "text",
        "[]",
        "{",
        "a: 1\n---\nb: 2\n---\nc: 3",
        "schemaVersion: 2.1.0",
        changed("schemaVersion", "1.0"),
        changed("root", "x"),
        changed("root.dag.tasks", ["a"]),
        changed("root.dag.tasks.b.dependentTasks", ["nobody"]),
        changed("root.dag.tasks.a.dependentTasks", ["b"]),
        changed("root.dag.tasks.b.inputs.parameters.n", {"taskFinalStatus": {"producerTask": "x"}}),
        changed("root.dag.tasks.b.componentRef.name", "comp-x"),
        changed("components.comp-b.executorLabel", "exec-x"),
        changed("root.dag.tasks.b.inputs.parameters.n", {"componentInputParameter": "gone"}),
        changed(
            "root.dag.tasks.b.inputs.parameters.n.taskOutputParameter.outputParameterKey", "gone"
        ),
        changed("root.dag.tasks.a.inputs.parameters.n.runtimeValue.constant", "three"),
        changed("root.dag.tasks.../../etc", {"componentRef": {"name": "comp-a"}}),
        changed("components.comp-a.outputDefinitions.artifacts.a/b", {}),
        "!!python/object/apply:os.system ['true']",
    ],
)
def test_what_is_no_pipeline_is_a_request_error(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(text)
    assert not isinstance(caught.value, UnsupportedError)


def test_a_component_that_holds_itself_is_no_pipeline() -> None:
    spec = nested()
    spec["components"]["comp-inner"]["dag"]["tasks"]["again"] = {
        "componentRef": {"name": "comp-inner"}
    }
    with pytest.raises(RequestError, match="comp-inner"):
        read(yaml.safe_dump(spec))


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"exec-a": None}, "deploymentSpec.executors.exec-a"),
        ({"exec-a": []}, "deploymentSpec.executors.exec-a"),
        ({"exec-a": {"container": ""}}, "deploymentSpec.executors.exec-a.container"),
    ],
)
def test_an_executor_of_nothing_is_refused_with_its_place(
    wrong: dict[str, Any], where: str
) -> None:
    spec = minimal()
    spec["deploymentSpec"]["executors"] |= wrong
    with pytest.raises(RequestError, match="stands where") as caught:
        read(json.dumps(spec))
    assert caught.value.problems[0].where == where


def test_an_output_that_no_step_gives_is_refused_with_its_place() -> None:
    spec = minimal()
    outputs = {"parameters": {"best": {"parameterType": "NUMBER_INTEGER"}}}
    spec["root"]["outputDefinitions"] = outputs
    with pytest.raises(RequestError, match="the output of a step belongs") as caught:
        read(json.dumps(spec))
    assert caught.value.problems[0].where == "root.dag.outputs.parameters.best"


@pytest.mark.parametrize("seconds", [[], "soon", -1])
def test_a_timeout_that_is_no_number_is_refused_with_its_place(seconds: Any) -> None:
    executors = {"executors": {"exec-a": {"activeDeadlineSeconds": seconds}}}
    platform = {"platforms": {"kubernetes": {"deploymentSpec": executors}}}
    with pytest.raises(RequestError, match="a number of seconds belongs") as caught:
        read(yaml.safe_dump_all([minimal(), platform]))
    assert caught.value.problems[0].where.endswith("exec-a.activeDeadlineSeconds")
