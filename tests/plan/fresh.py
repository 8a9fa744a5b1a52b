"""Cases that nobody chose: `python -m tests.plan.fresh SEED NUMBER` draws so many by a seed, traces them, says how far the closed
form is off each, and `--keep` writes them to tests/plan/fresh.json. Some fifteen seconds each."""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path

from rekindle.plan.memory import memory
from rekindle.plan.shape import shape_of
from rekindle.spec.layout_support import Cell, impossible
from tests.plan.retrace import finalist_of, llama, retraced
from tests.plan.traced.finalist import TraceError, extrapolated

FILE = Path(__file__).with_name("fresh.json")
KINDS = ("llama", "llama", "qwen3", "gpt2", "gpt2 plain", "bert", "distilbert", "qwen2", "mistral")
PLAIN = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
GIB = 2**30


def config(draw, kind):
    h, layers = draw.choice([512, 1024, 2048]), draw.choice([8, 12, 16])
    heads = h // 64
    if kind == "llama":
        wide, kv, vocab = (
            draw.choice([2, 3, 4]),
            draw.choice([1, 4]),
            draw.choice([8000, 32000, 128000]),
        )
        return llama(
            h, wide * h, layers, heads, heads // kv, vocab, tie_word_embeddings=draw.random() < 0.5
        )
    if kind in ("qwen2", "qwen3", "mistral"):
        vocab = draw.choice([32000, 152000])
        return llama(
            h, 3 * h, layers, heads, heads // 2, vocab, tie_word_embeddings=draw.random() < 0.5
        ) | {"model_type": kind}
    if kind in ("gpt2", "gpt2 plain"):
        more = PLAIN if kind == "gpt2 plain" else {}
        return {"model_type": "gpt2", "n_embd": h, "n_layer": layers, "n_head": heads, **more}
    if kind == "bert":
        sizes = {
            "hidden_size": h,
            "intermediate_size": 4 * h,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
        }
        return {"model_type": "bert", **sizes}
    return {
        "model_type": "distilbert",
        "dim": h,
        "hidden_dim": 4 * h,
        "n_layers": layers,
        "n_heads": heads,
    }


def case(draw):
    """As in CASES of retrace.py, or None where the draw has no meaning: nothing may be left out because it is hard."""
    model = config(draw, draw.choice(KINDS))
    kind = model["model_type"]
    causal = shape_of(model).causal
    axes = {}
    for axis in draw.sample(["dp", "shard", "tp", "pp", "cp"], draw.choice([0, 1, 1, 2, 2])):
        axes[axis] = draw.choice([2, 4])
    if model.get("num_key_value_heads", 4) % axes.get("tp", 1):
        return None
    schedule = draw.choice(["1f1b", "interleaved", "zero_bubble"])
    accumulation = draw.choice([4, 8]) if "pp" in axes else draw.choice([1, 2, 4])
    lengths = [512, 1024] if kind == "gpt2" else [512, 2048, 4096] if causal else [128, 256, 512]
    precision, lora = draw.choice(["bf16", "bf16", "fp32"]), draw.choice([0, 0, 0, 8])
    more = {
        "precision": precision,
        "checkpointing": draw.choice(["none", "none", "selective", "full"]),
    }
    if precision == "bf16" and draw.random() < 1 / 3:
        more["weights_bytes"] = 2
    if lora:
        more["lora"] = lora
    layout = {**axes, "micro_batch_size": draw.choice([1, 2, 4])}
    if "pp" in axes:
        layout["schedule"] = schedule
    kept = {"checkpointing": more["checkpointing"], "schedule": layout.get("schedule", "")}
    if impossible(Cell("tokens" if causal else "text", tuple(axes), **kept)):
        return None
    return [model, layout, draw.choice(lengths), accumulation, more]


def cases(seed, number):
    draw, found = random.Random(seed), []
    while len(found) < number:
        one = case(draw)
        if one is not None:
            found.append(one)
    return found


def both(kept):
    """What the closed form says, and what was traced."""
    one = finalist_of(kept["case"])
    place = kept["pp_rank"]
    return memory(one.work, place), extrapolated(kept["pair"], one.work, place)


def off(kept):
    closed, traced = both(kept)
    return closed.peak_bytes / traced.peak_bytes - 1


def said(found):
    return f"{found.peak_bytes / GIB:.3f} {found.phase} {found.pp_rank} { ({k: round(v / GIB, 3) for k, v in found.terms.items()}) }"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("number", type=int)
    parser.add_argument("--keep", action="store_true")
    given = parser.parse_args()
    kept = []
    for one in cases(given.seed, given.number):
        try:
            kept.append({"case": one, **retraced(finalist_of(one))})
        except TraceError as error:
            print(f"NO TRACE {one}: {error}", flush=True)
            continue
        closed, traced = both(kept[-1])
        print(
            f"{off(kept[-1]):+7.1%} {one}\n  closed {said(closed)}\n  traced {said(traced)}",
            flush=True,
        )
        if given.keep:
            FILE.write_text(json.dumps({"seed": given.seed, "cases": kept}, indent=1) + "\n")
    far = [abs(off(one)) for one in kept]
    print(
        f"{len(far)} of seed {given.seed}: {statistics.mean(far):.1%} off on average, {max(far):.1%} at worst"
    )


if __name__ == "__main__":
    main()
