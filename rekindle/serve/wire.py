"""Wire forms of one internal request, a function each: from a body to contents and
options, and from predictions to a body. docs/serving.md shows all of them.

`predict` is rekindle's own and Vertex AI's; `invocations` is SageMaker's, in JSON, JSON
lines, or CSV without a header; `infer` is version 2 of the Open Inference Protocol, as
JSON."""

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

from rekindle.objectives import KINDS
from rekindle.rows.columns import scalar_text
from rekindle.serve.inputs import Inputs
from rekindle.serve.work import Prediction, RefusedError, WritingOptions

if TYPE_CHECKING:
    from starlette.requests import Request

MOST_BYTES = 4 << 20
MOST_INSTANCES = 256
BODY_SECONDS = 15.0
TOO_LARGE = f"the body is larger than {MOST_BYTES >> 20} MiB: send fewer instances"
TOO_SLOW = f"the body took more than {BODY_SECONDS:g} s"
JSON = "application/json"
JSON_LINES = "application/jsonlines"
CSV = "text/csv"
# header of the protocol's binary extension: how many bytes of the body are JSON
_JSON_LENGTH = "inference-header-content-length"
# type in Python -> type of the Open Inference Protocol, and its code in `struct`
_KINDS = {bool: ("BOOL", "?"), float: ("FP64", "d"), int: ("INT64", "q")}
_Parsed = TypeVar("_Parsed", bound=BaseModel)


class Body(BaseModel):
    """What a request may say: a field that would change nothing is refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Predict(Body):
    """`POST /predict`."""

    instances: list[dict[str, Any]] = Field(min_length=1, max_length=MOST_INSTANCES)
    parameters: WritingOptions | None = None


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
class WireRequest:
    """What a request asks; `render` makes the body of the response, of type `media`, and
    may fill its `headers`. `ids` are those of the contents, if these have any."""

    contents: list[Any]
    options: WritingOptions
    render: Callable[[list[Prediction]], bytes]
    media: str = JSON
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    ids: list[str] = dataclasses.field(default_factory=list)


def predict(
    body: bytes, headers: Mapping[str, str], inputs: Inputs, about: Mapping[str, str]
) -> WireRequest:
    """{"instances": [{column: value}], "parameters":
    {...}} -> {"predictions": [...], "model"}."""
    request = parse(Predict, body)
    contents = inputs.contents(request.instances)
    options = _options(request.parameters, inputs)
    ids = list[str]()
    if inputs.key:
        ids = [_id_of(instance.get(inputs.key)) for instance in request.instances]

    def render(predictions: list[Prediction]) -> bytes:
        return json_bytes({"predictions": predictions, "model": about})

    return WireRequest(contents, options, render, ids=ids)


def _id_of(key: Any) -> str:
    """The id of an instance, written as the labels
    that are joined to it later write it."""
    if key is None:
        return ""
    return scalar_text(key) or str(key)


def invocations(
    body: bytes, headers: Mapping[str, str], inputs: Inputs, about: Mapping[str, str]
) -> WireRequest:
    """The same in JSON; or an instance a line, and a prediction a line;
    or a text a row."""
    media = headers.get("content-type", JSON).partition(";")[0].strip().lower()
    accept = headers.get("accept", "").lower().split(",")
    accepted = [media_range.partition(";")[0].strip() for media_range in accept]
    if not {"*/*", "", media}.intersection(accepted):
        raise RefusedError(406, f"the response has the type of the request, {media}")
    if media == JSON:
        return predict(body, headers, inputs, about)
    if media == JSON_LINES:
        lines = b",".join(line for line in body.split(b"\n") if line.strip())
        request = predict(b'{"instances":[' + lines + b"]}", headers, inputs, about)
        return dataclasses.replace(request, render=_as_json_lines, media=media)
    if media != CSV or not inputs.question.in_csv:
        raise RefusedError(415, f"{media} is not read here: send {JSON} or {JSON_LINES}")
    try:
        rows = [row for row in csv.reader(io.StringIO(body.decode())) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise RefusedError(400, f"the body is not a CSV in UTF-8: {error}") from None
    for number, row in enumerate(rows, 1):
        if len(row) != 1:
            raise RefusedError(400, f"row {number}: one value, `{inputs.column}`, is needed")
    instances = [{inputs.column: row[0]} for row in rows]
    request = predict(json_bytes({"instances": instances}), headers, inputs, about)
    return dataclasses.replace(request, render=_as_csv, media=media)


def infer(
    body: bytes, headers: Mapping[str, str], inputs: Inputs, about: Mapping[str, str]
) -> WireRequest:
    """One input, called as the column, BYTES [N]: lists and chats as JSON, images in
    base64. The outputs are the fields of predictions, lists as JSON. With the extension
    for binary data, as NVIDIA's client asks by default: values behind the JSON, in the
    order of the tensors."""
    json_length = len(body)
    length_header = headers.get(_JSON_LENGTH, "")
    if length_header.isdecimal() and len(length_header) < 9:
        json_length = int(length_header)
    request = parse(Infer, body[:json_length])
    tensor = request.inputs[0]
    if tensor.name != inputs.column:
        raise RefusedError(400, f"inputs: one input, called `{inputs.column}`, is needed")
    texts = _texts_of(tensor, body[json_length:])
    values = [inputs.encoded(text, f"data {i}") for i, text in enumerate(texts)]
    contents = inputs.contents([{inputs.column: value} for value in values])
    # what is left of the parameters are those of the model
    is_binary_default: object = request.parameters.pop("binary_data_output", False)
    options: WritingOptions | None = None
    if request.parameters:
        options = parse(WritingOptions, json_bytes(request.parameters))
    options = _options(options, inputs)
    answer_headers = dict[str, str]()
    about_model = {
        "id": request.id,
        "model_name": about["name"],
        "model_version": about["version"],
    }

    def render(predictions: list[Prediction]) -> bytes:
        names = _names(predictions)
        is_binary: dict[str, object] = {
            output.name: output.parameters.get("binary_data") for output in request.outputs
        }
        missing = sorted(is_binary.keys() - {*names, "truncated"})
        if missing:
            raise RefusedError(400, f"outputs: there is no `{missing[0]}`; there is {names}")
        if not is_binary:
            is_binary = dict.fromkeys(names, is_binary_default)
        tensors = list[dict[str, object]]()
        binary = b""
        for name in is_binary:
            column = [prediction.get(name, False) for prediction in predictions]
            output, output_binary = _tensor(name, column, bool(is_binary[name]))
            tensors.append(output)
            binary += output_binary
        head = json_bytes({**about_model, "outputs": tensors})
        if binary:
            answer_headers[_JSON_LENGTH] = str(len(head))
        return head + binary

    ids = [request.id] if inputs.key and len(values) == 1 else []
    return WireRequest(contents, options, render, headers=answer_headers, ids=ids)


def _texts_of(tensor: Tensor, binary: bytes) -> list[str]:
    """The values of an input, from its JSON and from what follows the JSON. Raises
    RefusedError where they are not as many as its shape says."""
    texts = list[str]()
    for value in tensor.data:
        if isinstance(value, list):
            texts += value
        else:
            texts.append(value)
    texts += _strings(binary, tensor.parameters.get("binary_data_size", 0))
    count = len(texts)
    if tensor.shape not in ([count], [count, 1]) or not 0 < count <= MOST_INSTANCES:
        message = f"inputs: the shape {tensor.shape} does not hold {count} values"
        raise RefusedError(400, f"{message}, or they are not 1 to {MOST_INSTANCES}")
    return texts


def outputs(inputs: Inputs) -> list[dict[str, object]]:
    """What `infer` answers with, as the metadata of a model describes it."""
    datatypes = {"number": "FP64", "count": "INT64"}
    descriptions = list[dict[str, object]]()
    for name, answer_type in KINDS[inputs.objective].answer_fields.items():
        # the protocol has no lists of different lengths: they are JSON in a string
        datatype = datatypes.get(answer_type, "BYTES")
        descriptions.append({"name": name, "datatype": datatype, "shape": [-1]})
    return descriptions


def _tensor(name: str, values: list[object], is_binary: bool) -> tuple[dict[str, object], bytes]:
    """An output, and the bytes of it that follow the JSON."""
    datatype, code = _KINDS.get(type(values[0]), ("BYTES", ""))
    # the protocol has no lists of different lengths: they are JSON in a string
    data = list[Any]()
    for value in values:
        data.append(json_bytes(value).decode() if isinstance(value, list) else value)
    tensor: dict[str, object] = {"name": name, "datatype": datatype, "shape": [len(data)]}
    if not is_binary:
        tensor["data"] = data
        return tensor, b""
    binary = b""
    if datatype == "BYTES":
        for text in data:
            encoded = text.encode()
            binary += len(encoded).to_bytes(4, "little") + encoded
    else:
        binary = struct.pack(f"<{len(data)}{code}", *data)
    tensor["parameters"] = {"binary_data_size": len(binary)}
    return tensor, binary


def _strings(raw: bytes, size: int) -> list[str]:
    """The values of a binary input, each behind its length in 4 bytes, little endian."""
    texts = list[str]()
    end = 0
    while end < len(raw) == size:
        begin = end + 4
        end = begin + int.from_bytes(raw[end:begin], "little")
        texts.append(raw[begin:end].decode(errors="surrogateescape"))  # which no text may have
    if end != size or len(raw) != size:
        raise RefusedError(400, f"inputs: of {size} bytes in strings {len(raw)} follow the JSON")
    return texts


def _names(predictions: list[Prediction]) -> list[str]:
    """The fields that some prediction has, in the order in which they first come."""
    return list(dict.fromkeys(name for prediction in predictions for name in prediction))


def _as_json_lines(predictions: list[Prediction]) -> bytes:
    return b"".join(json_bytes(prediction) + b"\n" for prediction in predictions)


def _as_csv(predictions: list[Prediction]) -> bytes:
    file = io.StringIO()
    writer = csv.writer(file)
    names = _names(predictions)
    for prediction in predictions:
        writer.writerow([prediction.get(name, False) for name in names])
    return file.getvalue().encode()


def _options(options: WritingOptions | None, inputs: Inputs) -> WritingOptions:
    if options is not None and not inputs.form:
        raise RefusedError(400, "parameters: this model is no language model and has none")
    return options or WritingOptions()


def parse(kind: type[_Parsed], body: bytes) -> _Parsed:
    """The body of a request; RefusedError 400 with its first fault."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the body"
        raise RefusedError(400, f"{place}: {first['msg']}") from None
    # pydantic takes them as numbers; where a text
    # alone holds the words, nothing is refused
    if b"NaN" in body or b"Infinity" in body:
        json.loads(body, parse_constant=_refuse_constant)
    return request


def _refuse_constant(name: str) -> None:
    raise RefusedError(400, f"the body: {name} is not a value of JSON")


async def read_body(request: Request) -> bytes:
    """The body; RefusedError 413 where it is too large. It is read to its end all the
    same, up to a bound, so that the client gets the answer."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise RefusedError(415, "the body is compressed: send it as it is")
    pieces = list[bytes]()
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                size += len(piece)
                if size <= MOST_BYTES:
                    pieces.append(piece)
                # a client that does not stop is not read to its end
                elif size > 16 * MOST_BYTES:
                    break
    except TimeoutError:
        raise RefusedError(408, TOO_SLOW) from None
    if size > MOST_BYTES:
        raise RefusedError(413, TOO_LARGE, "too_large")
    return b"".join(pieces)


def json_bytes(value: object) -> bytes:
    """JSON as it is sent."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def document(about: Mapping[str, str], inputs: Inputs) -> dict[str, object]:
    """`POST /predict` as an OpenAPI document."""
    column = {inputs.column: {"type": inputs.question.json_type}}
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
