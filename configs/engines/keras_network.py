"""rekindle's network for digits in Keras, and Keras' weights in it again, for own_keras.py and
own_multiworker.py."""

import sys

import keras
import numpy as np
import torch


def arrays(shards, task, split):
    """Pixels [B, H, W, D] from -1 to 1, and classes [B]."""
    table = shards.table(split)
    pixels = task.collate(table, shards.manifest.settings)["pixels"].permute(0, 2, 3, 1)
    return pixels.numpy(), np.array(table.column("label").to_pylist())


def like(network, shape):
    """The same layers in Keras, which has channels last: of images of `shape`, [H, W, D]."""
    layers = [keras.Input(tuple(shape))]
    for module in network:
        match type(module).__name__:
            case "Conv2d":
                layers.append(keras.layers.Conv2D(module.out_channels, 3, padding="same"))
            case "GroupNorm":
                layers.append(
                    keras.layers.GroupNormalization(module.num_groups, epsilon=module.eps)
                )
            case "GELU":
                layers.append(keras.layers.Activation(keras.activations.gelu))
            case "MaxPool2d":
                layers.append(keras.layers.MaxPooling2D(2))
            case "Flatten":
                layers.append(keras.layers.Permute((3, 1, 2)))  # as torch flattens
                layers.append(keras.layers.Flatten())
            case "Linear":
                layers.append(keras.layers.Dense(module.out_features))
            case "Dropout":
                layers.append(keras.layers.Dropout(module.p))
            case "Identity":
                pass
            case other:
                sys.exit(f"this script does not know {other}: it is for images of up to 16 x 16")
    return keras.Sequential(layers)


def loaded(network, model):
    """Keras' weights in torch's network."""
    weights = iter(model.get_weights())
    with torch.no_grad():
        for parameter in network.parameters():
            value = torch.from_numpy(next(weights))
            value = value.permute(3, 2, 0, 1) if value.ndim == 4 else value.T
            parameter.copy_(value)
    return network.eval()


def check(trained, model, pixels):
    """End where the exported network's scores are not those of Keras, of pixels [B, H, W, D]."""
    with torch.no_grad():
        ours = trained(torch.from_numpy(pixels).permute(0, 3, 1, 2)).numpy()
    apart = float(np.abs(ours - model(pixels, training=False).numpy()).max())
    if apart > 1e-3:
        sys.exit(f"the exported network's scores are up to {apart} from those of Keras")
