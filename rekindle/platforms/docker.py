"""The docker daemon of this machine, through its own command line.

Only a daemon on this machine counts (a socket in the file system): what a step reads and writes is
mounted from here. The address is found once and given to every later command, so that no variable
of a step leads it elsewhere. Images are known by their id, a hash of all that is in them."""

import dataclasses
import logging
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from rekindle.errors import RequestError

log = logging.getLogger(__name__)

HOME_LABEL, RUN_LABEL = "rekindle.home", "rekindle.run"
WHERE = "platforms.local.containers"
_ANSWER_SECONDS, _PULL_SECONDS = 20, 1800
_FIX = "start docker on this machine, or set platforms.local.containers to never"


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
    """The daemon that the docker command in `env` talks to; RequestError if there is none, or none
    on this machine."""
    client = shutil.which("docker", path=env.get("PATH"))
    if client is None:
        raise RequestError("there is no docker command here", where=WHERE, fix=_FIX)
    context = _ask([client, "context", "inspect", "--format={{.Endpoints.docker.Host}}"], env)
    address = context.stdout.strip()
    if not address.startswith("unix://"):
        what = f"the docker daemon is not on this machine: {address or last_line(context)}"
        raise RequestError(what, where=WHERE, fix=_FIX)
    docker = Docker(client, address, env)
    answer = _ask(docker.words("version", "--format={{.Server.Version}}"), env)
    if answer.returncode:
        what = f"cannot use docker: {last_line(answer)}"
        raise RequestError(what, where=WHERE, fix=_FIX)
    options = _ask(docker.words("info", "--format={{.SecurityOptions}}"), env).stdout
    return dataclasses.replace(docker, rootless="name=rootless" in options)


def _ask(
    command: list[str], env: Mapping[str, str], seconds: float = _ANSWER_SECONDS
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, env=dict(env), timeout=seconds,
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        said = f"docker did not answer within {seconds:g} s"
        return subprocess.CompletedProcess(command, 124, "", said)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The last of what a command printed."""
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"
