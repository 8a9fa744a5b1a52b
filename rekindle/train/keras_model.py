"""A model that Keras saved, as a network of PyTorch: here Keras computes on torch, so
evaluation, predictions and serving need no TensorFlow. Code that such a file brings is
not run (Keras' safe mode). Shapes: B images, H x W pixels, D channels, C classes."""

import os
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rekindle.errors import StepError

_FIX = "save a model of Keras 3 from images [B, H, W, D], -1 to 1, to [B, C] scores or softmax"
_SLACK_BYTES = 1 << 26


class KerasNetwork(torch.nn.Module):
    """Classifies `pixels_BDHW`, from -1 to 1; `probabilities` where the model ends with softmax."""

    def __init__(self, keras: Any, model: Any, probabilities: bool = False) -> None:
        super().__init__()
        self.keras = keras
        self.model = model
        self.probabilities = probabilities

    def forward(self, pixels_BDHW: torch.Tensor) -> torch.Tensor:
        """Scores [B, C], whose softmax is what the model says."""
        with self.keras.device(str(pixels_BDHW.device)):
            output_BC: torch.Tensor = self.model(pixels_BDHW.permute(0, 2, 3, 1), training=False)
        output_BC = output_BC.float()
        if self.probabilities:
            return output_BC.clamp_min(1e-30).log()
        return output_BC


def load_keras(file: Path, image_shape: Sequence[int], classes: int) -> KerasNetwork:
    """The network in `file`, on the CPU.

    Raises StepError without Keras, and for a file that is no classifier of images of this
    shape, [H, W, D]."""
    _check_size(file)
    keras = _keras()
    height, width, depth = image_shape
    chance = torch.Generator().manual_seed(0)
    probe_BDHW = torch.rand(8, depth, height, width, generator=chance) * 2 - 1
    try:
        with keras.device("cpu"):
            network = KerasNetwork(keras, keras.saving.load_model(file, compile=False)).eval()
            with torch.inference_mode():
                output_BC = network(probe_BDHW)
    except Exception as error:  # what Keras raises is not documented
        cause = str(error).rpartition("Exception encountered: ")[2]  # a config may stand before
        reason = re.sub(r"\x1b\[\d*m|\s+", " ", cause.partition("Arguments received")[0]).strip()
        message = f"Keras cannot compute images of {height} x {width} x {depth} with {file}: "
        raise StepError(message + reason[:400], fix=_FIX) from error
    if output_BC.shape != (8, classes):
        message = f"the model in {file} gives {list(output_BC.shape)} for 8 images of {classes} "
        raise StepError(f"{message}classes", fix=_FIX)
    # up to 3e-3 where a softmax was rounded to bfloat16
    distance_from_one = (output_BC.sum(1) - 1).abs().max()
    network.probabilities = bool((output_BC >= 0).all() and distance_from_one < 5e-3)
    return network


def _check_size(file: Path) -> None:
    """Raise StepError for what is no archive, or one that holds far more than it takes."""
    if not zipfile.is_zipfile(file):
        raise StepError(f"{file} is no whole model of Keras 3", fix=_FIX)
    with zipfile.ZipFile(file) as parts:
        size = sum(part.file_size for part in parts.infolist())
    if size > 10 * file.stat().st_size + _SLACK_BYTES:
        message = f"{file} would unpack to {size:,} bytes, far more than it has"
        raise StepError(message, fix="save it by Keras' model.save, which does not compress")


def _keras() -> Any:
    """Keras, computing on torch; StepError where it cannot be imported, or computes on another."""
    backend_before = os.environ.get("KERAS_BACKEND")
    os.environ["KERAS_BACKEND"] = "torch"  # whatever scripts that this process starts want
    try:
        import keras
    except ImportError as error:
        message = f"a model.keras needs Keras, which is not installed: {error}"
        fix = "pip install 'rekindle[keras]', in the image of the step where it has one"
        raise StepError(message, fix=fix) from None
    except Exception as error:
        fix = "correct keras.json, in ~/.keras or KERAS_HOME"
        raise StepError(f"Keras cannot be imported: {error}", fix=fix) from error
    finally:
        del os.environ["KERAS_BACKEND"]
        if backend_before is not None:
            os.environ["KERAS_BACKEND"] = backend_before
    backend = keras.backend.backend()
    if backend != "torch":
        message = f"a model.keras is computed on torch, and Keras is on {backend} in this process"
        raise StepError(message, fix="ask for it in another process")
    return keras
