"""Measured training speeds as rows of a CSV, ours or that of MosaicML's llm-foundry.

Our columns: model, layers, d_model, heads, kv_heads, ffn, vocab, gated, seq_len, gpus,
gpus_per_node, gpu, tp, pp, vp, cp, sharding (ddp, fsdp, hsdp, distributed_optimizer), micro_batch,
grad_accum, activation_checkpointing (none, selective, full), precision, compile,
tokens_per_sec_per_gpu. An empty one is its default: 8 GPUs a node, as many key-value heads as
heads, 4 d_model, no gate, fsdp, bf16. Further ones are let be; `network_gbits` (of a node, one
way), `shard_gpus` (data ranks that share the shards, where that is not all) and `stack` are
understood.

llm-foundry's tables (github.com/mosaicml/llm-foundry, scripts/train/benchmarking) have `params`,
`mfu_percent` and `sharding` in FSDP's words: MPT models, feed-forward 4 d_model, tied table, all on
nodes of 8. SHARD_GRAD_OP, which keeps the weights, is taken as fsdp."""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

from rekindle.catalog.gpus import Gpu, gpus
from rekindle.errors import Problem, RequestError
from rekindle.plan.cluster import Cluster
from rekindle.plan.shape import Matrix, ModelShape
from rekindle.plan.work import Checkpointing, Precision, Work
from rekindle.spec.layout import Layout

# A node's links where a row does not say: NVLink or PCIe one way, and the fastest network that the
# makers of such clusters build in (DGX A100: 8 x 200 Gbit/s; DGX H100: 8 x 400). GB/s.
_NODES = {"A100": (300, 200), "H100": (450, 400), "H200": (450, 400), "B200": (900, 400),
          "V100": (150, 50), "L4": (32, 12.5)}  # fmt: skip
_ELSE = (32, 12.5)
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
        "precision": precision, "sharding": "fsdp", "stack": "llm-foundry",
        "activation_checkpointing": "full" if full else "none",
    }  # fmt: skip


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
    precision: Precision = (line.get("precision") or "bf16").removeprefix("amp_")  # type: ignore[assignment]
    work = Work(
        shape=_shape(line),
        layout=Layout(dp, shard, tp, pp, cp, micro_batch_size=number("micro_batch", 1)),
        accumulation=number("grad_accum", 1), sequence=number("seq_len", 0), precision=precision,
        checkpointing=checkpointing, compile=(line.get("compile") or "").lower() in _TRUE,
        sharding="optimizer" if sharding == "distributed_optimizer" else "weights",
        chunks=number("vp", 0),
    )  # fmt: skip
    gpu = gpu_of(line["gpu"])
    network = line.get("network_gbits") or ""
    cluster = _cluster(gpu, per_node, size // per_node, float(network) if network else None)
    name = f"{line.get('model') or '?'} {size} x {gpu.name}"
    rate = float(line["tokens_per_sec_per_gpu"])
    return Row(name, line.get("stack") or "", work, cluster, rate)


def _shape(line: Mapping[str, str]) -> ModelShape:
    width, heads = int(line["d_model"]), int(line["heads"])
    ffn = int(line.get("ffn") or 4 * width)
    return decoder(
        layers=int(line["layers"]), width=width, heads=heads,
        kv_heads=int(line.get("kv_heads") or heads), ffn=ffn, vocab=int(line["vocab"]),
        gated=(line.get("gated") or "").lower() in _TRUE,
    )  # fmt: skip


def decoder(
    layers: int, width: int, heads: int, kv_heads: int, ffn: int, vocab: int, gated: bool
) -> ModelShape:
    """A decoder of which nothing but the sizes is known: no biases, a tied table."""
    kv = width // heads * kv_heads
    up = ("gate", "up") if gated else ("up",)
    return ModelShape(
        model_type="decoder", layers=layers, d_model=width, heads=heads, kv_heads=kv_heads,
        head_dim=width // heads, ffn=ffn, gated=gated, vocab=vocab, causal=True, norm="layer",
        matrices=(
            Matrix("q", width, width, divided="column"), Matrix("k", width, kv, divided="column"),
            Matrix("v", width, kv, divided="column"), Matrix("o", width, width, divided="row"),
            *(Matrix(name, width, ffn, divided="column") for name in up),
            Matrix("down", ffn, width, divided="row"),
        ),
        block_norms=2 * width, table=vocab * width, before=0, after=width, head=None,
    )  # fmt: skip


def gpu_of(text: str) -> Gpu:
    """The GPU that somebody else's name means: `a100_40gb`, `NVIDIA H100 80GB HBM3`."""
    words = re.findall(r"[a-z]+\d+[a-z]?|\d+", text.lower())
    known = {name.lower(): gpu for name, gpu in gpus().items()}
    family = next((w for w in words if w in known or f"{w}-80gb" in known), None)
    if family is None:
        raise ValueError(f"no GPU `{text}`; known: {', '.join(gpus())}")
    large = f"{family}-80gb" in known and "80gb" in re.sub(r"[ _-]", "", text.lower())
    return known[f"{family}-80gb" if large else family]


def _cluster(gpu: Gpu, per_node: int, nodes: int, network_gbits: float | None) -> Cluster:
    inside, between = _NODES.get(gpu.name.partition("-")[0], _ELSE)
    network = network_gbits / 8 if network_gbits else between * per_node / 8
    return Cluster(gpu, per_node, nodes, inside * 1e9, network * 1e9)
