"""Why this engine and this strategy, in words,
and what the other engine would do: `advice`."""

import dataclasses
import json
from collections.abc import Iterable, Iterator

from rekindle.plan.cluster import Cluster
from rekindle.plan.constants import CPU
from rekindle.plan.memory import needed
from rekindle.plan.request import Asked
from rekindle.plan.search import Option, Rejected, search
from rekindle.plan.work import Work, Zero
from rekindle.spec.layout import Layout
from rekindle.spec.model import AUTO

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


def advice(asked: Asked, option: Option, rejected: Iterable[Rejected]) -> Iterator[str]:
    """Sentences: what is done, why nothing simpler,
    and the other engine with its command."""
    if option.cluster.gpu.name == CPU:
        return
    if option.work.zero:
        yield f"DeepSpeed: {strategy(option.work)}"
        yield from _with_our_engine(asked, option.cluster, option)
        return
    yield f"rekindle's engine: {strategy(option.work)}"
    if not option.work.layout.only_replicates:
        replicas = str(Layout(option.work.layout.world))  # the simplest
        for candidate in rejected:
            if candidate.layout == replicas:
                yield f"not replicas alone: {candidate.reason}"
                if candidate.needed_bytes:
                    yield f"GPUs with {candidate.needed_bytes / _GIB:,.0f} GiB would change that"
    yield from instead(asked, option.cluster, option)


def strategy(work: Work) -> str:
    """What the GPUs of a layout do, in words."""
    layout = work.layout
    zero = work.zero
    if layout.world == 1:
        return "one GPU does everything" + _offload_words(zero)
    if zero is not None:
        divided = _DIVIDED[zero.stage]
        text = f"{layout.world} GPUs train a share of each batch and divide {divided} among them"
        return text + _offload_words(zero)
    clauses = []
    for axis, template in _AXES.items():
        degree = getattr(layout, axis)
        if degree > 1:
            clauses.append(template.format(degree))
    return ", ".join(clauses)


def instead(asked: Asked, cluster: Cluster, best: Option | None = None) -> Iterator[str]:
    """Advises DeepSpeed's lowest stage that fits, with the command that tries it; nothing
    where DeepSpeed does not train what is asked."""
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


def _with_our_engine(asked: Asked, cluster: Cluster, best: Option) -> Iterator[str]:
    """Advises the fastest layout of rekindle's engine, with the command that tries it."""
    train = asked.train.model_copy(update={"engine": "rekindle"})
    options = search(dataclasses.replace(asked, train=train, zero=None), cluster).options
    if not options:
        yield "rekindle's engine does not fit there"
        return
    fastest = options[0]
    command = "--set train.engine=rekindle --set train.engine_config=null"
    yield f"or rekindle's engine, {fastest.work.layout}: {_beside(fastest, best)}; {command}"


def _beside(option: Option, best: Option | None) -> str:
    """The memory of an option, and its time beside that of the best, in words."""
    size = needed(option.memory.peak_bytes)
    room = f"{size / _GIB:,.0f} of {option.cluster.gpu.memory_bytes / _GIB:,.0f} GiB"
    if best is None:
        return room
    change = option.step.seconds / best.step.seconds - 1
    # less than half a per cent would be printed as +0%
    speed = f"{change:+.0%} time" if abs(change) >= 0.005 else "as fast"
    return f"{room}, {speed}, a guess"


def _offload_words(zero: Zero | None) -> str:
    """What lies in the host's memory, as an addition to a sentence; "" for nothing."""
    if zero is None or not zero.optimizer_offloaded:
        return ""
    # `ZeRO 3, optimizer and weights in the host's memory` without the stage
    _, _, offloaded = str(zero).partition(", ")
    return f"; {offloaded}"
