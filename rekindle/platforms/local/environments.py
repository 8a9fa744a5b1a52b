"""Python environments for steps that name packages to install, made once and kept in the
home.

A step whose packages are installed here runs in this environment, which is never changed.
Every other step gets an environment of its own, `environments/<key>` in the home: pip
installs its packages there, and what is installed here can be imported behind them. The
key covers the packages, pip's options, this interpreter and what is installed here, since
pip leaves out what it finds."""

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
    """The folder with `python3` for each set of packages that is not here; RequestError
    if pip fails. `on_event` hears of each environment before it is made."""
    folders: dict[Packages, str] = {}
    problems: dict[Packages, Problem] = {}
    for step in steps:
        packages = packages_of(step)
        if not packages or packages in folders or packages in problems:
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
    installed_here = []
    for site_folder in site_folders():
        installed_here += [entry.name for entry in site_folder.glob("*-info")]
    key = digest([packages, sys.version, sys.prefix, sorted(installed_here)])[:16]
    folder = home / "environments" / key
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
    # site adds the folders of a .pth file at the end of the path: behind the
    # environment's own
    behind = ""
    for site_folder in site_folders():
        behind += f"import site; site.addsitedir({str(site_folder)!r})\n"
    bases = {"base": str(folder), "platbase": str(folder)}
    Path(sysconfig.get_path("purelib", vars=bases), "behind.pth").write_text(behind)
    options = ["--quiet", "--disable-pip-version-check", "--no-input"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", *options, *packages],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    log.info("%s", masked(done.stdout))
    if done.returncode:
        shutil.rmtree(folder)  # so that the next run tries again
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise _refusal(step, packages, "; ".join(errors[-_SHOWN_LINES:]))
    (folder / _MADE).touch()


def _refusal(step: Step, packages: Packages, why: str) -> RequestError:
    message = masked(f"the packages of the step `{step.path}` cannot be installed: {why}")
    fix = f"correct packages_to_install, or install here: pip install {shlex.join(packages)}"
    return RequestError(message, where=step.where, fix=fix)


def site_folders() -> list[Path]:
    """Where packages are installed that this interpreter imports, first ones first."""
    places = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        places = [*places, site.getusersitepackages()]
    return [Path(folder) for folder in places if folder in sys.path]


def satisfied(text: str) -> bool:
    """Whether this environment fulfils a requirement of pip; a path or URL never counts
    as fulfilled."""
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return False
    return not requirement.url and _installed(requirement)


def _installed(requirement: Requirement, extra: str = "") -> bool:
    if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
        return True  # it is not for this machine, or of an extra that is not wanted
    try:
        distribution = metadata.distribution(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    if not requirement.specifier.contains(distribution.version, prereleases=True):
        return False
    if not requirement.extras:
        return True  # pip has seen to what the distribution itself needs
    optional = []
    for line in distribution.requires or []:
        child = Requirement(line)
        if child.marker and not child.marker.evaluate({"extra": ""}):
            optional.append(child)
    for extra in requirement.extras:
        for child in optional:
            if not _installed(child, extra):
                return False
    return True


def _runtime_satisfied(text: str) -> bool:
    """Whether a requirement that KFP wrote is fulfilled: it pins its exact version into
    every step, and the executor's contract holds for all of 2.x."""
    if not text.startswith("kfp=="):
        return satisfied(text)
    try:
        installed = metadata.version("kfp")
    except metadata.PackageNotFoundError:
        return False
    pinned = text.removeprefix("kfp==")
    return installed.split(".")[0] == pinned.split(".")[0]
