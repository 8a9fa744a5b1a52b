"""A served model in memory."""

from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from rekindle.errors import UnsupportedError
from rekindle.serve.classifier import Classifier
from rekindle.serve.inputs import Inputs
from rekindle.serve.model import ServedModel
from rekindle.serve.work import Model
from rekindle.serve.writer import Writer
from rekindle.tasks.causal_lm import CausalLM
from rekindle.train.modelfolder import open_model


def loaded(served: ServedModel) -> tuple[Model, Inputs, Callable[[list[int]], str]]:
    """The model on the GPU, if there is one; its inputs; and what makes text of tokens. Raises
    UnsupportedError for a language model of a user's own task."""
    transformers.utils.logging.disable_progress_bar()
    opened = open_model(Path(served.path), served.code)
    inputs = Inputs.of(served, opened)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if opened.task.objective != "tokens":
        return Classifier(opened, device, served.precision), inputs, str
    if not isinstance(opened.task, CausalLM):
        what = "language models of a task of your own are not served"
        raise UnsupportedError(what, where="task", fix="use its `generate` in your own server")
    writer = Writer(opened, opened.task, device)
    return writer, inputs, writer.decoded
