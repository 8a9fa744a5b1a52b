"""Which attention a device really ran: operators and kernels of torch.profiler, by name.

The names are those of torch 2.10 to 2.13: operators as aten registers them, kernels as flash attention
(`flash_fwd_kernel`), CUTLASS (`fmha_cutlassF_bf16_...`) and cuDNN (`cudnn_generated_fort_native_sdpa_...`) call them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

# operator: what kind of attention it is
OPERATORS = {
    "torch_attn::_varlen_attn": "varlen",
    "torch_attn::_varlen_attn_backward": "varlen",
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_flash_attention_backward": "flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_efficient_attention_backward": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_cudnn_attention_backward": "cudnn",
    "aten::_scaled_dot_product_fused_attention_overrideable": "overrideable",
    "aten::_scaled_dot_product_attention_math": "math",
    "aten::baddbmm": "written out",  # ours, where tp or cp ranks draw the same dropout
}
SLOW = ("math", "written out")  # make scores of whole sequences


def operators_of(names: Iterable[str]) -> set[str]:
    """The kinds of attention among operators."""
    return {OPERATORS[name] for name in names if name in OPERATORS}


def kernel_kind(name: str) -> str | None:
    """flash, efficient or cudnn of a kernel that computes attention; None of any other."""
    lower = name.lower()
    if "cudnn" in lower and any(word in lower for word in ("sdpa", "fort_native", "flash", "mha")):
        return "cudnn"
    if any(word in lower for word in ("flash_fwd", "flash_bwd", "flashattn", "flash::")):
        return "flash"
    if "fmha_cutlass" in lower or "attentionkernel" in lower or "attentionbackwardkernel" in lower:
        return "efficient"
    return None


def short(name: str) -> str:
    """A kernel's name without its template arguments."""
    return name.removeprefix("void ").split("<")[0].split("(")[0][:60]


def profiled(cuda: bool, work: Callable[[], Any]) -> list[dict[str, Any]]:
    """The events of a Chrome trace of `work`: operators (`cpu_op`), and on a GPU `kernel` and `gpu_memcpy`, which have a stream."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        work()
        if cuda:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("cat")]


def named(events: Iterable[dict[str, Any]], category: str) -> list[str]:
    return [event["name"] for event in events if event["cat"] == category]


def streams_of(events: Iterable[dict[str, Any]]) -> set[Any]:
    return {event.get("args", {}).get("stream") for event in events}


def copies_to_device(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e for e in events if e["cat"] == "gpu_memcpy" and "HtoD" in e["name"]]


def at_once(copies: Iterable[dict[str, Any]], kernels: Iterable[dict[str, Any]]) -> int:
    """How many copies were under way while a kernel ran."""
    spans = sorted((k["ts"], k["ts"] + k["dur"]) for k in kernels)
    return sum(any(a < c["ts"] + c["dur"] and c["ts"] < b for a, b in spans) for c in copies)
