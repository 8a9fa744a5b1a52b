"""What a config asks to be trained, as the planner sees it: the model's shape, the length of its
sequences, what it leaves open. Reads no more than a config.json."""

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rekindle.catalog.machines import Gpu
from rekindle.catalog.tables import known_configs
from rekindle.errors import Problem, RequestError, first_line
from rekindle.plan.shape import ModelShape, shape_of
from rekindle.plan.work import Zero
from rekindle.spec.layout import LARGEST_AUTO_MICRO_BATCH, Shape, resolve
from rekindle.spec.layout_support import KIND_OF, Kind
from rekindle.spec.model import LayoutSpec, LoraSpec, Spec, TokenizerSpec, TrainSpec
from rekindle.tables import rows

_PLANNED = ("causal_lm", "text_classification", "text_regression")
_FREE = ("layout", "micro_batch_size", "activation_checkpointing")
_REFUSALS = Path(__file__).with_name("refusals.yaml")


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a config asks to be trained. `free` names what it leaves to the planner: `layout`,
    `micro_batch_size`, `activation_checkpointing`. `zero`: by DeepSpeed, with that stage."""

    kind: Kind
    shape: ModelShape
    sequence: int
    train: TrainSpec
    free: frozenset[str]
    lora: LoraSpec | None = None
    teacher: ModelShape | None = None
    zero: Zero | None = None


def problem(name: str, /, **about: object) -> Problem:
    """The row of that name in refusals.yaml, with the braces filled in from what it is about."""
    return Problem(*(text.format(**about) for text in rows(_REFUSALS)[name]))


def on_gpu(asked: Asked, gpu: Gpu) -> Asked:
    """With the precision that `auto` has there; the engine decides alike (train/rank.py)."""
    if asked.train.precision != "auto":
        return asked
    train = asked.train.model_copy(update={"precision": "bf16" if "bf16" in gpu.tflops else "fp32"})
    return dataclasses.replace(asked, train=train)


def asked_of(spec: Spec, ask_hub: bool = True) -> Asked:
    """What the config asks of the planner; RequestError for networks of images, the user's own
    networks and scripts, and models whose config is out of reach (the hub is asked last)."""
    if spec.pipeline is not None:
        raise RequestError([problem("pipeline")])
    if spec.train.engine not in ("rekindle", "deepspeed"):
        raise RequestError([problem("engine", engine=spec.train.engine)])
    if spec.train.engine == "deepspeed" and getattr(spec.train.layout, "tp", 1) > 1:
        raise RequestError([problem("autotp")])
    if spec.task not in _PLANNED or spec.train.entrypoint:
        name, known = "script" if spec.train.entrypoint else "task", " and ".join(_PLANNED)
        raise RequestError([problem(name, task=spec.task, known=known)])
    assert spec.data is not None
    kind = KIND_OF[spec.task]
    classes = None if kind == "tokens" else len(spec.data.labels) or 2
    classes = 1 if spec.data.is_numeric else classes
    shape, taught = shape_of(model_config(spec, ask_hub), classes), None
    if (teacher := spec.model.teacher) is not None:
        taught = shape_of(_config(teacher.source, None, ask_hub, "model.teacher.source"), classes)
    return Asked(
        kind,
        shape,
        spec.data.max_length,
        spec.train,
        left_open(spec),
        spec.model.lora,
        taught,
        Zero.of(spec.train.engine_config) if spec.train.engine == "deepspeed" else None,
    )


def as_on_a_cpu(asked: Asked, ranks: int) -> Asked:
    """With a run's layout there, and the largest micro-batch of up to 32 of which every data rank
    gets one, where the config leaves them open. RequestError for other numbers than fp32."""
    train, free = asked.train, asked.free
    if train.precision not in ("fp32", "auto"):
        raise RequestError([problem("precision", precision=train.precision)])
    layout = resolve(train, ranks)
    if "micro_batch_size" in free and layout.pp == 1:
        total = train.global_batch_size
        largest = min(LARGEST_AUTO_MICRO_BATCH, max(1, total // layout.data))
        fits = next(size for size in range(largest, 0, -1) if total % size == 0)
        layout = dataclasses.replace(layout, micro_batch_size=fits)
    degrees = {name: getattr(layout, name) for name in LayoutSpec.model_fields}
    fixed = {"layout": LayoutSpec(**degrees), "micro_batch_size": layout.micro_batch_size}
    return dataclasses.replace(asked, train=train.model_copy(update=fixed), free=frozenset())


def left_open(spec: Spec) -> frozenset[str]:
    """What the config leaves to the planner, of all that it may decide."""
    given = spec.train.model_fields_set
    return frozenset(n for n in _FREE if n not in given or getattr(spec.train, n) == "auto")


def model_config(spec: Spec, ask_hub: bool = True) -> Mapping[str, Any]:
    """The config in Hugging Face layout: inline, of a local folder, the catalog, or the hub."""
    source = spec.model.source
    if not isinstance(source, str):
        if not source:
            return source
        vocabulary, tokenizer = source.get("vocab_size"), spec.model.tokenizer
        if not isinstance(tokenizer, str):  # has at most as many entries as it was asked for
            vocabulary = max(int(vocabulary or 0), (tokenizer or TokenizerSpec()).vocab_size)
        return {**source, "vocab_size": vocabulary}
    return _config(source, spec.model.revision, ask_hub, "model.source")


def known_shape(spec: Spec) -> Shape | None:
    """What of its model has to be divisible, where that is known without the hub."""
    with contextlib.suppress(RequestError):
        config = model_config(spec, ask_hub=False)
        return Shape.of(config) if "model_type" in config else None
    return None


def _config(source: str, revision: str | None, ask_hub: bool, where: str) -> Mapping[str, Any]:
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
        raise RequestError([problem("no hub", source=source, where=where)]) from error
    try:
        return _read(Path(hf_hub_download(source, "config.json", revision=revision)), where)
    except (OSError, ValueError) as error:
        about = {"source": source, "why": first_line(error), "where": where}
        raise RequestError([problem("unreadable", **about)]) from error


def _read(path: Path, where: str) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"it is a {type(found).__name__} and no object")
    except ValueError as error:
        raise RequestError([problem("no JSON", path=path, error=error, where=where)]) from error
    return found
