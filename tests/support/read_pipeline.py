"""What tests share with ir/read/test_pipeline.py."""

from __future__ import annotations

from typing import Any


def executor(**container: Any) -> dict[str, Any]:
    return {"container": {"image": "python:3.11", "command": ["true"], **container}}


def minimal() -> dict[str, Any]:
    """One step `a` with an integer input and an output, and a step `b` that reads it."""
    number = {"parameterType": "NUMBER_INTEGER"}
    component = {
        "executorLabel": "exec-a",
        "inputDefinitions": {"parameters": {"n": number}},
        "outputDefinitions": {"parameters": {"Output": number}},
    }
    first = {
        "componentRef": {"name": "comp-a"},
        "taskInfo": {"name": "a"},
        "inputs": {"parameters": {"n": {"runtimeValue": {"constant": 3.0}}}},
        "cachingOptions": {"enableCache": True},
    }
    output = {"taskOutputParameter": {"producerTask": "a", "outputParameterKey": "Output"}}
    second = {
        "componentRef": {"name": "comp-b"},
        "dependentTasks": ["a"],
        "inputs": {"parameters": {"n": output}},
    }
    return {
        "pipelineInfo": {"name": "small"},
        "schemaVersion": "2.1.0",
        "sdkVersion": "kfp-2.17.0",
        "components": {"comp-a": component, "comp-b": {**component, "executorLabel": "exec-b"}},
        "deploymentSpec": {"executors": {"exec-a": executor(), "exec-b": executor()}},
        "root": {"dag": {"tasks": {"a": first, "b": second}}},
    }


def nested(condition: str = "") -> dict[str, Any]:
    spec = minimal()
    inner = spec["root"]["dag"]
    inner["tasks"]["a"]["inputs"]["parameters"]["n"] = {"componentInputParameter": "n"}
    inner["outputs"] = {
        "parameters": {
            "out": {"valueFromParameter": {"producerSubtask": "b", "outputParameterKey": "Output"}}
        }
    }
    number = {"parameters": {"n": {"parameterType": "NUMBER_INTEGER"}}}
    out = {"parameters": {"out": {"parameterType": "NUMBER_INTEGER"}}}
    spec["components"]["comp-inner"] = {
        "dag": inner,
        "inputDefinitions": number,
        "outputDefinitions": out,
    }
    task: dict[str, Any] = {
        "componentRef": {"name": "comp-inner"},
        "inputs": {"parameters": {"n": {"runtimeValue": {"constant": 1.0}}}},
    }
    if condition:
        task["triggerPolicy"] = {"condition": condition}
    spec["root"] = {"dag": {"tasks": {"inner": task}}}
    return spec


def looped(**iterator: Any) -> dict[str, Any]:
    """The nested pipeline with a loop around it, whose item is its input `n`."""
    spec = nested()
    task = spec["root"]["dag"]["tasks"]["inner"]
    del task["inputs"]["parameters"]["n"]
    task["parameterIterator"] = {"itemInput": "n", **iterator}
    task["iteratorPolicy"] = {"parallelismLimit": 2.0}
    return spec
