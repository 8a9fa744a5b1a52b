"""Which steps docker runs, and how: the image, the mounts, the limits and the variables
of each.

A step in a container is a task of the shim's like any other, with docker's client as its
command, so that logs, retries, time limits and signals are the same. It sees its inputs,
read-only, and the folder of its outputs, both under the paths that they have here, and
nothing else of this machine; it runs as the user who runs rekindle, with no other rights.
Variables go by name, so that no value of theirs is on a command line. An image is run by
its id, which is part of the step's cache key. An init passes SIGTERM on to the command
itself; the rest is killed with the container."""

import dataclasses
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, TypeAlias

from rekindle.errors import Problem, RequestError
from rekindle.ir.graph import Graph, Resources, Step
from rekindle.ir.placeholders import lower
from rekindle.launch.rendezvous import VARIABLE
from rekindle.platforms.docker import Docker, find
from rekindle.platforms.local.content import local_path
from rekindle.platforms.machines import amount
from rekindle.protojson import Json
from rekindle.records import Ignored

When = Literal["never", "auto", "always"]

# of our own environment, beside secrets; those that are not set stay so
_HANDED_ON = (VARIABLE, "CLUSTER_SPEC", "PYTHONUNBUFFERED", "_KFP_RUNTIME")
# no rights of root's over the kernel, none by programs that bring some, and no more
# processes than a step can want
_CONFINED = ("--cap-drop=ALL", "--security-opt=no-new-privileges", "--pids-limit=8192")
_PROCESS = "Runs as a process here, not in its image"
# of a command as the shim takes it: a text, or {"concat": [...]} of texts and
# placeholders
Word: TypeAlias = str | Json


@dataclasses.dataclass(frozen=True)
class Containers:
    """Ids of the `images` that steps run in, by name; `every_step` says that Python
    components do so, too. `secrets` are variables to hand on, `user` is whom steps run
    as, `left_out` is what might have run in a container and does not."""

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

    def contained(self, task: Json, step: Step, outputs: Path, labels: Mapping[str, str]) -> Json:
        """The same task, run by docker; `outputs` is the folder that it may write to."""
        assert self.docker is not None
        name = f"rekindle-{uuid.uuid4().hex}"
        inputs = list(_inputs(task["executor_input"]))
        options: list[Word] = [
            f"--name={name}",
            "--init",
            "--pull=never",
            "--log-driver=none",  # the shim keeps what docker's client prints
            f"--user={self.user}",
            *_CONFINED,
        ]
        options += [f"--label={key}={value}" for key, value in labels.items()]
        options += _limits(step.container.resources)
        if step.distribution:  # its nodes meet on this machine's loopback
            options.append("--network=host")
        options += [_mount(path, ",readonly") for path in inputs]
        options.append(_mount(outputs, ""))
        workspace = Path(task["run"]["workspace_path"])
        if workspace.exists():
            options.append(_mount(workspace, ""))
        options += self._variables(task, step)
        # docker's entry point is one word; the rest of the command are its arguments
        command = [lower(word) for word in step.container.as_written]
        if command:
            options.append({"concat": ["--entrypoint=", command[0]]})
        run: list[Word] = [*self.docker.words("run"), *options, self.image_of(step), *command[1:]]
        return {
            **task,
            "source": "",
            "command": run,
            "afterwards": self.docker.removal(name),
            "within": [str(path.resolve()) for path in (outputs, *inputs)],
        }

    def _variables(self, task: Json, step: Step) -> Iterator[Word]:
        """Options that hand variables on: by name, but for PATH, which the shim
        changes."""
        secrets = (*self.secrets, *(secret.env for secret in step.secrets))
        names = dict.fromkeys((*_HANDED_ON, *secrets, *task["env"]))
        yield from (f"--env={name}" for name in names if name != "PATH")
        if "PATH" in task["env"]:
            yield {"concat": ["--env=PATH=", task["env"]["PATH"]]}
        if "HOME" not in names:  # the image knows no home of this user
            yield "--env=HOME=/tmp"

    def sweep(self, home: Path, is_alive: Callable[[str], bool]) -> None:
        """Remove containers of runs under `home` whose process, and its shims, were
        killed."""
        if self.docker is not None:
            containers = self.docker.containers(str(home))
            self.docker.remove([name for name, run_id in containers if not is_alive(run_id)])


NO_CONTAINERS = Containers()


def prepare(
    graph: Graph, when: When, env: Mapping[str, str], secrets: tuple[str, ...] = ()
) -> Containers:
    """The containers that steps run in, once missing images are pulled; RequestError
    where a step has to have one."""
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
        message = f"{_PROCESS}: {error.problems[0].what}"
        return Containers(left_out=(Ignored(what=message, asked_by=tuple(names)),))
    images = {}
    left_out = []
    problems = []
    for name in names:
        image_id, why = _image(docker, name)
        if image_id:
            images[name] = image_id
        else:
            left_out.append(Ignored(what=f"{_PROCESS}: {why}", asked_by=(name,)))
            problems.append(_no_image(name, why))
    if every_step and problems:
        raise RequestError(problems)
    return Containers(docker, images, every_step, secrets, tuple(left_out), docker.user)


def _no_image(name: str, why: str) -> Problem:
    return Problem(
        f"the image {name} cannot be had: {why}",
        "platforms.local.containers",
        f"docker pull {name}, or build it; or set platforms.local.containers to auto",
    )


def _image(docker: Docker, name: str) -> tuple[str, str]:
    """The image's id, or why it cannot be had."""
    if "{{$" in name:  # a placeholder
        return "", "only the run knows which image it is"
    image_id = docker.image_id(name)
    if image_id:
        return image_id, ""
    why = docker.pull(name)
    if why:
        return "", why
    return docker.image_id(name), ""


def _limits(resources: Resources) -> Iterator[str]:
    """The step's limits as options of docker, with no more CPUs than there are."""
    # half of the memory, as Linux gives /dev/shm outside of containers: docker gives 64
    # MB, which is too little for the workers of a data loader
    yield f"--shm-size={os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') // 2}"
    if resources.at_run_time:
        return
    if resources.memory_limit:
        yield f"--memory={int(amount(resources.memory_limit))}"
    if resources.cpu_limit:  # docker refuses more than the machine has
        yield f"--cpus={min(amount(resources.cpu_limit), os.cpu_count() or 1):g}"


def _inputs(executor_input: Json) -> Iterator[Path]:
    """The artifacts that the step is given and that lie here."""
    uris: dict[str, None] = {}  # each once, in order
    for group in executor_input["inputs"]["artifacts"].values():
        for artifact in group["artifacts"]:
            uris[artifact["uri"]] = None
    for path in map(local_path, uris):
        if path is not None and path.exists():
            yield path


def _mount(path: Path, options: str) -> str:
    """The option is a line of CSV; unlike `--volume` it makes no folder that is not
    there."""
    quoted = str(path.absolute()).replace('"', '""')
    return f'--mount=type=bind,"source={quoted}","target={quoted}"{options}'
