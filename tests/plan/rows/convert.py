"""What a source reported, as tokens per second and GPU: `tokens_per_sec_per_gpu(row)`.

The column `reported` of other-stacks.csv holds a figure as its source states it, in one of the
forms of `FORMS`; the other columns hold what the conversion needs. `flops_per_token` counts a
model's work by its shape, for MFU and for Narayanan's figures. A row is what `csv.DictReader`
gives: every value a string, an empty one where the source is silent.
"""

import re
from collections.abc import Callable, Mapping

# NVIDIA's data sheets: dense 16-bit products per second, in TFLOP/s
PEAK_TFLOPS = {"A100-40GB": 312.0, "A100-80GB": 312.0, "H100": 989.0, "H200": 989.0, "V100": 125.0}

Row = Mapping[str, str]


def narayanan_flops_per_token(row: Row) -> float:
    """Work for a token with full recomputation, as the tables of arXiv 2104.04473 count it.

    Eq. 3 of the paper, 96 B s l h² (1 + s/6h + V/16lh), over the B·s tokens of a batch. With
    l=24, h=2304, s=2048, V=51200 (1.7B): 96 · 24 · 2304² · (1 + 0.14815 + 0.05787) = 1.475e10.
    """
    layers, d_model = int(row["layers"]), int(row["d_model"])
    seq_len, vocab = int(row["seq_len"]), int(row["vocab"])
    per_layers = 96 * layers * d_model**2
    return per_layers * (1 + seq_len / (6 * d_model) + vocab / (16 * layers * d_model))


def weights(row: Row) -> float:
    """The weights that multiply a token: the layers' matrices and the output projection.

    Llama 2 7B (32, 4096, 32, 32, 11008, 32000, gated): 32 · (4 · 4096² + 3 · 4096 · 11008)
    + 32000 · 4096 = 6.607e9.
    """
    layers, d_model = int(row["layers"]), int(row["d_model"])
    heads, kv_heads = int(row["heads"]), int(row["kv_heads"])
    attention = 2 * d_model**2 * (1 + kv_heads / heads)
    mlp = (3 if row["gated"] == "yes" else 2) * d_model * int(row["ffn"])
    return layers * (attention + mlp) + int(row["vocab"]) * d_model


def flops_per_token(row: Row) -> float:
    """Model FLOPs for a token without recomputation: 6 N + 12 l h s, as in PaLM's appendix B.

    Attention is counted whole, not halved for the causal mask, as most sources here do. Llama 2
    7B at 4096 tokens: 6 · 6.607e9 + 12 · 32 · 4096 · 4096 = 4.609e10.
    """
    attention = 12 * int(row["layers"]) * int(row["d_model"]) * int(row["seq_len"])
    return 6 * weights(row) + attention


def mfu(row: Row) -> float:
    """The share of the GPU's 16-bit peak that the row's model FLOPs make."""
    rate = float(row["tokens_per_sec_per_gpu"]) * flops_per_token(row)
    return rate / (PEAK_TFLOPS[row["gpu"]] * 1e12)


Convert = Callable[[Row, list[float]], float]


def _per_gpu(row: Row, tokens_per_s: float) -> float:
    return tokens_per_s / int(row["gpus"])


# pattern of `reported` -> tokens per second and GPU; `#` stands for a number
FORMS: dict[str, Convert] = {
    "# tokens/s/GPU": lambda row, n: n[0],
    "# tokens/s": lambda row, n: _per_gpu(row, n[0]),
    "# sequences/s": lambda row, n: _per_gpu(row, n[0] * int(row["seq_len"])),
    "# s/step of # sequences": lambda row, n: _per_gpu(row, n[1] * int(row["seq_len"]) / n[0]),
    "# h for # steps of # sequences": lambda row, n: _per_gpu(
        row, n[1] * n[2] * int(row["seq_len"]) / (n[0] * 3600)
    ),
    "# TFLOP/s/GPU by Narayanan eq. 3": lambda row, n: n[0] * 1e12 / narayanan_flops_per_token(row),
    "MFU # where MFU # is # tokens/s/GPU": lambda row, n: n[2] * n[0] / n[1],
}

_NUMBER = r"(\d+(?:\.\d+)?)"


def tokens_per_sec_per_gpu(row: Row) -> float:
    """`reported`, converted; raises ValueError for a figure of no known form."""
    for form, convert in FORMS.items():
        found = re.fullmatch(re.escape(form).replace(r"\#", _NUMBER), row["reported"])
        if found:
            return convert(row, [float(number) for number in found.groups()])
    raise ValueError(
        f"reported {row['reported']!r} has none of the forms {', '.join(FORMS)}; write it as one"
    )
