"""What can be known to be wrong with a config, this machine and a platform before anything is
written or started: all of it at once, each with its fix."""

import contextlib
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
from collections.abc import Iterator
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
from rekindle.platforms.checks import Needs, run_checks
from rekindle.platforms.checks import problems as wrong_ones
from rekindle.platforms.docker import find
from rekindle.platforms.platform import Platform
from rekindle.platforms.submission import Definition, problems_in
from rekindle.spec.checks import unknown_classes
from rekindle.spec.layout import resolve
from rekindle.spec.layout_support import KIND_OF, cell_of, refusal, require
from rekindle.spec.model import BUILTIN_TASKS, Spec
from rekindle.spec.platforms import PlatformsSpec
from rekindle.tasks import load_task
from rekindle.tasks.base import SAME_NUMBER
from rekindle.train.look import Question, look

log = logging.getLogger(__name__)

NEEDED = {"pyarrow": "data", "numpy": "data", "torch": "train", "mlflow": "registry"}
REGISTRY_SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks")
LOOK_SECONDS = 120
_PLACEHOLDER = re.compile(r"\{window(:[^}]*)?\}")
_problem = problems_in(__file__)


def preflight(spec: Spec, home: Path) -> None:
    """Raise RequestError with everything that would make a local run of `spec` fail at once."""
    if problems := [
        problem for found in problems_by_check(spec, home).values() for problem in found
    ]:
        raise RequestError(problems)


def problems_by_check(spec: Spec, home: Path, *, whole: bool = False) -> dict[str, list[Problem]]:
    """What was looked at, and what is wrong with it; writes nothing. `whole`: the network of an
    inline config is built, too, without values, which takes seconds."""
    found = {
        "packages": _packages(spec),
        "files": _files(spec),
        "task": _task(spec),
        "first rows of the data": [*first_look(spec, far=True), *_classes(spec)],
        "architecture": _architecture(spec),
        "adapters": _adapters(spec),
        "network": _network(spec) if whole or _is_folder(spec.model.source) else (),
        "layout": _layout(spec),
        "engine": _engine(spec),
        "secrets": _secrets(spec),
        "docker": _docker(spec),
        "registry": _registry(spec),
        "home": _home(home),
    }
    return {name: list(problems) for name, problems in found.items()}


def compile_for(platform: str, spec: Spec, *, whole: bool = True) -> Definition:
    """The definition; RequestError with everything that is wrong with it or not said. `whole` as in
    `problems_by_check`: nothing is trained yet where it is False."""
    problems: list[Problem] = list(Platform.of(platform, spec.platforms).settings.missing())
    problems += wrong_anywhere(spec, whole=whole)
    with collected(problems):
        definition = compiled(platform, spec, *graph_of(spec))
    if problems:
        raise RequestError(dict.fromkeys(problems))
    return definition


def wrong_anywhere(spec: Spec, *, whole: bool = True) -> list[Problem]:
    """What is wrong with the config wherever it runs; `whole` as in `problems_by_check`."""
    checks = [_task(spec), _architecture(spec), _adapters(spec)]
    problems = [problem for check in checks for problem in check]
    if not problems and whole:
        problems += _network(spec)
    return problems


def refuse_early(platform: Platform, definition: Definition) -> None:
    """RequestError with what would make a submission fail later, as far as it can be asked."""
    if found := wrong_ones(run_checks(platform.checks(definition, Needs()), early=True)):
        raise RequestError(dict.fromkeys(found))


def needs_of(spec: Spec, platform: str) -> Needs:
    """What the config asks of the platform beyond training."""
    return Needs(
        model=spec.model_name,
        deploys="deploy" in spec.model_fields_set,
        publishes=platform in spec.registration.publish,
        deploys_in_steps=spec.deploy.after_promotion and spec.pipeline is None,
    )


def readiness_here(spec: Spec, home: Path) -> Readiness:
    """What this machine and the config lack for a run here."""
    found = problems_by_check(spec, home, whole=True)
    problems = list(itertools.chain.from_iterable(found.values()))
    ok = functools.partial(ReadinessCheck, where="", state="ok", said="no problem found")
    wrong = functools.partial(ReadinessCheck, where="", state="problem", said="")
    checks = tuple((wrong if lacks else ok)(name=name) for name, lacks in found.items())
    errors = rows_of(RequestError(problems)) if problems else ()
    return Readiness(platform="local", checks=checks, errors=errors)


def readiness_on(spec: Spec | None, platform: str, home: Path) -> Readiness:
    """What a platform and the config lack for each other; the permissions that steps need."""
    there = Platform.of(platform, spec.platforms if spec else PlatformsSpec())
    definition, lacks = None, list[Problem]()
    spec = on_any_machine(spec, platform, home, lacks) if spec else None
    with collected(lacks):
        definition = compile_for(platform, spec) if spec else None
    needs = needs_of(spec, platform) if spec else Needs()
    found = run_checks(there.checks(definition, needs))
    errors = dict.fromkeys((*lacks, *wrong_ones(found)))
    return Readiness(
        platform=platform,
        permissions=there.permissions(needs),
        checks=found,
        errors=rows_of(RequestError(errors)) if errors else (),
    )


def _packages(spec: Spec) -> Iterator[Problem]:
    if spec.pipeline is not None:
        return
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        extras = ",".join(sorted({NEEDED[name] for name in missing}))
        yield _problem("packages", missing=", ".join(missing), extras=extras)


def _engine(spec: Spec) -> Iterator[Problem]:
    """Whether what another engine, launcher, precision or base needs is installed."""
    lora = spec.model.lora
    if lora is not None and lora.base == "4bit" and not importlib.util.find_spec("bitsandbytes"):
        yield _problem("no_bitsandbytes")
    if spec.train.launcher == "mpirun":
        if (mpirun := shutil.which("mpirun")) is None:
            yield _problem("no_mpirun")
        else:
            found = ""
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                words = [mpirun, "--version"]
                found = subprocess.run(words, capture_output=True, text=True, timeout=20).stdout
            if "Open MPI" not in found:
                yield _problem("other_mpirun", path=mpirun)
    if spec.train.precision == "fp8" and not importlib.util.find_spec("torchao"):
        yield _problem("no_torchao")
    engine = engine_of(spec.train.engine)
    if engine is not None and importlib.util.find_spec(engine.package) is None:
        yield _problem("no_engine", engine=spec.train.engine, package=engine.package)
    for program in engine.programs(spec.train) if engine is not None else ():
        if shutil.which(program) is None:
            yield _problem("no_program", engine=spec.train.engine, program=program)


def _files(spec: Spec) -> Iterator[Problem]:
    for part in spec.data.parts if spec.data else ():
        yield from _source(part.source)
    if spec.pipeline is not None:
        path, colon, _ = spec.pipeline.partition(".py:")
        yield from _file(path + colon.removesuffix(":"), "pipeline")
    if spec.train.entrypoint:
        script, *_ = shlex.split(spec.train.entrypoint)
        yield from _file(script, "train.entrypoint") if script != "-m" else ()
    fields = {name: getattr(spec.model, name) for name in ("source", "tokenizer", "init_from")}
    if spec.model.teacher is not None:
        fields["teacher.source"] = spec.model.teacher.source
    for field, value in fields.items():
        if isinstance(value, str) and value.startswith("/") and not Path(value).exists():
            yield _problem("no_model", field=field, path=value)


def _source(source: str) -> Iterator[Problem]:
    if "://" in source or source.startswith(("sklearn:", "hub:")):
        return
    pattern = _PLACEHOLDER.sub("*", source)
    # Path.glob refuses absolute patterns
    if not Path(pattern).exists() and not glob.glob(pattern, recursive=True):  # noqa: PTH207
        yield _problem("no_source", source=source)


def _file(path: str, field: str) -> Iterator[Problem]:
    if not Path(path).is_file():
        yield _problem("no_file", where=field, path=path)


def _task(spec: Spec) -> Iterator[Problem]:
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
    """What the first rows of a source, here or `far` away, show that `ingest` would refuse."""
    data, known = spec.data, spec.pipeline is None and spec.task in BUILTIN_TASKS
    if data is None or not known or any(any(_source(part.source)) for part in data.parts):
        return []
    if data.columns.time is not None and "by" not in data.split.model_fields_set:
        log.warning("training rows lie after test rows: set data.split.by to time, or to hash")
    task = load_task(spec.task)
    modality, found = task.modality, list[Problem]()
    try:
        refusal = task.refusals(data, spec.model)
    except RekindleError as error:
        return list(error.problems)
    for part in data.parts:
        found += first_rows(part, modality, far=far, refusal=refusal)
    return [*found, *(golden_rows(spec.must_pass, modality) if spec.must_pass else ())]


def _classes(spec: Spec) -> Iterator[Problem]:
    """Labels of a small local source that are all the same, and classes that have a weight and do
    not occur in it."""
    data, weights = spec.data, spec.train.class_weights
    if data is None or data.labels or spec.pipeline is not None or spec.task not in BUILTIN_TASKS:
        return
    task = load_task(spec.task)
    if task.objective == "tokens":
        return
    labels = classes(data, task.modality)
    if len(labels) == 1 and task.objective == "numbers":
        yield Problem(SAME_NUMBER, "data.columns.target", "name another column")
    elif len(labels) == 1:
        yield from one_class(labels[0])
    if labels and isinstance(weights, dict):
        for path, what, fix in unknown_classes(spec.train, labels):
            yield Problem(what, ".".join(map(str, path)), fix)


def _architecture(spec: Spec) -> Iterator[Problem]:
    """An inline config whose `model_type` transformers does not know."""
    source = spec.model.source
    if not isinstance(source, dict) or "model_type" not in source:
        return
    wanted, known = source["model_type"], model_types()
    if known and wanted not in known:
        near = did_you_mean(str(wanted), known) or "see transformers' list of models"
        yield _problem("architecture", wanted=wanted, near=near)


def _adapters(spec: Spec) -> Iterator[Problem]:
    """Adapters on a network whose weights nothing has trained."""
    model = spec.model
    if model.lora is not None and isinstance(model.source, dict) and model.init_from == "base":
        message = "adapters need trained weights: model.source describes a new network"
        fix = "name a pretrained model as model.source or model.init_from, or leave out model.lora"
        yield Problem(message, "model.lora", fix)


def _is_folder(source: object) -> bool:
    return isinstance(source, str) and Path(source).expanduser().is_dir()


def _network(spec: Spec) -> list[Problem]:
    """What is wrong with the network of a text task and the checkpoint in a local folder, asked of
    transformers; nothing where it is not installed."""
    texts = spec.task in BUILTIN_TASKS and spec.task != "image_classification"
    if not texts or spec.data is None or spec.pipeline is not None or spec.train.entrypoint:
        return []
    if not (isinstance(spec.model.source, dict) or _is_folder(spec.model.source)):
        return []
    needed = ("torch", "transformers", "safetensors")
    if any(importlib.util.find_spec(name) is None for name in needed):
        return []
    engine = spec.train.engine
    question = Question(task=spec.task, data=spec.data, model=spec.model, engine=engine)
    try:
        return look(question) if "torch" in sys.modules else _looked_elsewhere(question)
    except Exception as error:  # noqa: BLE001 - it says nothing of the config
        log.warning("the network was not looked at: %s", first_line(error))
        return []


def _looked_elsewhere(question: Question) -> list[Problem]:
    """What a process of its own finds: the control plane loads no torch, which takes seconds and
    memory, but where it is loaded already, as in a notebook."""
    words = [sys.executable, "-P", "-m", "rekindle.train.look"]
    asked = question.model_dump_json()
    answer = subprocess.run(
        words, input=asked, capture_output=True, text=True, timeout=LOOK_SECONDS, env=look_env()
    )
    if answer.returncode:
        lines = answer.stderr.strip().splitlines() or [f"it ended with {answer.returncode}"]
        raise RuntimeError(lines[-1])
    rows = json.loads(answer.stdout.splitlines()[-1])
    return [Problem(row["what"], row["where"], row["fix"]) for row in rows]


def look_env() -> dict[str, str]:
    """One thread, and nothing from the network: a look takes no more than this machine has."""
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return {**os.environ, **quiet}


@functools.cache
def model_types() -> frozenset[str]:
    """The architectures that transformers' tables name as text: importing them takes seconds."""
    found = importlib.util.find_spec("transformers")
    folders = found.submodule_search_locations if found is not None else None
    texts = [
        path.read_text(encoding="utf-8", errors="replace")
        for folder in folders or ()
        for path in Path(folder, "models", "auto").glob("*.py")
        if path.name in ("auto_mappings.py", "configuration_auto.py")
    ]
    names = re.findall(r"[\"']([\w.-]+)[\"'][,:]\s*[\"']\w+Config[\"']", "\n".join(texts))
    return frozenset(names if len(names) > 50 else ())


def _layout(spec: Spec) -> Iterator[Problem]:
    """What the ranks here would refuse, once the data is ready: a layout that does not divide them
    or the model, a combination that no test has trained."""
    kind, train = KIND_OF.get(spec.task), spec.train
    if kind is None or train.entrypoint:
        return
    try:
        layout = resolve(train, spec.platforms.local.ranks, known_shape(spec))
        wanted = [train.precision]
        if train.precision == "auto":  # which the ranks decide
            wanted = ["bf16", "fp32"] if has_gpu() else ["fp32"]
        trains = (train.model_copy(update={"precision": precision}) for precision in wanted)
        cells = [cell_of(kind, layout, each, spec.model.lora is not None) for each in trains]
        if all(refusal(cell, train.untested) for cell in cells):
            require(cells[0], train.untested)
    except RekindleError as error:
        yield from error.problems


def _secrets(spec: Spec) -> Iterator[Problem]:
    for name, reference in spec.platforms.local.secrets.items():
        variable = reference.removeprefix("env:")
        if variable not in os.environ:
            yield _problem("no_secret", name=name, variable=variable)


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
        yield _problem("tracking_uri", uri=uri)


def _home(home: Path) -> Iterator[Problem]:
    places = (home.absolute(), *home.absolute().parents)
    existing = next((p for p in places if p.exists()), Path("/"))
    lost = [p for p in places if p.is_symlink() and not p.exists()]
    if lost:
        yield _problem("lost_home", link=lost[0])
    elif not existing.is_dir():
        yield _problem("home_is_a_file", path=existing)
    # by mode and mount, without writing: root passes every mode check
    elif not os.access(existing, os.W_OK | os.X_OK) or os.statvfs(existing).f_flag & os.ST_RDONLY:
        yield _problem("read_only_home", folder=existing)
