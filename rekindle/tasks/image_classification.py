"""Image classification by a small convolutional network, or by a residual one.

The small network, for data like MNIST: blocks of 3x3 convolution, group norm, GELU and
2x2 max-pooling, one per entry of `channels`, then a hidden layer. Group norm and not
batch norm, because its result does not depend on how a batch is divided among ranks.
Shapes: B images, H x W pixels, D channels, C classes. Pixels are uint8, scaled to [-1,
1].

The residual networks are transformers' of He et al. 2015 (arXiv 1512.03385), for images
of 32 pixels a side or more. Batch norm is replaced by group norm of 32 groups (Wu & He
2018, arXiv 1803.08494). Channels are last in memory, with which convolutions on GPUs are
fastest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rekindle.errors import RequestError
from rekindle.tasks.base import Labels, Settings, Task

if TYPE_CHECKING:
    import pyarrow as pa
    import torch
    from torch.nn import Module

    from rekindle.spec.model import DataSpec, ModelSpec
    from rekindle.tasks.base import Columns

_SMALL = "{channels: [32, 64], hidden: 128}"
DEFAULTS: dict[str, Any] = {"channels": [32, 64], "hidden": 128, "dropout": 0.1}


class ImageClassification(Task):
    modality: ClassVar[str] = "image"

    def check(self, data: DataSpec, model: ModelSpec) -> None:
        _architecture(model)
        if "architecture" in model.source and data.image_size is not None:
            check_size(*data.image_size)

    def hold(self, settings: Settings, assets: Path) -> None:
        return  # `encode` reads no file

    def encode(self, batch: pa.RecordBatch, settings: Settings, assets: Path) -> Columns:
        return {"pixels": batch.column("image")}

    def build(self, model: ModelSpec, labels: Labels, settings: Settings, assets: Path) -> Module:
        architecture = dict(_architecture(model))
        architecture["shape"] = list(settings["image_shape"])
        architecture["classes"] = len(labels)
        return _network(architecture)

    def collate(self, table: pa.Table, settings: Settings) -> dict[str, torch.Tensor]:
        import numpy as np
        import torch

        height, width, depth = settings["image_shape"]
        raw = b"".join(table.column("pixels").to_pylist())
        pixels_BHWD = np.frombuffer(raw, np.uint8).reshape(len(table), height, width, depth)
        pixels_BDHW = torch.from_numpy(pixels_BHWD.astype(np.float32)).permute(0, 3, 1, 2)
        # 0 to 255 become -1 to 1
        return {"pixels": pixels_BDHW.contiguous() / 127.5 - 1.0}

    def logits(self, network: Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logits_BC: torch.Tensor = network(inputs["pixels"])
        return logits_BC

    def save(self, network: Module, folder: Path, labels: Labels, settings: Settings) -> None:
        from safetensors.torch import save_file

        tensors = {name: tensor.contiguous() for name, tensor in network.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(network.architecture, indent=2) + "\n")

    def load(self, folder: Path) -> Module:
        from safetensors.torch import load_file

        network = _network(json.loads((folder / "config.json").read_text()))
        network.load_state_dict(load_file(folder / "model.safetensors"))
        return network.eval()


def _architecture(model: ModelSpec) -> dict[str, Any]:
    """`model.source` with defaults filled in.
    RequestError for what no network here has."""
    source = model.source
    if isinstance(source, str):
        message = f"image_classification trains its own network and cannot start from `{source}`"
        fix = f"give an inline config: {_SMALL}, or use model.init_from"
        raise RequestError(message, where="model.source", fix=fix)
    if "architecture" in source:
        if set(source) != {"architecture"} or str(source["architecture"]) not in _SHAPES:
            message = f"not a network this task can build: {source}"
            fix = f"{{architecture: {' or '.join(_SHAPES)}}}"
            raise RequestError(message, where="model.source", fix=fix)
        return source
    unknown = sorted(set(source) - set(DEFAULTS))
    config = {**DEFAULTS, **source}
    fix = "{channels: [1 to 6 integers], hidden: an integer, dropout: 0 to 1}"
    if unknown:
        raise RequestError(f"unknown keys {unknown}", where="model.source", fix=fix)
    channels = config["channels"]
    hidden = config["hidden"]
    dropout = config["dropout"]
    is_list = isinstance(channels, list) and 1 <= len(channels) <= 6
    has_widths = is_list and all(
        isinstance(width, int) and 1 <= width <= 4096 for width in channels
    )
    has_hidden = isinstance(hidden, int) and 1 <= hidden <= 65_536
    has_dropout = isinstance(dropout, int | float) and 0 <= dropout < 1
    if not (has_widths and has_hidden and has_dropout):
        message = f"not a network this task can build: {source}"
        raise RequestError(message, where="model.source", fix=fix)
    return config


def _network(architecture: dict[str, Any]) -> torch.nn.Module:
    network = residual(architecture) if "architecture" in architecture else _cnn(architecture)
    # `save` writes it as the configuration
    network.architecture = architecture  # type: ignore[assignment]
    return network


def _pool(height: int, width: int) -> torch.nn.Module:
    """`nn.AdaptiveAvgPool2d`, side by side: its own sums have no fixed order on CUDA."""
    import torch

    class Pool(torch.nn.Module):
        def forward(self, x_BDHW: torch.Tensor) -> torch.Tensor:
            for side, count in ((2, height), (3, width)):
                size = x_BDHW.shape[side]
                means = list[torch.Tensor]()
                for i in range(count):
                    # the bounds of a bin, as PyTorch's adaptive pooling has them
                    start = i * size // count
                    end = -(-(i + 1) * size // count)
                    means.append(x_BDHW.narrow(side, start, end - start).mean(side))
                x_BDHW = torch.stack(means, side)
            return x_BDHW

    return Pool()


def _cnn(architecture: dict[str, Any]) -> torch.nn.Module:
    from torch import nn

    height, width, depth = architecture["shape"]
    layers: list[nn.Module] = []
    for channels in architecture["channels"]:
        groups = next(count for count in (8, 4, 2, 1) if channels % count == 0)
        convolution = nn.Conv2d(depth, channels, 3, padding=1)
        layers += [convolution, nn.GroupNorm(groups, channels), nn.GELU()]
        depth = channels
        if min(height, width) >= 2:
            layers.append(nn.MaxPool2d(2))
            height //= 2
            width //= 2
    # at most 4 x 4 places, so that the hidden layer does not grow with the images
    hidden = architecture["hidden"]
    rows = min(height, 4)
    columns = min(width, 4)
    pool = _pool(rows, columns) if max(height, width) > 4 else nn.Identity()
    layers += [pool, nn.Flatten(), nn.Linear(depth * rows * columns, hidden), nn.GELU()]
    layers += [nn.Dropout(architecture["dropout"]), nn.Linear(hidden, architecture["classes"])]

    class Cnn(nn.Sequential):
        """Has a name that messages can use."""

    return Cnn(*layers)


SMALLEST_SIDE = 32
_GROUPS = 32
_SHAPES: dict[str, dict[str, Any]] = {
    "resnet18": {"layer_type": "basic", "depths": [2, 2, 2, 2]},
    "resnet34": {"layer_type": "basic", "depths": [3, 4, 6, 3]},
    "resnet50": {"layer_type": "bottleneck", "depths": [3, 4, 6, 3]},
}
_HIDDEN = {"basic": [64, 128, 256, 512], "bottleneck": [256, 512, 1024, 2048]}


def check_size(height: int, width: int) -> None:
    """Refuse images that five halvings leave nothing of; raises RequestError."""
    if min(height, width) < SMALLEST_SIDE:
        message = f"images of {height} x {width} pixels are too small for a residual network"
        fix = f"set data.image_size to {SMALLEST_SIDE} or more, or train {_SMALL}"
        raise RequestError(message, where="model.source", fix=fix)


def residual(architecture: dict[str, Any]) -> torch.nn.Module:
    """The network of an `architecture`, `shape` and `classes`: [B, D, H, W] to [B, C]."""
    import torch
    from torch import nn
    from transformers import ResNetConfig, ResNetForImageClassification

    height, width, depth = architecture["shape"]
    check_size(height, width)
    shape = _SHAPES[architecture["architecture"]]
    config = ResNetConfig(
        num_channels=depth,
        hidden_sizes=_HIDDEN[shape["layer_type"]],
        num_labels=architecture["classes"],
        **shape,
    )
    body: nn.Module = ResNetForImageClassification(config)
    for path, module in list(body.named_modules()):
        # its result depends on how a batch is divided among ranks
        if isinstance(module, nn.BatchNorm2d):
            body.set_submodule(path, nn.GroupNorm(_GROUPS, module.num_features))

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = body

        def forward(self, pixels_BDHW: torch.Tensor) -> torch.Tensor:
            out = self.body(pixels_BDHW.contiguous(memory_format=torch.channels_last))
            return out.logits  # type: ignore[no-any-return]

    return Residual()
