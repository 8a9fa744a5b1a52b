"""What an instance holds, in the columns of the config, and how it becomes the content of an
example: the same for all wire forms and for files. Other columns are left alone, as by `ingest`."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.data.encodings import encodable
from rekindle.data.images import ImageColumn
from rekindle.data.validate import Findings
from rekindle.errors import RequestError
from rekindle.records import Objective
from rekindle.serve.messages import ServedModel
from rekindle.serve.work import RefusedError
from rekindle.tasks.chat import ROLES
from rekindle.train.modelfolder import ModelFolder, open_model


@dataclasses.dataclass(frozen=True)
class Inputs:
    """`column` holds what the model reads, and `key` the id of an instance, if it is to be logged;
    `form` is that of a language model, else ""."""

    modality: str
    column: str
    form: str
    image_size: tuple[int, int] | None
    image_shape: tuple[int, int, int] | None
    key: str = ""
    objective: Objective = "classes"

    @classmethod
    def of(cls, model: ServedModel, opened: ModelFolder) -> Inputs:
        """Those of a model. Raises RequestError where the config has documents of another form."""
        names, modality = model.columns, opened.task.modality
        form, shape = opened.settings.get("form", ""), opened.settings.get("image_shape")
        if modality == "document" and names.form != form:
            what = f"the model was trained on documents of the form {form}, not {names.form}"
            raise RequestError(what, where="data.columns", fix="name the columns as in training")
        columns = {"words": names.words, "image": names.image, "chat": names.messages}
        column = {**columns, "completion": names.prompt}.get(form or modality) or names.text
        key = model.log.key if model.log else ""
        shape = tuple(shape) if shape else None
        size = (shape[0], shape[1]) if shape and model.image_size else None  # the version's own
        return cls(modality, column, form, size, shape, key, opened.task.objective)

    @property
    def described(self) -> str:
        """How clients ask, in words: two models that are described alike take the same requests."""
        forms = {
            "text": "the beginning of a text",
            "completion": "a prompt",
            "chat": "a chat",
        }
        kinds = {"text": "a text", "words": "a list of words", "image": "an image"}
        what = forms[self.form] if self.modality == "document" else kinds[self.modality]
        if self.image_shape is not None and self.image_size is None:
            height, width, depth = self.image_shape
            what += f" of {height} x {width} x {depth}"
        return f"{what} in the column {self.column}"

    def contents(self, instances: list[dict[str, Any]]) -> list[Any]:
        """The contents of a request's instances; RefusedError 400 for the first that has none."""
        return [self.content(instance, f"instance {i}") for i, instance in enumerate(instances)]

    def content(self, instance: Mapping[str, Any], place: str) -> Any:
        """A text, a list of words, pixels [height, width, channels], or the turns of a document."""
        if self.column not in instance:
            listed = ", ".join(f"`{name}`" for name in instance) or "none"
            raise RefusedError(400, f"{place}: there is no column `{self.column}`; it has {listed}")
        value, place = instance[self.column], f"{place}, `{self.column}`"
        if self.modality == "image":
            return self._pixels(value, place)
        if self.modality == "words":
            if not isinstance(value, list) or not value:
                raise RefusedError(400, f"{place}: a list of words is needed")
            return [_text(word, place) for word in value]
        if self.form == "chat":
            return _turns(value, place)
        role = {"completion": "prompt", "text": "text"}.get(self.form)
        return [(role, _text(value, place))] if role else _text(value, place)

    def encoded(self, text: str, place: str) -> Any:
        """The value of the column where a wire form has text alone: lists and chats are JSON."""
        if self.modality != "words" and self.form != "chat":
            return text
        try:
            return json.loads(text)
        except ValueError as error:
            raise RefusedError(400, f"{place}: not JSON: {error}") from None

    def _pixels(self, value: Any, place: str) -> np.ndarray:
        findings, images = Findings(), ImageColumn(self.image_size)
        images.shape = self.image_shape
        if isinstance(value, str):
            try:
                value = base64.b64decode(value, validate=True)
            except ValueError as error:
                what = f"{place}: an image is base64 of a file, or lists of numbers: {error}"
                raise RefusedError(400, what) from None
        pixels = images.pixels(value, place, findings)
        if pixels is None:
            found = findings.problems()[0]
            raise RefusedError(400, f"{found.where}: {found.what}")
        return np.frombuffer(pixels, np.uint8).reshape(self.image_shape or (-1,))


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str) or not value.strip() or not encodable(value):
        raise RefusedError(400, f"{place}: a text that is not empty is needed")
    return value


def _turns(value: Any, place: str) -> list[tuple[str, str]]:
    turns = [_said(turn) for turn in value] if isinstance(value, list) else []
    fine = all(turn.get("role") in ROLES and len(turn) == 2 for turn in turns)
    if not turns or not fine or turns[-1]["role"] == "assistant":
        what = f"a list of {{role, content}} is needed, role {', '.join(ROLES)}, the user's last"
        raise RefusedError(400, f"{place}: {what}")
    return [(t["role"], _text(t.get("content"), f"{place}, turn {i}")) for i, t in enumerate(turns)]


def _said(turn: Any) -> dict[str, Any]:
    """A turn without what is null; what consists of parts of text alone is one text."""
    said = {k: v for k, v in turn.items() if v is not None} if isinstance(turn, dict) else {}
    if isinstance(parts := said.get("content"), list) and all(isinstance(p, dict) for p in parts):
        texts = [part.get("text") for part in parts if part.get("type") == "text"]
        if len(texts) == len(parts) and all(isinstance(text, str) for text in texts):
            said["content"] = "\n".join(texts)
    return said


def described(model: ServedModel) -> str:
    """How clients ask a version: see `Inputs.described`."""
    return Inputs.of(model, open_model(Path(model.path), model.code)).described
