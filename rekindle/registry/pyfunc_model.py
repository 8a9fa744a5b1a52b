"""Loads and asks a registered model; MLflow runs this file to load
`models:/NAME@champion`."""

from pathlib import Path
from typing import Any

import mlflow
import pandas as pd

from rekindle.modalities.turns import ROLE_OF_FORM
from rekindle.registry.signature import MAX_NEW_TOKENS
from rekindle.serve.work import RefusedError, WritingOptions
from rekindle.tasks import TokenTask
from rekindle.train.modelfolder import ANY_CODE, open_model


class RegisteredModel(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """Loading a model with MLflow runs this file, and a task of a user's beside it.

    Input: a table with a column `text` or `words` (lists of them), or uint8 pixels [N, H,
    W, C]. Output: `label` and its `probability`; for words `tags` and their
    `probabilities`, null where a word was cut off; of a language model `text`, the answer
    to each (a chat's first question, a prompt, or the beginning of a text), at most
    `max_new_tokens` long."""

    def load_context(self, context: Any) -> None:
        import torch  # registering runs this file, too, and needs no torch

        from rekindle.serve.classifier import Classifier, network_in

        self.model = open_model(Path(context.artifacts["model"]), ANY_CODE)
        self.model.task.hold(self.model.settings, self.model.path)
        if isinstance(self.model.task, TokenTask):
            self.network, _ = network_in(self.model, torch.device("cpu"), "")
        else:
            self.classifier = Classifier(self.model, torch.device("cpu"))

    def predict(self, context: Any, model_input: Any, params: Any = None) -> pd.DataFrame:
        if isinstance(self.model.task, TokenTask):
            return self._written(self.model.task, list(model_input["text"]), params or {})
        contents = model_input  # an array of images, unless it is a table
        if isinstance(model_input, pd.DataFrame | dict):
            contents = model_input[self.model.task.modality]
        answers = self.classifier.answers(list(contents), WritingOptions())
        for refused in answers:
            if isinstance(refused, RefusedError):
                raise refused
        return pd.DataFrame(answers, columns=list(self.model.task.kind.answer_fields))

    def _written(self, task: TokenTask, texts: list[str], params: dict[str, Any]) -> pd.DataFrame:
        role = ROLE_OF_FORM.get(self.model.settings["form"], "text")
        length = int(params.get("max_new_tokens", MAX_NEW_TOKENS))
        prompts = [[(role, text)] for text in texts]
        answers = task.generate(self.network, prompts, self.model.settings, self.model.path, length)
        return pd.DataFrame({"text": answers})


mlflow.models.set_model(RegisteredModel())
