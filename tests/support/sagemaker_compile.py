"""What tests share with platforms/sagemaker/test_compile.py."""

import json
from typing import Any

from kfp import dsl

from rekindle.ir.compile import compile_function
from rekindle.ir.read.pipeline import read as read_ir
from rekindle.platforms.sagemaker.compile import compile
from rekindle.platforms.sagemaker.section import SageMakerSpec
from rekindle.platforms.submission import Definition
from tests.support.two_steps import component

IMAGE = "123456789012.dkr.ecr.eu-central-1.amazonaws.com/rekindle/train@sha256:" + "0" * 64


PLACE: dict[str, Any] = {
    "region": "eu-central-1",
    "role_arn": "arn:aws:iam::123456789012:role/me",
    "artifact_root": "s3://lake/rekindle/",
    "image": IMAGE,
}


ECR = "123456789012.dkr.ecr.eu-central-1.amazonaws.com"


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
