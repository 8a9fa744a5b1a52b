"""Why this engine and this strategy, in words, and what the other engine would do: `advice`."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rekindle.plan.cluster import Cluster
from rekindle.plan.constants import CPU
from rekindle.plan.memory import needed
from rekindle.plan.request import Asked
from rekindle.plan.search import Option, search
from rekindle.plan.work import Work, Zero
from rekindle.spec.layout import Layout
from rekindle.spec.model import AUTO
from rekindle.tables import rows

if TYPE_CHECKING:
    from rekindle.plan.plan import Plan

_GIB = 2**30
_TABLE = Path(__file__).with_suffix(".yaml")


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
        what = rows(_TABLE)["divided"][zero.stage]
        divided = f"{layout.world} GPUs train a share of each batch and divide {what} among them"
        return divided + _host(zero)
    words = ((getattr(layout, axis), word) for axis, word in rows(_TABLE)["axes"].items())
    return ", ".join(word.format(degree) for degree, word in words if degree > 1)


def instead(asked: Asked, cluster: Cluster, best: Option | None = None) -> Iterator[str]:
    """DeepSpeed's lowest stage that fits; nothing where DeepSpeed does not train what is asked."""
    train = asked.train
    half = train.weights == "bf16" or train.precision in ("fp16", "fp64", "fp8")
    quantised = asked.lora is not None and asked.lora.base == "4bit"
    if train.compile or half or quantised or train.optimizer != "adamw":
        return
    layout = "" if "layout" in asked.free else " --set train.layout=auto"
    free = train.model_copy(update={"layout": AUTO, "engine": "deepspeed"})
    for section in rows(_TABLE)["sections"]:
        zero = Zero.of({"zero_optimization": section})
        found = search(dataclasses.replace(asked, train=free, zero=zero), cluster).options
        if found:
            break
    else:
        yield "DeepSpeed's ZeRO does not fit either, with everything in the host's memory"
        return
    said = ", ".join(
        f"{key}: {{device: cpu}}" if isinstance(value, dict) else f"{key}: {value}"
        for key, value in section.items()
    )
    config = f"--set 'train.engine_config={{zero_optimization: {{{said}}}}}'"
    command = f"--set train.engine=deepspeed {config}{layout}"
    yield f"or DeepSpeed's {zero}: {_beside(found[0], best)}; {command}"


def _ours(asked: Asked, cluster: Cluster, best: Option) -> Iterator[str]:
    train = asked.train.model_copy(update={"engine": "rekindle"})
    found = search(dataclasses.replace(asked, train=train, zero=None), cluster)
    if found.options:
        back = "--set train.engine=rekindle --set train.engine_config=null"
        how = f"{found.options[0].work.layout}: {_beside(found.options[0], best)}"
        yield f"or rekindle's engine, {how}; {back}"
    else:
        yield "rekindle's engine does not fit there"


def _beside(option: Option, best: Option | None) -> str:
    size, has = needed(option.memory.peak_bytes), option.cluster.gpu.memory_bytes
    room = f"{size / _GIB:,.0f} of {has / _GIB:,.0f} GiB"
    if best is None:
        return room
    by = option.step.seconds / best.step.seconds - 1
    return f"{room}, {f'{by:+.0%} time' if abs(by) >= 0.005 else 'as fast'}, a guess"


def _host(zero: Zero) -> str:
    return f"; {str(zero).partition(', ')[2]}" if zero.optimizer_offloaded else ""
