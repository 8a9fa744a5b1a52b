"""The model as MLflow keeps it: our folder plus a few lines of code, never a pickle, with
the shape of inputs and outputs."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import rekindle
from rekindle.modalities import load_modality
from rekindle.train.modelfolder import ModelFolder, open_model

if TYPE_CHECKING:
    from mlflow.models import ModelSignature
    from mlflow.models.model import ModelInfo

CODE = Path(__file__).with_name("pyfunc_model.py")
EVIDENCE = "evidence.json"
MAX_NEW_TOKENS = 64


def log_model(folder: Path, code: str, evidence_file: Path) -> ModelInfo:
    """Log the model in `folder` and its evidence into the active run; `code` as `open_model`."""
    import mlflow

    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as scratch:
        evidence = shutil.copy(evidence_file, Path(scratch, EVIDENCE))
        # advice on type hints and input examples; the signature is explicit
        warnings.simplefilter("ignore")
        opened = open_model(folder, code)
        extras = "train,keras" if opened.of_keras else "train"
        return mlflow.pyfunc.log_model(
            name="model",
            python_model=str(CODE),
            signature=signature(opened),
            artifacts={"model": str(folder), "evidence": str(evidence)},
            pip_requirements=[f"rekindle[{extras}]=={rekindle.__version__}"],
        )


def signature(model: ModelFolder) -> ModelSignature:
    """Texts or uint8 pixels [N, H, W, C] in; label and its probability out, or a number,
    or a text. Lists of words in: lists of tags and of probabilities out."""
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema, TensorSpec
    from mlflow.types.schema import Array, DataType

    text = Schema([ColSpec("string", "text")])
    if model.task.kind.writes:
        length = ParamSpec("max_new_tokens", "integer", MAX_NEW_TOKENS)
        return ModelSignature(text, text, ParamSchema([length]))
    types = {
        "text": DataType.string,
        "number": DataType.double,
        "texts": Array(DataType.string),
        "numbers": Array(DataType.double),
    }
    fields = model.task.kind.answer_fields
    answer = Schema([ColSpec(types[kind], name) for name, kind in fields.items()])
    modality = model.task.modality
    if load_modality(modality).is_list:
        return ModelSignature(Schema([ColSpec(Array(DataType.string), modality)]), answer)
    if "image_shape" not in model.settings:
        return ModelSignature(Schema([ColSpec("string", modality)]), answer)
    pixels = TensorSpec(np.dtype(np.uint8), (-1, *model.settings["image_shape"]))
    return ModelSignature(Schema([pixels]), answer)
