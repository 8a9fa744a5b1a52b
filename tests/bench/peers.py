"""What a user would pick instead, as a script: `python peers.py WISH.json`.

Trains one model on the rows of a shards folder with transformers.Trainer, or with accelerate's loop
as its documentation shows it; leaves the model and prints a line
`BENCH {seconds, steps, tokens, padded}`, seconds from the first step's start to the last one's end.

The packed rows of `batches.json` are those that our engine packs, in its order, and come with
position ids that start anew in every document, by which transformers keeps documents apart."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

IGNORED = -100


class Padding:
    """Pads the rows of a batch to the longest, and counts what is padding."""

    def __init__(self, pad_token_id: int, tokens: bool) -> None:
        self.pad_token_id, self.tokens = pad_token_id, tokens
        self.real = self.padded = 0

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        self.real += sum(len(row["input_ids"]) for row in rows)
        self.padded += longest * len(rows)

        def padded(name: str, value: int) -> torch.Tensor:
            return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

        ids = padded("input_ids", self.pad_token_id)
        if "position_ids" in rows[0]:
            return {
                "input_ids": ids,
                "position_ids": padded("position_ids", 0),
                "labels": padded("labels", IGNORED),
            }
        mask = torch.tensor([[i < len(row["input_ids"]) for i in range(longest)] for row in rows])
        if self.tokens:
            labels = ids.masked_fill(~mask, IGNORED)
        else:
            labels = torch.tensor([row["labels"] for row in rows])
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


class OurBatches:
    """The rows of each step as our engine draws them where texts are joined: at random."""

    drop_last = False

    def __init__(self, wish: dict[str, Any], rows: int) -> None:
        from rekindle.data.order import SampleOrder

        self.batch_size, self.epoch = wish["batch_size"], 0
        self.order = SampleOrder(rows=[rows], global_batch_size=self.batch_size, seed=wish["seed"])

    def __len__(self) -> int:
        return self.order.steps_in_epoch

    def __iter__(self) -> Iterator[list[int]]:
        first = self.epoch * len(self)
        self.epoch += 1
        for step in range(first, first + len(self)):
            yield [row for row in self.order.batch(step).rows.tolist() if row >= 0]


def rows_of(wish: dict[str, Any]) -> list[dict[str, Any]]:
    """The training rows; for packed work, the sequences of each step in our order."""
    from rekindle.data.manifest import open_shards

    shards = open_shards(wish["shards"])
    table = shards.table("train")
    ids = table.column("input_ids").to_pylist()
    if not wish.get("packed"):
        if wish["tokens"]:
            return [{"input_ids": row} for row in ids]
        labels = table.column("label").to_pylist()
        return [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]

    length, size = int(shards.manifest.settings["max_length"]), wish["batch_size"]
    order = shards.order("train", global_batch_size=size, seed=wish["seed"], pack_length=length)
    made = []
    for step in range(order.steps_in_epoch):
        batch = order.batch(step)
        packs: list[dict[str, Any]] = [
            {"input_ids": [], "position_ids": [], "labels": []} for _ in range(size)
        ]
        for row, slot in zip(batch.rows.tolist(), batch.slots.tolist(), strict=True):
            if row >= 0:
                packs[slot]["input_ids"] += ids[row]
                packs[slot]["position_ids"] += range(len(ids[row]))
                packs[slot]["labels"] += [IGNORED, *ids[row][1:]]
        made += [pack for pack in packs if pack["input_ids"]]
    return made


def network_of(wish: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    auto = AutoModelForCausalLM if wish["tokens"] else AutoModelForSequenceClassification
    network = auto.from_pretrained(wish["start"], dtype=torch.float32)
    network.config.use_cache = False
    return network.train()


def trainer(wish: dict[str, Any], rows: list[dict[str, Any]], pad: Padding) -> dict[str, Any]:
    """transformers.Trainer with its defaults, but for what the contest fixes."""
    import datasets
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Watch(TrainerCallback):  # type: ignore[misc]
        began = ended = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            Watch.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if not Watch.ended:
                print("FIRST STEP", flush=True)
            Watch.ended = time.perf_counter()

    ours = wish["sampling"] == "our_batches"

    class Ordered(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            if not ours:
                return super().get_train_dataloader()
            rows = self.train_dataset.remove_columns("length")
            return DataLoader(rows, batch_sampler=OurBatches(wish, len(rows)), collate_fn=pad)

    arguments = TrainingArguments(
        output_dir=wish["output"],
        num_train_epochs=wish["epochs"],
        per_device_train_batch_size=wish["batch_size"] // wish.get("ranks", 1),
        learning_rate=wish["lr"],
        lr_scheduler_type="linear",
        max_grad_norm=1.0,
        weight_decay=0.0,
        train_sampling_strategy="random" if ours else wish["sampling"],
        seed=wish["seed"],
        save_strategy="steps" if "save" in wish else "no",
        save_steps=wish.get("save", 500),
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        length_column_name="length",
        max_steps=wish.get("steps", -1),
    )
    columns: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in rows[0]}
    columns["length"] = [len(row["input_ids"]) for row in rows]
    run = Ordered(
        model=network_of(wish),
        args=arguments,
        train_dataset=datasets.Dataset.from_dict(columns),
        data_collator=pad,
        callbacks=[Watch()],
    )
    run.train(resume_from_checkpoint=wish.get("resume"))
    run.save_model(wish["output"] + "/model")
    return {"seconds": Watch.ended - Watch.began, "steps": run.state.global_step}


def accelerated(wish: dict[str, Any], rows: list[dict[str, Any]], pad: Padding) -> dict[str, Any]:
    """accelerate's basic loop, one or more ranks."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    network = network_of(wish)
    optimizer = torch.optim.AdamW(network.parameters(), lr=wish["lr"], weight_decay=0.0, fused=True)
    ranks = accelerator.num_processes
    loader: Any = DataLoader(rows, batch_size=wish["batch_size"] // ranks, collate_fn=pad)  # type: ignore[arg-type]
    steps = -(-len(rows) // wish["batch_size"]) * wish["epochs"]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    began, done = time.perf_counter(), 0
    for _ in range(wish["epochs"]):
        for batch in loader:
            loss = network(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            done += 1
    seconds = time.perf_counter() - began
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(network).save_pretrained(wish["output"] + "/model")
    return {"seconds": seconds, "steps": done}


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """A list as a data set: `datasets` need not be there."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.rows[number]


def on_gpu(wish: dict[str, Any], rows: list[dict[str, Any]], pad: Padding) -> dict[str, Any]:
    """transformers.Trainer for large shapes: random weights, bf16 arithmetic, peft's LoRA, its FSDP
    where there are several ranks; seconds of the steps after the warm ones."""
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    model, cuda = dict(wish["model"]), torch.cuda.is_available()
    world = int(os.environ.get("WORLD_SIZE", 1))
    config = AutoConfig.for_model(model.pop("model_type"), **model, use_cache=False)
    dtype = torch.bfloat16 if wish["weights"] == "bf16" else torch.float32
    place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else "cpu"
    with torch.device(place):
        network = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if wish["lora"]:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
        network = get_peft_model(network, adapters)
        network.enable_input_require_grads()
    times: dict[int, float] = {}

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, arguments: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step in (wish["warm"], wish["steps"]):
                if cuda:
                    torch.cuda.synchronize()
                times[state.global_step] = time.perf_counter()

    fsdp: dict[str, Any] = {}
    if world > 1:
        fsdp = {"fsdp": True, "fsdp_config": {"activation_checkpointing": wish["recompute"]}}
    arguments = TrainingArguments(
        output_dir=wish["output"],
        max_steps=wish["steps"],
        save_strategy="no",
        report_to="none",
        per_device_train_batch_size=wish["micro"],
        seed=wish["seed"],
        disable_tqdm=True,
        gradient_accumulation_steps=wish["batch_size"] // wish["micro"] // world,
        max_grad_norm=1.0,
        learning_rate=wish["lr"],
        bf16=True,
        use_cpu=not cuda,
        gradient_checkpointing=wish["recompute"] and world == 1,
        train_sampling_strategy="sequential",
        logging_strategy="no",
        **fsdp,
    )
    Trainer(
        model=network,
        args=arguments,
        train_dataset=Rows(rows),
        data_collator=pad,
        callbacks=[Watch()],
    ).train()
    memory = torch.cuda.max_memory_allocated() if cuda else 0
    return {"seconds": times[wish["steps"]] - times[wish["warm"]], "memory_bytes": memory}


def hand_written(wish: dict[str, Any], rows: list[dict[str, Any]], pad: Padding) -> dict[str, Any]:
    """See by_hand.py."""
    from by_hand import by_hand

    return by_hand(wish, rows, pad)


def by_deepspeed(wish: dict[str, Any], rows: list[dict[str, Any]], pad: Padding) -> dict[str, Any]:
    """DeepSpeed's basic loop on some ranks; the operators that it would compile are torch's."""
    import deepspeed

    deepspeed.init_distributed()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    network = network_of(wish)
    each = wish["batch_size"] // world
    adamw = {"lr": wish["lr"], "weight_decay": 0.0, "torch_adam": True, "fused": True}
    config = {
        "train_batch_size": wish["batch_size"],
        "train_micro_batch_size_per_gpu": each,
        "optimizer": {"type": "AdamW", "params": adamw},
        "gradient_clipping": 1.0,
        "zero_optimization": wish["zero"],
    }
    engine, *_ = deepspeed.initialize(
        model=network, model_parameters=network.parameters(), config=config
    )
    loader: Any = DataLoader(rows[rank::world], batch_size=each, collate_fn=pad)  # type: ignore[arg-type]
    began, done = time.perf_counter(), 0
    for batch in loader:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        done += 1
    return {"seconds": time.perf_counter() - began, "steps": done}


LOOPS = {
    "trainer": trainer,
    "accelerate": accelerated,
    "on_gpu": on_gpu,
    "by_hand": hand_written,
    "deepspeed": by_deepspeed,
}


def main() -> None:
    wish = json.loads(Path(sys.argv[1]).read_text())
    torch.manual_seed(wish["seed"])
    pad = Padding(wish["pad_token_id"], wish["tokens"])
    found = LOOPS[wish["loop"]](wish, rows_of(wish), pad)
    if os.environ.get("RANK", "0") == "0":  # two ranks would write into the same line
        print("BENCH", json.dumps({**found, "tokens": pad.real, "padded": pad.padded}), flush=True)


if __name__ == "__main__":
    main()
