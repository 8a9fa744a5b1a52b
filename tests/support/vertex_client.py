"""What tests share with platforms/vertex/test_client.py."""

from __future__ import annotations

from rekindle.platforms.submission import Definition
from rekindle.platforms.vertex.section import VertexSpec
from tests.platforms.local.runs import module
from tests.platforms.vertex.project import project as project
from tests.servers.google.rest import PROJECT, REGION

PLACE = VertexSpec(project=PROJECT, region=REGION, artifact_root="gs://lake/rekindle")


def definition(word: str = "a") -> Definition:
    from rekindle.ir.compile import compile_function
    from rekindle.ir.read.pipeline import read
    from rekindle.platforms.vertex.compile import compile

    text = compile_function(module("behaviour").chain)
    return compile(text, read(text), {"folder": "x", "text": word}, PLACE)
