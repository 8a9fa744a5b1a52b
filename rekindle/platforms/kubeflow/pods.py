"""The pods of a step on several nodes: what the step's own settings ask for, and the config's
section, together.

What only the run knows (a secret named by a parameter, tolerations from JSON) waits until
the launcher has the values. Two who ask for different things are an error, at compile time as far
as both are written down, in the launcher otherwise."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rekindle.errors import Problem
from rekindle.ir.graph import Setting, Step
from rekindle.platforms.bundle import image_of
from rekindle.platforms.kubeflow import settings
from rekindle.platforms.kubeflow.pod_patch import Clash, Misfit, Piece, joined
from rekindle.spec.platforms import KubeflowSpec

MACHINE = "node.kubernetes.io/instance-type"
# What the pod of a launcher has of its step's settings: its image comes from a registry as private,
# and namespaces that demand a user, a label or an annotation demand them of every pod. All else is
# for the nodes: their machines, their volumes, their variables.
LAUNCHERS_TOO = ("imagePullSecret", "podMetadata", "securityContext")

_FIX = "take it out, or what says the other"
Part = tuple[str, Callable[[], Piece]]  # the place of a wish, and what it asks for


def late(step: Step) -> tuple[list[Setting], dict[str, Mapping[str, Any]]]:
    """Settings that need values of the run, each with `{"input": NAME}` where a value is to be, and
    what these inputs are bound to, as the IR writes it."""
    found: list[Setting] = []
    bindings: dict[str, Mapping[str, Any]] = {}

    def take(binding: Mapping[str, Any]) -> str:
        name = next((n for n, known in bindings.items() if known == binding), "")
        name = name or f"{settings.INPUT}{len(bindings)}"
        bindings[name] = dict(binding)
        return name

    for setting in settings.settings_of(step):
        value = settings.opened(setting.value, take)
        if value != setting.value:
            found.append(dataclasses.replace(setting, value=value))
    return found, bindings


def problems(step: Step, place: KubeflowSpec) -> Iterator[Problem]:
    """What keeps the settings of a step from its nodes, each with its place in the IR."""
    who = f"`{step.path}` runs on several nodes"
    yield from put_together(step, place)[1]
    for setting in late(step)[0]:
        if twice := sorted(settings.variables([setting]) & {*place.secrets}):
            what = f"{who}, and platforms.kubeflow.secrets has `{twice[0]}` as well"
            yield Problem(what, setting.where, _FIX)
    for name in sorted(set(step.container.env) & ({*place.secrets} | own_variables(step))):
        what = f"{who}, and `{name}` is in its environment twice: as a value and by reference"
        yield Problem(what, step.where, _FIX)


def put_together(step: Step, place: KubeflowSpec) -> tuple[Piece, list[Problem]]:
    """Of all that is written down what fits together, and what does not."""
    made: Piece = {"env": [], "spec": {}}
    found: list[Problem] = []
    who = f"`{step.path}` runs on several nodes"
    image, waiting = image_of(step, place.image), {one.where for one in late(step)[0]}
    of_step: list[Part] = [
        (one.where, functools.partial(settings.piece, one.name, one.value, image))
        for one in settings.settings_of(step)
        if one.where not in waiting
    ]
    for where, part in (*_of_place(step, place), *of_step):
        try:
            made = joined(made, part())
        except Misfit as misfit:
            found.append(Problem(f"{who}, and {misfit}", where, misfit.fix))
        except Clash as clash:
            found.append(Problem(f"{who}, and {clash}", where, _FIX))
    return made, found


def _of_place(step: Step, place: KubeflowSpec) -> Iterator[Part]:
    """What the config says of the nodes of this step."""
    wanted, here = step.distribution, "platforms.kubeflow"
    assert wanted is not None
    pairs = sorted(secrets_of(place).items())
    secrets = [(env, {"name": name, "key": key}) for env, (name, key) in pairs]
    named = functools.partial(settings.variable, reference="secretKeyRef")
    yield f"{here}.secrets", lambda: {"env": [named(name, source=at) for name, at in secrets]}
    if wanted.machine:
        yield step.where, lambda: {"spec": {"nodeSelector": {MACHINE: wanted.machine}}}
    if wanted.accelerator:
        labels = dict(place.accelerator_nodes[wanted.accelerator])
        yield f"{here}.accelerator_nodes", lambda: {"spec": {"nodeSelector": labels}}
    if wanted.spot:
        taints = [
            {"key": key, "operator": "Equal", "value": value}
            for key, value in sorted(place.spot_nodes.items())
        ]
        spot = {"nodeSelector": dict(place.spot_nodes), "tolerations": taints}
        yield f"{here}.spot_nodes", lambda: {"spec": spot}


def own_variables(step: Step) -> set[str]:
    """The environment variables that the step's own settings fill."""
    return settings.variables(settings.settings_of(step))


def secrets_of(place: KubeflowSpec) -> dict[str, tuple[str, str]]:
    """Variable -> secret and key, for all steps."""
    pairs = {env: reference.partition("/") for env, reference in place.secrets.items()}
    return {env: (name, key) for env, (name, _, key) in pairs.items()}
