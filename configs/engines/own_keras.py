"""rekindle's network for digits, trained by Keras under tf.distribute.MirroredStrategy: on all GPUs
of this machine, or on two logical CPU devices. Saved after each epoch, resumed where it was."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
import torch

from rekindle.data.manifest import open_shards
from rekindle.spec.model import ModelSpec
from rekindle.tasks import load_task

EPOCHS, BATCH = 8, 64

job = json.loads(Path(os.environ["REKINDLE_JOB"]).read_text())
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
keras.utils.set_random_seed(job["train"]["seed"])

devices = tf.config.list_logical_devices("GPU") if tf.config.list_physical_devices("GPU") else None
if devices is None:
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    devices = tf.config.list_logical_devices("CPU")
strategy = tf.distribute.MirroredStrategy([device.name for device in devices])
# on one device TensorFlow would train alone, without a word
if strategy.num_replicas_in_sync != len(devices):
    sys.exit(f"{strategy.num_replicas_in_sync} replicas train, not {len(devices)}")
print(f"MirroredStrategy on {len(devices)} devices", flush=True)

shards, task = open_shards(job["shards"]), load_task(job["task"])
manifest = shards.manifest
network = task.build(ModelSpec(**job["model"]), manifest.labels, manifest.settings, shards.assets)
height, width, depth = manifest.settings["image_shape"]


def arrays(split):
    """Pixels [B, H, W, D] from -1 to 1, and classes [B]."""
    table = shards.table(split)
    pixels = task.collate(table, manifest.settings)["pixels"].permute(0, 2, 3, 1)
    return pixels.numpy(), np.array(table.column("label").to_pylist())


def like(network):
    """The same layers in Keras, which has channels last."""
    layers = [keras.Input((height, width, depth))]
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


class Told(keras.callbacks.Callback):
    """The live line, and the end where that was asked for; after the epoch was saved."""

    def on_epoch_end(self, epoch, logs=None):
        event = {"event": "progress", "step": epoch + 1, "steps": EPOCHS, "loss": logs["loss"]}
        print("::rekindle", json.dumps(event), flush=True)
        if stop.is_set():
            sys.exit(1)


pixels, classes = arrays("train")
data = tf.data.Dataset.from_tensor_slices((pixels, classes))
data = data.shuffle(len(pixels), seed=job["train"]["seed"], reshuffle_each_iteration=False)
with strategy.scope():
    model = like(network)
    model.compile(
        optimizer=keras.optimizers.Adam(job["train"]["lr"]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
backup = keras.callbacks.BackupAndRestore(
    str(Path(job["checkpoints"]) / "keras"), delete_checkpoint=False
)
model.fit(data.batch(BATCH), epochs=EPOCHS, verbose=0, callbacks=[backup, Told()])

trained = loaded(network, model)
with torch.no_grad():
    ours = trained(torch.from_numpy(pixels[:256]).permute(0, 3, 1, 2)).numpy()
apart = float(np.abs(ours - model.predict(pixels[:256], verbose=0)).max())
if apart > 1e-3:
    sys.exit(f"the exported network's scores are up to {apart} from those of Keras")
task.save(trained, Path(job["output"]), manifest.labels, manifest.settings)
