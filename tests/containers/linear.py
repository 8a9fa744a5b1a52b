"""A task of one's own: a linear model on raw pixels."""

import numpy as np
from scale import scaled

from rekindle import Task


class Linear(Task):
    """Softmax regression."""

    modality = "image"

    def encode(self, batch, settings, assets):
        return {"pixels": batch.column("image")}

    def build(self, model, labels, settings, assets):
        import torch

        height, width, depth = settings["image_shape"]
        return torch.nn.Linear(height * width * depth, len(labels))

    def collate(self, rows, settings):
        import torch

        raw = np.frombuffer(b"".join(rows.column("pixels").to_pylist()), np.uint8)
        return {"x": torch.from_numpy(scaled(raw.reshape(len(rows), -1)))}

    def logits(self, network, inputs):
        return network(inputs["x"])

    def save(self, network, folder, labels, settings):
        from safetensors.torch import save_file

        save_file(network.state_dict(), folder / "model.safetensors")

    def load(self, folder):
        import torch
        from safetensors.torch import load_file

        tensors = load_file(folder / "model.safetensors")
        network = torch.nn.Linear(*reversed(tensors["weight"].shape))
        network.load_state_dict(tensors)
        return network.eval()
