"""A loop of Ray Train, as its documentation shows it, on rekindle's shards: two epochs of a text classifier by two workers,
saved every 20 steps and on SIGTERM, resumed where it was.

The one process that rekindle starts (`platforms.local.ranks: 1`) drives Ray: a cluster that RAY_ADDRESS names, whose machines
see the same folders, or one that it starts here."""

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


def train(job):
    """What each worker does; only the first one writes."""
    from rekindle.data.manifest import open_shards
    from rekindle.spec.model import ModelSpec
    from rekindle.tasks import load_task

    rank, seed = get_context().get_world_rank(), job["train"]["seed"]
    shards, task = open_shards(job["shards"]), load_task(job["task"])
    manifest, table = shards.manifest, shards.table("train")
    torch.manual_seed(seed)
    network = task.build(
        ModelSpec(**job["model"]), manifest.labels, manifest.settings, shards.assets
    )
    saved, done, state = Path(job["checkpoints"]) / "ray", 0, None
    if (saved / "step.json").exists():
        done = json.loads((saved / "step.json").read_text())
        state = torch.load(saved / f"step-{done}.pt", weights_only=True)
        network.load_state_dict(state["network"])
    module = prepare_model(network)
    optimizer = torch.optim.AdamW(module.parameters(), lr=job["train"]["lr"])
    if state is not None:
        optimizer.load_state_dict(state["optimizer"])

    def collated(rows):
        part = table.take(rows)
        labels = torch.tensor(part.column("label").to_pylist())
        return {**task.collate(part, manifest.settings), "labels": labels}

    loader = DataLoader(
        range(table.num_rows), batch_size=BATCH // WORKERS, shuffle=True, collate_fn=collated
    )
    loader = prepare_data_loader(loader)  # divides the rows among workers

    def save(step):
        """A file a step; `step.json` names the newest one that is complete."""
        saved.mkdir(parents=True, exist_ok=True)
        found = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(found, saved / f"step-{step}.pt")
        draft = saved / "step.json.draft"
        draft.write_text(json.dumps(step))
        draft.replace(saved / "step.json")

    module.train()
    for epoch in range(done // len(loader), EPOCHS):
        loader.sampler.set_epoch(epoch)
        begun = done - epoch * len(loader)
        for number, batch in enumerate(loader):
            if number < begun:
                continue
            # dropout follows from the seed and the step, so that a resumed training ends the same
            torch.manual_seed(seed + done * WORKERS + rank)
            loss = module(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            asked = rank == 0 and Path(job["stop"]).exists()
            told = torch.tensor([float(loss) / WORKERS, float(asked)], device=get_device())
            torch.distributed.all_reduce(told)
            shown, stopping = told.tolist()
            if rank == 0:
                event = {
                    "event": "progress",
                    "step": done,
                    "steps": EPOCHS * len(loader),
                    "loss": shown,
                }
                with Path(job["said"]).open("a") as file:
                    file.write(json.dumps(event) + "\n")
                if stopping or done % EVERY == 0:
                    save(done)
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
