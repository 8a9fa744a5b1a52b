"""What tests share with platforms/sagemaker/test_compile.py."""

import json
from typing import Any

from kfp import dsl

import rekindle
from rekindle.ir.compile import compile_function
from rekindle.ir.read.pipeline import read as read_ir
from rekindle.platforms.sagemaker.compile import compile
from rekindle.platforms.sagemaker.section import SageMakerSpec
from rekindle.platforms.submission import Definition

IMAGE = "123456789012.dkr.ecr.eu-central-1.amazonaws.com/rekindle/train@sha256:" + "0" * 64


PLACE: dict[str, Any] = {
    "region": "eu-central-1",
    "role_arn": "arn:aws:iam::123456789012:role/me",
    "artifact_root": "s3://lake/rekindle/",
    "image": IMAGE,
}


ECR = "123456789012.dkr.ecr.eu-central-1.amazonaws.com"


component = dsl.component(base_image="python:3.11", install_kfp_package=False)


@component
def make(n: int, text: str, data: dsl.Output[dsl.Dataset]) -> bool:
    return n > 1


@component
def use(data: dsl.Input[dsl.Dataset], flag: bool):
    print(flag)


@dsl.pipeline(name="two-steps")
def pipeline(n: int, text: str = "a"):
    first = make(n=n, text=text).set_retry(2, backoff_duration="7s").set_cpu_limit("4")
    with dsl.If(first.outputs["Output"] == True):  # noqa: E712
        use(data=first.outputs["data"], flag=first.outputs["Output"])


@component
def write(text: str, result: dsl.Output[dsl.Dataset]):
    from pathlib import Path

    Path(result.path).write_text(text)


@component
def read(result: dsl.Input[dsl.Dataset]) -> str:
    from pathlib import Path

    return Path(result.path).read_text()


@dsl.pipeline(name="named-result")
def named_result(text: str) -> None:
    read(result=write(text=text).outputs["result"])


def compiled(made: Any, arguments: dict[str, object] | None = None, **place: Any) -> Definition:
    text = made if isinstance(made, str) else compile_function(made)
    return compile(text, read_ir(text), arguments or {}, SageMakerSpec(**{**PLACE, **place}))


def definition(made: Definition) -> dict[str, Any]:
    (name,) = [name for name in made.files if name.endswith(".sagemaker.json")]
    found: dict[str, Any] = json.loads(made.files[name])
    return found


def changed(**change: Any) -> Any:
    """The two steps with something about them changed."""

    @dsl.pipeline(name=change.pop("name", "changed"))
    def other() -> None:
        task = make(n=1, text="")
        for method, values in change.items():
            getattr(task, method)(*values)

    return other


def spread(nodes: int, retry: bool = False, **more: Any) -> Any:
    """One step on several nodes."""

    @dsl.pipeline(name="spread")
    def other() -> None:
        task = rekindle.distribute(make(n=1, text=""), nodes=nodes, **more)
        if retry:
            task.set_retry(2)

    return other
