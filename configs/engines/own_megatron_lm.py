"""Megatron-LM's own pretraining, on rekindle's shards and with rekindle's config: `pretrain_gpt.py`
in the folder that MEGATRON_LM names, a process a rank, with tensor and pipeline parallelism as
`train.layout` has them. It resumes by itself and saves on SIGTERM; the model of the last step is
exported by Megatron-Bridge. For NVIDIA's images, which hold both.

What is shown: Megatron's own parser takes the command line, and its reader the data. Nothing of it
has run on GPUs (docs/engines.md)."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

from rekindle.data.manifest import open_shards
from rekindle.spec.model import ModelSpec
from rekindle.tasks import load_task

EVERY = 500


def data(shards, prefix):
    """The documents of the training split as Megatron reads them: PREFIX.bin and PREFIX.idx."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    tokens = shards.table("train").column("input_ids")
    most = max(max(row) for row in tokens.to_pylist() if row)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(most + 1))
    for row in tokens.to_pylist():
        builder.add_document(torch.tensor(row), [len(row)])
    builder.finalize(f"{prefix}.idx")


def command(job, config, shards, prefix, saved):
    """The words after pretrain_gpt.py, for a Llama's configuration, and the number of steps."""
    train, layout = job["train"], {"tp": 1, "pp": 1}
    layout |= train["layout"] if isinstance(train["layout"], dict) else {}
    size, rows = train["micro_batch_size"], shards.rows("train")
    batch = train["global_batch_size"]
    steps = train["steps"] or int(train["epochs"] * rows // batch)
    words = {
        # the network
        "num-layers": config.num_hidden_layers,
        "hidden-size": config.hidden_size,
        "ffn-hidden-size": config.intermediate_size,
        "num-attention-heads": config.num_attention_heads,
        "num-query-groups": config.num_key_value_heads,
        "norm-epsilon": config.rms_norm_eps,
        "normalization": "RMSNorm",
        "position-embedding-type": "rope",
        "rotary-base": int(config.rope_parameters["rope_theta"]),
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "max-position-embeddings": config.max_position_embeddings,
        # the data
        "data-path": prefix,
        "split": "100,0,0",
        "tokenizer-type": "HuggingFaceTokenizer",
        "tokenizer-model": shards.assets,
        "seq-length": shards.manifest.settings["max_length"],
        "eval-iters": 0,
        # the training
        "train-iters": steps,
        "global-batch-size": batch,
        "micro-batch-size": size if isinstance(size, int) else 1,
        "lr": train["lr"],
        "min-lr": train["lr"] * train["min_lr_ratio"],
        "lr-decay-style": {"wsd": "WSD"}.get(train["lr_schedule"], train["lr_schedule"]),
        "lr-warmup-fraction": train["warmup"],
        "weight-decay": train["weight_decay"],
        "adam-beta1": train["betas"][0],
        "adam-beta2": train["betas"][1],
        "adam-eps": train["eps"],
        "clip-grad": train["clip_norm"],
        "seed": train["seed"],
        "tensor-model-parallel-size": layout["tp"],
        "pipeline-model-parallel-size": layout["pp"],
        "log-interval": 1,
        # its checkpoints
        "save": saved,
        "load": saved,
        "save-interval": EVERY,
        "ckpt-format": "torch_dist",
    }
    flags = [
        "swiglu",
        "disable-bias-linear",
        "group-query-attention",
        "use-distributed-optimizer",
        "exit-signal-handler",
        "bf16",
    ]
    flags += [] if config.tie_word_embeddings else ["untie-embeddings-and-output-weights"]
    flags += ["sequence-parallel"] if layout["tp"] > 1 else []
    named = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    return [*named, *(f"--{flag}" for flag in flags)], steps


def export(saved, network, output):
    """The saved model in Hugging Face's layout, by one process on a CPU."""
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_config(network.config)
    bridge.export_ckpt(str(saved), str(output), show_progress=False)


def main():
    job = json.loads(Path(os.environ["REKINDLE_JOB"]).read_text())
    shards, task = open_shards(job["shards"]), load_task(job["task"])
    rank, saved = int(os.environ["RANK"]), Path(job["checkpoints"]) / "megatron-lm"
    prefix = saved / "data" / "train"
    with torch.device("meta"):
        given = shards.manifest.labels, shards.manifest.settings, shards.assets
        network = task.build(ModelSpec(**job["model"]), *given)
    torch.distributed.init_process_group("gloo")
    if rank == 0 and not Path(f"{prefix}.idx").exists():
        data(shards, prefix)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    words, steps = command(job, network.config, shards, prefix, saved)
    script = Path(os.environ["MEGATRON_LM"]) / "pretrain_gpt.py"
    megatron = subprocess.Popen([sys.executable, str(script), *words])
    signal.signal(signal.SIGTERM, lambda *_: megatron.terminate())  # it saves, and ends with 0
    if code := megatron.wait():
        sys.exit(code)
    last = saved / "latest_checkpointed_iteration.txt"
    if not last.exists() or int(last.read_text()) < steps:
        sys.exit(1)  # stopped: the next attempt goes on
    if rank == 0:
        export(saved, network, job["output"])


if __name__ == "__main__":
    main()
