"""What can be known to be wrong with a config, this machine and a platform before
anything is written or started: all of it at once, each with its fix."""

import functools
import glob
import importlib.util
import itertools
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from rekindle.app.compile import compiled
from rekindle.app.pipeline import graph_of
from rekindle.app.plan import on_any_machine
from rekindle.data.glance import classes, first_rows, golden_rows, one_class
from rekindle.engines import engine_of
from rekindle.errors import (
    Problem,
    RekindleError,
    RequestError,
    collected,
    did_you_mean,
    first_line,
)
from rekindle.launch.process import has_gpu
from rekindle.outputs import Readiness, ReadinessCheck, rows_of
from rekindle.plan.request import known_shape
from rekindle.platforms.api import ConfiguredPlatform, platform_of
from rekindle.platforms.checks import Needs, run_checks
from rekindle.platforms.checks import problems as problems_of
from rekindle.platforms.docker import find
from rekindle.platforms.submission import Definition
from rekindle.spec.checks import unknown_classes
from rekindle.spec.layout import resolve
from rekindle.spec.layout_support import KIND_OF, cell_of, refusal, require
from rekindle.spec.model import BUILTIN_TASKS, Spec
from rekindle.spec.platforms import PlatformsSpec
from rekindle.tasks import load_task
from rekindle.tasks.base import SAME_NUMBER
from rekindle.train.look import Question, look

log = logging.getLogger(__name__)

# package -> extra of rekindle that installs it
NEEDED = {"pyarrow": "data", "numpy": "data", "torch": "train", "mlflow": "registry"}
REGISTRY_SCHEMES = (
    "http",
    "https",
    "sqlite",
    "postgresql",
    "mysql",
    "mssql",
    "databricks",
)
LOOK_SECONDS = 120
_MPIRUN_SECONDS = 20
_FEWEST_MODEL_TYPES = 50  # fewer: transformers' tables are written in another way
_PLACEHOLDER = re.compile(r"\{window(:[^}]*)?\}")
_INSTALL_OPEN_MPI = "install Open MPI (apt-get install openmpi-bin), or use torchrun"
_CHECK_THE_PATH = "check the path; relative ones start at the config's folder"


def preflight(spec: Spec, home: Path) -> None:
    """Raise RequestError with everything that would make a local run fail at once."""
    problems = list(itertools.chain.from_iterable(problems_by_check(spec, home).values()))
    if problems:
        raise RequestError(problems)


def problems_by_check(spec: Spec, home: Path, *, whole: bool = False) -> dict[str, list[Problem]]:
    """The problems of a local run, by the check that found them; writes nothing.

    `whole`: the network of an inline config is built, too, without values, which takes
    seconds."""
    checks_network = whole or _is_folder(spec.model.source)
    checks: dict[str, Iterable[Problem]] = {
        "packages": _packages(spec),
        "files": _files(spec),
        "task": _task(spec),
        "first rows of the data": [*first_look(spec, far=True), *_classes(spec)],
        "architecture": _architecture(spec),
        "adapters": _adapters(spec),
        "network": _network(spec) if checks_network else [],
        "layout": _layout(spec),
        "engine": _engine(spec),
        "secrets": _secrets(spec),
        "docker": _docker(spec),
        "registry": _registry(spec),
        "home": _home(home),
    }
    return {name: list(problems) for name, problems in checks.items()}


def compile_for(platform: str, spec: Spec, *, whole: bool = True) -> Definition:
    """The definition for a platform.

    RequestError with everything that is wrong or missing in it. `whole` as in
    `problems_by_check`: False where nothing is trained yet."""
    problems: list[Problem] = list(platform_of(platform, spec.platforms).settings.missing())
    problems += wrong_anywhere(spec, whole=whole)
    with collected(problems):
        definition = compiled(platform, spec, *graph_of(spec))
    if problems:
        raise RequestError(dict.fromkeys(problems))
    return definition


def wrong_anywhere(spec: Spec, *, whole: bool = True) -> list[Problem]:
    """The problems of a config that do not depend on the platform.

    `whole` as in `problems_by_check`."""
    problems = [*_task(spec), *_architecture(spec), *_adapters(spec)]
    if not problems and whole:
        problems += _network(spec)
    return problems


def refuse_early(platform: ConfiguredPlatform, definition: Definition) -> None:
    """Raise RequestError with the problems that the early checks of a platform find."""
    checks = run_checks(platform.checks(definition, Needs()), early=True)
    problems = problems_of(checks)
    if problems:
        raise RequestError(dict.fromkeys(problems))


def needs_of(spec: Spec, platform: str) -> Needs:
    """What the config asks of the platform beyond training."""
    return Needs(
        model=spec.model_name,
        deploys="deploy" in spec.model_fields_set,
        publishes=platform in spec.registration.publish,
        deploys_in_steps=spec.deploy.after_promotion and spec.pipeline is None,
    )


def readiness_here(spec: Spec, home: Path) -> Readiness:
    """What this machine and the config lack for a run on this machine."""
    checks: list[ReadinessCheck] = []
    problems: list[Problem] = []
    for name, check_problems in problems_by_check(spec, home, whole=True).items():
        problems += check_problems
        if check_problems:
            check = ReadinessCheck(name=name, where="", state="problem", said="")
        else:
            check = ReadinessCheck(name=name, where="", state="ok", said="no problem found")
        checks.append(check)
    errors = rows_of(RequestError(problems)) if problems else ()
    return Readiness(platform="local", checks=tuple(checks), errors=errors)


def readiness_on(spec: Spec | None, platform: str, home: Path) -> Readiness:
    """What a platform and the config lack for each other, and the steps' permissions."""
    sections = spec.platforms if spec else PlatformsSpec()
    target = platform_of(platform, sections)
    definition = None
    needs = Needs()
    problems: list[Problem] = []
    if spec is not None:
        spec = on_any_machine(spec, platform, home, problems)
        with collected(problems):
            definition = compile_for(platform, spec)
        needs = needs_of(spec, platform)
    checks = run_checks(target.checks(definition, needs))
    problems += problems_of(checks)
    errors = rows_of(RequestError(dict.fromkeys(problems))) if problems else ()
    return Readiness(
        platform=platform,
        permissions=target.permissions(needs),
        checks=checks,
        errors=errors,
    )


def _packages(spec: Spec) -> Iterator[Problem]:
    """Packages that the shipped pipeline needs; a user's may need others."""
    if spec.pipeline is not None:
        return
    missing = [name for name in NEEDED if not _is_installed(name)]
    if missing:
        extras = ",".join(sorted({NEEDED[name] for name in missing}))
        yield Problem(
            f"a local run needs {', '.join(missing)}",
            fix=f"pip install 'rekindle[{extras}]', or [local] for all",
        )


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _engine(spec: Spec) -> Iterator[Problem]:
    """What another engine, launcher, precision or base needs and is not installed."""
    train = spec.train
    lora = spec.model.lora
    if lora is not None and lora.base == "4bit" and not _is_installed("bitsandbytes"):
        yield Problem(
            "a base in 4 bits needs the package bitsandbytes",
            "model.lora.base",
            "pip install 'rekindle[qlora]'",
        )
    if train.launcher == "mpirun":
        mpirun = shutil.which("mpirun")
        if mpirun is None:
            yield Problem("there is no mpirun", "train.launcher", _INSTALL_OPEN_MPI)
        elif not _is_open_mpi(mpirun):
            yield Problem(f"{mpirun} is not Open MPI's", "train.launcher", _INSTALL_OPEN_MPI)
    if train.precision == "fp8" and not _is_installed("torchao"):
        yield Problem(
            "fp8 needs the package torchao",
            "train.precision",
            "pip install 'rekindle[fp8]'",
        )
    engine = engine_of(train.engine)
    if engine is None:
        return
    if not _is_installed(engine.package):
        yield Problem(
            f"the engine {train.engine} needs the package {engine.package}",
            "train.engine",
            f"pip install 'rekindle[{train.engine}]'",
        )
    for program in engine.programs(train):
        if shutil.which(program) is None:
            yield Problem(
                f"the engine {train.engine} needs {program} for these settings",
                "train.engine_config",
                f"install {program}, or remove offload",
            )


def _is_open_mpi(mpirun: str) -> bool:
    """Whether this mpirun is Open MPI's: MPICH and others take other options."""
    try:
        answer = subprocess.run(
            [mpirun, "--version"], capture_output=True, text=True, timeout=_MPIRUN_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return "Open MPI" in answer.stdout


def _files(spec: Spec) -> Iterator[Problem]:
    """Local files and folders that the config names and that are not there."""
    if spec.data is not None:
        for part in spec.data.parts:
            yield from _source(part.source)
    if spec.pipeline is not None:
        path, colon, _ = spec.pipeline.partition(".py:")
        yield from _file(path + colon.removesuffix(":"), "pipeline")
    if spec.train.entrypoint:
        script = shlex.split(spec.train.entrypoint)[0]
        if script != "-m":  # what follows is a module, which the step imports
            yield from _file(script, "train.entrypoint")
    sources = {
        "source": spec.model.source,
        "tokenizer": spec.model.tokenizer,
        "init_from": spec.model.init_from,
    }
    if spec.model.teacher is not None:
        sources["teacher.source"] = spec.model.teacher.source
    for field, source in sources.items():
        # other names are the hub's, or URIs
        if isinstance(source, str) and source.startswith("/") and not Path(source).exists():
            yield Problem(
                f"folder not found: {source}",
                f"model.{field}",
                "check the path; a hub name has no leading slash",
            )


def _source(source: str) -> Iterator[Problem]:
    """A source of data on this machine that matches no file."""
    if "://" in source or source.startswith(("sklearn:", "hub:")):
        return
    pattern = _PLACEHOLDER.sub("*", source)
    # Path.glob refuses absolute patterns
    if not Path(pattern).exists() and not glob.glob(pattern, recursive=True):  # noqa: PTH207
        yield Problem(f"no such file or folder: {source}", "data.source", _CHECK_THE_PATH)


def _file(path: str, field: str) -> Iterator[Problem]:
    if not Path(path).is_file():
        yield Problem(f"file not found: {path}", field, _CHECK_THE_PATH)


def _task(spec: Spec) -> Iterator[Problem]:
    """What the task refuses of the sections `data` and `model`."""
    if not spec.task:
        return
    if spec.task not in BUILTIN_TASKS:
        yield from _file(spec.task.rpartition(":")[0], "task")
        return
    if spec.data is None or spec.train.entrypoint:
        return
    try:
        load_task(spec.task).check(spec.data, spec.model)
    except RequestError as error:
        yield from error.problems


def first_look(spec: Spec, *, far: bool = False) -> list[Problem]:
    """The problems that `ingest` would refuse, as far as the first rows show them.

    `far`: sources elsewhere are read, too."""
    data = spec.data
    reads_rows = spec.pipeline is None and spec.task in BUILTIN_TASKS
    if data is None or not reads_rows:
        return []
    for part in data.parts:
        if any(_source(part.source)):
            return []  # `_files` names what is not there
    if data.columns.time is not None and "by" not in data.split.model_fields_set:
        log.warning("training rows lie after test rows: set data.split.by to time, or to hash")
    task = load_task(spec.task)
    try:
        refusal = task.refusals(data, spec.model)
    except RekindleError as error:
        return list(error.problems)
    problems: list[Problem] = []
    for part in data.parts:
        problems += first_rows(part, task.modality, far=far, refusal=refusal)
    if spec.must_pass:
        problems += golden_rows(spec.must_pass, task.modality)
    return problems


def _classes(spec: Spec) -> Iterator[Problem]:
    """Labels of a small local source that are all the same, and classes that have a
    weight and do not occur in it."""
    data = spec.data
    weights = spec.train.class_weights
    if data is None or data.labels or spec.pipeline is not None or spec.task not in BUILTIN_TASKS:
        return
    task = load_task(spec.task)
    if task.kind.writes:
        return
    labels = classes(data, task.modality)
    if len(labels) == 1 and task.kind.label == "number":
        yield Problem(SAME_NUMBER, "data.columns.target", "name another column")
    elif len(labels) == 1:
        yield from one_class(labels[0])
    if labels and isinstance(weights, dict):
        for path, message, fix in unknown_classes(spec.train, labels):
            yield Problem(message, ".".join(map(str, path)), fix)


def _architecture(spec: Spec) -> Iterator[Problem]:
    """An inline config whose `model_type` transformers does not know."""
    source = spec.model.source
    if not isinstance(source, dict) or "model_type" not in source:
        return
    model_type = source["model_type"]
    known_types = model_types()
    if known_types and model_type not in known_types:
        nearest = did_you_mean(str(model_type), known_types)
        yield Problem(
            f"transformers has no architecture `{model_type}`",
            "model.source.model_type",
            nearest or "see transformers' list of models",
        )


def _adapters(spec: Spec) -> Iterator[Problem]:
    """Adapters on a network whose weights nothing has trained."""
    model = spec.model
    if model.lora is not None and isinstance(model.source, dict) and model.init_from == "base":
        yield Problem(
            "adapters need trained weights: model.source describes a new network",
            "model.lora",
            "name a pretrained model as model.source or model.init_from, or leave out model.lora",
        )


def _is_folder(source: object) -> bool:
    return isinstance(source, str) and Path(source).expanduser().is_dir()


def _network(spec: Spec) -> list[Problem]:
    """The problems of a text task's network and of the checkpoint in a local folder, as
    transformers sees them; none where it is not installed."""
    is_text = spec.task in BUILTIN_TASKS and spec.task != "image_classification"
    if not is_text or spec.data is None or spec.pipeline is not None or spec.train.entrypoint:
        return []
    if not (isinstance(spec.model.source, dict) or _is_folder(spec.model.source)):
        return []
    if not all(_is_installed(name) for name in ("torch", "transformers", "safetensors")):
        return []
    question = Question(task=spec.task, data=spec.data, model=spec.model, engine=spec.train.engine)
    try:
        if "torch" in sys.modules:
            return look(question)
        return _look_in_a_process(question)
    except Exception as error:  # noqa: BLE001 - it says nothing of the config
        log.warning("the network was not looked at: %s", first_line(error))
        return []


def _look_in_a_process(question: Question) -> list[Problem]:
    """The same from a process of its own: the control plane loads no torch, which takes
    seconds and memory, except where it is loaded already, as in a notebook."""
    answer = subprocess.run(
        # -P: a file of the working directory may be called like a module
        [sys.executable, "-P", "-m", "rekindle.train.look"],
        input=question.model_dump_json(),
        capture_output=True,
        text=True,
        timeout=LOOK_SECONDS,
        env=look_env(),
    )
    if answer.returncode:
        lines = answer.stderr.strip().splitlines() or [f"it ended with {answer.returncode}"]
        raise RuntimeError(lines[-1])
    # libraries may have printed lines before
    rows = json.loads(answer.stdout.splitlines()[-1])
    return [Problem(row["what"], row["where"], row["fix"]) for row in rows]


def look_env() -> dict[str, str]:
    """The environment of that process: one thread and no network, so that a look takes no
    more than this machine has."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }


@functools.cache
def model_types() -> frozenset[str]:
    """The architectures that transformers' tables name, read as text: importing them
    takes seconds. Empty where transformers is not installed, or has other tables."""
    package = importlib.util.find_spec("transformers")
    if package is None:
        return frozenset()
    texts: list[str] = []
    for folder in package.submodule_search_locations or ():
        tables = Path(folder, "models", "auto").glob("*.py")
        texts += [
            path.read_text(encoding="utf-8", errors="replace")
            for path in tables
            if path.name in ("auto_mappings.py", "configuration_auto.py")
        ]
    pattern = r"[\"']([\w.-]+)[\"'][,:]\s*[\"']\w+Config[\"']"
    names = re.findall(pattern, "\n".join(texts))
    if len(names) <= _FEWEST_MODEL_TYPES:
        return frozenset()
    return frozenset(names)


def _layout(spec: Spec) -> Iterator[Problem]:
    """What the ranks on this machine would refuse once the data is ready: a layout that
    does not divide them or the model, a combination that no test has trained."""
    kind = KIND_OF.get(spec.task)
    train = spec.train
    if kind is None or train.entrypoint:
        return
    try:
        layout = resolve(train, spec.platforms.local.ranks, known_shape(spec))
        precisions = [train.precision]
        if train.precision == "auto":  # which the ranks decide
            precisions = ["bf16", "fp32"] if has_gpu() else ["fp32"]
        cells = []
        for precision in precisions:
            in_precision = train.model_copy(update={"precision": precision})
            cells.append(cell_of(kind, layout, in_precision, spec.model.lora is not None))
        # the ranks may still choose a precision that trains
        if all(refusal(cell, train.untested) for cell in cells):
            require(cells[0], train.untested)
    except RekindleError as error:
        yield from error.problems


def _secrets(spec: Spec) -> Iterator[Problem]:
    for name, reference in spec.platforms.local.secrets.items():
        variable = reference.removeprefix("env:")
        if variable not in os.environ:
            yield Problem(
                f"the environment variable {variable} is not set",
                f"platforms.local.secrets.{name}",
                f"export {variable}=...",
            )


def _docker(spec: Spec) -> Iterator[Problem]:
    if spec.platforms.local.containers == "always":
        try:
            find(os.environ)
        except RequestError as error:
            yield from error.problems


def _registry(spec: Spec) -> Iterator[Problem]:
    uri = spec.registration.tracking_uri
    scheme = uri.partition("://")[0].partition("+")[0]
    if uri and ("://" not in uri or scheme not in REGISTRY_SCHEMES):
        yield Problem(
            f"{uri!r} is not a tracking URI that MLflow 3 takes",
            "register.tracking_uri",
            "https://..., postgresql://..., sqlite:///file.db, or empty for the embedded one",
        )


def _home(home: Path) -> Iterator[Problem]:
    """A home that cannot be made, or not be written to."""
    paths = (home.absolute(), *home.absolute().parents)
    existing = next((path for path in paths if path.exists()), Path("/"))
    dangling_links = [path for path in paths if path.is_symlink() and not path.exists()]
    if dangling_links:
        yield Problem(
            f"the link {dangling_links[0]} leads nowhere", "--home", "name another folder"
        )
    elif not existing.is_dir():
        yield Problem(f"{existing} is a file, not a folder", "--home", "name another folder")
    # by mode and mount, without writing: root passes every mode check
    elif not os.access(existing, os.W_OK | os.X_OK) or os.statvfs(existing).f_flag & os.ST_RDONLY:
        yield Problem(
            f"the folder {existing} is not writable",
            "--home",
            "correct its permissions, or name another --home",
        )
