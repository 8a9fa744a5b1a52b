"""What an instance holds, in the columns of the config, and how it becomes the content of
an example: the same for all wire forms and for files. Other columns are left alone, as by
`ingest`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rekindle.modalities import load_modality
from rekindle.modalities.base import InstanceError, Modality, Question
from rekindle.records import Objective
from rekindle.serve.messages import ServedModel
from rekindle.serve.work import RefusedError
from rekindle.train.modelfolder import ModelFolder, open_model


@dataclasses.dataclass(frozen=True)
class Inputs:
    """`question` says how the model is asked, and `key` names the column with the id of an
    instance, if it is to be logged; `form` is that of a language model, else ""."""

    modality: Modality[Any, Any]
    question: Question[Any]
    form: str
    key: str = ""
    objective: Objective = "classes"

    @classmethod
    def of(cls, model: ServedModel, opened: ModelFolder) -> Inputs:
        """Those of a model.
        Raises RequestError where the config has another form of documents."""
        modality = load_modality(opened.task.modality)
        question = modality.question(model.columns, opened.settings, model.image_size)
        form = opened.settings.get("form", "")
        key = model.log.key if model.log else ""
        return cls(modality, question, form, key, opened.task.objective)

    @property
    def column(self) -> str:
        """The column that holds what the model reads."""
        return self.question.column

    @property
    def described(self) -> str:
        """How clients ask, in words: models that are
        described alike take the same requests."""
        return f"{self.question.kind} in the column {self.column}"

    def contents(self, instances: list[dict[str, object]]) -> list[Any]:
        """The contents of a request's instances.
        RefusedError 400 for the first without one."""
        return [self.content(instance, f"instance {i}") for i, instance in enumerate(instances)]

    def content(self, instance: Mapping[str, Any], place: str) -> Any:
        """The content of one instance. RefusedError 400 where it has none."""
        # other columns may be there: clients send rows as they have them
        if self.column not in instance:
            listed = ", ".join(f"`{name}`" for name in instance) or "none"
            raise RefusedError(400, f"{place}: there is no column `{self.column}`; it has {listed}")
        try:
            return self.question.content(instance[self.column], f"{place}, `{self.column}`")
        except InstanceError as error:
            raise RefusedError(400, str(error)) from None

    def encoded(self, text: str, place: str) -> Any:
        """The column's value, where a wire form has texts alone:
        lists and chats are JSON."""
        if self.question.json_type != "array":
            return text
        try:
            return json.loads(text)
        except ValueError as error:
            raise RefusedError(400, f"{place}: not JSON: {error}") from None


def described(model: ServedModel) -> str:
    """How clients ask a version: see `Inputs.described`."""
    return Inputs.of(model, open_model(Path(model.path), model.code)).described
