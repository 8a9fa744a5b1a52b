"""A loop of accelerate, as its documentation shows it, on rekindle's shards: two epochs of a text
classifier, saved every 20 steps and on SIGTERM, resumed where it was."""

import functools
import json
import os
import signal
import sys
import threading
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader

from rekindle.data.manifest import open_shards
from rekindle.spec.model import ModelSpec
from rekindle.tasks import load_task

EPOCHS, BATCH, EVERY = 2, 16, 20


def collated(task, settings, table, rows):
    """A batch as the network takes it, from row numbers."""
    part = table.take(rows)
    labels = torch.tensor(part.column("label").to_pylist())
    return {**task.collate(part, settings), "labels": labels}


job = json.loads(Path(os.environ["REKINDLE_JOB"]).read_text())
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())

shards, task = open_shards(job["shards"]), load_task(job["task"])
manifest, table = shards.manifest, shards.table("train")
torch.manual_seed(job["train"]["seed"])
network = task.build(ModelSpec(**job["model"]), manifest.labels, manifest.settings, shards.assets)
optimizer = torch.optim.AdamW(network.parameters(), lr=job["train"]["lr"])
# order and dropout follow from the seed and the step, so that a resumed training ends the same
order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=job["train"]["seed"])
accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=order)
loader = DataLoader(
    range(table.num_rows),
    batch_size=BATCH // accelerator.num_processes,
    shuffle=True,
    collate_fn=functools.partial(collated, task, manifest.settings, table),
)
network, optimizer, loader = accelerator.prepare(network, optimizer, loader)

saved = Path(job["checkpoints"]) / "accelerate"
done = 0
if (saved / "step.json").exists():
    done = json.loads((saved / "step.json").read_text())
    accelerator.load_state(str(saved / f"step-{done}"))


def save(step):
    """A folder a step; `step.json` names the newest one that is complete."""
    accelerator.save_state(str(saved / f"step-{step}"))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        draft = saved / "step.json.draft"
        draft.write_text(json.dumps(step))
        draft.replace(saved / "step.json")


network.train()
for epoch in range(done // len(loader), EPOCHS):
    loader.set_epoch(epoch)
    begun = done - epoch * len(loader)
    for batch in accelerator.skip_first_batches(loader, begun):
        torch.manual_seed(
            job["train"]["seed"] + done * accelerator.num_processes + accelerator.process_index
        )
        loss = network(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        shown = accelerator.reduce(loss.detach(), "mean").item()
        if accelerator.is_main_process:
            event = {
                "event": "progress",
                "step": done,
                "steps": EPOCHS * len(loader),
                "loss": shown,
            }
            print("::rekindle", json.dumps(event), flush=True)
        asked = accelerator.reduce(torch.tensor(float(stop.is_set()), device=accelerator.device))
        if asked or done % EVERY == 0:
            save(done)
        if asked:
            sys.exit(1)

if accelerator.is_main_process:
    accelerator.unwrap_model(network).save_pretrained(job["output"])
accelerator.end_training()
