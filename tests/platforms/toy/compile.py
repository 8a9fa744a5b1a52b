"""A pipeline as the names of its steps, in an order that works."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rekindle.errors import SpecError
from rekindle.ir.graph import Graph
from rekindle.platforms.submission import Definition
from tests.platforms.toy import ToySpec


def compile(ir_text: str, graph: Graph, arguments: Mapping[str, Any], place: ToySpec) -> Definition:
    if problems := place.missing("compile"):
        raise SpecError(problems)
    steps = {step.path: step.container.image for step in graph.steps()}
    text = json.dumps({"arguments": dict(arguments), "steps": steps}, indent=1)
    return Definition({f"{graph.name}.toy.json": text.encode()})
