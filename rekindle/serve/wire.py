"""Wire forms of one internal request, a function each: from a body to contents and options, and
from predictions to a body. docs/serving.md shows all of them.

`predict` is rekindle's own and Vertex AI's; `invocations` is SageMaker's, in JSON, JSON lines, or
CSV without a header; `infer` is version 2 of the Open Inference Protocol, as JSON."""

from __future__ import annotations

import asyncio
import csv
import dataclasses
import io
import json
import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rekindle.data.columns import scalar_text
from rekindle.serve.inputs import Inputs
from rekindle.serve.work import Options, Prediction, RefusedError
from rekindle.tasks.base import ANSWERS

if TYPE_CHECKING:
    from starlette.requests import Request

MOST_BYTES, MOST_INSTANCES, BODY_SECONDS = 4 << 20, 256, 15.0
TOO_LARGE = f"the body is larger than {MOST_BYTES >> 20} MiB: send fewer instances"
TOO_SLOW = f"the body took more than {BODY_SECONDS:g} s"
JSON, JSON_LINES, CSV = "application/json", "application/jsonlines", "text/csv"
_JSON_LENGTH = "inference-header-content-length"
_KINDS = {bool: ("BOOL", "?"), float: ("FP64", "d"), int: ("INT64", "q")}
_Read = TypeVar("_Read", bound=BaseModel)


class Body(BaseModel):
    """What a request may say: a field that would change nothing is refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Predict(Body):
    """`POST /predict`."""

    instances: list[dict[str, Any]] = Field(min_length=1, max_length=MOST_INSTANCES)
    parameters: Options | None = None


class Tensor(Body):
    """An input of the Open Inference Protocol, or the name of an output."""

    name: str
    shape: list[int] = []
    datatype: Literal["BYTES"] = "BYTES"
    data: list[str | list[str]] = []
    parameters: dict[Literal["binary_data_size", "binary_data"], int | bool] = {}


class Infer(Body):
    """`POST /v2/models/NAME/infer`."""

    id: str = ""
    inputs: list[Tensor] = Field(min_length=1, max_length=1)
    outputs: list[Tensor] = []
    parameters: dict[str, Any] = {}


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a request asks; `render` makes the body of the response, of type `media`, and may fill
    its `headers`. `ids` are those of the contents, if these have any."""

    contents: list[Any]
    options: Options
    render: Callable[[list[Prediction]], bytes]
    media: str = JSON
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    ids: list[str] = dataclasses.field(default_factory=list)


def predict(body: bytes, headers: Mapping[str, str], inputs: Inputs, about: Any) -> Asked:
    """{"instances": [{column: value}], "parameters": {...}} -> {"predictions": [...], "model"}."""
    asked = read(Predict, body)
    contents, options = inputs.contents(asked.instances), _options(asked.parameters, inputs)
    keys = [one.get(inputs.key) for one in asked.instances] if inputs.key else []
    ids = ["" if key is None else scalar_text(key) or str(key) for key in keys]  # as labels have it

    def render(found: list[Prediction]) -> bytes:
        return dumped({"predictions": found, "model": about})

    return Asked(contents, options, render, ids=ids)


def invocations(body: bytes, headers: Mapping[str, str], inputs: Inputs, about: Any) -> Asked:
    """The same in JSON; or an instance a line, answered by a prediction a line; or a text a row."""
    media = headers.get("content-type", JSON).partition(";")[0].strip().lower()
    wanted = headers.get("accept", "").lower().split(",")
    accepted = [one.partition(";")[0].strip() for one in wanted]
    if not {"*/*", "", media}.intersection(accepted):
        raise RefusedError(406, f"the response has the type of the request, {media}")
    if media == JSON:
        return predict(body, headers, inputs, about)
    if media == JSON_LINES:
        lines = b",".join(line for line in body.split(b"\n") if line.strip())
        asked = predict(b'{"instances":[' + lines + b"]}", headers, inputs, about)
        return dataclasses.replace(
            asked, render=lambda found: b"".join(dumped(one) + b"\n" for one in found), media=media
        )
    if media != CSV or inputs.modality in ("words", "image") or inputs.form == "chat":
        raise RefusedError(415, f"{media} is not read here: send {JSON} or {JSON_LINES}")
    try:
        rows = [row for row in csv.reader(io.StringIO(body.decode())) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise RefusedError(400, f"the body is not a CSV in UTF-8: {error}") from None
    if wide := [i for i, row in enumerate(rows, 1) if len(row) != 1]:
        raise RefusedError(400, f"row {wide[0]}: one value, `{inputs.column}`, is needed")
    instances = [{inputs.column: row[0]} for row in rows]
    asked = predict(dumped({"instances": instances}), headers, inputs, about)
    return dataclasses.replace(asked, render=_as_csv, media=media)


def infer(body: bytes, headers: Mapping[str, str], inputs: Inputs, about: Any) -> Asked:
    """One input, called as the column, BYTES [N]: lists and chats as JSON, images in base64. The
    outputs are the fields of predictions, lists as JSON. With the extension for binary data, as
    NVIDIA's client asks by default: values behind the JSON, in the order of the tensors."""
    length = headers.get(_JSON_LENGTH, "")
    cut = int(length) if length.isdecimal() and len(length) < 9 else len(body)
    head, raw = body[:cut], body[cut:]
    asked = read(Infer, head)
    tensor, given, answer_headers = asked.inputs[0], asked.parameters, dict[str, str]()
    if tensor.name != inputs.column:
        raise RefusedError(400, f"inputs: one input, called `{inputs.column}`, is needed")
    texts = [text for row in tensor.data for text in (row if isinstance(row, list) else [row])]
    texts += _strings(raw, tensor.parameters.get("binary_data_size", 0))
    if tensor.shape not in ([len(texts)], [len(texts), 1]) or not 0 < len(texts) <= MOST_INSTANCES:
        what = f"inputs: the shape {tensor.shape} does not hold {len(texts)} values"
        raise RefusedError(400, f"{what}, or they are not 1 to {MOST_INSTANCES}")
    values = [inputs.encoded(text, f"data {i}") for i, text in enumerate(texts)]
    contents = inputs.contents([{inputs.column: value} for value in values])
    binary = given.pop("binary_data_output", False)
    options = _options(read(Options, dumped(given)) if given else None, inputs)
    same = {"id": asked.id, "model_name": about["name"], "model_version": about["version"]}

    def render(found: list[Prediction]) -> bytes:
        names = _names(found)
        wanted = {one.name: one.parameters.get("binary_data") for one in asked.outputs}
        if missing := sorted(wanted.keys() - {*names, "truncated"}):
            raise RefusedError(400, f"outputs: there is no `{missing[0]}`; there is {names}")
        wanted = wanted or dict.fromkeys(names, binary)
        pairs = [_tensor(n, [one.get(n, False) for one in found], wanted[n]) for n in wanted]
        outputs, ends = zip(*pairs, strict=True)
        head, end = dumped({**same, "outputs": outputs}), b"".join(ends)
        answer_headers.update({_JSON_LENGTH: str(len(head))} if end else {})
        return head + end

    ids = [asked.id] if inputs.key and len(values) == 1 else []
    return Asked(contents, options, render, headers=answer_headers, ids=ids)


def outputs(inputs: Inputs) -> list[dict[str, Any]]:
    """What `infer` answers with, as the metadata of a model describes it."""
    numbers = {"probability": "FP64", "value": "FP64", "prompt_tokens": "INT64", "tokens": "INT64"}
    names = ANSWERS[inputs.objective]
    return [{"name": n, "datatype": numbers.get(n, "BYTES"), "shape": [-1]} for n in names]


def _tensor(name: str, values: list[Any], binary: Any) -> tuple[dict[str, Any], bytes]:
    """An output, and the bytes of it that follow the JSON."""
    kind, form = _KINDS.get(type(values[0]), ("BYTES", ""))
    data = [dumped(value).decode() if isinstance(value, list) else value for value in values]
    tensor = {"name": name, "datatype": kind, "shape": [len(data)]}
    if not binary:
        return {**tensor, "data": data}, b""
    parts = [one.encode() for one in data] if kind == "BYTES" else []
    end = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    end = end or struct.pack(f"<{len(data)}{form}", *data)
    return {**tensor, "parameters": {"binary_data_size": len(end)}}, end


def _strings(raw: bytes, size: int) -> list[str]:
    """The values of a binary input, each behind its length in 4 bytes, little endian."""
    found, at = list[str](), 0
    while at < len(raw) == size:
        begin, at = at + 4, at + 4 + int.from_bytes(raw[at : at + 4], "little")
        found.append(raw[begin:at].decode(errors="surrogateescape"))  # which no text may have
    if at != size or len(raw) != size:
        raise RefusedError(400, f"inputs: of {size} bytes in strings {len(raw)} follow the JSON")
    return found


def _names(found: list[Prediction]) -> list[str]:
    return list(dict.fromkeys(name for one in found for name in one))


def _as_csv(found: list[Prediction]) -> bytes:
    file = io.StringIO()
    csv.writer(file).writerows([one.get(name, False) for name in _names(found)] for one in found)
    return file.getvalue().encode()


def _options(given: Options | None, inputs: Inputs) -> Options:
    if given is not None and not inputs.form:
        raise RefusedError(400, "parameters: this model is no language model and has none")
    return given or Options()


def read(kind: type[_Read], body: bytes) -> _Read:
    """The body of a request; RefusedError 400 with its first fault."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the body"
        raise RefusedError(400, f"{place}: {first['msg']}") from None
    if b"NaN" in body or b"Infinity" in body:  # pydantic takes them as numbers, where texts may
        json.loads(body, parse_constant=_refuse_constant)  # hold the words
    return request


def _refuse_constant(name: str) -> None:
    raise RefusedError(400, f"the body: {name} is not a value of JSON")


async def read_body(request: Request) -> bytes:
    """The body; RefusedError 413 where it is too large. It is read to its end all the same, up to a
    bound, so that the client gets the answer."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise RefusedError(415, "the body is compressed: send it as it is")
    pieces, size = list[bytes](), 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                size += len(piece)
                if size <= MOST_BYTES:
                    pieces.append(piece)
                elif size > 16 * MOST_BYTES:
                    break
    except TimeoutError:
        raise RefusedError(408, TOO_SLOW) from None
    if size > MOST_BYTES:
        raise RefusedError(413, TOO_LARGE, "too_large")
    return b"".join(pieces)


def dumped(value: Any) -> bytes:
    """JSON as it is sent."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def document(about: Mapping[str, str], inputs: Inputs) -> dict[str, Any]:
    """`POST /predict` as an OpenAPI document."""
    kind = "array" if inputs.modality == "words" or inputs.form == "chat" else "string"
    column = {inputs.column: {"type": kind}}
    body = Predict.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas = body.pop("$defs", {})
    instance = {"type": "object", "properties": column, "required": [inputs.column]}
    body["properties"]["instances"]["items"] = instance
    operation = {
        "requestBody": {"required": True, "content": {JSON: {"schema": body}}},
        "responses": {
            "200": {"description": "`predictions`, one an instance, and the `model`"},
            "4XX": {"description": "the request is wrong: `error` says where"},
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": about["name"], "version": about["version"]},
        "paths": {"/predict": {"post": operation}},
        "components": {"schemas": schemas},
    }
