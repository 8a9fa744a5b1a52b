"""A loop under Horovod, as its documentation shows it, on rekindle's shards: two epochs of a text
classifier, saved every 20 steps and on SIGTERM, resumed where it was. The ranks are torchrun's;
Horovod's own launcher would only tell them where they meet.

Horovod's last release is of 2023 and does not compile beside torch 2.1 or later; docs/engines.md
has the two lines that it takes."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.distributed as dist
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

from rekindle.data.manifest import open_shards
from rekindle.spec.model import ModelSpec
from rekindle.tasks import load_task

EPOCHS, BATCH, EVERY = 2, 16, 20

job = json.loads(Path(os.environ["REKINDLE_JOB"]).read_text())
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
saved = Path(job["checkpoints"]) / "horovod"


def met():
    """Have all ranks know Horovod's server, which the first one starts, and what is saved; returns
    the last step that is."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    told = [None]
    if rank == 0:
        hosts = ",".join(f"node-{node}:{local}" for node in range(size // local))
        server = RendezvousServer(0)
        port = server.start()
        server.init(get_host_assignments(parse_hosts(hosts), size, size))
        step = saved / "step.json"
        told = [(port, json.loads(step.read_text()) if step.exists() else 0)]
    dist.broadcast_object_list(told)
    dist.destroy_process_group()
    ((port, done),) = told
    os.environ |= {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": os.environ["LOCAL_RANK"],
        "HOROVOD_LOCAL_SIZE": str(local),
        "HOROVOD_CROSS_RANK": str(rank // local),
        "HOROVOD_CROSS_SIZE": str(size // local),
        "HOROVOD_HOSTNAME": f"node-{rank // local}",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": os.environ["MASTER_ADDR"],
        "HOROVOD_GLOO_IFACE": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    return done


done = met()
hvd.init()
shards, task = open_shards(job["shards"]), load_task(job["task"])
manifest, table = shards.manifest, shards.table("train")
seed = job["train"]["seed"]
torch.manual_seed(seed)
network = task.build(ModelSpec(**job["model"]), manifest.labels, manifest.settings, shards.assets)
adamw = torch.optim.AdamW(network.parameters(), lr=job["train"]["lr"])
optimizer = hvd.DistributedOptimizer(adamw, named_parameters=network.named_parameters())
if done:
    kept = torch.load(saved / f"step-{done}.pt")
    network.load_state_dict(kept["network"])
    optimizer.load_state_dict(kept["optimizer"])
# weights only: what broadcasts the state of a fresh optimizer first takes a step with no gradients,
# which for AdamW is one too many
hvd.broadcast_parameters(network.state_dict(), root_rank=0)


def save(step):
    """A file a step; `step.json` names the newest one that is complete."""
    saved.mkdir(parents=True, exist_ok=True)
    state = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, saved / f"step-{step}.pt")
    draft = saved / "step.json.draft"
    draft.write_text(json.dumps(step))
    draft.replace(saved / "step.json")


network.train()
a_epoch = table.num_rows // BATCH
for step in range(done + 1, EPOCHS * a_epoch + 1):
    epoch, turn = divmod(step - 1, a_epoch)
    order = torch.randperm(
        table.num_rows, generator=torch.Generator().manual_seed(seed * 1000 + epoch)
    )
    rows = order[turn * BATCH : (turn + 1) * BATCH][hvd.rank() :: hvd.size()]
    part = table.take(rows.numpy())
    labels = torch.tensor(part.column("label").to_pylist())
    # order and dropout follow from the seed and the step, so that a resumed training ends the same
    torch.manual_seed((seed + step) * hvd.size() + hvd.rank())
    loss = network(**task.collate(part, manifest.settings), labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    shown, asked = hvd.allreduce(torch.tensor([loss.item(), float(stop.is_set())])).tolist()
    if hvd.rank() == 0:
        event = {"event": "progress", "step": step, "steps": EPOCHS * a_epoch, "loss": shown}
        print("::rekindle", json.dumps(event), flush=True)
        if asked or step % EVERY == 0:
            save(step)
    if asked:
        hvd.barrier()
        sys.exit(1)

if hvd.rank() == 0:
    network.save_pretrained(job["output"])
hvd.barrier()  # a rank that leaves earlier takes the others down
