"""The docker daemon of this machine, through its own command line.

Only a daemon on this machine counts (a socket in the file system): what a step reads and writes is
mounted from here. The address is found once and given to every later command, so that no variable
of a step leads it elsewhere. Images are known by their id, a hash of all that is in them.

An image with the user's code is built on top of an image of rekindle, pushed to where a platform
pulls from, and known from then on by the digest of its manifest, as the registry answers `docker
push`. Its labels say which code is in it, and which base is below."""

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
from rekindle.platforms.submission import problems_in, write_files
from rekindle.platforms.user_code import HOME, Code
from rekindle.spec import lock
from rekindle.spec.imports import INCLUDED
from rekindle.spec.lock import Pin

log = logging.getLogger(__name__)

HOME_LABEL, RUN_LABEL, CODE_LABEL = "rekindle.home", "rekindle.run", "rekindle.code"
_ANSWER_SECONDS, _PULL_SECONDS, _BUILD_SECONDS = 20, 1800, 3600
_DIGEST = re.compile(r"digest: (sha256:[0-9a-f]{64})\b")
_problem = problems_in(__file__)


@dataclasses.dataclass(frozen=True)
class Docker:
    """A daemon that answered at `address`; `env` is the environment of the client. A `rootless` one
    runs as a user, whom containers know as root (none has run a step yet)."""

    client: str
    address: str
    env: Mapping[str, str] = dataclasses.field(repr=False)
    rootless: bool = False

    @property
    def user(self) -> str:
        """Whom a container runs as, so that its files belong to the user who runs rekindle."""
        return "0:0" if self.rootless else f"{os.getuid()}:{os.getgid()}"

    def words(self, *words: str) -> list[str]:
        """A command for this daemon."""
        return [self.client, f"--host={self.address}", *words]

    def image_id(self, image: str) -> str:
        """`sha256:...` of an image that is here; "" if it is not."""
        found = self.ask("image", "inspect", "--format={{.Id}}", "--", image)
        return found.stdout.strip() if found.returncode == 0 else ""

    def pull(self, image: str) -> str:
        """Why the image cannot be had; "" once it is here."""
        log.warning("pulling %s", image)
        done = self.ask("pull", "--quiet", "--", image, seconds=_PULL_SECONDS)
        return last_line(done) if done.returncode else ""

    def containers(self, home: str) -> list[tuple[str, str]]:
        """Name and run id of each container, running or not, that belongs to a home folder."""
        shown = f'--format={{{{.Names}}}} {{{{.Label "{RUN_LABEL}"}}}}'
        found = self.ask("ps", "--all", f"--filter=label={HOME_LABEL}={home}", shown)
        return [(name, run) for name, run in map(str.split, found.stdout.splitlines())]

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
    """The daemon of the docker command in `env`; RequestError if there is none on this machine."""
    if (client := shutil.which("docker", path=env.get("PATH"))) is None:
        raise RequestError([_problem("no_command")])
    context = _ask([client, "context", "inspect", "--format={{.Endpoints.docker.Host}}"], env)
    address = context.stdout.strip()
    if not address.startswith("unix://"):
        raise RequestError([_problem("elsewhere", why=address or last_line(context))])
    docker = Docker(client, address, env)
    answer = docker.ask("version", "--format={{.Server.Version}}")
    if answer.returncode:
        raise RequestError([_problem("no_use", why=last_line(answer))])
    options = docker.ask("info", "--format={{.SecurityOptions}}").stdout
    return dataclasses.replace(docker, rootless="name=rootless" in options)


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
        said = f"docker did not answer within {seconds:g} s"
        return subprocess.CompletedProcess(command, 124, "", said)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The last of what a command printed."""
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def local_name(name: str) -> str:
    """What an image is called on this machine, by the config's name."""
    return f"rekindle-code/{name}"


def build(docker: Docker, code: Code, base: str, name: str) -> str:
    """The id of the image `name`, `base` with the code in it; RequestError where it cannot be."""
    below = docker.image_id(base)
    if not below and (why := docker.pull(base)):
        raise RequestError([_problem("no_base", base=base, why=why)])
    below = below or docker.image_id(base)
    with tempfile.TemporaryDirectory(prefix="rekindle-") as made:
        inside = Path(made, "code")
        inside.mkdir()
        write_files(inside, code.files)
        for path in (inside, *inside.rglob("*")):  # for any user that the step runs as
            path.chmod(0o755 if path.is_dir() else 0o644)
        places = ":".join(str(HOME / name) for name in code.folders)
        lines = [f"FROM {base}", f"COPY --chown=0:0 code {HOME}"]
        lines += [f"ENV PYTHONPATH={places}${{PYTHONPATH:+:$PYTHONPATH}}"] if places else []
        lines += [f"ENV {INCLUDED}={code.included}"] if code.included else []
        lines.append(f'LABEL {CODE_LABEL}="{code.digest}" rekindle.base="{below}"')
        Path(made, "Dockerfile").write_text("\n".join([*lines, ""]))
        done = docker.ask("build", "--tag", name, made, seconds=_BUILD_SECONDS)
    if done.returncode:
        raise RequestError([_problem("not_built", why=last_line(done))])
    return docker.image_id(name)


def code_label(docker: Docker, name: str) -> str | None:
    """Hash of the code in an image on this machine; None if there is no such image."""
    label = f'--format={{{{index .Config.Labels "{CODE_LABEL}"}}}}'
    found = docker.ask("image", "inspect", label, name, seconds=_BUILD_SECONDS)
    return None if found.returncode else found.stdout.strip()


def push(docker: Docker, local: str, name: str) -> Pin:
    """Push the image `local` as `name`; PlatformError where the registry refuses it."""
    code = code_label(docker, local)
    for words in (("tag", local, name), ("push", name)):
        done = docker.ask(*words, seconds=_BUILD_SECONDS)
        if done.returncode:
            host = lock.repository(name).partition("/")[0]
            wrong = _problem("not_pushed", name=name, why=last_line(done), host=host)
            raise PlatformError([wrong])
    if not (digests := _DIGEST.findall(done.stdout)):
        wrong = _problem("no_digest", name=name, repository=lock.repository(name))
        raise PlatformError([wrong])
    return Pin(digest=digests[-1], code=code or "")
