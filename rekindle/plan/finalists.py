"""The finalists of a plan, traced: the engine itself says what the best two layouts hold."""

from __future__ import annotations

import dataclasses

from rekindle.errors import RequestError
from rekindle.plan.choice import Choice
from rekindle.plan.memory import needed
from rekindle.plan.plan import Plan
from rekindle.plan.request import model_config, teacher_config
from rekindle.plan.trace import AT_MOST, Finalist, trace
from rekindle.spec.model import Spec


def traced(plan: Plan, spec: Spec) -> Plan:
    """The plan with the traced memory of its finalists, the best of them that fits first. Takes
    some ten seconds; RequestError where none of them fits."""
    config, teacher = model_config(spec), teacher_config(spec)
    finalists = [plan.chosen, *plan.others][:AT_MOST]
    asked = [
        Finalist(config, spec.task, one.option.work, lora=plan.asked.lora, teacher=teacher)
        for one in finalists
    ]
    answers = trace(asked)
    found, notes = list[Choice](), list[str]()
    for one, answer in zip(finalists, answers, strict=True):
        option = dataclasses.replace(one.option, memory=answer.memory)
        layout, size = str(option.work.layout), answer.memory.peak_bytes / 2**30
        known = one.option.memory.peak_bytes / 2**30
        if answer.traced:
            notes.append(f"traced: {layout} holds {size:.1f} GiB (closed form: {known:.1f})")
        notes += [answer.note] if answer.note else []
        if needed(answer.memory.peak_bytes).bytes <= option.cluster.gpu.memory_bytes:
            found.append(Choice(one.fleet, option))
    if not found:
        raise RequestError(
            "neither of the two best layouts fits, as a trace says", where="resources",
            fix=f"{'; '.join(notes)}: more or larger machines, or train.layout for another one",
        )  # fmt: skip
    others = (*found[1:], *plan.others[AT_MOST - 1 :])
    return dataclasses.replace(
        plan, chosen=found[0], others=others, notes=(*plan.notes, *dict.fromkeys(notes))
    )
