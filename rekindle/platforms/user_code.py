"""The user's code on a platform: which files steps need, and where the image has them.

Steps on a platform see nothing of the author's machine but what their image holds, so `task:
path.py:Class`, `train.entrypoint`, and modules that a component imports have to be in it.
`rekindle images build` puts them there, under `/opt/rekindle/code` as they lie to each other here.
A definition is compiled only for an image whose code is, by its hash, the code that is here. A path
that is not on this machine is taken for one in the image, which rekindle does not check.

`image.include` puts further files there: all below what it names, but no hidden ones, no keys,
nothing that a `.dockerignore` beside the config leaves out, and nothing that a link brings in from
elsewhere. A file that is named by itself is taken whatever it is called. Authority for
`.dockerignore`: docs.docker.com/build/concepts/context, "Filename and location": Go's
filepath.Match, `**` for any folders, `!` for exceptions, the last line that matches decides."""

import contextlib
import dataclasses
import fnmatch
import glob
import hashlib
import itertools
import logging
import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from rekindle.errors import Problem, RequestError
from rekindle.ir.edit.rewrite import OWN_IMAGES
from rekindle.ir.graph import Graph, Step
from rekindle.ir.placeholders import lower
from rekindle.platforms.submission import problems_in
from rekindle.spec import lock
from rekindle.spec.identity import digest, large_file_sha256
from rekindle.spec.imports import as_import, closure, contents, folders_of, own_folders
from rekindle.spec.model import Spec

log = logging.getLogger(__name__)

HOME = PurePosixPath("/opt/rekindle/code")
# names of images that SageMaker pulls
ECR = re.compile(r"\d{12}\.dkr\.ecr(?:-fips)?\.[a-z0-9-]+\.amazonaws\.com(\.cn)?/.+")
# has no user's modules; of other images only their makers know
_BARE = re.compile(r"(docker\.io/)?(library/)?python(:|@|$)")
_KEYS = (
    "*.pem",
    "*.key",
    "*.p12",
    "*.pfx",
    "*.jks",
    "*.kdbx",
    "*.ppk",
    "id_rsa*",
    "id_dsa*",
    "id_ecdsa*",
    "id_ed25519*",
    "*.tfstate",
    "kubeconfig*",
    "__pycache__",
)
_PART = re.compile(r"\*\*/|\*\*|\[(?P<letters>.[^]]*)\]|\\?(?P<letter>.)", re.DOTALL)
_WILD = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
_Rules = list[tuple[bool, re.Pattern[str]]]
_problem = problems_in(__file__)


@dataclasses.dataclass(frozen=True)
class Code:
    """Files by their path below `HOME`; the `folders` below it that modules are imported from; who
    wants any of it, as fields of the config and paths of steps; the folder here (`root`) that
    becomes `HOME`; and what stands for the files that `image.include` names."""

    files: Mapping[str, bytes]
    folders: tuple[str, ...]
    wanted_by: tuple[str, ...]
    root: Path
    included: str = ""

    @property
    def digest(self) -> str:
        """32 characters that stand for all of it; empty for nothing."""
        if not self.files:
            return ""
        hashed = [[name, hashlib.sha256(file).hexdigest()] for name, file in self.files.items()]
        return digest([self.folders, sorted(hashed)])

    def inside(self, file: Path) -> str:
        """Where the image has a file."""
        return str(HOME / file.relative_to(self.root).as_posix())


def code_of(spec: Spec, graph: Graph) -> Code:
    """The user's own files that the pipeline's steps need; RequestError for an unreadable one."""
    files = {field: file for field, file in _named(spec) if file.is_file()}
    named = spec.image.include
    beside = _folder_of(spec)
    taken = list(included(named, beside)) if named else []
    sources = _sources(spec, graph)
    folders = _folders(spec, files)
    found = closure(files.values(), sources, folders)
    importing = set(found.values())
    more = closure([file for file in taken if file not in found], {}, folders)
    importing |= {folder for file, folder in more.items() if file not in taken}
    found |= more
    if not found:
        return Code({}, (), (), Path("/"))
    if taken:
        importing.add(beside)
    needing = (path for path, text in sources.items() if closure([], {path: text}, folders))
    root = Path(os.path.commonpath([*(file.parent for file in found), *importing]))
    content = {file.relative_to(root).as_posix(): _content(file) for file in found}
    places = tuple(sorted(folder.relative_to(root).as_posix() for folder in importing))
    wanted_by = (*files, *needing, *(["image.include"] if taken else []))
    return Code(content, places, wanted_by, root, _included_hash(taken, beside))


def hashes(spec: Spec, graph: Graph, names: Collection[str] | None = None) -> dict[str, str]:
    """What stands for the user's own files in the cache of this machine: by the value of the
    parameter that names the task, and by the components that import, name or may read them."""
    folders = _folders(spec, dict(_named(spec)))
    task = [file for field, file in _named(spec) if field == "task" and file.is_file()]
    found: dict[str, dict[Path, Path]] = {}
    if task and (names is None or spec.task in names):
        found[spec.task] = closure(task, {}, folders, everywhere=True)
    for step in graph.steps() if spec.pipeline else ():
        if names is not None and step.component not in names:
            continue
        source, path = step.container.source, step.container.env.get("PYTHONPATH")
        own = str(lower(path)).split(os.pathsep) if path is not None else []
        places = [*(Path(folder).absolute() for folder in own if folder), *folders]
        if source:
            found[step.component] = closure([], {step.path: source}, places, everywhere=True)
        else:
            found[step.component] = _called(step, places)
    beside = included_hash(spec) if found else ""
    return {
        name: digest([contents(files), beside]) for name, files in found.items() if files or beside
    }


def included_hash(spec: Spec) -> str:
    """What stands for the files that `image.include` names; empty for none."""
    return _included_hash(included(spec.image.include, _folder_of(spec)), _folder_of(spec))


def _folder_of(spec: Spec) -> Path:
    return Path(spec.origin[0]).resolve().parent


def _included_hash(files: Iterable[Path], folder: Path) -> str:
    found = sorted([os.path.relpath(file, folder), large_file_sha256(file)] for file in files)
    return digest(found) if found else ""


def _called(step: Step, folders: Sequence[Path]) -> dict[Path, Path]:
    """Files that a command has among its words, with what they import, as `closure` has them; of
    folders their `__main__.py`, and behind `-m` a module."""
    found: dict[Path, Path] = {}
    lowered = [lower(word) for word in (*step.container.command, *step.container.args)]
    words = [word for word in lowered if isinstance(word, str)]
    for before, text in zip(["", *words], words, strict=False):
        # a script of a shell, and an option with its value, hold words too
        inner = [text, text.partition("=")[2]]
        if before == "-c":
            inner = []
            with contextlib.suppress(ValueError):
                inner = shlex.split(text)
            with contextlib.suppress(RequestError):  # not Python, then a shell's
                found |= closure([], {step.path: text}, folders, everywhere=True)
        for option, word in zip([before, *inner], inner, strict=False):
            if option == "-m":
                source = {step.path: as_import(word)}
                with contextlib.suppress(RequestError):  # not a module
                    found |= closure([], source, folders, everywhere=True)
            with contextlib.suppress(OSError, ValueError):  # a text that names no file
                found |= _file_called(Path(word).absolute(), folders) if word else {}
    return found


def _file_called(file: Path, folders: Sequence[Path]) -> dict[Path, Path]:
    file = file / "__main__.py" if file.is_dir() else file
    if not file.is_file():
        return {}
    try:
        # Python looks beside a script first
        return closure([file], {}, [file.parent, *folders], everywhere=True)
    except RequestError:  # no Python, or for another one than this
        return {file: file.parent}


def placed(spec: Spec, code: Code) -> Spec:
    """The spec with the paths of its code as the image has them."""
    files = {field: file for field, file in _named(spec) if file.is_file()}
    update: dict[str, object] = {}
    if "task" in files:
        update["task"] = f"{code.inside(files['task'])}:{spec.task.rpartition(':')[2]}"
    if "train.entrypoint" in files:
        _, *rest = shlex.split(spec.train.entrypoint or "")
        words = shlex.join([code.inside(files["train.entrypoint"]), *rest])
        update["train"] = spec.train.model_copy(update={"entrypoint": words})
    return spec.model_copy(update=update)


def problems(platform: str, spec: Spec, graph: Graph, code: Code) -> Iterator[Problem]:
    """Why the steps would not find the code there."""
    image, config = getattr(spec.platforms, platform).image or "", spec.origin[0] or "CONFIG"
    fix = f"rekindle images build {config} && rekindle images push {config}"
    for step, module in _abroad(platform, spec, graph, image):
        own = step.container.image
        if not _BARE.match(own):
            log.warning("`%s` imports %s, which its image %s has to have", step.path, module, own)
            continue
        yield _problem("not_in_image", step=step, module=module, fix=fix)
    if not code.files:
        return
    where = f"platforms.{platform}.image"
    needs = "needs" if len(code.wanted_by) == 1 else "need"
    wanted = f"{', '.join(f'`{name}`' for name in code.wanted_by)} {needs}"
    about = {"where": where, "wanted": wanted, "image": image}
    there = lock.code_in(image, Path(config).parent)
    if not image:
        yield _problem("no_image", fix=fix, **about)
    elif there is None:
        again = " with the image as REGISTRY/NAME:TAG" if "@" in image else ""
        yield _problem("unknown", fix=fix + again, **about)
    elif there != code.digest:
        yield _problem("other_files", fix=fix, **about)


def _named(spec: Spec) -> Iterator[tuple[str, Path]]:
    """Files that a field of the config names."""
    if ".py:" in spec.task:
        yield "task", Path(spec.task.rpartition(":")[0]).resolve()
    if spec.train.entrypoint:
        script, *_ = shlex.split(spec.train.entrypoint)
        if script != "-m":
            yield "train.entrypoint", Path(script).resolve()


def _sources(spec: Spec, graph: Graph) -> dict[str, str]:
    """Python that is to run there without being a file there, by who runs it."""
    found = {step.path: step.container.source for step in graph.steps() if step.container.source}
    words = shlex.split(spec.train.entrypoint or "")
    if words[:1] == ["-m"] and len(words) > 1:
        found["train.entrypoint"] = as_import(words[1])
    return found if spec.pipeline or words[:1] == ["-m"] else {}


def _folders(spec: Spec, files: Mapping[str, Path]) -> tuple[Path, ...]:
    """Where modules are looked for: as when the pipeline is compiled."""
    around = [*files.values()]
    if spec.pipeline and ".py:" in spec.pipeline:
        around.append(Path(spec.pipeline.rpartition(":")[0]).resolve())
    found = [folder for file in around for folder in folders_of(file)]
    return tuple(dict.fromkeys([*found, Path.cwd().resolve(), *own_folders()]))


def _abroad(platform: str, spec: Spec, graph: Graph, image: str) -> Iterator[tuple[Step, str]]:
    """Steps in images that rekindle does not choose, which import the user's own modules."""
    if not spec.pipeline:
        return
    folders = _folders(spec, {})
    for step in graph.steps():
        own = step.container.image
        ours = own.startswith(OWN_IMAGES) or own == image
        ours = ours or (platform == "sagemaker" and not ECR.fullmatch(own))
        if step.container.source and not ours:
            for file in list(closure([], {step.path: step.container.source}, folders))[:1]:
                yield step, file.name


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise RequestError([_problem("unreadable", file=file, why=error.strerror)]) from None


def included(patterns: Iterable[str], folder: Path) -> Iterator[Path]:
    """The files; `folder` is that of the config. RequestError for a pattern that names nothing, and
    for a link that leads out of what was named."""
    rules = _rules(folder)
    for pattern in patterns:
        # Path.glob refuses absolute patterns
        found = sorted(Path(name) for name in glob.glob(pattern, recursive=True))  # noqa: PTH207
        if not found:
            raise RequestError([_problem("nothing", pattern=pattern)])
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
            raise RequestError([_problem("outside", path=path, top=top)])
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
    path = folder / ".dockerignore"
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
