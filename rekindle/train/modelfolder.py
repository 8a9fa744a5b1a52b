"""A trained model as a folder that explains itself:

model.safetensors, config.json   as the task saves them (Hugging Face layout where it can)
model.keras                      in their place, of a script of a user's that trains with Keras
tokenizer.json, ...              what the task needs to encode inputs (its assets)
rekindle.json                    task, labels, settings, run key, precision of the training
task.py                          a user's own task, so that the folder loads anywhere
trained_on.npy                   uint64 [rows], sorted: the first 8 bytes of the hash of each
                                 example that the weights were trained on, and those of models
                                 that they began from or learned from

A model counts as trained on what its origin (`init_from`, a folder of `model.source`) and
its teacher were trained on: `trained_on.npy` is the union, and an origin without the file
is a DataError before anything is trained. Otherwise an example that the champion was
trained on could decide about a candidate that began from it. Rejected: a notice and no
judgement, because the run would succeed each day and never promote; walking the registry
when scoring, because origins may be gone. The cost: 8 bytes for each example that any
ancestor saw; models from the hub do not say what they were trained on."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rekindle.data.manifest import Shards, folder_fingerprint
from rekindle.errors import DataError, StepError
from rekindle.records import write_atomically
from rekindle.spec.heartbeat import beat
from rekindle.spec.identity import file_sha256
from rekindle.spec.model import ModelSpec
from rekindle.tasks import TASKS, Task, load_task

DESCRIPTION = "rekindle.json"
CODE = "task.py"
KERAS = "model.keras"
GENERATION = "generation_config.json"
ANY_CODE = "*"
TOKENIZER = "tokenizer.json"
TRAINED_ON = "trained_on.npy"
_ROWS_AT_ONCE = 1 << 16

if TYPE_CHECKING:
    import pyarrow as pa
    import torch


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """What `rekindle.json` says."""

    path: Path
    task: Task
    labels: tuple[str, ...]
    settings: Mapping[str, Any]
    run_key: str
    own_task: bool = False
    """Whether the task is a user's, whose code the folder holds."""
    precision: str = ""
    """The one that the training computed in; "" where that is not known."""

    def network(self) -> torch.nn.Module:
        """The network with its weights."""
        if self.of_keras:
            from rekindle.train.keras_model import load_keras  # imports torch

            return load_keras(self.path / KERAS, self.settings["image_shape"], len(self.labels))
        return self.task.load(self.path)

    @property
    def of_keras(self) -> bool:
        """Whether its weights are a file of Keras."""
        return (self.path / KERAS).is_file() and not list(self.path.glob("*.safetensors"))


def configure(network: torch.nn.Module, folder: Path, base: Path | None = None) -> None:
    """Write the configuration of a network of transformers beside its weights.

    How to generate is taken over from the folder of its `base`: what ends an answer,
    sampling, penalties."""
    model: Any = network
    types = [type_name for type_name, _ in _stored(folder)]
    most_frequent = max(set(types), key=types.count)
    model.config.architectures = [type(network).__name__]
    model.config.dtype = "bfloat16" if most_frequent == "BF16" else "float32"
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
        if base is not None and (base / GENERATION).is_file():
            own_settings = json.loads((folder / GENERATION).read_text())
            base_settings = json.loads((base / GENERATION).read_text())
            _write_json(folder / GENERATION, own_settings | base_settings)


def _write_json(path: Path, fields: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(fields, indent=2, sort_keys=True) + "\n")


def count_parameters(folder: Path) -> int:
    """How many numbers the weights in a folder are."""
    return sum(size for _, size in _stored(folder))


def _stored(folder: Path) -> list[tuple[str, int]]:
    """Type and size of each tensor, read from the headers alone."""
    tensors = []
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        for entry in header.values():
            tensors.append((entry["dtype"], math.prod(entry["shape"])))
    return tensors


def inherited(init: str, model: ModelSpec) -> list[np.ndarray]:
    """What models that a training begins from, or learns from, were `trained_on`."""
    names = [init or model.source, model.teacher.source if model.teacher else None]
    folders = [Path(name).expanduser() for name in names if isinstance(name, str)]
    return [trained_on(folder) for folder in folders if (folder / DESCRIPTION).is_file()]


def trained_on(folder: Path) -> np.ndarray:
    """uint64 [rows], sorted, memory-mapped: see the module.

    Raises DataError without the file: any example may then be one that the model
    knows."""
    path = folder / TRAINED_ON
    if not path.is_file():
        message = f"{folder} does not say what its model was trained on: it has no {TRAINED_ON}"
        fix = "copy the model's folder with all its files, or train the model again"
        raise DataError(message, fix=fix)
    return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]


def describe(
    task_name: str,
    shards: Shards,
    folder: Path,
    run_key: str,
    *,
    precision: str = "",
    known: Sequence[np.ndarray] = (),
) -> None:
    """Add to a folder of weights what rekindle needs; `known`: examples of before (`inherited`)."""
    if shards.assets.is_dir():
        shutil.copytree(shards.assets, folder, dirs_exist_ok=True)
    if ".py:" in task_name:
        path, _, name = task_name.rpartition(":")
        shutil.copyfile(path, folder / CODE)
        task_name = f"{CODE}:{name}"
    write_prefixes(shards.hashes("train"), shards.rows("train"), folder / TRAINED_ON, known)
    manifest = shards.manifest
    write_stop_tokens(folder, manifest.settings)
    description = {
        "schema_version": 1,
        "task": task_name,
        "labels": manifest.labels,
        "settings": dict(manifest.settings),
        "run_key": run_key,
        "precision": precision,
    }
    _write_json(folder / DESCRIPTION, description)


def write_stop_tokens(folder: Path, settings: Mapping[str, Any]) -> None:
    """Add the tokens at which a model's answers end (`stop_token_ids`) to its
    `generation_config.json`, so that transformers, vLLM and others stop where rekindle
    does."""
    path = folder / GENERATION
    stops = settings.get("stop_token_ids")
    if not stops or not path.is_file():
        return
    fields = json.loads(path.read_text())
    fields.pop("_from_model_config", None)  # else transformers may make it from config.json again
    before = fields.get("eos_token_id")
    eos_token_ids = list(stops)
    for token in before if isinstance(before, list) else [before]:
        if token is not None and token not in stops:
            eos_token_ids.append(token)
    fields["eos_token_id"] = eos_token_ids
    _write_json(path, fields)


def write_prefixes(
    hashes: Iterable[pa.ChunkedArray], rows: int, path: Path, known: Sequence[np.ndarray] = ()
) -> None:
    """What np.save writes of the distinct prefixes, sorted, in a mapped file: memory is bounded."""
    count = rows + sum(map(len, known))
    if not count:
        np.save(path, np.zeros(0, np.uint64), allow_pickle=False)
        return
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".draft") as draft:
        prefixes = np.memmap(draft.name, np.uint64, "w+", shape=(count,))
        end = 0
        own = (part for array in hashes for part in _prefix_parts(array))
        inherited = (part for array in known for part in _slices(array))
        for part in itertools.chain(own, inherited):
            prefixes[end : end + len(part)] = part
            end += len(part)
            beat()
        prefixes.sort()
        count = sum(len(part) for part in _distinct(prefixes))
        header = {"descr": "<u8", "fortran_order": False, "shape": (count,)}
        with path.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            for part in _distinct(prefixes):
                file.write(part.tobytes())
                beat()


def _prefix_parts(hashes: pa.ChunkedArray) -> Iterator[np.ndarray]:
    """uint64: the first 8 bytes of some hashes at a time, read where they lie."""
    for chunk in hashes.chunks:
        whole = np.frombuffer(chunk.buffers()[1], np.uint8).reshape(-1, chunk.type.byte_width)
        rows = whole[chunk.offset : chunk.offset + len(chunk)]
        for part in _slices(rows):
            first = np.ascontiguousarray(part[:, :8])
            yield first.view(">u8")[:, 0].astype(np.uint64)


def _slices(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Some rows at a time, as they lie."""
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        yield rows[start : start + _ROWS_AT_ONCE]


def _distinct(ordered: np.ndarray) -> Iterator[np.ndarray]:
    """The values of a sorted array, each once, some at a time."""
    for start in range(0, len(ordered), _ROWS_AT_ONCE):
        part = ordered[start : start + _ROWS_AT_ONCE]
        fresh = np.empty(len(part), bool)
        fresh[1:] = part[1:] != part[:-1]
        fresh[0] = start == 0 or part[0] != ordered[start - 1]
        yield part[fresh]


def hash_prefixes(hashes: list[bytes]) -> np.ndarray:
    """uint64 [rows]: the first 8 bytes of each."""
    return np.frombuffer(b"".join(digest[:8] for digest in hashes), ">u8").astype(np.uint64)


def open_model(folder: Path, code: str = "") -> ModelFolder:
    """The model in `folder`; raises DataError if it is not one of ours.

    Write access to a folder must not run code here: one that names a task of its own gets
    `code`, this config's `path.py:Class`, if its copy is the same byte for byte; with
    ANY_CODE its copy is run."""
    path = folder / DESCRIPTION
    if not path.is_file():
        message = f"{folder} is not a model of rekindle: it has no {DESCRIPTION}"
        raise DataError(message, fix="name a folder that a rekindle run wrote")
    description = json.loads(path.read_text())
    name = description["task"]
    is_own_task = name not in TASKS
    task = load_task(_own_task(folder, name, code) if is_own_task else name)
    return ModelFolder(
        path=folder,
        task=task,
        labels=tuple(description["labels"]),
        settings=description["settings"],
        run_key=description["run_key"],
        own_task=is_own_task,
        precision=description.get("precision", ""),
    )


def code_in(folder: Path) -> str:
    """What code a model folder brings, as the hash of its bytes and the class; "" for none."""
    name = json.loads((folder / DESCRIPTION).read_text())["task"]
    return "" if name in TASKS else _code(folder / CODE, name)


def may_run(brought: str, code: str) -> bool:
    """Whether `open_model` would run the code of a folder that brings this (see `code_in`)."""
    if code == ANY_CODE or not brought:
        return True
    if ".py:" not in code:
        return False
    file, _, _ = code.rpartition(":")
    return brought == _code(Path(file), code)


def _code(file: Path, name: str) -> str:
    """What code a file and the class in it are: the hash of its bytes, and the class."""
    return f"{file_sha256(file)}:{name.rpartition(':')[2]}"


def _own_task(folder: Path, name: str, code: str) -> str:
    """What `load_task` is to load where a model was trained for a task of a user's."""
    file, _, class_name = name.rpartition(":")
    copy = folder / CODE
    if file != CODE or not copy.is_file():
        message = f"the model in {folder} names the task `{name}`, and holds no such code"
        fix = "name a folder that a rekindle run wrote"
        raise DataError(message, where=str(folder / DESCRIPTION), fix=fix)
    if code == ANY_CODE:
        return f"{copy}:{class_name}"
    if may_run(_code(copy, name), code):
        return code
    message = f"the model in {folder} brings code that is not the task of this config"
    fix = "read it, and if it may run here, set register.trust_code: true"
    raise DataError(message, where=str(copy), fix=fix)


def check_start(
    folder: Path, shards: Shards, where: str = "model.init_from", code: str = ""
) -> ModelFolder:
    """The model in `folder`, if training can start from it, or learn from it.

    Raises StepError when it knows other classes, or when its tokens mean something else
    than those of the shards. `where` is the field that names it, `code` as for
    `open_model`."""
    model = open_model(folder, code)
    if model.of_keras:
        fix = "name a model of safetensors; a script (train.entrypoint) finds any folder in {init}"
        raise StepError(f"{folder} holds a model of Keras", where=where, fix=fix)
    labels = shards.manifest.labels
    if model.labels != labels:
        message = f"{folder} knows the classes {list(model.labels)}, the data holds {list(labels)}"
        if labels and model.labels:
            fix = "set data.labels to the model's classes, or name another model"
        else:
            fix = "name a model of the same task"
        raise StepError(message, where=where, fix=fix)
    our_file = shards.assets / TOKENIZER
    its_file = folder / TOKENIZER
    if our_file.exists() and its_file.exists() and file_sha256(our_file) != file_sha256(its_file):
        message = f"{folder} has another tokenizer than this run: its embeddings would mean other "
        message += "tokens"
        fix = f"set model.tokenizer: {folder}, or name another model"
        raise StepError(message, where=where, fix=fix)
    return model


def digest_of(folder: Path) -> str:
    """Hash over all files of a model folder. Raises DataError for one with links or devices."""
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            message = "a model folder holds files of its own only, and this is a link or a device"
            fix = "replace it by a copy of the file that it stands for"
            raise DataError(message, where=str(path), fix=fix)
    return folder_fingerprint(folder)


def weights_sha256(folder: Path) -> str:
    """One hash over all weight files in `folder`, by name and content."""
    total = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob(KERAS)]):
        total.update(f"{path.name}:{file_sha256(path)}\n".encode())
    return total.hexdigest()
