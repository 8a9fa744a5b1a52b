"""Loads and asks a registered model; MLflow runs this file to load `models:/NAME@champion`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd

from rekindle.registry.signature import MAX_NEW_TOKENS
from rekindle.tasks import TokenTask
from rekindle.train.modelfolder import ANY_CODE, open_model

BATCH = 64


class RegisteredModel(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """Loading a model with MLflow runs this file, and a task of a user's beside it.

    Input: a table with a column `text` or `words` (lists of them), or uint8 pixels [N, H, W, C].
    Output: `label` and its `probability`; for words `tags` and their `probabilities`, null where a
    word was cut off; of a language model `text`, the answer to each (a chat's first question, a
    prompt, or the beginning of a text), at most `max_new_tokens` long."""

    def load_context(self, context: Any) -> None:
        self.model = open_model(Path(context.artifacts["model"]), ANY_CODE)
        self.network = self.model.network()

    def predict(self, context: Any, model_input: Any, params: Any = None) -> pd.DataFrame:
        import torch  # registering runs this file, too, and needs no torch

        if isinstance(self.model.task, TokenTask):
            return self._written(self.model.task, list(model_input["text"]), params or {})
        modality = self.model.task.modality
        inputs = list(model_input if modality == "image" else model_input[modality])
        rows = self.model.task.encode_raw(inputs, self.model.settings, self.model.path)
        tops: list[Any] = []
        indices: list[Any] = []
        with torch.inference_mode():
            for start in range(0, len(rows), BATCH):
                tensors = self.model.task.collate(rows.slice(start, BATCH), self.model.settings)
                logits = self.model.task.logits(self.network, tensors)
                top, index = torch.softmax(logits.double(), -1).max(-1)
                tops += top.tolist()
                indices += index.tolist()
        if modality == "words":
            return self._tagged(rows.column("places").to_pylist(), tops, indices)
        labels = [self.model.labels[index] for index in indices]
        return pd.DataFrame({"label": labels, "probability": tops})

    def _tagged(self, places: list[Any], tops: list[Any], indices: list[Any]) -> pd.DataFrame:
        """Of each text the tag of each word and its probability, from those of its tokens."""
        answers = [
            (
                [self.model.labels[index[p]] if p >= 0 else None for p in words],
                [top[p] if p >= 0 else None for p in words],
            )
            for words, top, index in zip(places, tops, indices, strict=True)
        ]
        return pd.DataFrame(answers, columns=["tags", "probabilities"])

    def _written(
        self, task: TokenTask, texts: list[str], params: Mapping[str, Any]
    ) -> pd.DataFrame:
        role = {"chat": "user", "completion": "prompt"}.get(self.model.settings["form"], "text")
        length = int(params.get("max_new_tokens", MAX_NEW_TOKENS))
        prompts = [[(role, text)] for text in texts]
        answers = task.generate(self.network, prompts, self.model.settings, self.model.path, length)
        return pd.DataFrame({"text": answers})


mlflow.models.set_model(RegisteredModel())
