"""A network of Keras under tf.distribute.MirroredStrategy: on all GPUs of this machine, or on two
logical CPU devices. Saved after each epoch, resumed where it was; the model is a model.keras."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

os.environ["KERAS_BACKEND"] = "tensorflow"  # on another, Keras would train alone, without a word

import keras
import tensorflow as tf
from keras_network import arrays, network

from rekindle.data.manifest import open_shards
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

shards = open_shards(job["shards"])
shape, labels = shards.manifest.settings["image_shape"], shards.manifest.labels


class Told(keras.callbacks.Callback):
    """The live line, and the end where that was asked for; after the epoch was saved."""

    def on_epoch_end(self, epoch, logs=None):
        event = {"event": "progress", "step": epoch + 1, "steps": EPOCHS, "loss": logs["loss"]}
        print("::rekindle", json.dumps(event), flush=True)
        if stop.is_set():
            sys.exit(1)


pixels, classes = arrays(shards, load_task(job["task"]))
data = tf.data.Dataset.from_tensor_slices((pixels, classes))
data = data.shuffle(len(pixels), seed=job["train"]["seed"], reshuffle_each_iteration=False)
with strategy.scope():
    model = network(job["model"]["source"], shape, len(labels))
    model.compile(
        optimizer=keras.optimizers.Adam(job["train"]["lr"]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
backup = keras.callbacks.BackupAndRestore(
    str(Path(job["checkpoints"]) / "keras"), delete_checkpoint=False
)
model.fit(data.batch(BATCH), epochs=EPOCHS, verbose=0, callbacks=[backup, Told()])
model.save(Path(job["output"]) / "model.keras")
