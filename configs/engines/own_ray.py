"""A loop of Ray Train, as its documentation shows it, on rekindle's shards: two epochs of a text
classifier by two workers, saved every 20 steps and on SIGTERM, resumed where it was.

The one process that rekindle starts (`platforms.local.ranks: 1`) drives Ray: a cluster that
RAY_ADDRESS names, whose machines see the same folders, or one that it starts here."""

import itertools
import json
import os
import signal
import sys
import threading
from pathlib import Path

import ray
import torch
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchTrainer, get_device, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader

EPOCHS, BATCH, EVERY, WORKERS = 2, 16, 20, 2


def prepared(job):
    """The network, and batches of this worker's share of the rows."""
    from rekindle.data.manifest import open_shards
    from rekindle.spec.model import ModelSpec
    from rekindle.tasks import load_task

    shards, task = open_shards(job["shards"]), load_task(job["task"])
    settings, table = shards.manifest.settings, shards.table("train")
    torch.manual_seed(job["train"]["seed"])
    network = task.build(ModelSpec(**job["model"]), shards.manifest.labels, settings, shards.assets)

    def collated(rows):
        part = table.take(rows)
        labels = torch.tensor(part.column("label").to_pylist())
        return {**task.collate(part, settings), "labels": labels}

    rows, size = range(table.num_rows), BATCH // WORKERS
    loader = DataLoader(rows, batch_size=size, shuffle=True, collate_fn=collated)
    return network, prepare_data_loader(loader)


class Saved:
    """A file a step; `step.json` names the newest one that is complete."""

    def __init__(self, job):
        self.folder, self.done, self.state = Path(job["checkpoints"]) / "ray", 0, None
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / "step.json").exists():
            self.done = json.loads((self.folder / "step.json").read_text())
            self.state = torch.load(self.folder / f"step-{self.done}.pt", weights_only=True)

    def save(self, step, network, optimizer):
        state = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, self.folder / f"step-{step}.pt")
        draft = self.folder / "step.json.draft"
        draft.write_text(json.dumps(step))
        draft.replace(self.folder / "step.json")


def train(job):
    """What each worker does; only the first one writes."""
    rank, seed = get_context().get_world_rank(), job["train"]["seed"]
    (network, loader), saved = prepared(job), Saved(job)
    if saved.state is not None:
        network.load_state_dict(saved.state["network"])
    module = prepare_model(network)
    optimizer = torch.optim.AdamW(module.parameters(), lr=job["train"]["lr"])
    if saved.state is not None:
        optimizer.load_state_dict(saved.state["optimizer"])
    module.train()
    steps = EPOCHS * len(loader)
    for step in range(saved.done, steps):
        epoch, number = divmod(step, len(loader))
        if step == saved.done or number == 0:
            loader.sampler.set_epoch(epoch)
            batches = itertools.islice(loader, number, None)
        # dropout follows from the seed and the step, so that a resumed training ends the same
        torch.manual_seed(seed + step * WORKERS + rank)
        loss = module(**next(batches)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        asked = rank == 0 and Path(job["stop"]).exists()
        told = torch.tensor([loss.item() / WORKERS, float(asked)], device=get_device())
        torch.distributed.all_reduce(told)
        shown, stopping = told.tolist()
        if rank == 0:
            event = {"event": "progress", "step": step + 1, "steps": steps, "loss": shown}
            with Path(job["said"]).open("a") as file:
                file.write(json.dumps(event) + "\n")
            if stopping or (step + 1) % EVERY == 0:
                saved.save(step + 1, network, optimizer)
        if stopping:
            return
    if rank == 0:
        network.save_pretrained(job["output"])


def tell(path, over):
    """Hand on what the first worker says: what a worker prints has Ray's name in front of it."""
    with path.open() as file:
        while True:
            ended, line = over.wait(0.1), file.readline()
            while line:
                print("::rekindle", line, end="", flush=True)
                line = file.readline()
            if ended:
                return


if __name__ == "__main__":
    job = json.loads(Path(os.environ["REKINDLE_JOB"]).read_text())
    stop, said = (Path(job["checkpoints"]) / name for name in ("ray-stop", "ray-said.jsonl"))
    stop.unlink(missing_ok=True)
    said.write_text("")
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        os.environ.pop(name, None)  # torchrun's, for the process that drives, not for Ray's workers
    if os.environ.get("RAY_ADDRESS"):
        ray.init()
    else:
        ray.init(address="local", num_cpus=WORKERS, include_dashboard=False)
    signal.signal(signal.SIGTERM, lambda *_: stop.touch())  # behind Ray's own handler
    over = threading.Event()
    telling = threading.Thread(target=tell, args=(said, over))
    telling.start()
    try:
        TorchTrainer(
            train,
            train_loop_config={**job, "stop": str(stop), "said": str(said)},
            scaling_config=ScalingConfig(num_workers=WORKERS, use_gpu=torch.cuda.is_available()),
            run_config=RunConfig(name="reviews", storage_path=str(stop.parent / "ray-results")),
        ).fit()
    finally:
        over.set()
        telling.join()
        ray.shutdown()
    sys.exit(1 if stop.exists() else 0)
