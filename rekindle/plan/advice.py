"""Why this engine and this strategy, in words, and what the other engine would do: `advice`."""

import dataclasses
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rekindle.plan.cluster import Cluster
from rekindle.plan.constants import CPU
from rekindle.plan.memory import needed
from rekindle.plan.request import Asked
from rekindle.plan.search import Option, search
from rekindle.plan.work import Work, Zero
from rekindle.spec.layout import Layout
from rekindle.spec.model import AUTO

if TYPE_CHECKING:
    from rekindle.plan.plan import Plan

_GIB = 2**30
# what the GPUs of a layout do, by axis
_AXES = {
    "dp": "{} replicas train a share of each batch (data parallel)",
    "shard": "{} GPUs divide weights, gradients and optimizer among them (FSDP)",
    "tp": "{} GPUs share each matrix (tensor parallel)",
    "cp": "{} GPUs share each sequence (context parallel)",
    "pp": "{} stages hold the blocks one after the other (pipeline)",
}
# what ranks divide under DeepSpeed's ZeRO, by stage
_DIVIDED = (
    "nothing",
    "the optimizer's state",
    "the optimizer's state and gradients",
    "the optimizer's state, gradients and weights",
)
# `zero_optimization` of ds_config.json to try, those that take the least time first
_ZERO_SECTIONS: tuple[dict[str, object], ...] = (
    {"stage": 1},
    {"stage": 2},
    {"stage": 3},
    {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
)


def advice(plan: "Plan") -> Iterator[str]:
    """Sentences: what is done, why nothing simpler, and the other engine with its command."""
    option = plan.chosen.option
    if option.cluster.gpu.name == CPU:
        return
    name, other = ("DeepSpeed", _ours) if option.work.zero else ("rekindle's engine", instead)
    yield f"{name}: {strategy(option.work)}"
    if not (option.work.zero or option.work.layout.only_replicates):
        replicas = str(Layout(option.work.layout.world))  # the simplest
        for one in plan.rejected:
            if one.layout == replicas:
                yield f"not replicas alone: {one.reason}"
                if one.needed_bytes:
                    yield f"GPUs with {one.needed_bytes / _GIB:,.0f} GiB would change that"
    yield from other(plan.asked, option.cluster, option)


def strategy(work: Work) -> str:
    layout, zero = work.layout, work.zero
    if layout.world == 1:
        return "one GPU does everything" + (_host(zero) if zero else "")
    if zero is not None:
        text = f"{layout.world} GPUs train a share of each batch and divide "
        return f"{text}{_DIVIDED[zero.stage]} among them{_host(zero)}"
    texts = []
    for axis, text in _AXES.items():
        degree = getattr(layout, axis)
        if degree > 1:
            texts.append(text.format(degree))
    return ", ".join(texts)


def instead(asked: Asked, cluster: Cluster, best: Option | None = None) -> Iterator[str]:
    """DeepSpeed's lowest stage that fits; nothing where DeepSpeed does not train what is asked."""
    train = asked.train
    other_numbers = train.weights == "bf16" or train.precision in ("fp16", "fp64", "fp8")
    is_quantised = asked.lora is not None and asked.lora.base == "4bit"
    if train.compile or other_numbers or is_quantised or train.optimizer != "adamw":
        return
    layout = "" if "layout" in asked.free else " --set train.layout=auto"
    free = train.model_copy(update={"layout": AUTO, "engine": "deepspeed"})
    for section in _ZERO_SECTIONS:
        zero = Zero.of({"zero_optimization": section})
        options = search(dataclasses.replace(asked, train=free, zero=zero), cluster).options
        if options:
            # YAML of the flow style has no quotes where none are needed
            text = json.dumps(section).replace('"', "")
            config = f"--set 'train.engine_config={{zero_optimization: {text}}}'"
            command = f"--set train.engine=deepspeed {config}{layout}"
            yield f"or DeepSpeed's {zero}: {_beside(options[0], best)}; {command}"
            return
    yield "DeepSpeed's ZeRO does not fit either, with everything in the host's memory"


def _ours(asked: Asked, cluster: Cluster, best: Option) -> Iterator[str]:
    train = asked.train.model_copy(update={"engine": "rekindle"})
    options = search(dataclasses.replace(asked, train=train, zero=None), cluster).options
    if not options:
        yield "rekindle's engine does not fit there"
        return
    fastest = options[0]
    command = "--set train.engine=rekindle --set train.engine_config=null"
    yield f"or rekindle's engine, {fastest.work.layout}: {_beside(fastest, best)}; {command}"


def _beside(option: Option, best: Option | None) -> str:
    size = needed(option.memory.peak_bytes)
    room = f"{size / _GIB:,.0f} of {option.cluster.gpu.memory_bytes / _GIB:,.0f} GiB"
    if best is None:
        return room
    change = option.step.seconds / best.step.seconds - 1
    speed = f"{change:+.0%} time" if abs(change) >= 0.005 else "as fast"
    return f"{room}, {speed}, a guess"


def _host(zero: Zero) -> str:
    return f"; {str(zero).partition(', ')[2]}" if zero.optimizer_offloaded else ""
