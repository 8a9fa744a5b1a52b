"""Measured training speeds as rows of a CSV, ours or that of MosaicML's llm-foundry.

Our columns: model, layers, d_model, heads, kv_heads, ffn, vocab, gated, seq_len, gpus,
gpus_per_node, gpu, tp, pp, vp, cp, sharding (ddp, fsdp, hsdp, distributed_optimizer), micro_batch,
grad_accum, activation_checkpointing (none, selective, full), precision, compile,
tokens_per_sec_per_gpu. An empty one is its default: 8 GPUs a node, as many key-value heads as
heads, 4 d_model, no gate, fsdp, bf16. Further ones are let be; these are understood, too:

stack                  whose it is
network_gbits          of a node, one way
shard_gpus             data ranks that share the shards, where that is not all
watts                  of a card that is not let use what its data sheet says
memory_gb_per_second   of its memory, where that is not the data sheet's
attention              flash1, flash2 (the default), flash3, cudnn, unfused; apart: scale and mask
                       are kernels of their own, too
kernels                eager, fused or compiled; by `compile` where it is empty
merged                 yes: queries, keys and values are one product, and so are gate and up
causal, dropout        no; yes (a tenth, of attention and behind each half of a block)
scored                 share of the tokens that the head of a model that is not causal sees
prefetch               no: weights and gradients are exchanged while nothing is computed
overlap                axes (tp, cp) whose exchange runs beside computing
reduce                 fp32: gradients are added up in it
sequence_parallel      no: tp ranks hold the residual stream in whole
repeated               what is computed again: `attention` alone, that share of a block's products
                       (and attention, if full), or all in that share of the blocks (`blocks 0.5`)

llm-foundry's tables (github.com/mosaicml/llm-foundry, scripts/train/benchmarking) have `params`,
`mfu_percent` and `sharding` in FSDP's words: MPT models, feed-forward 4 d_model, tied table, all on
nodes of 8. SHARD_GRAD_OP, which keeps the weights, is taken as fsdp. Its benchmarks ran Triton's
port of the first flash attention (submit_benchmarks.py: `attn_impl` triton; six models on 128 and
more H100 in sweep.py: some flash), multiplied queries, keys and values at once, and on torch 1.13
and 2.0, which recompute to the end; Composer's FSDP gathers weights of the backward pass late
(backward_prefetch BACKWARD_POST)."""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

from rekindle.catalog.machines import Gpu, gpus
from rekindle.errors import Problem, RequestError
from rekindle.plan.cluster import Cluster
from rekindle.plan.shape import Matrix, ModelShape
from rekindle.plan.work import Checkpointing, Precision, Work
from rekindle.spec.layout import Layout
from tests.plan.stacks import Software, StackWork

# A node's links where a row does not say: NVLink or PCIe one way, and the fastest network that the
# makers of such clusters build in (DGX A100: 8 x 200 Gbit/s; DGX H100: 8 x 400). GB/s.
_NODES = {
    "A100": (300, 200),
    "H100": (450, 400),
    "H200": (450, 400),
    "B200": (900, 400),
    "V100": (150, 50),
    "L4": (32, 12.5),
}
_ELSE = (32, 12.5)
_WATTS = {"H100": 700.0}  # NVIDIA H100 data sheet, SXM
_TRUE = ("true", "1", "yes")


@dataclasses.dataclass(frozen=True)
class Row:
    """A measurement: `tokens_per_second` of one GPU."""

    name: str
    stack: str
    work: Work
    cluster: Cluster
    tokens_per_second: float


def read_rows(path: Path) -> list[Row]:
    """All rows of a file, either schema; RequestError that names every line that cannot be read."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    found, problems = list[Row](), list[Problem]()
    for number, line in enumerate(lines, start=2):
        given = {key: (value or "").strip() for key, value in line.items() if key}
        try:
            found.append(_row(_ours(given) if "mfu_percent" in given else given))
        except (ValueError, KeyError, ZeroDivisionError) as error:
            problems.append(Problem(f"cannot read the row: {error}", f"{path}:{number}"))
    if problems:
        raise RequestError(problems)
    return found


def _ours(line: Mapping[str, str]) -> dict[str, str]:
    """llm-foundry's row in our columns."""
    precision = line["precision"].removeprefix("amp_")
    full = line["activation_checkpointing"].lower() in _TRUE
    return {
        **{key: line[key] for key in line if key not in ("sharding", "params", "mfu_percent")},
        "precision": precision,
        "sharding": "fsdp",
        "stack": "llm-foundry",
        "attention": "flash1",
        "prefetch": "no",
        "merged": "yes",
        "repeated": "1" if full else "",
        "activation_checkpointing": "full" if full else "none",
    }


def _row(line: Mapping[str, str]) -> Row:
    def number(name: str, otherwise: int) -> int:
        return int(float(line.get(name) or otherwise))

    size, per_node = number("gpus", 1), number("gpus_per_node", 8)
    per_node = min(size, per_node)
    tp, pp, cp = number("tp", 1), number("pp", 1), number("cp", 1)
    data, odd = divmod(size, tp * pp * cp)
    if odd or not data:
        raise ValueError(f"tp {tp} x pp {pp} x cp {cp} does not divide {size} GPUs")
    sharding = line.get("sharding") or "fsdp"
    inside = max(1, per_node // (tp * cp))
    most = {"ddp": 1, "fsdp": data, "distributed_optimizer": data, "hsdp": inside}[sharding]
    shard = min(data, number("shard_gpus", most))
    dp = data // shard
    checkpointing: Checkpointing = line.get("activation_checkpointing") or "none"  # type: ignore[assignment]
    if (line.get("repeated") or "").startswith("blocks"):
        checkpointing = "full"
    precision: Precision = (line.get("precision") or "bf16").removeprefix("amp_")  # type: ignore[assignment]
    work = StackWork(
        shape=_shape(line),
        layout=Layout(dp, shard, tp, pp, cp, micro_batch_size=number("micro_batch", 1)),
        accumulation=number("grad_accum", 1),
        sequence=number("seq_len", 0),
        precision=precision,
        checkpointing=checkpointing,
        compile=(line.get("compile") or "").lower() in _TRUE,
        sharding="optimizer" if sharding == "distributed_optimizer" else "weights",
        software=_software(line),
    )
    gpu = _as_run(gpu_of(line["gpu"]), line)
    network = line.get("network_gbits") or ""
    cluster = _cluster(gpu, per_node, size // per_node, float(network) if network else None)
    name = f"{line.get('model') or '?'} {size} x {gpu.name}"
    rate = float(line["tokens_per_sec_per_gpu"])
    return Row(name, line.get("stack") or "", work, cluster, rate)


def _software(line: Mapping[str, str]) -> Software:
    word, _, value = (line.get("repeated") or "").rpartition(" ")
    only_core = value == "attention"
    number = float(value) if value and not only_core else None
    return Software(
        attention=line.get("attention") or "flash2",  # type: ignore[arg-type]
        kernels=line.get("kernels") or None,  # type: ignore[arg-type]
        prefetched=_yes(line, "prefetch", otherwise=True),
        overlapped=tuple((line.get("overlap") or "").split()),
        scored=float(line["scored"]) if line.get("scored") else None,
        reduced_bytes=4 if line.get("reduce") == "fp32" else 2,
        merged=_yes(line, "merged", otherwise=False),
        sequence=_yes(line, "sequence_parallel", otherwise=True),
        chunks=int(float(line.get("vp") or 0)),
        repeated=0.0 if only_core else None if word else number,
        core=True if only_core else None,
        elementwise=not only_core,
        blocks=number if word and number else 1.0,
    )


def _yes(line: Mapping[str, str], name: str, otherwise: bool) -> bool:
    return line[name].lower() in _TRUE if line.get(name) else otherwise


def _shape(line: Mapping[str, str]) -> ModelShape:
    width, heads = int(line["d_model"]), int(line["heads"])
    ffn = int(line.get("ffn") or 4 * width)
    return decoder(
        layers=int(line["layers"]),
        width=width,
        heads=heads,
        kv_heads=int(line.get("kv_heads") or heads),
        ffn=ffn,
        vocab=int(line["vocab"]),
        gated=_yes(line, "gated", otherwise=False),
        causal=_yes(line, "causal", otherwise=True),
        dropout=0.1 if _yes(line, "dropout", otherwise=False) else 0.0,
    )


def decoder(
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    gated: bool,
    causal: bool = True,
    dropout: float = 0.0,
) -> ModelShape:
    """A decoder of which nothing but the sizes is known: no biases, a tied table; RMS norms and
    rotary positions where it is gated, as Llama is."""
    kv = width // heads * kv_heads
    up = ("gate", "up") if gated else ("up",)
    return ModelShape(
        model_type="decoder",
        layers=layers,
        d_model=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width // heads,
        ffn=ffn,
        gated=gated,
        vocab=vocab,
        causal=causal,
        norm="rms" if gated else "layer",
        dropout=dropout,
        attention_dropout=dropout,
        matrices=(
            Matrix("q", width, width, divided="column"),
            Matrix("k", width, kv, divided="column"),
            Matrix("v", width, kv, divided="column"),
            Matrix("o", width, width, divided="row"),
            *(Matrix(name, width, ffn, divided="column") for name in up),
            Matrix("down", ffn, width, divided="row"),
        ),
        block_norms=2 * width,
        table=vocab * width,
        before=0,
        after=width,
        head=None,
    )


def gpu_of(text: str) -> Gpu:
    """The GPU that another source's name means: `a100_40gb`, `NVIDIA H100 80GB HBM3`."""
    words = re.findall(r"[a-z]+\d+[a-z]?|\d+", text.lower())
    known = {name.lower(): gpu for name, gpu in gpus().items()}
    family = next((w for w in words if w in known or f"{w}-80gb" in known), None)
    if family is None:
        raise ValueError(f"no GPU `{text}`; known: {', '.join(gpus())}")
    large = f"{family}-80gb" in known and "80gb" in re.sub(r"[ _-]", "", text.lower())
    return known[f"{family}-80gb" if large else family]


def _as_run(gpu: Gpu, line: Mapping[str, str]) -> Gpu:
    """With the power and the memory of the row's cards. A power is a frequency times the square of
    a voltage that goes with it, so that speed goes with its third root: 500 of 700 W are 0.89."""
    memory, watts = line.get("memory_gb_per_second"), line.get("watts")
    if memory:
        gpu = dataclasses.replace(gpu, bandwidth_bytes_per_second=float(memory) * 1e9)
    if watts:
        slower = (float(watts) / _WATTS[gpu.name]) ** (1 / 3)
        peaks = {precision: slower * peak for precision, peak in gpu.tflops.items()}
        gpu = dataclasses.replace(gpu, tflops=peaks)
    return gpu


def _cluster(gpu: Gpu, per_node: int, nodes: int, network_gbits: float | None) -> Cluster:
    inside, between = _NODES.get(gpu.name.partition("-")[0], _ELSE)
    network = network_gbits / 8 if network_gbits else between * per_node / 8
    return Cluster(gpu, per_node, nodes, inside * 1e9, network * 1e9)
