"""The reviews trained by Ray Train: two epochs on two workers of a cluster, or of this machine, saved
every 20 steps and on SIGTERM, resumed where it was. Ray starts the workers, rekindle restarts them."""

import json
import os
import shutil
import signal
import threading
from pathlib import Path

# Ray's workers are no ranks of torchrun, whose store they would wait for
for name in [*os.environ]:
    if name.startswith("TORCHELASTIC_") or name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

WORKERS = 2


def train(job):
    """What each worker does."""
    import torch
    import torch.distributed as dist
    from ray.train import get_context
    from torch.nn.parallel import DistributedDataParallel

    from rekindle.data.manifest import open_shards
    from rekindle.spec.model import ModelSpec
    from rekindle.tasks import load_task

    epochs, batch, every = 2, 8, 20
    rank, world, folder = get_context().get_world_rank(), dist.get_world_size(), Path(job["checkpoints"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shards, task = open_shards(job["shards"]), load_task(job["task"])
    manifest, table = shards.manifest, shards.table("train")
    torch.manual_seed(job["train"]["seed"])
    network = task.build(ModelSpec(**job["model"]), manifest.labels, manifest.settings, shards.assets)
    wrapped = DistributedDataParallel(network.to(device))
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=job["train"]["lr"])
    per_epoch = table.num_rows // (batch * world)
    steps, done = epochs * per_epoch, 0
    if (folder / "step.json").exists():
        done = json.loads((folder / "step.json").read_text())
        kept = torch.load(folder / f"step-{done}.pt", map_location=device)
        network.load_state_dict(kept["network"])
        optimizer.load_state_dict(kept["optimizer"])

    def save():
        """Rank 0 writes; `step.json` names the newest one that is complete."""
        if rank == 0:
            state = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, folder / f"step-{done}.pt")
            draft = folder / "step.json.draft"
            draft.write_text(json.dumps(done))
            draft.replace(folder / "step.json")
        dist.barrier()

    wrapped.train()
    while done < steps:
        epoch, at = divmod(done, per_epoch)
        order = torch.randperm(table.num_rows, generator=torch.Generator().manual_seed(epoch))
        begin = (at * world + rank) * batch
        part = table.take(order[begin : begin + batch].tolist())
        inputs = task.collate(part, manifest.settings)
        inputs = {name: value.to(device) for name, value in inputs.items()}
        labels = torch.tensor(part.column("label").to_pylist(), device=device)
        torch.manual_seed(job["train"]["seed"] + done * world + rank)  # dropout of a resumed training
        loss = wrapped(**inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done += 1
        shared = torch.stack([loss.detach().cpu(), torch.tensor(float((folder / "stop").exists()))])
        dist.all_reduce(shared)
        if rank == 0:
            row = {"step": done, "epoch": done / per_epoch, "loss": float(shared[0]) / world}
            row |= {"lr": job["train"]["lr"], "grad_norm": 0.0}
            with (folder / "history.jsonl").open("a") as history:
                history.write(json.dumps(row) + "\n")
        if shared[1] or done % every == 0 or done == steps:
            save()
        if shared[1]:
            raise SystemExit("stopped")
    if rank == 0:
        network.save_pretrained(job["output"])


def follow(history, over):
    """Print what worker 0 notes: what workers print themselves, Ray sets a prefix before."""
    lines = history.read_text().splitlines() if history.exists() else []
    shown = len(lines)  # of attempts before
    while not over.wait(0.2):
        lines = history.read_text().splitlines() if history.exists() else []
        for line in lines[shown:]:
            event = {"event": "progress", **{k: json.loads(line)[k] for k in ("step", "loss")}}
            print("::rekindle", json.dumps(event), flush=True)
        shown = len(lines)


def main():
    job = json.loads(Path(os.environ["REKINDLE_JOB"]).read_text())
    folder, over = Path(job["checkpoints"]), threading.Event()
    (folder / "stop").unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: (folder / "stop").touch())
    # RAY_ADDRESS names a cluster, which has to see the same folders
    ray.init(include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}})
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
