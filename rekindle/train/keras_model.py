"""A model that Keras saved, as a network of PyTorch: here Keras computes on torch, so evaluation,
predictions and serving need no TensorFlow. Code that such a file brings is not run (Keras' safe
mode). Shapes: B images, H x W pixels, D channels, C classes."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rekindle.errors import StepError

_FIX = "save a model of Keras 3 from images [B, H, W, D], -1 to 1, to [B, C] scores or softmax"


class KerasNetwork(torch.nn.Module):
    """Classifies `pixels_BDHW`, from -1 to 1; `probabilities` where the model ends with softmax."""

    def __init__(self, keras: Any, model: Any, probabilities: bool = False) -> None:
        super().__init__()
        self.keras, self.model, self.probabilities = keras, model, probabilities

    def forward(self, pixels_BDHW: torch.Tensor) -> torch.Tensor:
        """Scores [B, C], whose softmax is what the model says."""
        with self.keras.device(str(pixels_BDHW.device)):
            found_BC: torch.Tensor = self.model(pixels_BDHW.permute(0, 2, 3, 1), training=False)
        found_BC = found_BC.float()
        return found_BC.clamp_min(1e-30).log() if self.probabilities else found_BC


def load_keras(file: Path, image_shape: Sequence[int], classes: int) -> KerasNetwork:
    """The network in `file`, on the CPU. Raises StepError without Keras, and for a file that is no
    classifier of images of this shape, [H, W, D]."""
    keras = _keras()
    height, width, depth = image_shape
    probe_BDHW = torch.linspace(-1, 1, 2 * depth * height * width).view(2, depth, height, width)
    try:
        with keras.device("cpu"):
            network = KerasNetwork(keras, keras.saving.load_model(file, compile=False)).eval()
            with torch.inference_mode():
                found = network(probe_BDHW)
    except Exception as error:  # what Keras raises is not documented
        why = re.sub(r"\x1b\[\d*m|\s+", " ", str(error).partition("Arguments received")[0]).strip()
        what = f"Keras cannot compute images of {height} x {width} x {depth} with {file}: {why}"
        raise StepError(what, where="train.entrypoint", fix=_FIX) from error
    if found.shape != (2, classes):
        what = f"the model in {file} gives {list(found.shape)} for 2 images of {classes} classes"
        raise StepError(what, where="train.entrypoint", fix=_FIX)
    sums_B = found.sum(1)
    network.probabilities = bool((found >= 0).all() and (sums_B - 1).abs().max() < 1e-3)
    return network


def _keras() -> Any:
    """Keras, computing on torch; StepError where it is not installed, or computes on another."""
    asked = os.environ.get("KERAS_BACKEND")
    backend = asked or "torch"
    if backend == "torch":
        try:
            os.environ["KERAS_BACKEND"] = backend
            import keras
        except ImportError as error:
            what = f"a model.keras needs Keras, which is not installed: {error}"
            fix = "pip install 'rekindle[keras]', in the image of the step where it has one"
            raise StepError(what, where="train.entrypoint", fix=fix) from None
        finally:
            if not asked:  # scripts that this process starts may want another
                del os.environ["KERAS_BACKEND"]
        if (backend := keras.backend.backend()) == "torch":
            return keras
    what = f"a model.keras is computed on torch, and Keras is set to {backend} in this process"
    raise StepError(what, fix="set KERAS_BACKEND=torch before Keras is imported")
