"""The pipeline of a spec: where it is, its Graph, and values for its parameters."""

import subprocess
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import rekindle
from rekindle.errors import Problem, RequestError
from rekindle.ir.graph import Graph, Parameter
from rekindle.ir.read.pipeline import read
from rekindle.records import RECORD_FILES, RunRecord
from rekindle.spec.model import Spec

TRAINING = "finetune"  # the step of the shipped pipeline
ON_MACHINES = (TRAINING, "score")  # those that `resources` are for
PIPELINE = "pipelines/continuous_training.py:continuous_training"
DEPLOYING = "pipelines/continuous_deployment.py:continuous_deployment"


def shipped(path: str) -> Path:
    """A file or folder that comes with rekindle: inside the wheel, or beside the package."""
    package = Path(rekindle.__file__).resolve().parent
    inside = package / "shipped" / path
    return inside if inside.exists() else package.parent / path


def training_of(record: RunRecord) -> Path:
    """The file in which the training step of a run here summed up its training."""
    model = record.step(TRAINING).holding("training")
    assert model is not None
    return Path(model.uri, RECORD_FILES["training"])


def pipeline_of(spec: Spec, here: bool = False) -> str:
    """`path.py:function`, or the path of a compiled pipeline. `here` nothing deploys in a step: it
    would end with the step."""
    if spec.pipeline:
        return spec.pipeline
    used = DEPLOYING if spec.deploy.after_promotion and not here else PIPELINE
    path, _, function = used.partition(":")
    return f"{shipped(path)}:{function}"


def graph_of(spec: Spec, here: bool = False) -> tuple[str, Graph]:
    """The IR of the spec's pipeline, and the Graph read from it; `here` as in `pipeline_of`."""
    from rekindle.ir.compile import compile_pipeline

    text = compile_pipeline(pipeline_of(spec, here))
    return text, read(text)


def arguments_of(
    spec: Spec, graph: Graph, artifact_root: str, platform: str = ""
) -> dict[str, Any]:
    """Values for the pipeline's parameters: what the config says for those that it `receives` (the
    shipped pipeline: everything), and the user's own `arguments`. RequestError for one without a
    value, and for one called like a section that the config sets, without a word that they belong
    together."""
    filled: dict[str, Any] = {
        "name": spec.model_name, "task": spec.task,
        "data": spec.data.model_dump_json() if spec.data else "",
        "model": spec.model.model_dump_json(), "train": spec.train.model_dump_json(),
        "evaluate": spec.evaluate.model_dump_json(),
        "register": spec.registration.model_dump_json(),
        "artifact_root": artifact_root, "code_commit": code_commit(),
    }  # fmt: skip
    if spec.pipeline is None and "deploy" in graph.inputs.parameters:
        needed = ("name", "task", "data", "registration", "deploy")
        known: dict[str, Any] = {**dict.fromkeys(needed, True), "platforms": {platform}}
        filled["deploy"] = spec.model_dump_json(include=known, by_alias=True)
    parameters = graph.inputs.parameters
    wanted: Iterable[str] = spec.receives
    if spec.pipeline is None or spec.receives == "all":
        wanted = [name for name in filled if name in parameters]
    values = {**{name: filled[name] for name in wanted}, **spec.arguments}
    open_ones = [parameter for name, parameter in parameters.items() if name not in values]
    if problems := list(_open(spec, open_ones, filled)):
        raise RequestError(problems)
    return values


_SECTIONS = {"task", "data", "model", "train", "evaluate", "register"}


def _open(
    spec: Spec, parameters: Iterable[Parameter], filled: Collection[str]
) -> Iterator[Problem]:
    """Parameters that need a value and have none, or that a section of the config may be for."""
    for parameter in parameters:
        name, fix = parameter.name, f"write arguments: {{{parameter.name}: VALUE}}"
        if name in filled:
            fix = f"write receives: [{name}] for what the config says, or {fix[6:]}"
        field = "registration" if name == "register" else name
        if parameter.required:
            yield Problem(f"the pipeline needs a value for `{name}`", "pipeline", fix)
        elif name in _SECTIONS and field in spec.model_fields_set:
            what = f"the config sets `{name}`, and the pipeline has a parameter `{name}`"
            what += ": nothing says whether it receives the one or keeps its default"
            yield Problem(what, name, f"{fix}; or remove the section")


def code_commit() -> str:
    """The commit of the working directory, `+changes` when it is not clean, "" outside of git."""
    try:
        commit = _git("rev-parse", "HEAD")
        changes = _git("status", "--porcelain", "--untracked-files=no")
        return f"{commit}+changes" if changes else commit
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=10, check=True)  # noqa: S607 - found on PATH
    return done.stdout.strip()
