"""What a config asks to be trained, as the planner sees it: the model's shape, the length
of its sequences, and what it leaves to the planner. Of a model it reads config.json only."""

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rekindle.catalog.machines import Gpu
from rekindle.catalog.tables import known_configs
from rekindle.errors import RequestError, first_line
from rekindle.plan.shape import ModelShape, shape_of
from rekindle.plan.work import Zero
from rekindle.spec.layout import LARGEST_AUTO_MICRO_BATCH, Shape, resolve
from rekindle.spec.layout_support import KIND_OF, Kind
from rekindle.spec.model import LayoutSpec, LoraSpec, Spec, TokenizerSpec, TrainSpec

_PLANNED = ("causal_lm", "text_classification", "text_regression")
# what a config may leave to the planner
_FREE = ("layout", "micro_batch_size", "activation_checkpointing")
_NAME_A_FOLDER = (
    "name a local folder with its config.json, or install `rekindle[hub]` and a network"
)


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a config asks to be trained."""

    kind: Kind
    shape: ModelShape
    sequence: int
    """Most tokens of an example."""
    train: TrainSpec
    free: frozenset[str]
    """What it leaves to the planner: `layout`, `micro_batch_size`, `activation_checkpointing`."""
    lora: LoraSpec | None = None
    teacher: ModelShape | None = None
    zero: Zero | None = None
    """How DeepSpeed divides the state; None: rekindle's engine trains."""


def on_gpu(asked: Asked, gpu: Gpu) -> Asked:
    """The same with the precision that `auto` becomes on this GPU, as train/rank.py decides
    it when the training starts."""
    if asked.train.precision != "auto":
        return asked
    precision = "bf16" if "bf16" in gpu.tflops else "fp32"
    train = asked.train.model_copy(update={"precision": precision})
    return dataclasses.replace(asked, train=train)


def asked_of(spec: Spec, ask_hub: bool = True) -> Asked:
    """What the config asks of the planner.

    RequestError for what it cannot plan: networks of images, the user's own networks and
    scripts, and models whose config cannot be read (the hub is asked last)."""
    _refuse_unplanned(spec)
    assert spec.data is not None
    kind = KIND_OF[spec.task]
    classes: int | None
    if spec.data.is_numeric:
        classes = 1
    elif kind == "tokens":
        classes = None
    else:
        # without labels in the config their number is not known; the head is small
        classes = len(spec.data.labels) or 2
    shape = shape_of(model_config(spec, ask_hub), classes)
    teacher = spec.model.teacher
    teacher_shape = None
    if teacher is not None:
        config = _config(teacher.source, None, ask_hub, "model.teacher.source")
        teacher_shape = shape_of(config, classes)
    zero = None
    if spec.train.engine == "deepspeed":
        zero = Zero.of(spec.train.engine_config)
    return Asked(
        kind=kind,
        shape=shape,
        sequence=spec.data.max_length,
        train=spec.train,
        free=left_open(spec),
        lora=spec.model.lora,
        teacher=teacher_shape,
        zero=zero,
    )


def _refuse_unplanned(spec: Spec) -> None:
    """Raise RequestError for what the planner has no arithmetic for."""
    if spec.pipeline is not None:
        raise RequestError(
            "the planner does not know what a pipeline of your own computes",
            where="pipeline",
            fix="name machines where it needs them: rekindle.distribute(task, nodes=...)",
        )
    if spec.train.engine not in ("rekindle", "deepspeed"):
        raise RequestError(
            f"the planner does not know what the engine {spec.train.engine} holds on each machine",
            where="train.engine",
            fix="run it and look, or plan with rekindle's engine (--set train.engine=rekindle)",
        )
    if spec.train.engine == "deepspeed" and getattr(spec.train.layout, "tp", 1) > 1:
        raise RequestError(
            "the planner does not know what DeepSpeed's tensor parallelism holds on each machine",
            where="train.layout.tp",
            fix="run it and look, or plan without it (--set train.layout=auto)",
        )
    planned_tasks = f"it plans {' and '.join(_PLANNED)} of transformers"
    if spec.train.entrypoint:
        raise RequestError(
            "the planner does not know what a script of your own computes",
            where="train.entrypoint",
            fix=planned_tasks,
        )
    if spec.task not in _PLANNED:
        raise RequestError(
            f"the planner does not know what the task `{spec.task}` computes",
            where="task",
            fix=planned_tasks,
        )


def as_on_a_cpu(asked: Asked, ranks: int) -> Asked:
    """The same with the layout that a run on `ranks` CPU ranks has, and with its
    micro-batch size: where the config leaves it open, the largest up to 32 that divides
    the batch and gives every data rank one.

    RequestError for another precision than fp32."""
    train = asked.train
    if train.precision not in ("fp32", "auto"):
        raise RequestError(
            f"the planner knows this CPU in fp32, not in {train.precision}",
            where="train.precision",
            fix="name GPUs in `resources`, or train in fp32 here",
        )
    layout = resolve(train, ranks)
    if "micro_batch_size" in asked.free and layout.pp == 1:
        total = train.global_batch_size
        largest = min(LARGEST_AUTO_MICRO_BATCH, max(1, total // layout.data))
        fits = next(size for size in range(largest, 0, -1) if total % size == 0)
        layout = dataclasses.replace(layout, micro_batch_size=fits)
    degrees = {name: getattr(layout, name) for name in LayoutSpec.model_fields}
    fixed = {"layout": LayoutSpec(**degrees), "micro_batch_size": layout.micro_batch_size}
    return dataclasses.replace(asked, train=train.model_copy(update=fixed), free=frozenset())


def left_open(spec: Spec) -> frozenset[str]:
    """What the config leaves to the planner, of what the planner may decide."""
    train = spec.train
    left_open = set()
    for name in _FREE:
        if name not in train.model_fields_set or getattr(train, name) == "auto":
            left_open.add(name)
    return frozenset(left_open)


def model_config(spec: Spec, ask_hub: bool = True) -> Mapping[str, Any]:
    """The model's config as transformers writes it: the one in the spec, or that of a local
    folder, the catalog or the hub."""
    source = spec.model.source
    if not isinstance(source, str):
        if not source:
            return source
        vocabulary = source.get("vocab_size")
        tokenizer = spec.model.tokenizer
        if not isinstance(tokenizer, str):
            # a tokenizer that is trained has at most the entries that the config asks for
            trained = tokenizer or TokenizerSpec()
            vocabulary = max(int(vocabulary or 0), trained.vocab_size)
        return {**source, "vocab_size": vocabulary}
    return _config(source, spec.model.revision, ask_hub, "model.source")


def known_shape(spec: Spec) -> Shape | None:
    """The numbers of the model that layouts have to divide, or None where they are not
    known without the hub."""
    with contextlib.suppress(RequestError):
        config = model_config(spec, ask_hub=False)
        return Shape.of(config) if "model_type" in config else None
    return None


def _config(source: str, revision: str | None, ask_hub: bool, where: str) -> Mapping[str, Any]:
    """A model's config from the cheapest place that has it; the hub comes last."""
    folder = Path(source).expanduser()
    if (folder / "config.json").is_file():
        return _read(folder / "config.json", where)
    if source in known_configs():
        return known_configs()[source]
    if not ask_hub:
        raise RequestError(f"the shape of `{source}` is not known here", where=where)
    try:  # of the hub's cache on this machine, or of the hub
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise RequestError(
            f"the shape of `{source}` is not known here", where=where, fix=_NAME_A_FOLDER
        ) from error
    try:
        return _read(Path(hf_hub_download(source, "config.json", revision=revision)), where)
    except (OSError, ValueError) as error:
        raise RequestError(
            f"cannot read the config of `{source}`: {first_line(error)}",
            where=where,
            fix=_NAME_A_FOLDER,
        ) from error


def _read(path: Path, where: str) -> Mapping[str, Any]:
    """A config.json; RequestError where it is not one."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"it is a {type(config).__name__} and no object")
    except ValueError as error:
        raise RequestError(
            f"{path} is not JSON: {error}", where=where, fix="correct the file"
        ) from error
    return config
