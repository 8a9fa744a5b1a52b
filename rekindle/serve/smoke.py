"""What a server proves before it is ready: the rows that the evidence keeps, sent to its
own HTTP route, are answered as the model was judged. Other weights, another tokenizer,
other processing of images do not."""

import contextlib
import http.client
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rekindle.errors import StepError
from rekindle.records import Evidence, Smoke, SmokeRow
from rekindle.serve.inputs import Inputs
from rekindle.serve.messages import ServedModel
from rekindle.serve.work import RefusedError
from rekindle.train.modelfolder import open_model
from rekindle.train.pieces import HALF


def instance_of(row: SmokeRow, inputs: Inputs) -> dict[str, object]:
    """A row of the evidence as an instance."""
    return {inputs.column: inputs.question.value(row.content)}


def proof_contents(model: ServedModel, inputs: Inputs) -> list[Any]:
    """The contents that prove a deployment of the version, as requests for them bring them."""
    rows = Evidence.read(model.evidence).smoke if model.evidence else None
    if rows is None:
        return []
    contents = []
    for row in rows.rows:
        # what this server would refuse proves nothing here
        with contextlib.suppress(RefusedError):
            contents += inputs.contents([instance_of(row, inputs)])
    return contents


def smoke(host: str, port: int, headers: dict[str, str], proof: Smoke, inputs: Inputs) -> None:
    """Ask the server on this machine. Raises StepError with the first difference."""
    # over HTTP, so that the wire form is proven, too
    connection = http.client.HTTPConnection(host, port, timeout=600)
    connection.request("POST", "/predict", json.dumps(question(proof, inputs)), headers)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    if response.status != 200:
        raise StepError(f"smoke: the server answered {response.status}: {text[:300]}")
    compare(proof, json.loads(text))


def prove(model: ServedModel, ask: Callable[[dict[str, object]], Any]) -> None:
    """Let a deployed version answer the rows of its evidence: `ask` sends a body of
    `/predict` the way that requests take, and returns the answer. Raises StepError with
    the first difference."""
    proof = Evidence.read(model.evidence).smoke if model.evidence else None
    if proof is not None:
        inputs = Inputs.of(model, open_model(Path(model.path), model.code))
        compare(proof, ask(question(proof, inputs)))


def question(proof: Smoke, inputs: Inputs) -> dict[str, object]:
    """The rows as the body of a request."""
    body: dict[str, object] = {"instances": [instance_of(row, inputs) for row in proof.rows]}
    if proof.tokens:
        body["parameters"] = {"max_new_tokens": proof.tokens}
    return body


def compare(proof: Smoke, body: Any) -> None:
    """Raise StepError with the first difference to what the model was judged by."""
    predictions = body.get("predictions") if isinstance(body, dict) else None
    if not isinstance(predictions, list) or len(predictions) != len(proof.rows):
        raise StepError(f"smoke: the server answered {json.dumps(body)[:300]}")
    for row, prediction in zip(proof.rows, predictions, strict=True):
        for name, expected in row.answer.items():
            answer = prediction.get(name)
            # the evidence keeps the beginning of what was written in half precision
            if name == "text" and proof.tolerance >= HALF:
                answer = answer[: len(expected)]
            if not _equal(expected, answer, proof.tolerance):
                message = f"smoke: to row {row.id} of its test split the model answers {name} "
                message += f"{prediction.get(name)!r}, and was judged by {expected!r}"
                fix = "weights, tokenizer, image processing or library versions are not those "
                fix += "that were judged: serve where the model was trained, or train it again here"
                raise StepError(message, fix=fix)


def _equal(expected: Any, answer: Any, tolerance: float) -> bool:
    if isinstance(expected, list):
        if not isinstance(answer, list) or len(answer) != len(expected):
            return False
        pairs = zip(expected, answer, strict=True)
        return all(_equal(ours, theirs, tolerance) for ours, theirs in pairs)
    if isinstance(expected, float):
        return isinstance(answer, float) and math.isclose(expected, answer, abs_tol=tolerance)
    return bool(expected == answer)
