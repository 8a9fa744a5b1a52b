"""The traces that the closed form is held against: `python -m tests.plan.retrace [NAME...]` traces those anew (all of them
without a name) and writes tests/plan/traces.json. Some twenty seconds each."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rekindle.plan.memory import memory
from rekindle.plan.shape import shape_of
from rekindle.plan.work import Work
from rekindle.spec.layout import Layout
from rekindle.spec.model import LoraSpec
from tests.plan.traced.finalist import Finalist, TraceError, asked, depths, job

FILE = Path(__file__).with_name("traces.json")


def llama(hidden, ffn, layers, heads, kv, vocab, **more):
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        **more,
    }


SEVEN = llama(4096, 11008, 32, 32, 32, 32000)
EIGHT = llama(4096, 14336, 32, 32, 8, 128256)
SEVENTY = llama(8192, 28672, 80, 64, 8, 128256)
LARGE = llama(12288, 32768, 72, 96, 8, 64000)  # 130B
SMALL = llama(2048, 5632, 22, 32, 4, 32000)  # 1.1B
QWEN = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
GPT2 = {"model_type": "gpt2"}
GPT2_XL = {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25}
GPT2_PLAIN = {**GPT2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
TIED = llama(1024, 3072, 16, 16, 8, 64000, tie_word_embeddings=True)
BERT, DISTILBERT = {"model_type": "bert"}, {"model_type": "distilbert"}

# name: config, layout, sequence, accumulation, and what else differs
CASES = {
    "distilbert ddp": (
        DISTILBERT,
        {"dp": 2, "micro_batch_size": 32},
        128,
        1,
        {"precision": "fp32"},
    ),
    "distilbert ddp bf16": (DISTILBERT, {"dp": 8, "micro_batch_size": 32}, 128, 2, {}),
    "bert ddp": (BERT, {"dp": 4, "micro_batch_size": 16}, 256, 1, {}),
    "bert fsdp": (BERT, {"shard": 4, "micro_batch_size": 32}, 128, 1, {}),
    "bert tp": (BERT, {"tp": 2, "micro_batch_size": 16}, 128, 1, {"precision": "fp32"}),
    "gpt2 one": (GPT2, {"micro_batch_size": 4}, 1024, 4, {}),
    "gpt2 ddp fp32": (GPT2, {"dp": 2, "micro_batch_size": 2}, 1024, 1, {"precision": "fp32"}),
    "gpt2 no dropout": (GPT2_PLAIN, {"dp": 8, "micro_batch_size": 8}, 1024, 1, {}),
    "gpt2 xl fsdp full": (
        GPT2_XL,
        {"shard": 8, "micro_batch_size": 2},
        1024,
        1,
        {"checkpointing": "full"},
    ),
    "qwen3 0.6b ddp": (QWEN, {"dp": 8, "micro_batch_size": 2}, 4096, 1, {}),
    "qwen3 0.6b tp": (QWEN, {"tp": 4, "micro_batch_size": 2}, 4096, 1, {}),
    "1b ddp": (SMALL, {"dp": 8, "micro_batch_size": 4}, 2048, 2, {}),
    "1b ddp full": (SMALL, {"dp": 8, "micro_batch_size": 4}, 2048, 2, {"checkpointing": "full"}),
    "1b one bf16 weights": (SMALL, {"micro_batch_size": 1}, 2048, 1, {"weights_bytes": 2}),
    "1b fsdp fp32": (SMALL, {"shard": 4, "micro_batch_size": 2}, 2048, 1, {"precision": "fp32"}),
    "7b fsdp": (SEVEN, {"shard": 8, "micro_batch_size": 1}, 2048, 1, {}),
    "7b fsdp many": (SEVEN, {"shard": 8, "micro_batch_size": 6}, 2048, 1, {}),
    "7b fsdp full": (
        SEVEN,
        {"shard": 8, "micro_batch_size": 4},
        2048,
        2,
        {"checkpointing": "full"},
    ),
    "7b hsdp selective": (
        SEVEN,
        {"dp": 2, "shard": 8, "micro_batch_size": 2},
        4096,
        1,
        {"checkpointing": "selective"},
    ),
    "7b lora fsdp": (SEVEN, {"shard": 4, "micro_batch_size": 2}, 2048, 1, {"lora": 16}),
    "7b lora one full": (
        SEVEN,
        {"micro_batch_size": 1},
        2048,
        1,
        {"lora": 16, "checkpointing": "full", "weights_bytes": 2},
    ),
    "7b pp": (SEVEN, {"pp": 4, "dp": 1, "micro_batch_size": 1}, 2048, 8, {}),
    "8b fsdp selective": (
        EIGHT,
        {"shard": 8, "micro_batch_size": 2},
        8192,
        1,
        {"checkpointing": "selective"},
    ),
    "8b fsdp full": (
        EIGHT,
        {"shard": 8, "micro_batch_size": 1},
        8192,
        1,
        {"checkpointing": "full"},
    ),
    "8b fsdp tp": (EIGHT, {"shard": 4, "tp": 2, "micro_batch_size": 1}, 8192, 1, {}),
    "8b tp": (EIGHT, {"tp": 8, "micro_batch_size": 1}, 8192, 1, {}),
    "8b cp full": (
        EIGHT,
        {"shard": 4, "cp": 2, "micro_batch_size": 1},
        16384,
        1,
        {"checkpointing": "full"},
    ),
    "8b pp interleaved": (
        EIGHT,
        {"pp": 4, "shard": 2, "micro_batch_size": 1, "schedule": "interleaved"},
        4096,
        8,
        {"checkpointing": "full"},
    ),
    "8b pp zero bubble": (
        EIGHT,
        {"pp": 4, "tp": 2, "micro_batch_size": 1, "schedule": "zero_bubble"},
        4096,
        8,
        {},
    ),
    "70b fsdp full": (
        SEVENTY,
        {"shard": 64, "micro_batch_size": 1},
        8192,
        1,
        {"checkpointing": "full"},
    ),
    "70b fsdp tp": (
        SEVENTY,
        {"shard": 16, "tp": 8, "micro_batch_size": 1},
        4096,
        1,
        {"checkpointing": "selective"},
    ),
    "gpt2 pp": (GPT2, {"pp": 2, "micro_batch_size": 4}, 1024, 4, {}),
    "gpt2 tp": (GPT2, {"tp": 2, "micro_batch_size": 4}, 1024, 1, {}),
    "gpt2 fsdp selective": (
        GPT2,
        {"shard": 4, "micro_batch_size": 4},
        1024,
        1,
        {"checkpointing": "selective"},
    ),
    "bert ddp full": (BERT, {"dp": 4, "micro_batch_size": 16}, 512, 1, {"checkpointing": "full"}),
    "1b lora ddp": (SMALL, {"dp": 8, "micro_batch_size": 4}, 2048, 1, {"lora": 8}),
    "1b cp": (SMALL, {"cp": 4, "micro_batch_size": 1}, 16384, 1, {}),
    "8b pp fsdp": (EIGHT, {"pp": 2, "shard": 4, "micro_batch_size": 1}, 4096, 4, {}),
    "qwen3 hsdp fp16": (
        QWEN,
        {"dp": 2, "shard": 4, "micro_batch_size": 2},
        4096,
        2,
        {"precision": "fp16", "checkpointing": "full"},
    ),
    "distilbert fsdp bf16 weights": (
        DISTILBERT,
        {"shard": 4, "micro_batch_size": 2},
        128,
        1,
        {"weights_bytes": 2},
    ),
    "tied one": (TIED, {"micro_batch_size": 2}, 512, 1, {}),
    "tied cp lora selective": (
        TIED,
        {"cp": 2, "micro_batch_size": 4},
        2048,
        4,
        {"precision": "fp32", "checkpointing": "selective", "lora": 8},
    ),
    "tied pp fsdp zero bubble": (
        TIED,
        {"pp": 2, "shard": 4, "micro_batch_size": 4, "schedule": "zero_bubble"},
        4096,
        8,
        {},
    ),
    "tied pp zero bubble few": (
        TIED,
        {"pp": 4, "micro_batch_size": 1, "schedule": "zero_bubble"},
        4096,
        4,
        {},
    ),
    "1b taught by 8b": (
        {**SMALL, "vocab_size": 128256},
        {"shard": 8, "micro_batch_size": 2},
        4096,
        1,
        {"teacher": EIGHT},
    ),
    "small taught by 7b": (
        {**SMALL, "hidden_size": 512, "intermediate_size": 1024},
        {"shard": 8, "micro_batch_size": 4},
        2048,
        1,
        {"teacher": SEVEN, "checkpointing": "full"},
    ),
    "gpt2 taught one": (
        GPT2,
        {"micro_batch_size": 2},
        1024,
        2,
        {"teacher": {**GPT2_XL, "n_layer": 6}},
    ),
    "distilbert taught ddp": (
        DISTILBERT,
        {"dp": 4, "micro_batch_size": 16},
        256,
        1,
        {"teacher": BERT},
    ),
    "1b muon full": (
        SMALL,
        {"micro_batch_size": 1},
        512,
        1,
        {"optimizer": "muon", "checkpointing": "full"},
    ),
    "1b muon pp": (
        SMALL,
        {"pp": 2, "dp": 2, "micro_batch_size": 1},
        2048,
        4,
        {"optimizer": "muon"},
    ),
    "1b lora muon": (SMALL, {"micro_batch_size": 1}, 2048, 1, {"optimizer": "muon", "lora": 16}),
    "7b 8 bit fsdp": (
        SEVEN,
        {"shard": 8, "micro_batch_size": 1},
        2048,
        1,
        {"optimizer": "adamw8bit"},
    ),
    "gpt2 8 bit one": (GPT2, {"micro_batch_size": 1}, 256, 1, {"optimizer": "adamw8bit"}),
    "distilbert tp selective": (
        DISTILBERT,
        {"tp": 4, "micro_batch_size": 2},
        128,
        1,
        {"precision": "fp32", "checkpointing": "selective"},
    ),
    "130b 3d": (
        LARGE,
        {"shard": 8, "tp": 8, "pp": 4, "micro_batch_size": 1},
        2048,
        8,
        {"checkpointing": "full"},
    ),
}


def finalist(name):
    return finalist_of(CASES[name])


def finalist_of(case):
    config, layout, sequence, accumulation, more = case
    more = dict(more)
    classes = 2 if config["model_type"] in ("bert", "distilbert") else None
    task = "causal_lm" if classes is None else "text_classification"
    rank = more.pop("lora", 0)
    lora, teacher = LoraSpec(rank=rank) if rank else None, more.pop("teacher", None)
    work = Work(
        shape_of(config, classes),
        Layout(**layout),
        accumulation,
        sequence,
        lora_rank=rank,
        teacher=shape_of(teacher, classes) if teacher else None,
        **more,
    )
    return Finalist(config, task, work, lora=lora, teacher=teacher)


def retraced(one):
    """A finalist's traces of both depths, as the child said them."""
    place = memory(one.work).pp_rank
    jobs = [job(one, place, depth) for depth in depths(one.work)]
    pair = asked(jobs, 900)
    for said in pair:
        del said["largest"]
    return {"pp_rank": place, "pair": pair}


def main():
    for name in sys.argv[1:] or CASES:
        try:
            found = retraced(finalist(name))
        except TraceError as error:
            print(name, error, flush=True)
            continue
        known = json.loads(FILE.read_text()) if FILE.exists() else {}
        known[name] = found
        FILE.write_text(json.dumps({n: known[n] for n in CASES if n in known}, indent=1) + "\n")
        print(name, flush=True)


if __name__ == "__main__":
    main()
