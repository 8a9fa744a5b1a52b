"""A network of Keras under tf.distribute.MultiWorkerMirroredStrategy: a worker a rank, on one
machine or several, in a loop of its own, for which Keras 3's `fit` has no place
(keras-team/keras#20585). Saved by the first worker after each epoch, resumed where it was."""

import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import numpy as np
import torch.distributed as dist

job = json.loads(Path(os.environ["REKINDLE_JOB"]).read_text())
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())

# torchrun's ranks meet once, to tell each other where their worker listens and which epoch is saved
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
saved = sorted(Path(job["checkpoints"], "multiworker").glob("epoch-*.npz"))
with socket.socket() as free:
    free.bind(("", 0))
    port = free.getsockname()[1]
host = "127.0.0.1" if os.environ["LOCAL_WORLD_SIZE"] == str(world) else socket.getfqdn()
met = [None] * world
dist.all_gather_object(met, (f"{host}:{port}", str(saved[-1]) if saved else ""))
dist.destroy_process_group()
workers, begun = [address for address, _ in met], met[0][1]
task = {"type": "worker", "index": rank}
os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})

import keras  # noqa: E402 - reads TF_CONFIG
import tensorflow as tf  # noqa: E402
from keras_network import arrays, network  # noqa: E402

from rekindle.data.manifest import open_shards  # noqa: E402
from rekindle.tasks import load_task  # noqa: E402

EPOCHS, BATCH = 8, 64  # of all workers together

seed = job["train"]["seed"]
keras.utils.set_random_seed(seed)
strategy = tf.distribute.MultiWorkerMirroredStrategy()
if strategy.num_replicas_in_sync % world or strategy.extended._num_workers != world:
    sys.exit(f"{strategy.extended._num_workers} workers train, not {world}")
print(f"MultiWorkerMirroredStrategy of {world} workers", flush=True)

shards = open_shards(job["shards"])
shape, labels = shards.manifest.settings["image_shape"], shards.manifest.labels
pixels, classes = arrays(shards, load_task(job["task"]))
with strategy.scope():
    model = network(job["model"]["source"], shape, len(labels))
    optimizer = keras.optimizers.Adam(job["train"]["lr"])
    optimizer.build(model.trainable_variables)
state = [*model.variables, *optimizer.variables]
first = 0
if begun:
    with np.load(begun) as kept:
        for number, variable in enumerate(state):
            variable.assign(kept[str(number)])
    first = int(Path(begun).stem.partition("-")[2])
losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


@tf.function
def step(pixels, classes):
    """Of this worker's part of a batch: its share of the mean loss over the whole batch."""

    def replica(pixels, classes):
        with tf.GradientTape() as tape:
            share = tf.reduce_sum(losses(classes, model(pixels, training=True))) / BATCH
        gradients = tape.gradient(share, model.trainable_variables)
        # Keras' optimizer has no place for several workers either: it applies what is summed here
        context = tf.distribute.get_replica_context()
        optimizer.apply(context.all_reduce("SUM", gradients), model.trainable_variables)
        return share

    return strategy.reduce("SUM", strategy.run(replica, (pixels, classes)), axis=None)


@tf.function
def asked(flag):
    return strategy.reduce("SUM", strategy.run(lambda one: one, (flag,)), axis=None)


for epoch in range(first, EPOCHS):
    order = np.random.default_rng((seed, epoch)).permutation(len(pixels))
    order = order[: len(order) // BATCH * BATCH].reshape(-1, world, BATCH // world)
    loss = 0.0
    for rows in order[:, rank]:
        loss = float(step(tf.constant(pixels[rows]), tf.constant(classes[rows])))
    if rank == 0:
        folder = Path(job["checkpoints"], "multiworker")
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"epoch-{epoch + 1:03}.npz"
        with file.with_suffix(".part").open("wb") as part:
            np.savez(part, **{str(n): variable.numpy() for n, variable in enumerate(state)})
        file.with_suffix(".part").replace(file)
        event = {"event": "progress", "step": epoch + 1, "steps": EPOCHS, "loss": loss}
        print("::rekindle", json.dumps(event), flush=True)
    if float(asked(tf.constant(float(stop.is_set())))):  # all end after the same epoch
        sys.exit(1)

if rank == 0:
    model.save(Path(job["output"]) / "model.keras")
asked(tf.constant(0.0))  # a worker that leaves earlier takes the others down
