"""What KFP's backend does otherwise than its SDK documents: compiled into a form that avoids it and
means the same (run here, as it was compiled), refused, or said."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2

from rekindle.errors import RequestError, UnsupportedError
from rekindle.ir.compile import compile_function
from rekindle.ir.distribution import Distribution
from rekindle.ir.edit.rewrite import executors_of
from rekindle.ir.read.pipeline import read
from rekindle.platforms.kubeflow.compile import compile, launcher
from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.platforms.submission import Definition
from rekindle.records import RunRecord
from tests.platforms.local.runs import module, run


def compiled(name: str, arguments: dict[str, Any] | None = None, **place: Any) -> Definition:
    text = compile_function(getattr(module("backend"), name))
    return compile(text, read(text), arguments or {}, KubeflowSpec(**place))


def document(name: str, arguments: dict[str, Any] | None = None, **place: Any) -> Any:
    """The compiled pipeline, which KFP's own protos take."""
    spec = yaml.safe_load(compiled(name, arguments, **place).text)
    json_format.ParseDict(spec, pipeline_spec_pb2.PipelineSpec())
    return spec


def tasks(spec: Any) -> Iterator[Any]:
    for component in (spec["root"], *spec["components"].values()):
        yield from component.get("dag", {}).get("tasks", {}).values()


def outputs(record: RunRecord) -> dict[str, Any]:
    """The outputs of steps that ran, by path, but for those that a compiler adds."""
    return {
        step.name: dict(step.parameters)
        for step in record.steps
        if step.status == "succeeded" and not step.name.startswith("text-for-")
    }


@pytest.mark.parametrize(
    "name",
    [
        "text_for_nested",
        "facts",
        "arguments",
        "presence",
        "branches",
        "absent",
        "absent_in_groups",
        "absent_in_part",
        "absent_for_container",
        "absent_artifact_in_groups",
        "presence_of_defaults",
        "presence_in_command",
        "sources",
        "dollars_in_source",
    ],
)
def test_what_is_compiled_gives_what_the_pipeline_gives(name: str, tmp_path: Path) -> None:
    pipeline = read(compile_function(getattr(module("backend"), name)))
    expected = outputs(run(pipeline, tmp_path / "written", name="compiled", run_id="r"))
    spec = document(name)
    for task in tasks(spec):
        task.pop("retryPolicy", None)
    compiled_pipeline = read(yaml.safe_dump(spec))
    found = run(compiled_pipeline, tmp_path / "compiled", name="compiled", run_id="r")
    assert outputs(found) == expected


def test_a_nested_pipeline_gets_the_text_and_not_its_placeholders() -> None:
    spec = document("text_for_nested")
    (binding,) = spec["root"]["dag"]["tasks"]["gate"]["inputs"]["parameters"]["word"].items()
    assert binding == (
        "taskOutputParameter",
        {"outputParameterKey": "Output", "producerTask": "text-for-gate"},
    )


def test_no_fact_stands_inside_a_text() -> None:
    spec = document("facts")
    for task in tasks(spec):
        for name, binding in task["inputs"]["parameters"].items():
            constant = str(binding.get("runtimeValue", {}).get("constant", ""))
            assert "{{$.pipeline" not in constant or name == "v" or name.startswith("rekindle-")
    for container in executors(spec):
        assert "{{$.pipeline" not in str(container)


def executors(spec: Any) -> Iterator[Any]:
    for executor in spec["deploymentSpec"]["executors"].values():
        yield executor["container"]


def test_the_place_of_artifacts_is_written_or_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"set platforms\.kubeflow\.pipeline_root"):
        compiled("root")
    spec = document("root", pipeline_root="s3://b/kfp")
    (task,) = tasks(spec)
    assert task["inputs"]["parameters"]["v"]["runtimeValue"]["constant"] == "s3://b/kfp/x"


def test_what_fails_runs_again_in_its_pod_and_the_step_beside_it_does_not(tmp_path: Path) -> None:
    folders = {"folder": str(tmp_path / "a"), "other": str(tmp_path / "b")}
    spec = document("retries", folders)
    by_label = {label: e["container"] for label, e in executors_of(spec).items()}
    retried, other = (
        by_label[
            spec["components"][spec["root"]["dag"]["tasks"][name]["componentRef"]["name"]][
                "executorLabel"
            ]
        ]
        for name in ("flaky", "flaky-2")
    )
    assert run_container(retried, {"folder": folders["folder"], "times": 3}, tmp_path) == 0
    assert (tmp_path / "a" / "tries").read_text() == "xxx"
    assert run_container(retried, {"folder": folders["folder"], "times": 9}, tmp_path) != 0
    assert (tmp_path / "a" / "tries").read_text() == "xxxxxx"
    assert run_container(other, {"folder": folders["other"], "times": 2}, tmp_path) != 0
    assert (tmp_path / "b" / "tries").read_text() == "x"


def run_container(container: Any, values: dict[str, Any], folder: Path) -> int:
    """The exit code of a container's command, here, with what KFP's launcher hands to it."""
    executor_input = {
        "inputs": {"parameterValues": values},
        "outputs": {"outputFile": str(folder / "out.json")},
    }
    words = [*container["command"], *container["args"]]
    words = [json.dumps(executor_input) if word == "{{$}}" else word for word in words]
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    return subprocess.run(words, env={"PATH": path}, capture_output=True).returncode


def test_an_older_kfp_retries_by_itself() -> None:
    folders = {"folder": "a", "other": "b"}
    text = compiled("retries", folders, version="2.16.0").text.decode()
    assert "rekindle: exit code" not in text


def test_branches_that_a_choice_is_made_from_never_come_from_the_cache() -> None:
    spec = document("branches")
    cached = {task["taskInfo"]["name"] for task in tasks(spec) if task.get("cachingOptions")}
    assert cached == {"as-str", "greet-3"}


def test_a_choice_that_only_the_pipeline_returns_leaves_its_branches_in_the_cache() -> None:
    """KFP resolves what a task reads; outputs of the root are read by none."""
    assert not_cached(document("returned_choice")) == set()
    assert not_cached(document("nested_choices")) == {"greet", "greet-2"}


def not_cached(spec: Any) -> set[str]:
    """The steps that are never taken from the cache."""
    return {
        task["taskInfo"]["name"]
        for task in tasks(spec)
        if "executorLabel" in spec["components"][task["componentRef"]["name"]]
        and not task.get("cachingOptions")
    }


def test_a_step_waits_for_the_one_that_sizes_its_machine() -> None:
    """The SDK leaves it out, and KFP starts a task when all that it names are done
    (argocompiler/dag.go, depends)."""
    written = yaml.safe_load(compile_function(module("backend").machine_of_output))
    assert "dependentTasks" not in written["root"]["dag"]["tasks"]["greet"]
    definition = compiled("machine_of_output")
    assert definition.notices == ()
    compiled_tasks = document("machine_of_output")["root"]["dag"]["tasks"]
    assert compiled_tasks["greet"]["dependentTasks"] == ["greet-2"]
    assert "dependentTasks" not in compiled_tasks["greet-2"]


def test_a_number_that_a_step_gives_sizes_no_machine() -> None:
    with pytest.raises(UnsupportedError, match="reads a number as the empty text"):
        compiled("machine_of_number")


def test_an_exit_task_reads_succeeded_where_kfp_says_complete(tmp_path: Path) -> None:
    spec = document("status", {"folder": str(tmp_path)})
    (container,) = [e for e in executors(spec) if "status.state" in str(e["command"])]
    final = {"state": "COMPLETE", "pipelineTaskName": "exit-handler-1", "error": {}}
    values = {"status": final, "folder": str(tmp_path)}
    assert run_container(container, values, tmp_path) == 0
    assert (tmp_path / "status").read_text() == "SUCCEEDED exit-handler-1"


def test_what_has_no_value_is_bound_to_nothing() -> None:
    spec = document("absent")
    first, second = (spec["root"]["dag"]["tasks"][name] for name in ("middle", "middle-2"))
    assert "v" not in first["inputs"]["parameters"]
    assert second["inputs"]["parameters"]["v"] == {"componentInputParameter": "given"}
    middle = spec["components"][first["componentRef"]["name"]]
    assert "v" not in middle["dag"]["tasks"]["inner"]["inputs"].get("parameters", {})
    middle = spec["components"][second["componentRef"]["name"]]
    assert middle["dag"]["tasks"]["inner"]["inputs"]["parameters"]["v"] == {
        "componentInputParameter": "v"
    }


def test_a_value_that_comes_too_late_is_not_lost_in_silence() -> None:
    """KFP's server refuses one for an input that the root does not declare (validatePipelineJobInputs
    in kubeflow/pipelines 2.17.0, backend/src/apiserver/template/v2_template.go)."""
    assert list(document("absent")["root"]["inputDefinitions"]["parameters"]) == ["given"]
    declared = document("absent", {"v": "x"})["root"]["inputDefinitions"]["parameters"]
    assert list(declared) == ["given", "v"]
    in_part = document("absent_in_part")["root"]
    assert list(in_part["inputDefinitions"]["parameters"]) == ["v"]
    assert compiled("absent_in_part", {"v": "x"}).notices == ()


def test_no_condition_and_no_loop_is_given_what_has_no_value() -> None:
    spec = document("absent_in_groups")
    for component in (spec["root"], *spec["components"].values()):
        declared = component.get("inputDefinitions", {}).get("parameters", {})
        for task in component.get("dag", {}).get("tasks", {}).values():
            for binding in task.get("inputs", {}).get("parameters", {}).values():
                assert binding.get("componentInputParameter", next(iter(declared), "")) in {
                    *declared,
                    "",
                }
                assert binding.get("componentInputParameter") not in ("n", "pipelinechannel--n")
        assert "pipelinechannel--v" not in declared
    spec = document("absent_in_groups", {"v": "x", "n": 2})
    (condition,) = [t for name, t in spec["root"]["dag"]["tasks"].items() if name == "condition-1"]
    assert condition["inputs"]["parameters"]["pipelinechannel--v"] == {
        "componentInputParameter": "v"
    }


def test_no_condition_and_no_loop_is_given_an_artifact_that_is_not_there() -> None:
    spec = document("absent_artifact_in_groups")
    tasks_of_root = spec["root"]["dag"]["tasks"]
    given = {
        name: [task.get("inputs", {}).get("artifacts") for task in inner_tasks(spec, name)]
        for name in ("reading", "reading-2", "reading-3")
    }
    assert "artifacts" not in tasks_of_root["reading"].get("inputs", {})
    assert not any(given["reading"])
    assert all(given["reading-2"])
    assert not any(given["reading-3"])


def inner_tasks(spec: Any, name: str) -> Iterator[Any]:
    """The tasks at every depth inside a task of the root."""
    waiting = [spec["root"]["dag"]["tasks"][name]]
    while waiting:
        component = spec["components"][waiting.pop()["componentRef"]["name"]]
        inner = list(component.get("dag", {}).get("tasks", {}).values())
        yield from inner
        waiting += inner


def test_a_text_of_an_input_without_a_value_still_asks_for_it() -> None:
    maker = document("text_of_nothing")["root"]["dag"]["tasks"]["text-for-inner"]
    assert maker["inputs"]["parameters"] == {"pipelinechannel--v": {"componentInputParameter": "v"}}


def test_a_default_takes_the_place_of_an_argument_that_has_no_value() -> None:
    (task,) = tasks(document("absent_for_container"))
    assert task["inputs"]["parameters"]["b"] == {"runtimeValue": {"constant": "the default"}}
    (task,) = tasks(document("absent_for_container", {"b": "B"}))
    assert task["inputs"]["parameters"]["b"] == {"componentInputParameter": "b"}


def test_an_if_present_counts_a_default_as_a_value() -> None:
    spec = document("presence_of_defaults")
    values = [task["inputs"]["parameters"] for task in tasks(spec)]
    constants = [{n: b["runtimeValue"]["constant"] for n, b in v.items()} for v in values]
    assert constants == [{"name": "you", "other": "others"}, {"name": "me", "other": "others"}]


def test_tasks_that_share_an_executor_keep_their_own_retries_and_their_settings() -> None:
    written = yaml.safe_load(compile_function(module("backend").retries))
    root_tasks = written["root"]["dag"]["tasks"]
    first = root_tasks["flaky"]
    for name, count in (("flaky-2", 0), ("flaky-3", 5)):
        root_tasks[name] = {**first, "taskInfo": {"name": name}}
        root_tasks[name]["retryPolicy"] = {**first["retryPolicy"], "maxRetryCount": count}
    secret = {"secretName": "s", "keyToEnv": [{"secretKey": "k", "envVar": "E"}]}
    settings = {"deploymentSpec": {"executors": {"exec-flaky": {"secretAsEnv": [secret]}}}}
    text = yaml.safe_dump_all([written, {"platforms": {"kubernetes": settings}}])
    definition = compile(text, read(text), {"folder": "a", "other": "b"}, KubeflowSpec())
    spec, second = yaml.safe_load_all(definition.text)
    retries = {}
    for name, task in spec["root"]["dag"]["tasks"].items():
        label = spec["components"][task["componentRef"]["name"]]["executorLabel"]
        words = spec["deploymentSpec"]["executors"][label]["container"]["command"]
        counts = [words[index + 2] for index, word in enumerate(words) if word.startswith("left=")]
        retries[name] = counts
        assert (
            "secretAsEnv" in second["platforms"]["kubernetes"]["deploymentSpec"]["executors"][label]
        )
    assert retries == {"flaky": ["2"], "flaky-2": [], "flaky-3": ["5"]}


def test_what_an_exit_handler_covers_never_comes_from_the_cache_where_its_status_is_read() -> None:
    spec = document("status", {"folder": "f"})
    cached = {task["taskInfo"]["name"] for task in tasks(spec) if task.get("cachingOptions")}
    assert cached == {"told"}
    spec = document("exit_without_status")
    cached = {task["taskInfo"]["name"] for task in tasks(spec) if task.get("cachingOptions")}
    assert cached == {"greet", "greet-2"}


def test_a_step_from_the_cache_has_succeeded_for_who_reads_its_status(tmp_path: Path) -> None:
    spec = document("status", {"folder": str(tmp_path)})
    (container,) = [e for e in executors(spec) if "status.state" in str(e["command"])]
    final = {"state": "CACHED", "pipelineTaskName": "greet", "error": {}}
    values = {"status": final, "folder": str(tmp_path)}
    assert run_container(container, values, tmp_path) == 0
    assert (tmp_path / "status").read_text() == "SUCCEEDED greet"


def test_an_importer_is_recorded_under_the_name_that_others_find_it_by() -> None:
    spec = document("uri_of_argument")
    assert spec["root"]["dag"]["tasks"]["importer"]["taskInfo"]["name"] == "importer"


@pytest.mark.parametrize("name", ["text_of_gpus", "machine_beside_output"])
def test_an_input_of_the_pipeline_that_is_a_text_may_size_a_machine(name: str) -> None:
    assert compiled(name).notices == ()


def test_no_source_has_dollars_that_kubernetes_would_change() -> None:
    text = compiled("dollars_in_source").text.decode()
    assert "a$$b" not in text
    assert "KFP_POD_NAME" not in text


def test_no_launcher_has_dollars_that_kubernetes_would_change() -> None:
    graph = read(compile_function(module("backend").dollars_in_source))
    (step,) = graph.spread("dollars", Distribution(nodes=2)).steps()
    definition = launcher(step, KubeflowSpec(image="train:1"))["args"][0]
    assert "$$" not in definition
    assert "$(KFP_POD_NAME)" not in definition
    assert "a$$b $(KFP_POD_NAME)" in str(json.loads(definition)["task"])


def test_a_step_that_makes_a_text_pulls_its_image_as_the_step_does_that_has_it() -> None:
    pipeline = compile_function(module("backend").text_for_nested)
    pull = {"imagePullSecret": [{"secretName": "registry"}]}
    settings = {"deploymentSpec": {"executors": {"exec-as-str": pull}}}
    text = f"{pipeline}\n---\n{yaml.safe_dump({'platforms': {'kubernetes': settings}})}"
    _, second = yaml.safe_load_all(compile(text, read(text), {}, KubeflowSpec()).text)
    by_label = second["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert by_label == {"exec-as-str": pull, "exec-rekindle-text-1": pull}


def test_settings_that_are_null_are_refused_and_not_a_bug() -> None:
    pipeline = compile_function(module("backend").text_for_nested)
    settings = {"deploymentSpec": {"executors": {"exec-as-str": None}}}
    text = f"{pipeline}\n---\n{yaml.safe_dump({'platforms': {'kubernetes': settings}})}"
    with pytest.raises(RequestError, match="None stands where KFP reads a struct"):
        compile(text, read(text), {}, KubeflowSpec())


def test_sources_have_nothing_that_argo_or_kfp_would_change() -> None:
    text = compiled("sources").text.decode()
    assert "workflow.name" not in text
    assert "\U0001f389" not in text
    (step,) = read(text).steps()
    (written,) = read(compile_function(module("backend").sources)).steps()
    assert step.container.source == written.container.source


REFUSED = {
    "nested_collected": "KFP gives one flat list",
    "element_for_loop": "takes the element out once more in each turn",
    "ignored_output": "after a failure KFP gives the empty text",
    "ignored_several": "KFP runs it once behind each of them",
    "ignored_follower": "KFP's server takes no such pipeline",
    "metadata": "KFP hands them on in another form",
    "metadata_of_run": "KFP records the placeholders",
    "importer_https": "KFP opens gs://, s3:// and minio:// only",
    "importer_https_in_loop": "KFP opens gs://, s3:// and minio:// only",
    "dollars_in_argument": "Kubernetes makes one dollar sign of two",
    "dollars_in_constant": "Kubernetes makes one dollar sign of two",
    "dollars_in_items": "Kubernetes makes one dollar sign of two",
    "dollars_in_variable": "Kubernetes makes one dollar sign of two",
    "name_of_pod": "and fills in their variables",
    "name_of_variable": "and fills in their variables",
    "tag_in_constant": "Argo fills it in wherever it stands in a Workflow",
    "tag_in_default": "Argo fills it in wherever it stands in a Workflow",
    "tag_in_items": "Argo fills it in wherever it stands in a Workflow",
    "tag_in_variable": "Argo fills it in wherever it stands in a Workflow",
    "expression_in_key": "Argo fills it in wherever it stands in a Workflow",
    "fact_in_variable": "KFP hands them on as they are",
    "fact_in_items": "KFP hands it on as it is written",
    "image_with_tag": "takes the value alone, without the text around it",
    "number_of_gpus": "reads a number as the empty text",
    "uri_with_values": "KFP imports from a text or from an input of the pipeline only",
    "uri_of_step": "KFP imports from a text or from an input of the pipeline only",
    "output_in_presence": "KFP hands its JSON to the program",
    "text_for_exit": "KFP would run the pipeline behind that step, too",
    "ignored_status_follower": "KFP's server takes no such pipeline",
    "choice_of_importers": "KFP marks the end of a branch only where a container ends last",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_or_fail_is_refused_with_its_place(name: str) -> None:
    with pytest.raises(UnsupportedError, match=REFUSED[name]) as refused:
        compiled(name)
    for problem in refused.value.problems:
        assert problem.where
        assert problem.fix


def test_a_root_of_the_pipelines_own_is_one_that_kfp_can_open() -> None:
    text = f"{compile_function(module('backend').sources)}defaultPipelineRoot: abfs://lake/kfp\n"
    with pytest.raises(RequestError, match="is in a store that KFP cannot open") as refused:
        compile(text, read(text), {}, KubeflowSpec())
    assert refused.value.problems[0].where == "defaultPipelineRoot"
    assert compile(text, read(text), {}, KubeflowSpec(pipeline_root="s3://b/kfp"))
    text = text.replace("abfs://", "gs://")
    assert compile(text, read(text), {}, KubeflowSpec())


def test_a_text_that_no_template_has_room_for_is_refused() -> None:
    assert compiled("long_argument", {"text": "a" * 100_000})
    with pytest.raises(UnsupportedError, match="template of 136,502 bytes"):
        compiled("long_argument", {"text": "a" * 130_000})


def test_a_text_is_counted_with_the_escapes_that_it_has_in_the_pod_of_its_step() -> None:
    assert compiled("long_argument", {"text": '"' * 14_000})
    with pytest.raises(UnsupportedError, match="with its inputs it makes a template of 13") as big:
        compiled("long_argument", {"text": '"' * 16_000})
    assert [problem.where for problem in big.value.problems] == ["root.dag.tasks.as-str"]


NOTICED = {
    "text_with_values": "`as-str` uses an f-string with a text, a list or a struct in it: ",
    "absent_in_part": "v is compiled without a value, and parts of the pipeline do not ask for it",
    "emoji_in_constant": "the pipeline uses a character of four bytes (an emoji, say)",
    "text_of_quoted_items": "`for-loop-2/as-str` uses an f-string with a text, a list or a struct",
    "collected_of_nothing": "`for-loop-1` uses Collected over a list that may be empty: ",
    "collected_of_branches": "`for-loop-2` uses Collected over steps that a condition may leave",
    "collected_of_choices": "`for-loop-2` uses Collected over a OneOf: ",
    "choice_of_conditions": "`condition-branches-1` uses OneOf over a branch that ends with a cond",
    "status_of_conditions": "`told-alone` uses the final status of what ends with a condition or",
    "status_of_inner_conditions": "`told-alone` uses the final status of what ends with a cond",
    "choice_of_loops": "`condition-branches-1/condition-3/for-loop-2` uses OneOf over a branch with a",
    "status_of_loops": "`exit-handler-1/for-loop-2` uses the final status of what has a loop over a",
    "text_of_step_in_argument": "`says` uses a text that a step gives in an argument of a container",
    "retries_without_a_shell": "`no-shell` uses retries of a command that no shell starts: ",
}


@pytest.mark.parametrize("name", NOTICED)
def test_what_fails_sometimes_is_said(name: str) -> None:
    (notice,) = compiled(name).notices
    assert notice.startswith(NOTICED[name])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("text_without_quotes", {}),
        ("text_of_plain_items", {}),
        ("collected_of_nothing", {"xs": [1]}),
        ("loops_with_turns", {}),
        ("status_of_loops", {"xs": ["x"]}),
        ("argument_in_argument", {}),
        ("sources", {}),
    ],
)
def test_what_is_known_to_be_right_is_not_said(name: str, arguments: dict[str, Any]) -> None:
    assert compiled(name, arguments).notices == ()


def test_brackets_that_neither_kubernetes_nor_argo_knows_stay() -> None:
    assert compiled("other_brackets").notices == ()
