"""Python environments for steps that name packages to install, made once and kept in the home.

A step whose packages are installed here runs in this environment, which is never changed. Every
other step gets an environment of its own, `environments/<key>` in the home: pip installs its
packages there, and what is installed here can be imported behind them. The key covers the packages,
pip's options, this interpreter and what is installed here, since pip leaves out what it finds."""

import fcntl
import importlib.util
import logging
import os
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from rekindle.errors import Problem, RequestError
from rekindle.ir.graph import Step
from rekindle.masking import masked
from rekindle.spec.identity import digest

log = logging.getLogger(__name__)

Packages = tuple[str, ...]
OnEvent = Callable[[str, dict[str, Any]], None]
_MADE = "made"  # the file in an environment that is complete
_SHOWN_LINES = 3


def packages_of(step: Step) -> Packages:
    """What pip has to install for the step, options first; empty if all of it is here."""
    container = step.container
    runtime = [text for text in container.runtime_requirements if not _runtime_satisfied(text)]
    if not runtime and all(map(satisfied, container.requirements)):
        return ()
    return (*container.pip_options, *container.requirements, *runtime)


def prepare(
    steps: Iterable[Step], home: Path, env: Mapping[str, str], on_event: OnEvent | None = None
) -> dict[Packages, str]:
    """The folder with `python3` for each set of packages that is not here; RequestError if pip
    fails. `on_event` hears of each environment before it is made."""
    folders: dict[Packages, str] = {}
    problems: dict[Packages, Problem] = {}
    for step in steps:
        if not (packages := packages_of(step)) or packages in folders or packages in problems:
            continue
        try:
            folders[packages] = _environment(step, packages, home, env, on_event)
        except RequestError as error:
            problems[packages] = error.problems[0]
    if problems:
        raise RequestError(list(problems.values()))
    return folders


def _environment(
    step: Step, packages: Packages, home: Path, env: Mapping[str, str], on_event: OnEvent | None
) -> str:
    here = sorted(entry.name for place in site_folders() for entry in place.glob("*-info"))
    folder = home / "environments" / digest([packages, sys.version, sys.prefix, here])[:16]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / _MADE).exists():
            if on_event:
                text = f"installing {shlex.join(packages)} into an environment of its own"
                on_event(step.path, {"event": "notice", "text": masked(text)})
            _make(step, packages, folder, env)
        os.utime(folder)  # `rekindle gc` counts the days since it was last used
    return str(folder / "bin")


def _make(step: Step, packages: Packages, folder: Path, env: Mapping[str, str]) -> None:
    """An environment with the packages, in front of what is installed here."""
    if importlib.util.find_spec("pip") is None:
        raise _refusal(step, packages, "pip is not installed here")
    venv.EnvBuilder(symlinks=True, clear=True).create(folder)
    python = folder / "bin" / "python3"
    names = {"base": str(folder), "platbase": str(folder)}
    behind = "".join(f"import site; site.addsitedir({str(place)!r})\n" for place in site_folders())
    Path(sysconfig.get_path("purelib", vars=names), "behind.pth").write_text(behind)
    words = ["--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words, "--no-input", *packages],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    log.info("%s", masked(done.stdout))
    if done.returncode:
        shutil.rmtree(folder)
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise _refusal(step, packages, "; ".join(errors[-_SHOWN_LINES:]))
    (folder / _MADE).touch()


def _refusal(step: Step, packages: Packages, why: str) -> RequestError:
    what = masked(f"the packages of the step `{step.path}` cannot be installed: {why}")
    fix = f"correct packages_to_install, or install here: pip install {shlex.join(packages)}"
    return RequestError(what, where=step.where, fix=fix)


def site_folders() -> list[Path]:
    """Where packages are installed that this interpreter imports, first ones first."""
    users = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [Path(place) for place in (*site.getsitepackages(), *users) if place in sys.path]


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
    needed = [Requirement(line) for line in distribution.requires or [] if requirement.extras]
    optional = [one for one in needed if one.marker and not one.marker.evaluate({"extra": ""})]
    return all(_installed(child, extra) for extra in requirement.extras for child in optional)


def _runtime_satisfied(text: str) -> bool:
    """KFP pins its exact version into every step; the executor's contract holds for all of 2.x."""
    if text.startswith("kfp=="):
        try:
            return metadata.version("kfp").split(".")[0] == text.removeprefix("kfp==").split(".")[0]
        except metadata.PackageNotFoundError:
            return False
    return satisfied(text)
