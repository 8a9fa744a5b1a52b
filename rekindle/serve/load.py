"""A served model in memory."""

import importlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from rekindle.errors import RequestError, UnsupportedError
from rekindle.serve.classifier import Classifier
from rekindle.serve.inputs import Inputs
from rekindle.serve.messages import ServedModel
from rekindle.serve.vllm_writer import VLLM, VllmWriter
from rekindle.serve.work import Model
from rekindle.serve.writer import LanguageModel, Writer
from rekindle.tasks.causal_lm import CausalLM
from rekindle.train.modelfolder import ModelFolder, digest_of, open_model

_HIDING = threading.Lock()  # a version and the one in its shadow are loaded side by side


def load_served(served: ServedModel) -> tuple[Model, Inputs, Callable[[list[int]], str]]:
    """The model on the GPU, if there is one; its inputs; and what makes text of tokens.
    All of it is in memory: nothing of the folder is read later. Raises RequestError where
    the files are not those with the digest, UnsupportedError as `model_for` does."""
    # the bytes that are loaded, not those that some command looked at before
    check_files(served)
    opened = open_model(Path(served.path), served.code)
    inputs = Inputs.of(served, opened)
    # before it is ready: what is proven then no file can change any more
    opened.task.hold(opened.settings, opened.path)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: Model
    if VLLM in os.environ and isinstance(opened.task, CausalLM):
        if served.shadow is not None:
            fix = "leave deploy.shadow out, or serve without vLLM"
            raise UnsupportedError("vLLM serves one version in a process", where=VLLM, fix=fix)
        model = VllmWriter(opened, opened.task, served.precision)
    else:
        model = model_for(opened, device, served.precision)
    decode: Callable[[list[int]], str] = str
    if isinstance(model, LanguageModel):
        decode = model.decoded
    return model, inputs, decode


def check_files(served: ServedModel) -> None:
    """Raise RequestError where a version's files are not those that were registered: they
    may have changed since the command that started this process looked at them."""
    folder = Path(served.path)
    fix = f"restore them, or deploy {served.name} again"
    if not folder.is_dir():
        message = f"the files of version {served.version} are gone"
        raise RequestError(message, where=served.path, fix=fix)
    if digest_of(folder) != served.digest:
        message = f"the files of version {served.version} are not those that were registered"
        raise RequestError(message, where=served.path, fix=fix)


def model_for(opened: ModelFolder, device: torch.device, precision: str) -> Classifier | Writer:
    """The model that answers in the precision. Raises UnsupportedError for a language
    model of a user's own task."""
    transformers.utils.logging.disable_progress_bar()
    _import_quantizers_without_torchao()
    if not opened.task.kind.writes:
        return Classifier(opened, device, precision)
    if not isinstance(opened.task, CausalLM):
        message = "language models of a task of your own are not served"
        raise UnsupportedError(message, where="task", fix="use its `generate` in your own server")
    return Writer(opened, opened.task, device, precision)


def _import_quantizers_without_torchao() -> None:
    """Let transformers not find torchao, which it imports to see whether it is there:
    that warns of each of torchao's libraries for other machines, and what is served needs
    none of them."""
    with _HIDING:
        # None in sys.modules makes an import of the
        # name fail; one that is there already stays
        if sys.modules.setdefault("torchao", None) is None:  # type: ignore[arg-type]
            try:
                importlib.import_module("transformers.quantizers")
            finally:
                del sys.modules["torchao"]
