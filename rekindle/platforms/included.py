"""Which files `image.include` puts into an image, which is then pushed: all below what it names,
but no hidden ones, no keys, nothing that a `.dockerignore` beside the config leaves out, and
nothing that a link brings in from elsewhere. A file that is named by itself is taken whatever it is
called.

Authority for `.dockerignore`: docs.docker.com/build/concepts/context, "Filename and location": Go's
filepath.Match, `**` for any folders, `!` for exceptions, the last line that matches decides."""

import fnmatch
import glob
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from rekindle.errors import RequestError

IGNORE = ".dockerignore"
_KEYS = (
    "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.kdbx", "*.ppk", "id_rsa*", "id_dsa*",
    "id_ecdsa*", "id_ed25519*", "*.tfstate", "kubeconfig*", "__pycache__",
)  # fmt: skip
_PART = re.compile(r"\*\*/|\*\*|\[(?P<letters>.[^]]*)\]|\\?(?P<letter>.)", re.DOTALL)
_WILD = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}

_Rules = list[tuple[bool, re.Pattern[str]]]


def included(patterns: Iterable[str], folder: Path) -> Iterator[Path]:
    """The files; `folder` is that of the config. RequestError for a pattern that names nothing, and
    for a link that leads out of what was named."""
    rules = _rules(folder)
    for pattern in patterns:
        # Path.glob refuses absolute patterns
        found = sorted(Path(name) for name in glob.glob(pattern, recursive=True))  # noqa: PTH207
        if not found:
            raise RequestError(
                f"no such file or folder: {pattern}", where="image.include", fix="check the path"
            )
        if glob.has_magic(pattern):
            parts = Path(pattern).parts
            top = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), parts))
            yield from _chosen(dict.fromkeys(_inside(found)), top.resolve(), folder, rules)
        elif found[0].is_dir():
            yield from _chosen(_inside([found[0].resolve()]), found[0].resolve(), folder, rules)
        else:
            yield found[0].resolve()


def _inside(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        place = path.parent.resolve() / path.name
        yield from sorted(place.rglob("*")) if place.is_dir() else [place]


def _chosen(paths: Iterable[Path], top: Path, folder: Path, rules: _Rules) -> Iterator[Path]:
    for path in paths:
        if _is_left_out(path, top, folder, rules):
            continue
        if not path.resolve().is_relative_to(top):
            raise RequestError(
                f"{path} is a link that leads out of {top}", where="image.include",
                fix="copy what it leads to, or leave it out in .dockerignore",
            )  # fmt: skip
        if path.is_file():
            yield path


def _is_left_out(path: Path, top: Path, folder: Path, rules: _Rules) -> bool:
    """Also where only what a link leads to is hidden or a key."""
    real, inside = path.resolve(), Path(os.path.relpath(path, top)).parts
    parts = (*inside, *(real.relative_to(top).parts if real.is_relative_to(top) else ()))
    if parts[0] == "..":  # a link on the way: the caller refuses it
        return False
    hidden = any(part.startswith(".") for part in parts)
    if hidden or any(fnmatch.fnmatch(part.lower(), key) for part in parts for key in _KEYS):
        return True
    name = os.path.relpath(path, folder.resolve()).replace(os.sep, "/")
    return next((leaves for leaves, pattern in reversed(rules) if pattern.fullmatch(name)), False)


def _rules(folder: Path) -> _Rules:
    path = folder / IGNORE
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    rules: _Rules = []
    for line in lines:
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name = text.removeprefix("!").strip()
        name = os.path.normpath(name).replace(os.sep, "/").lstrip("/")
        if name != ".":
            # what matches a folder matches all below it
            expression = _PART.sub(_as_regular, name) + "(/.*)?"
            rules.append((not text.startswith("!"), re.compile(expression, re.DOTALL)))
    return rules


def _as_regular(part: re.Match[str]) -> str:
    """A part of a pattern of Go's filepath.Match, with `**`, as a regular expression."""
    if part["letters"]:
        return f"[{part['letters']}]".replace("\\", "\\\\")
    return _WILD.get(part[0]) or re.escape(part["letter"])
