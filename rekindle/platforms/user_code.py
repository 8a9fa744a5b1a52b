"""The user's code on a platform: which files steps need, and where the image has them.

Steps on a platform see nothing of the author's machine but what their image holds, so
`task: path.py:Class`, `train.entrypoint`, and modules that a component imports have to be
in it. `rekindle images build` puts them there, under `/opt/rekindle/code` as they lie to
each other here. A definition is compiled only for an image whose code is, by its hash,
the code that is here. A path that is not on this machine is taken for one in the image,
which rekindle does not check.

`image.include` puts further files there: all below what it names, but no hidden ones, no
keys, nothing that a `.dockerignore` beside the config leaves out, and nothing that a link
brings in from elsewhere. A file that is named by itself is taken whatever it is called.
Authority for `.dockerignore`: docs.docker.com/build/concepts/context, "Filename and
location": Go's filepath.Match, `**` for any folders, `!` for exceptions, the last line
that matches decides.

pathspec does not read these lines, for its patterns are git's. Of 2,000 drawn files it
read 115 otherwise, each line anchored: after `!data/[^b]` the line `data` keeps `data/x`,
`a**b` matches no `/`, and `[!b]` is all but `b`. What is to be left out may be a secret."""

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
from rekindle.platforms.api import platform_class
from rekindle.spec import lock
from rekindle.spec.identity import digest, large_file_sha256
from rekindle.spec.imports import as_import, closure, contents, folders_of, own_folders
from rekindle.spec.model import Spec

log = logging.getLogger(__name__)

HOME = PurePosixPath("/opt/rekindle/code")
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


@dataclasses.dataclass(frozen=True)
class Code:
    """Files by their path below `HOME`; the `folders` below it that modules are imported
    from; who wants any of it, as fields of the config and paths of steps; the folder here
    (`root`) that becomes `HOME`; and what stands for the files that `image.include`
    names."""

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
        hashes = [[name, hashlib.sha256(file).hexdigest()] for name, file in self.files.items()]
        return digest([self.folders, sorted(hashes)])

    def inside(self, file: Path) -> str:
        """Where the image has a file."""
        return str(HOME / file.relative_to(self.root).as_posix())


def code_of(spec: Spec, graph: Graph) -> Code:
    """The user's own files that the pipeline's steps need; RequestError for an unreadable
    one."""
    named_files = {field: file for field, file in _named(spec) if file.is_file()}
    config_folder = _folder_of(spec)
    included_files: list[Path] = []
    if spec.image.include:
        included_files = list(included(spec.image.include, config_folder))
    sources = _sources(spec, graph)
    folders = _folders(spec, named_files)
    # file -> the folder that it is imported from
    files = closure(named_files.values(), sources, folders)
    import_folders = set(files.values())
    new_files = [file for file in included_files if file not in files]
    for file, folder in closure(new_files, {}, folders).items():
        files[file] = folder
        if file not in included_files:  # what these files import
            import_folders.add(folder)
    if not files:
        return Code({}, (), (), Path("/"))
    wanted_by = list(named_files)
    for path, text in sources.items():
        if closure([], {path: text}, folders):
            wanted_by.append(path)
    if included_files:
        import_folders.add(config_folder)
        wanted_by.append("image.include")
    root = Path(os.path.commonpath([*(file.parent for file in files), *import_folders]))
    content = {file.relative_to(root).as_posix(): _content(file) for file in files}
    places = sorted(folder.relative_to(root).as_posix() for folder in import_folders)
    included_digest = _included_hash(included_files, config_folder)
    return Code(content, tuple(places), tuple(wanted_by), root, included_digest)


def hashes(spec: Spec, graph: Graph, names: Collection[str] | None = None) -> dict[str, str]:
    """What stands for the user's own files in the cache of this machine: by the value of
    the parameter that names the task, and by the components that import, name or may read
    them."""
    named_files = dict(_named(spec))
    folders = _folders(spec, named_files)
    files_by_name: dict[str, dict[Path, Path]] = {}
    task = named_files.get("task")
    if task is not None and task.is_file() and (names is None or spec.task in names):
        files_by_name[spec.task] = closure([task], {}, folders, everywhere=True)
    # the components of the shipped pipeline are rekindle's own
    steps = list(graph.steps()) if spec.pipeline else []
    for step in steps:
        if names is not None and step.component not in names:
            continue
        places = [*_pythonpath(step), *folders]
        if step.container.source:
            source = {step.path: step.container.source}
            files_by_name[step.component] = closure([], source, places, everywhere=True)
        else:
            files_by_name[step.component] = _called(step, places)
    # any of them may read what is included
    included_digest = included_hash(spec) if files_by_name else ""
    hashes = {}
    for name, files in files_by_name.items():
        if files or included_digest:
            hashes[name] = digest([contents(files), included_digest])
    return hashes


def _pythonpath(step: Step) -> list[Path]:
    """The folders of the step's own PYTHONPATH."""
    variable = step.container.env.get("PYTHONPATH")
    if variable is None:
        return []
    folders = str(lower(variable)).split(os.pathsep)
    return [Path(folder).absolute() for folder in folders if folder]


def included_hash(spec: Spec) -> str:
    """What stands for the files that `image.include` names; empty for none."""
    return _included_hash(included(spec.image.include, _folder_of(spec)), _folder_of(spec))


def _folder_of(spec: Spec) -> Path:
    return Path(spec.origin[0]).resolve().parent


def _included_hash(files: Iterable[Path], folder: Path) -> str:
    hashes = sorted([os.path.relpath(file, folder), large_file_sha256(file)] for file in files)
    return digest(hashes) if hashes else ""


def _called(step: Step, folders: Sequence[Path]) -> dict[Path, Path]:
    """Files that a command has among its words, with what they import, as `closure` has
    them; of folders their `__main__.py`, and behind `-m` a module."""
    files: dict[Path, Path] = {}
    lowered = [lower(word) for word in (*step.container.command, *step.container.args)]
    words = [word for word in lowered if isinstance(word, str)]  # others only the run knows
    for before, text in zip(["", *words], words, strict=False):
        # a script of a shell, and an option with its value, hold words too
        inner = [text, text.partition("=")[2]]
        if before == "-c":
            inner = []
            with contextlib.suppress(ValueError):
                inner = shlex.split(text)
            with contextlib.suppress(RequestError):  # not Python, then a shell's
                files |= closure([], {step.path: text}, folders, everywhere=True)
        for option, word in zip([before, *inner], inner, strict=False):
            files |= _word_called(step, option, word, folders)
    return files


def _word_called(step: Step, option: str, word: str, folders: Sequence[Path]) -> dict[Path, Path]:
    """The files that one word of a command names, behind `option`."""
    files: dict[Path, Path] = {}
    if option == "-m":
        source = {step.path: as_import(word)}
        with contextlib.suppress(RequestError):  # not a module
            files |= closure([], source, folders, everywhere=True)
    if word:
        with contextlib.suppress(OSError, ValueError):  # a text that names no file
            files |= _file_called(Path(word).absolute(), folders)
    return files


def _file_called(file: Path, folders: Sequence[Path]) -> dict[Path, Path]:
    if file.is_dir():  # as `python FOLDER` runs it
        file /= "__main__.py"
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
        _, *arguments = shlex.split(spec.train.entrypoint or "")
        entrypoint = shlex.join([code.inside(files["train.entrypoint"]), *arguments])
        update["train"] = spec.train.model_copy(update={"entrypoint": entrypoint})
    return spec.model_copy(update=update)


def problems(platform: str, spec: Spec, graph: Graph, code: Code) -> Iterator[Problem]:
    """Why the steps would not find the code there."""
    image = spec.platforms.section(platform).image or ""
    config = spec.origin[0] or "CONFIG"
    fix = f"rekindle images build {config} && rekindle images push {config}"
    for step, module in _in_other_images(platform, spec, graph, image):
        step_image = step.container.image
        if not _BARE.match(step_image):
            log.warning(
                "`%s` imports %s, which its image %s has to have", step.path, module, step_image
            )
            continue
        yield Problem(
            f"`{step.path}` imports {module}, which its image {step_image} does not have",
            step.where,
            "let it run in rekindle's image, base_image='rekindle/cpu', which gets your code: "
            f"{fix}",
        )
    if not code.files:
        return
    where = f"platforms.{platform}.image"
    names = ", ".join(f"`{name}`" for name in code.wanted_by)
    verb = "needs" if len(code.wanted_by) == 1 else "need"
    image_code = lock.code_in(image, Path(config).parent)
    if not image:
        message = f"{names} {verb} files of yours, and no image has them"
        yield Problem(message, where, f"name one as REGISTRY/NAME:TAG, then {fix}")
    elif image_code is None:
        if "@" in image:  # what is pushed gets another digest
            fix += " with the image as REGISTRY/NAME:TAG"
        message = f"it is not known whether {image} has your files that {names} {verb}"
        yield Problem(message, where, fix)
    elif image_code != code.digest:
        message = f"{image} was built from other files than those here that {names} {verb}"
        yield Problem(message, where, fix)


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
    entrypoint = shlex.split(spec.train.entrypoint or "")
    is_module = entrypoint[:1] == ["-m"]
    if not spec.pipeline and not is_module:
        return {}
    sources = {}
    for step in graph.steps():
        if step.container.source:
            sources[step.path] = step.container.source
    if is_module and len(entrypoint) > 1:
        sources["train.entrypoint"] = as_import(entrypoint[1])
    return sources


def _folders(spec: Spec, files: Mapping[str, Path]) -> tuple[Path, ...]:
    """Where modules are looked for: as when the pipeline is compiled."""
    importing_files = list(files.values())
    if spec.pipeline and ".py:" in spec.pipeline:
        importing_files.append(Path(spec.pipeline.rpartition(":")[0]).resolve())
    folders: list[Path] = []
    for file in importing_files:
        folders += folders_of(file)
    return tuple(dict.fromkeys([*folders, Path.cwd().resolve(), *own_folders()]))


def _in_other_images(
    platform: str, spec: Spec, graph: Graph, image: str
) -> Iterator[tuple[Step, str]]:
    """Steps in images that rekindle does not choose, each with a module of the user's
    that it imports."""
    if not spec.pipeline:
        return
    folders = _folders(spec, {})
    for step in graph.steps():
        step_image = step.container.image
        is_chosen = step_image.startswith(OWN_IMAGES) or step_image == image
        if platform_class(platform).replaces_image(step_image):
            is_chosen = True
        if not step.container.source or is_chosen:
            continue
        files = closure([], {step.path: step.container.source}, folders)
        first_file = next(iter(files), None)
        if first_file is not None:
            yield step, first_file.name


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        message = f"cannot read {file}: {error.strerror}"
        raise RequestError(message, fix="check the file") from None


def included(patterns: Iterable[str], folder: Path) -> Iterator[Path]:
    """The files; `folder` is that of the config. RequestError for a pattern that names
    nothing, and for a link that leads out of what was named."""
    rules = _rules(folder)
    for pattern in patterns:
        # Path.glob refuses absolute patterns
        matches = sorted(Path(name) for name in glob.glob(pattern, recursive=True))  # noqa: PTH207
        if not matches:
            raise RequestError(
                f"no such file or folder: {pattern}",
                where="image.include",
                fix="check the path",
            )
        first = matches[0]
        if glob.has_magic(pattern):
            parts = Path(pattern).parts
            top = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), parts))
            # each once: a folder may match, and what is in it as well
            paths = dict.fromkeys(_all_below(matches))
            yield from _without_ignored(paths, top.resolve(), folder, rules)
        elif first.is_dir():
            top = first.resolve()
            yield from _without_ignored(_all_below([top]), top, folder, rules)
        else:
            yield first.resolve()


def _all_below(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        # a link itself, in a folder whose own links are followed
        resolved = path.parent.resolve() / path.name
        if resolved.is_dir():
            yield from sorted(resolved.rglob("*"))
        else:
            yield resolved


def _without_ignored(
    paths: Iterable[Path], top: Path, folder: Path, rules: _Rules
) -> Iterator[Path]:
    """The files of these; RequestError for a link that leads out of `top`."""
    for path in paths:
        if _is_left_out(path, top, folder, rules):
            continue
        if not path.resolve().is_relative_to(top):
            raise RequestError(
                f"{path} is a link that leads out of {top}",
                where="image.include",
                fix="copy what it leads to, or leave it out in .dockerignore",
            )
        if path.is_file():
            yield path


def _is_left_out(path: Path, top: Path, folder: Path, rules: _Rules) -> bool:
    """Whether a path is hidden, a key or ignored; also where only what a link leads to is
    hidden or a key."""
    parts = [*Path(os.path.relpath(path, top)).parts]
    real_path = path.resolve()
    if real_path.is_relative_to(top):
        parts += real_path.relative_to(top).parts
    if parts[0] == "..":  # a link on the way: the caller refuses it
        return False
    if any(map(_is_hidden_or_key, parts)):
        return True
    name = os.path.relpath(path, folder.resolve()).replace(os.sep, "/")
    for leaves_out, pattern in reversed(rules):  # the last line that matches decides
        if pattern.fullmatch(name):
            return leaves_out
    return False


def _is_hidden_or_key(part: str) -> bool:
    if part.startswith("."):
        return True
    return any(fnmatch.fnmatch(part.lower(), key) for key in _KEYS)


def _rules(folder: Path) -> _Rules:
    """The lines of `.dockerignore` in order: whether each leaves out what it matches."""
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
