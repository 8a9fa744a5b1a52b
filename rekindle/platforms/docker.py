"""The docker daemon of this machine, through its own command line.

Only a daemon on this machine counts (a socket in the file system): what a step reads and
writes is mounted from here. The address is found once and given to every later command,
so that no variable of a step leads it elsewhere. Images are known by their id, a hash of
all that is in them.

An image with the user's code is built on top of an image of rekindle, pushed to where a
platform pulls from, and known from then on by the digest of its manifest, as the registry
answers `docker push`. Its labels say which code is in it, and which base is below."""

import dataclasses
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rekindle.errors import PlatformError, RequestError
from rekindle.platforms.submission import write_files
from rekindle.platforms.user_code import HOME, Code
from rekindle.spec import lock
from rekindle.spec.imports import INCLUDED
from rekindle.spec.lock import Pin

log = logging.getLogger(__name__)

HOME_LABEL = "rekindle.home"
RUN_LABEL = "rekindle.run"
CODE_LABEL = "rekindle.code"
_ANSWER_SECONDS = 20
_PULL_SECONDS = 1800
_BUILD_SECONDS = 3600
_DIGEST = re.compile(r"digest: (sha256:[0-9a-f]{64})\b")
_START = "start docker on this machine, or set platforms.local.containers to never"


@dataclasses.dataclass(frozen=True)
class Docker:
    """A daemon that answered at `address`; `env` is the environment of the client. A
    `rootless` one runs as a user, whom containers know as root (none has run a step
    yet)."""

    client: str
    address: str
    env: Mapping[str, str] = dataclasses.field(repr=False)
    rootless: bool = False

    @property
    def user(self) -> str:
        """The user whom a container runs as, so that its files belong to the user who
        runs rekindle."""
        return "0:0" if self.rootless else f"{os.getuid()}:{os.getgid()}"

    def words(self, *words: str) -> list[str]:
        """A command for this daemon."""
        return [self.client, f"--host={self.address}", *words]

    def image_id(self, image: str) -> str:
        """`sha256:...` of an image that is here; "" if it is not."""
        answer = self.ask("image", "inspect", "--format={{.Id}}", "--", image)
        return answer.stdout.strip() if answer.returncode == 0 else ""

    def pull(self, image: str) -> str:
        """Pull the image; why it cannot be had, "" once it is here."""
        log.warning("pulling %s", image)
        done = self.ask("pull", "--quiet", "--", image, seconds=_PULL_SECONDS)
        return last_line(done) if done.returncode else ""

    def containers(self, home: str) -> list[tuple[str, str]]:
        """Name and run id of each container, running or not, that belongs to a home
        folder."""
        columns = f'--format={{{{.Names}}}} {{{{.Label "{RUN_LABEL}"}}}}'
        answer = self.ask("ps", "--all", f"--filter=label={HOME_LABEL}={home}", columns)
        return [(name, run) for name, run in map(str.split, answer.stdout.splitlines())]

    def removal(self, *names: str) -> list[str]:
        """The command that kills and removes containers."""
        return self.words("rm", "--force", "--volumes", *names)

    def remove(self, names: Sequence[str]) -> None:
        """Kill and remove containers, if they are still there."""
        if names:
            _ask(self.removal(*names), self.env)

    def ask(
        self, *words: str, seconds: float = _ANSWER_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """How a command ended; with 124 where it took longer."""
        return _ask(self.words(*words), self.env, seconds)


def find(env: Mapping[str, str]) -> Docker:
    """The daemon of the docker command in `env`; RequestError if there is none on this
    machine."""
    client = shutil.which("docker", path=env.get("PATH"))
    if client is None:
        raise _unusable("there is no docker command here")
    context = _ask([client, "context", "inspect", "--format={{.Endpoints.docker.Host}}"], env)
    address = context.stdout.strip()
    if not address.startswith("unix://"):
        why = address or last_line(context)
        raise _unusable(f"the docker daemon is not on this machine: {why}")
    docker = Docker(client, address, env)
    answer = docker.ask("version", "--format={{.Server.Version}}")
    if answer.returncode:
        raise _unusable(f"cannot use docker: {last_line(answer)}")
    options = docker.ask("info", "--format={{.SecurityOptions}}").stdout
    return dataclasses.replace(docker, rootless="name=rootless" in options)


def _unusable(what: str) -> RequestError:
    return RequestError(what, where="platforms.local.containers", fix=_START)


def _ask(
    command: list[str], env: Mapping[str, str], seconds: float = _ANSWER_SECONDS
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            env=dict(env),
            timeout=seconds,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    except subprocess.TimeoutExpired:
        message = f"docker did not answer within {seconds:g} s"
        # 124, as timeout(1) has it
        return subprocess.CompletedProcess(command, 124, "", message)


def last_line(command: subprocess.CompletedProcess[str]) -> str:
    """The last line that a command printed."""
    lines = (command.stderr.strip() or command.stdout.strip()).splitlines()
    return lines[-1] if lines else f"exit code {command.returncode}"


def local_name(name: str) -> str:
    """The name of an image on this machine, by the config's name."""
    return f"rekindle-code/{name}"


def build(docker: Docker, code: Code, base: str, name: str) -> str:
    """The id of the image `name`, built from `base` with the code in it; RequestError
    where it cannot be."""
    base_id = docker.image_id(base)
    if not base_id:
        why = docker.pull(base)
        if why:
            raise RequestError(
                f"the image {base} cannot be had: {why}",
                where="image.base",
                fix="`make images` in a checkout of rekindle builds rekindle-cpu; or name another",
            )
        base_id = docker.image_id(base)
    with tempfile.TemporaryDirectory(prefix="rekindle-") as context:
        code_folder = Path(context, "code")
        code_folder.mkdir()
        write_files(code_folder, code.files)
        for path in (code_folder, *code_folder.rglob("*")):  # for any user that the step runs as
            path.chmod(0o755 if path.is_dir() else 0o644)
        Path(context, "Dockerfile").write_text(_dockerfile(code, base, base_id))
        build = docker.ask("build", "--tag", name, context, seconds=_BUILD_SECONDS)
    if build.returncode:
        message = f"docker cannot build it: {last_line(build)}"
        raise RequestError(message, where="image.base", fix="see what it says")
    return docker.image_id(name)


def _dockerfile(code: Code, base: str, base_id: str) -> str:
    """The code on top of a base; what the base itself has on PYTHONPATH stays behind
    it."""
    lines = [f"FROM {base}", f"COPY --chown=0:0 code {HOME}"]
    places = ":".join(str(HOME / name) for name in code.folders)
    if places:
        lines.append(f"ENV PYTHONPATH={places}${{PYTHONPATH:+:$PYTHONPATH}}")
    if code.included:
        lines.append(f"ENV {INCLUDED}={code.included}")
    lines.append(f'LABEL {CODE_LABEL}="{code.digest}" rekindle.base="{base_id}"')
    return "\n".join([*lines, ""])


def code_label(docker: Docker, name: str) -> str | None:
    """Hash of the code in an image on this machine; None if there is no such image."""
    label = f'--format={{{{index .Config.Labels "{CODE_LABEL}"}}}}'
    answer = docker.ask("image", "inspect", label, name, seconds=_BUILD_SECONDS)
    return None if answer.returncode else answer.stdout.strip()


def push(docker: Docker, local: str, name: str) -> Pin:
    """Push the image `local` as `name`; PlatformError where the registry refuses it."""
    code = code_label(docker, local)
    repository = lock.repository(name)
    for command in (("tag", local, name), ("push", name)):
        answer = docker.ask(*command, seconds=_BUILD_SECONDS)
        if answer.returncode:
            host = repository.partition("/")[0]
            raise PlatformError(
                f"{name} cannot be pushed: {last_line(answer)}",
                where=name,
                fix=f"docker login {host} with push rights, or correct the image name; "
                "then push again",
            )
    digests = _DIGEST.findall(answer.stdout)
    if not digests:
        raise PlatformError(
            f"docker pushed {name} and named no digest",
            where=name,
            fix=f"write {repository}@sha256:... into the config by hand",
        )
    return Pin(digest=digests[-1], code=code or "")
