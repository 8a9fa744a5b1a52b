"""What own_keras.py and own_multiworker.py share: the digits as arrays, and a network for them."""

import keras
import numpy as np


def arrays(shards, task):
    """Pixels [B, H, W, D] from -1 to 1, and classes [B], of the training split."""
    table = shards.table("train")
    pixels = task.collate(table, shards.manifest.settings)["pixels"].permute(0, 2, 3, 1)
    return pixels.numpy(), np.array(table.column("label").to_pylist())


def network(source, shape, classes):
    """From images of `shape`, [H, W, D], to scores; `source` is `model.source` of the config."""
    layers = [keras.Input(tuple(shape))]
    for channels in source["channels"]:
        layers += [
            keras.layers.Conv2D(channels, 3, padding="same", activation="gelu"),
            keras.layers.MaxPooling2D(2),
        ]
    layers += [
        keras.layers.Flatten(),
        keras.layers.Dense(source["hidden"], activation="gelu"),
        keras.layers.Dropout(source.get("dropout", 0.1)),
        keras.layers.Dense(classes),
    ]
    return keras.Sequential(layers)
