"""No rank ever holds the whole model: while it loads a folder of weights, exports, saves and resumes, it holds its own shard
and a few copies of one matrix.

`python test_memory.py FOLDER LAYOUTS OUT` under torchrun is one rank: it does all of that in one layout after the other.
"""

import ctypes
import gc
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

VOCABULARY, HIDDEN, INNER, LAYERS = 8_000, 512, 2_048, 12
BLOCK = 4 * (4 * HIDDEN**2 + 3 * HIDDEN * INNER + 2 * HIDDEN)
TABLE = 4 * VOCABULARY * HIDDEN
WHOLE = LAYERS * BLOCK + 2 * TABLE + 4 * HIDDEN
SLACK = 12 << 20
# above its shard, a rank may hold: one matrix, from the folder; one that torch gathers, in two copies; nothing; and as many
# pieces of matrices as threads read
MORE = {"load": BLOCK, "export": 2 * TABLE, "save": 0, "resume": 2 * BLOCK}
LAYOUTS = {2: [{"shard": 2}, {"tp": 2}, {"pp": 2}], 4: [{"shard": 4}, {"shard": 2, "tp": 2}]}


def torchrun(folder, world, layouts):
    """By layout and rank: bytes of the shard, and the peak above what the rank had before, by phase."""
    log = folder / f"log-{world}.txt"
    with log.open("w") as stream:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={world}",
                __file__,
                str(folder),
                json.dumps(layouts),
                str(folder),
            ],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(Path(__file__).parents[2]),
                "MALLOC_MMAP_THRESHOLD_": "65536",  # what is freed goes back to the system
            },
            stdout=stream,
            stderr=stream,
            timeout=280,
            cwd=folder,
        )
    paths = [folder / f"{world}-{rank}.json" for rank in range(world)]
    assert all(path.exists() for path in paths), log.read_text()[-4000:]
    return [json.loads(path.read_text()) for path in paths]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("memory")
    for name, layers, vocabulary in (("large", LAYERS, VOCABULARY), ("small", 4, 64)):
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=HIDDEN,
            intermediate_size=INNER if name == "large" else 8,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=64,
        )
        LlamaForCausalLM(config).save_pretrained(folder / name)
    assert (folder / "large" / "model.safetensors").stat().st_size >= WHOLE
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("world", LAYOUTS)
def test_no_rank_ever_holds_the_whole_model(folder, world):
    for rank, found in enumerate(torchrun(folder, world, LAYOUTS[world])):
        for layout, said in found.items():
            where = f"{layout}, rank {rank}: " + ", ".join(
                f"{name} {size / 1e6:.0f} MB" for name, size in said.items()
            )
            print(where)
            assert said["shard"] < 0.6 * WHOLE, where
            for phase, more in MORE.items():
                limit = said["shard"] + more + SLACK
                assert said[phase] <= limit, f"{phase}: {where}"
                assert said["control"] > limit, (
                    "a rank that held the whole model would not be noticed"
                )


class Peak:
    """The most memory of its own that this process has held inside, above what it had before, in bytes. Pages of files,
    which it shares with everybody and can lose, do not count."""

    def __enter__(self):
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        self.before = self.highest = self.held()
        self.over = threading.Event()
        self.watcher = threading.Thread(target=self.watch)
        self.watcher.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.watcher.join()
        self.bytes = max(self.highest, self.held()) - self.before

    def watch(self):
        while not self.over.wait(0.001):
            self.highest = max(self.highest, self.held())

    @staticmethod
    def held():
        said = Path("/proc/self/status").read_text()
        return 1024 * sum(map(int, re.findall(r"Rss(?:Anon|Shmem):\s+(\d+)", said)))


def measure(source, layout, out):
    """What this rank holds, and held at most while it loaded, exported, saved, and resumed."""
    import torch
    from safetensors.torch import load_file

    from rekindle.spec.model import CheckpointSpec, ModelSpec, TrainSpec
    from rekindle.tasks import load_task
    from rekindle.train.checkpoint import Checkpointer, agreed, load
    from rekindle.train.job import Job
    from rekindle.train.weights import local_of
    from rekindle.train.worker import TrainingStart
    from tests.train.differential import made_shards

    job = Job.of(
        artifact_root=str(out),
        run_key="key",
        task="causal_lm",
        shards="",
        output="",
        history="",
        init="",
        init_from="base",
        model=ModelSpec(source=str(source)),
        train=TrainSpec(layout=layout, precision="fp32", global_batch_size=8, micro_batch_size=2),
    )
    task, shards = load_task("causal_lm"), made_shards("causal_lm", packing=True)
    with Peak() as loading:
        start = TrainingStart.of(job, task, shards, torch.device("cpu"))
        parts = start.parts(fresh=True)
    shard = sum(local_of(p).nbytes for _, p in parts.parameters())
    with Peak() as exporting:
        start.save(parts, out / "exported")
    weights = {"model": {name: p.detach() for name, p in parts.parameters()}}
    checkpointer = Checkpointer(out / "checkpoints", CheckpointSpec(), "key")
    with Peak() as saving:
        checkpointer.save(1, weights, {})
        checkpointer.wait()
    del checkpointer
    with Peak() as resuming:
        load(agreed(out / "checkpoints", "key"), weights)
    with Peak() as control:
        whole = load_file(source / "model.safetensors")
        whole = {name: tensor.clone() for name, tensor in whole.items()}
    return {
        "shard": shard,
        "load": loading.bytes,
        "export": shard + exporting.bytes,
        "save": saving.bytes,
        "resume": shard + resuming.bytes,
        "control": control.bytes,
    }


def main():
    import torch.distributed as dist

    source, layouts, out = Path(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, is_master=False
    )
    found = {}
    # the first time on a small model: what is imported on the way is no weight
    for number, layout in enumerate([layouts[0], *layouts]):
        name = " x ".join(f"{axis} {n}" for axis, n in layout.items()) if number else "import"
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=world
        )
        model = source / ("large" if number else "small")
        found[name] = measure(model, layout, out / f"{world}-{number}")
        dist.barrier()
        dist.destroy_process_group()
    del found["import"]
    (out / f"{world}-{rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads now and then abort an ordinary exit


if __name__ == "__main__":
    main()
