"""The reviews trained by Ray Train: two epochs on two workers of a cluster, or of this machine,
saved every 20 steps and on SIGTERM, resumed where it was. Ray starts workers, rekindle restarts."""

import json
import os
import shutil
import signal
import threading
from pathlib import Path

import ray
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer
from torch.nn.parallel import DistributedDataParallel

from rekindle.data.manifest import open_shards
from rekindle.spec.model import ModelSpec
from rekindle.tasks import load_task

WORKERS, EPOCHS, BATCH, EVERY = 2, 2, 8, 20
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Worker:
    """What one of Ray's workers trains."""

    def __init__(self, job):
        self.seed, self.folder = job["train"]["seed"], Path(job["checkpoints"])
        self.rank, self.world = get_context().get_world_rank(), dist.get_world_size()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        shards, self.task = open_shards(job["shards"]), load_task(job["task"])
        self.settings, self.table = shards.manifest.settings, shards.table("train")
        torch.manual_seed(self.seed)
        given = shards.manifest.labels, self.settings, shards.assets
        self.network = self.task.build(ModelSpec(**job["model"]), *given).to(self.device)
        self.wrapped = DistributedDataParallel(self.network).train()
        self.optimizer = torch.optim.AdamW(self.wrapped.parameters(), lr=job["train"]["lr"])
        self.per_epoch = self.table.num_rows // (BATCH * self.world)
        self.done = 0
        if (self.folder / "step.json").exists():
            self.done = json.loads((self.folder / "step.json").read_text())
            kept = torch.load(self.folder / f"step-{self.done}.pt", map_location=self.device)
            self.network.load_state_dict(kept["network"])
            self.optimizer.load_state_dict(kept["optimizer"])

    def step(self):
        """One update; the loss, and whether the driver was asked to stop, as all workers see it."""
        epoch, at = divmod(self.done, self.per_epoch)
        order = torch.randperm(self.table.num_rows, generator=torch.Generator().manual_seed(epoch))
        begin = (at * self.world + self.rank) * BATCH
        part = self.table.take(order[begin : begin + BATCH].tolist())
        inputs = {
            name: tensor.to(self.device)
            for name, tensor in self.task.collate(part, self.settings).items()
        }
        labels = torch.tensor(part.column("label").to_pylist(), device=self.device)
        # dropout follows from the step, so that a resumed training ends the same
        torch.manual_seed(self.seed + self.done * self.world + self.rank)
        loss = self.wrapped(**inputs, labels=labels).loss
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.done += 1
        asked = torch.tensor(float((self.folder / "stop").exists()), device=self.device)
        shared = torch.stack([loss.detach(), asked])
        dist.all_reduce(shared)
        return float(shared[0]) / self.world, bool(shared[1])

    def save(self):
        """Worker 0 writes; `step.json` names the newest one that is complete."""
        if self.rank == 0:
            state = {"network": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, self.folder / f"step-{self.done}.pt")
            draft = self.folder / "step.json.draft"
            draft.write_text(json.dumps(self.done))
            draft.replace(self.folder / "step.json")
        dist.barrier()


def train(job):
    worker = Worker(job)
    steps = EPOCHS * worker.per_epoch
    while worker.done < steps:
        loss, asked = worker.step()
        if worker.rank == 0:
            row = {"step": worker.done, "epoch": worker.done / worker.per_epoch, "loss": loss}
            with (worker.folder / "history.jsonl").open("a") as history:
                history.write(json.dumps(row | {"lr": job["train"]["lr"], "grad_norm": 0.0}) + "\n")
        if asked or worker.done % EVERY == 0 or worker.done == steps:
            worker.save()
        if asked:
            raise SystemExit("stopped")
    if worker.rank == 0:
        worker.network.save_pretrained(job["output"])


def follow(history, over):
    """Print what worker 0 notes: Ray sets a prefix before what workers print themselves."""
    shown = len(history.read_text().splitlines()) if history.exists() else 0  # attempts before
    while not over.wait(0.2):
        lines = history.read_text().splitlines() if history.exists() else []
        for row in map(json.loads, lines[shown:]):
            event = {"event": "progress", "step": row["step"], "loss": row["loss"]}
            print("::rekindle", json.dumps(event), flush=True)
        shown = len(lines)


def main():
    job = json.loads(Path(os.environ["REKINDLE_JOB"]).read_text())
    folder, over = Path(job["checkpoints"]), threading.Event()
    (folder / "stop").unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: (folder / "stop").touch())
    for name in [*os.environ]:  # Ray's workers are no ranks of torchrun, and have another store
        if name.startswith("TORCHELASTIC_") or name in RANKS:
            del os.environ[name]
    # RAY_ADDRESS names a cluster, which has to see the same folders and packages
    paths = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    ray.init(include_dashboard=False, runtime_env={"env_vars": paths})
    threading.Thread(target=follow, args=(folder / "history.jsonl", over), daemon=True).start()
    has_gpu = ray.cluster_resources().get("GPU", 0) >= WORKERS
    try:
        TorchTrainer(
            train,
            train_loop_config=job,
            torch_config=TorchConfig(backend="nccl" if has_gpu else "gloo"),
            scaling_config=ScalingConfig(num_workers=WORKERS, use_gpu=has_gpu),
            run_config=RunConfig(
                storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=0)
            ),
        ).fit()
    finally:
        over.set()
        ray.shutdown()
        shutil.rmtree(folder / "ray", ignore_errors=True)


if __name__ == "__main__":
    main()
