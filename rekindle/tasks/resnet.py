"""The residual networks of He et al. 2015 (arXiv 1512.03385), for images of 32 pixels a side or
more.

`resnet50` is built by transformers, which is always there; `timm:resnet50` and
`torchvision:resnet50` by those libraries, where they are installed. The library is part of the
name, because each names its weights differently. Batch norm is replaced by group norm of 32 groups
(Wu & He 2018, arXiv 1803.08494), whose result does not depend on how a batch is divided among
ranks. Images come with their channels last in memory, which convolutions on GPUs are fastest with.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from rekindle.errors import RequestError

if TYPE_CHECKING:
    import torch

LIBRARIES = ("timm", "torchvision")
SMALLEST_SIDE = 32
_GROUPS = 32
_SHAPES: dict[str, dict[str, Any]] = {
    "resnet18": {"layer_type": "basic", "depths": [2, 2, 2, 2]},
    "resnet34": {"layer_type": "basic", "depths": [3, 4, 6, 3]},
    "resnet50": {"layer_type": "bottleneck", "depths": [3, 4, 6, 3]},
}
_HIDDEN = {"basic": [64, 128, 256, 512], "bottleneck": [256, 512, 1024, 2048]}


def check(source: dict[str, Any]) -> None:
    """Refuse a name that is none, or a library that is not installed; raises RequestError."""
    library, name = _parts(str(source["architecture"]))
    if set(source) != {"architecture"} or name not in _SHAPES or library not in ("", *LIBRARIES):
        what = f"not a network this task can build: {source}"
        fix = f"{{architecture: {' or '.join(_SHAPES)}}}, timm: or torchvision: before it or not"
        raise RequestError(what, where="model.source", fix=fix)
    if library and importlib.util.find_spec(library) is None:
        fix = f"pip install {library}, or leave out `{library}:`"
        raise RequestError(f"{library} is not installed", where="model.source", fix=fix)


def check_size(height: int, width: int) -> None:
    """Refuse images that five halvings leave nothing of; raises RequestError."""
    if min(height, width) < SMALLEST_SIDE:
        raise RequestError(
            f"images of {height} x {width} pixels are too small for a residual network",
            where="model.source",
            fix=f"set data.image_size to {SMALLEST_SIDE} or more, or train "
            "{channels: [32, 64], hidden: 128}",
        )


def build(architecture: dict[str, Any]) -> torch.nn.Module:
    """The network for `architecture`, `shape` (height, width, depth) and `classes`; takes float
    [B, D, H, W] and gives class scores, [B, C]."""
    import torch
    from torch import nn

    height, width, depth = architecture["shape"]
    check_size(height, width)
    body = _body(architecture["architecture"], depth, architecture["classes"])

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = body

        def forward(self, pixels_BDHW: torch.Tensor) -> torch.Tensor:
            out = self.body(pixels_BDHW.contiguous(memory_format=torch.channels_last))
            scores_BC: torch.Tensor = getattr(out, "logits", out)
            return scores_BC

    return Residual()


def _body(architecture: str, depth: int, classes: int) -> torch.nn.Module:
    library, name = _parts(architecture)
    found: torch.nn.Module
    if library == "timm":
        import timm

        found = timm.create_model(name, num_classes=classes, in_chans=depth, norm_layer=_norm)
        return found
    if library == "torchvision":
        import torchvision

        if depth != 3:
            what = f"torchvision:{name} reads images in colour, and these have {depth} channel(s)"
            raise RequestError(what, where="model.source", fix=f"set architecture: {name}")
        found = getattr(torchvision.models, name)(num_classes=classes, norm_layer=_norm)
        return found
    return _by_transformers(name, depth, classes)


def _by_transformers(name: str, depth: int, classes: int) -> torch.nn.Module:
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    shape = _SHAPES[name]
    hidden = _HIDDEN[shape["layer_type"]]
    config = ResNetConfig(num_channels=depth, hidden_sizes=hidden, num_labels=classes, **shape)
    network: torch.nn.Module = ResNetForImageClassification(config)
    for path, module in list(network.named_modules()):
        if isinstance(module, torch.nn.BatchNorm2d):
            parent, _, child = path.rpartition(".")
            setattr(network.get_submodule(parent), child, _norm(module.num_features))
    return network


def _norm(channels: int, **_: Any) -> torch.nn.Module:
    from torch import nn

    return nn.GroupNorm(_GROUPS, channels)


def _parts(name: str) -> tuple[str, str]:
    library, _, rest = name.rpartition(":")
    return library, rest
