"""Images with the user's code: built by docker on top of an image of rekindle, pushed by docker to
where a platform pulls from, and known by digest from then on.

The digest is that of the manifest, as the registry answers `docker push`. The image's labels say
which code is in it, and which base is below."""

import re
import tempfile
from pathlib import Path

from rekindle.errors import PlatformError, RequestError
from rekindle.platforms.docker import Docker, last_line
from rekindle.platforms.user_code import HOME, Code
from rekindle.spec import lock
from rekindle.spec.imports import INCLUDED
from rekindle.spec.lock import Pin

CODE_LABEL = "rekindle.code"
_DIGEST = re.compile(r"digest: (sha256:[0-9a-f]{64})\b")
_SECONDS = 3_600


def local_name(name: str) -> str:
    """What an image is called on this machine, by the config's name."""
    return f"rekindle-code/{name}"


def build(docker: Docker, code: Code, base: str, name: str) -> str:
    """The id of the image `name`: `base` with the code in it. RequestError where there is no such
    base, or docker cannot build."""
    below = docker.image_id(base)
    if not below and (why := docker.pull(base)):
        raise RequestError(
            f"the image {base} cannot be had: {why}", where="image.base",
            fix="`make images` in a checkout of rekindle builds rekindle-cpu; or name another",
        )  # fmt: skip
    below = below or docker.image_id(base)
    with tempfile.TemporaryDirectory(prefix="rekindle-") as made:
        folder = Path(made)
        (folder / "code").mkdir()
        for file, content in code.files.items():
            path = folder / "code" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        for path in (folder / "code").rglob("*"):  # for any user that the step runs as
            path.chmod(0o755 if path.is_dir() else 0o644)
        (folder / "code").chmod(0o755)
        (folder / "Dockerfile").write_text(_dockerfile(code, base, below))
        done = docker.ask("build", "--tag", name, made, seconds=_SECONDS)
    if done.returncode:
        raise RequestError(
            f"docker cannot build it: {last_line(done)}", where="image.base", fix="see what it says"
        )
    return docker.image_id(name)


def _dockerfile(code: Code, base: str, below: str) -> str:
    places = [str(HOME / folder) for folder in code.folders]
    lines = [f"FROM {base}", f"COPY --chown=0:0 code {HOME}"]
    if places:
        lines.append(f"ENV PYTHONPATH={':'.join(places)}${{PYTHONPATH:+:$PYTHONPATH}}")
    if code.included:
        lines.append(f"ENV {INCLUDED}={code.included}")
    lines.append(f'LABEL {CODE_LABEL}="{code.digest}" rekindle.base="{below}"')
    return "\n".join([*lines, ""])


def code_label(docker: Docker, name: str) -> str | None:
    """Hash of the code in an image on this machine; None if there is no such image."""
    label = f'--format={{{{index .Config.Labels "{CODE_LABEL}"}}}}'
    found = docker.ask("image", "inspect", label, name, seconds=_SECONDS)
    return None if found.returncode else found.stdout.strip()


def push(docker: Docker, local: str, name: str) -> Pin:
    """Push the image `local` as `name`; what it is called for good. PlatformError where the
    registry will not have it."""
    code = code_label(docker, local)
    for words in (("tag", local, name), ("push", name)):
        done = docker.ask(*words, seconds=_SECONDS)
        if done.returncode:
            raise PlatformError(
                f"{name} cannot be pushed: {last_line(done)}", where=name,
                fix=f"docker login {lock.repository(name).partition('/')[0]} with push rights, or "
                "correct the image name; then push again",
            )  # fmt: skip
    digests = _DIGEST.findall(done.stdout)
    if not digests:
        raise PlatformError(
            f"docker pushed {name} and named no digest", where=name,
            fix=f"write {lock.repository(name)}@sha256:... into the config by hand",
        )  # fmt: skip
    return Pin(digest=digests[-1], code=code or "")
