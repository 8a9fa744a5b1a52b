"""Which steps docker runs, and how: the image, the mounts, the limits and the variables of each.

A step in a container is a task of the shim's like any other, with docker's client as its command,
so that logs, retries, time limits and signals are the same. It sees its inputs, read-only, and the
folder of its outputs, both under the paths that they have here, and nothing else of this machine;
it runs as the user who runs rekindle, with no other rights. Variables go by name, so that no value
of theirs is on a command line. An image is run by its id, which is part of the step's cache key. An
init passes SIGTERM on to the command itself; the rest is killed with the container."""

import dataclasses
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from rekindle.errors import RequestError
from rekindle.ir.graph import Graph, Resources, Step
from rekindle.ir.placeholders import lower
from rekindle.launch.rendezvous import VARIABLE
from rekindle.platforms.docker import Docker, find
from rekindle.platforms.local.content import local_path
from rekindle.platforms.machines import amount
from rekindle.platforms.submission import problems_in
from rekindle.records import Ignored

When = Literal["never", "auto", "always"]

# of our own environment, beside secrets; those that are not set stay so
_HANDED_ON = (VARIABLE, "CLUSTER_SPEC", "PYTHONUNBUFFERED", "_KFP_RUNTIME")
# no rights of root's over the kernel, none by programs that bring some, and no more processes than
# a step can want
_CONFINED = ("--cap-drop=ALL", "--security-opt=no-new-privileges", "--pids-limit=8192")
_PROCESS = "Runs as a process here, not in its image"
_problem = problems_in(__file__)


@dataclasses.dataclass(frozen=True)
class Containers:
    """Ids of the `images` that steps run in, by name; `every_step` says that Python components do
    so, too. `secrets` are variables to hand on, `user` is whom steps run as, `left_out` is what
    might have run in a container and does not."""

    docker: Docker | None = None
    images: Mapping[str, str] = dataclasses.field(default_factory=dict)
    every_step: bool = False
    secrets: tuple[str, ...] = ()
    left_out: tuple[Ignored, ...] = ()
    user: str = ""

    def image_of(self, step: Step) -> str:
        """The id of the image that the step runs in; "" if it runs as a process."""
        if step.container.source and not self.every_step:
            return ""
        return self.images.get(step.container.image, "")

    def contained(
        self, task: Mapping[str, Any], step: Step, outputs: Path, labels: Mapping[str, str]
    ) -> dict[str, Any]:
        """The same task, run by docker; `outputs` is the folder that it may write to."""
        assert self.docker is not None
        name, workspace = f"rekindle-{uuid.uuid4().hex}", Path(task["run"]["workspace_path"])
        inputs = list(_inputs(task["executor_input"]))
        command = [lower(word) for word in step.container.as_written]
        words: list[Any] = [
            *self.docker.words("run", f"--name={name}", "--init", "--pull=never"),
            "--log-driver=none",
            f"--user={self.user}",
            *_CONFINED,
            *(f"--label={key}={value}" for key, value in labels.items()),
            *_limits(step.container.resources),
            *(["--network=host"] if step.distribution else []),
            *(_mount(path, ",readonly") for path in inputs),
            _mount(outputs, ""),
            *([_mount(workspace, "")] if workspace.exists() else []),
            *self._variables(task, step),
            *({"concat": ["--entrypoint=", word]} for word in command[:1]),
            self.image_of(step),
            *command[1:],
        ]
        within = [str(path.resolve()) for path in (outputs, *inputs)]
        afterwards = self.docker.removal(name)
        return {**task, "source": "", "command": words, "afterwards": afterwards, "within": within}

    def _variables(self, task: Mapping[str, Any], step: Step) -> Iterator[Any]:
        """Options that hand variables on: by name, but for PATH, which the shim changes."""
        secrets = (*self.secrets, *(secret.env for secret in step.secrets))
        names = dict.fromkeys((*_HANDED_ON, *secrets, *task["env"]))
        yield from (f"--env={name}" for name in names if name != "PATH")
        if "PATH" in task["env"]:
            yield {"concat": ["--env=PATH=", task["env"]["PATH"]]}
        if "HOME" not in names:  # the image knows no home of this user
            yield "--env=HOME=/tmp"

    def sweep(self, home: Path, is_alive: Callable[[str], bool]) -> None:
        """Remove containers of runs under `home` whose process, and its shims, were killed."""
        if self.docker is not None:
            found = self.docker.containers(str(home))
            self.docker.remove([name for name, run_id in found if not is_alive(run_id)])


NO_CONTAINERS = Containers()


def prepare(
    graph: Graph, when: When, env: Mapping[str, str], secrets: tuple[str, ...] = ()
) -> Containers:
    """Find docker, and pull missing images; RequestError where a step has to have one."""
    every_step = when == "always"
    steps = [step for step in graph.steps() if every_step or not step.container.source]
    if when == "never" or not steps:
        return NO_CONTAINERS
    names = sorted({step.container.image for step in steps})
    try:
        docker = find(env)
    except RequestError as error:
        if every_step:
            raise
        what = f"{_PROCESS}: {error.problems[0].what}"
        return Containers(left_out=(Ignored(what=what, asked_by=tuple(names)),))
    known = {name: _image(docker, name) for name in names}
    reasons = {name: why for name, (image_id, why) in known.items() if not image_id}
    if every_step and reasons:
        raise RequestError(_problem("no_image", name=n, why=why) for n, why in reasons.items())
    rows = (Ignored(what=f"{_PROCESS}: {why}", asked_by=(name,)) for name, why in reasons.items())
    images = {name: image_id for name, (image_id, _) in known.items() if image_id}
    return Containers(docker, images, every_step, secrets, tuple(rows), docker.user)


def _image(docker: Docker, name: str) -> tuple[str, str]:
    """The image's id, or why it cannot be had."""
    if "{{$" in name:
        return "", "only the run knows which image it is"
    if found := docker.image_id(name):
        return found, ""
    why = docker.pull(name)
    return (docker.image_id(name), "") if not why else ("", why)


def _limits(asked: Resources) -> Iterator[str]:
    """A half of the memory as shared memory, and what the step asks for, with no more CPUs."""
    yield f"--shm-size={os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') // 2}"
    if asked.at_run_time:
        return
    if asked.memory_limit:
        yield f"--memory={int(amount(asked.memory_limit))}"
    if asked.cpu_limit:
        yield f"--cpus={min(amount(asked.cpu_limit), os.cpu_count() or 1):g}"


def _inputs(executor_input: Mapping[str, Any]) -> Iterator[Path]:
    """The artifacts that the step is given and that lie here."""
    groups = executor_input["inputs"]["artifacts"].values()
    uris = dict.fromkeys(artifact["uri"] for group in groups for artifact in group["artifacts"])
    for path in map(local_path, uris):
        if path is not None and path.exists():
            yield path


def _mount(path: Path, options: str) -> str:
    """The option is a line of CSV; unlike `--volume` it makes no folder that is not there."""
    quoted = str(path.absolute()).replace('"', '""')
    return f'--mount=type=bind,"source={quoted}","target={quoted}"{options}'
