"""What an instance holds, in the columns of the config, and how it becomes the content of
an example: the same for all wire forms and for files. Other columns are left alone, as by
`ingest`."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.data.images import ImageColumn
from rekindle.errors import RequestError
from rekindle.records import Objective
from rekindle.rows.columns import encodable
from rekindle.rows.findings import Findings
from rekindle.serve.messages import ServedModel
from rekindle.serve.work import RefusedError
from rekindle.tasks.chat import ROLES
from rekindle.train.modelfolder import ModelFolder, open_model


@dataclasses.dataclass(frozen=True)
class Inputs:
    """`column` holds what the model reads, and `key` the id of an instance, if it is to
    be logged; `form` is that of a language model, else ""."""

    modality: str
    column: str
    form: str
    image_size: tuple[int, int] | None
    image_shape: tuple[int, int, int] | None
    key: str = ""
    objective: Objective = "classes"

    @classmethod
    def of(cls, model: ServedModel, opened: ModelFolder) -> Inputs:
        """Those of a model.
        Raises RequestError where the config has another form of documents."""
        names = model.columns
        modality = opened.task.modality
        form = opened.settings.get("form", "")
        if modality == "document" and names.form != form:
            message = f"the model was trained on documents of the form {form}, not {names.form}"
            raise RequestError(message, where="data.columns", fix="name the columns as in training")
        columns = {
            "words": names.words,
            "image": names.image,
            "chat": names.messages,
            "completion": names.prompt,
        }
        column = columns.get(form or modality) or names.text
        key = model.log.key if model.log else ""
        shape: tuple[int, int, int] | None = None
        size: tuple[int, int] | None = None
        trained_shape = opened.settings.get("image_shape")
        if trained_shape:
            height, width, depth = trained_shape
            shape = (height, width, depth)
            if model.image_size:  # the config says that images are scaled, the version to what
                size = (height, width)
        return cls(modality, column, form, size, shape, key, opened.task.objective)

    @property
    def described(self) -> str:
        """How clients ask, in words: models that are
        described alike take the same requests."""
        forms = {
            "text": "the beginning of a text",
            "completion": "a prompt",
            "chat": "a chat",
        }
        kinds = {"text": "a text", "words": "a list of words", "image": "an image"}
        kind = forms[self.form] if self.modality == "document" else kinds[self.modality]
        if self.image_shape is not None and self.image_size is None:
            height, width, depth = self.image_shape
            kind += f" of {height} x {width} x {depth}"
        return f"{kind} in the column {self.column}"

    def contents(self, instances: list[dict[str, object]]) -> list[Any]:
        """The contents of a request's instances.
        RefusedError 400 for the first without one."""
        return [self.content(instance, f"instance {i}") for i, instance in enumerate(instances)]

    def content(self, instance: Mapping[str, Any], place: str) -> Any:
        """A text, a list of words, pixels [height, width, channels],
        or a document's turns."""
        # other columns may be there: clients send rows as they have them
        if self.column not in instance:
            listed = ", ".join(f"`{name}`" for name in instance) or "none"
            raise RefusedError(400, f"{place}: there is no column `{self.column}`; it has {listed}")
        value = instance[self.column]
        place = f"{place}, `{self.column}`"
        if self.modality == "image":
            return self._pixels(value, place)
        if self.modality == "words":
            if not isinstance(value, list) or not value:
                raise RefusedError(400, f"{place}: a list of words is needed")
            return [_text(word, place) for word in value]
        if self.form == "chat":
            return _turns(value, place)
        text = _text(value, place)
        if self.form == "completion":
            return [("prompt", text)]
        if self.form == "text":
            return [("text", text)]
        return text

    def encoded(self, text: str, place: str) -> Any:
        """The column's value, where a wire form has texts alone:
        lists and chats are JSON."""
        if self.modality != "words" and self.form != "chat":
            return text
        try:
            return json.loads(text)
        except ValueError as error:
            raise RefusedError(400, f"{place}: not JSON: {error}") from None

    def _pixels(self, value: object, place: str) -> np.ndarray:
        findings = Findings()
        images = ImageColumn(self.image_size)
        images.shape = self.image_shape
        if isinstance(value, str):
            try:
                # strict: lenient decoding skips letters that are not base64
                value = base64.b64decode(value, validate=True)
            except ValueError as error:
                message = f"{place}: an image is base64 of a file, or lists of numbers: {error}"
                raise RefusedError(400, message) from None
        pixels = images.pixels(value, place, findings)
        if pixels is None:
            problem = findings.problems()[0]
            raise RefusedError(400, f"{problem.where}: {problem.what}")
        return np.frombuffer(pixels, np.uint8).reshape(self.image_shape or (-1,))


def _text(value: object, place: str) -> str:
    if not isinstance(value, str) or not value.strip() or not encodable(value):
        raise RefusedError(400, f"{place}: a text that is not empty is needed")
    return value


def _turns(value: object, place: str) -> list[tuple[str, str]]:
    turns = [_plain_turn(turn) for turn in value] if isinstance(value, list) else []
    is_chat = all(turn.get("role") in ROLES and len(turn) == 2 for turn in turns)
    if not turns or not is_chat or turns[-1]["role"] == "assistant":
        message = f"a list of {{role, content}} is needed, role {', '.join(ROLES)}, the user's last"
        raise RefusedError(400, f"{place}: {message}")
    content = list[tuple[str, str]]()
    for number, turn in enumerate(turns):
        text = _text(turn.get("content"), f"{place}, turn {number}")
        content.append((turn["role"], text))
    return content


def _plain_turn(turn: object) -> dict[str, Any]:
    """A turn without what is null; what consists of parts of text alone is one text."""
    if not isinstance(turn, dict):
        return {}
    fields = {name: value for name, value in turn.items() if value is not None}
    parts = fields.get("content")
    if isinstance(parts, list):
        texts = _part_texts(parts)
        if texts is not None:
            fields["content"] = "\n".join(texts)
    return fields


def _part_texts(parts: list[Any]) -> list[str] | None:
    """The texts of OpenAI's content parts; None where one of them is no text."""
    texts = list[str]()
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            return None
        text = part.get("text")
        if not isinstance(text, str):
            return None
        texts.append(text)
    return texts


def described(model: ServedModel) -> str:
    """How clients ask a version: see `Inputs.described`."""
    return Inputs.of(model, open_model(Path(model.path), model.code)).described
