"""Are the packages that a pipeline's steps would install with pip already here? Running never
installs anything."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement

from rekindle.errors import Problem, RequestError
from rekindle.ir.graph import Step


def check(steps: Iterable[Step]) -> None:
    """RequestError that names, per step, what is missing and the command that would install it."""
    problems = []
    for step in steps:
        container = step.container
        missing = [text for text in container.requirements if not satisfied(text)]
        missing += [text for text in container.runtime_requirements if not _runtime_satisfied(text)]
        if missing:
            words = ["python3", "-m", "pip", "install", *container.pip_options, *missing]
            problems.append(
                Problem(
                    f"the step `{step.path}` needs {', '.join(missing)}, not installed here",
                    step.where,
                    f"install what it needs yourself: {shlex.join(words)}",
                )
            )
    if problems:
        raise RequestError(problems)


def satisfied(text: str) -> bool:
    """Does this environment fulfil one pip requirement? A path or URL never counts as fulfilled."""
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return False
    return not requirement.url and _installed(requirement)


def _installed(requirement: Requirement, extra: str = "") -> bool:
    if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
        return True
    try:
        distribution = metadata.distribution(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    if not requirement.specifier.contains(distribution.version, prereleases=True):
        return False
    needed = (
        [Requirement(line) for line in distribution.requires or []] if requirement.extras else []
    )
    return all(
        _installed(child, extra)
        for extra in requirement.extras
        for child in needed
        if child.marker and not child.marker.evaluate({"extra": ""})
    )


def _runtime_satisfied(text: str) -> bool:
    """KFP pins its own exact version into every step; the contract with the executor holds for all
    of 2.x."""
    if text.startswith("kfp=="):
        try:
            return metadata.version("kfp").split(".")[0] == text.removeprefix("kfp==").split(".")[0]
        except metadata.PackageNotFoundError:
            return False
    return satisfied(text)
