"""What the source holds now, and the keys of a run: its first step, which is never cached.

    data      hash of the bytes in the window, wherever they lie
    work_key  data + window + the settings that shape the weights + rekindle's training code
    run_key   work_key + the weights that it starts from: the same training, attempted however often

With a window over a time column only its records are hashed. Settings that cannot change
the weights (where the source lies, how often a checkpoint is made) are left out."""

import contextlib
import dataclasses
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rekindle.data.executor import WORTH_BYTES, Order, executor_of
from rekindle.data.files import combined, content_hash
from rekindle.data.pieces import cut, source_of
from rekindle.data.records import RecordsHash, Span, inside, read_times, to_datetime
from rekindle.data.roles import wanted_columns
from rekindle.data.source import FileSource, open_source
from rekindle.data.store import PieceStore
from rekindle.data.window import Window, parse_window, resolve
from rekindle.engines import engine_of
from rekindle.errors import DataError, RequestError
from rekindle.records import Fingerprint
from rekindle.rows.columns import Source
from rekindle.rows.findings import Findings
from rekindle.spec.identity import TRAINING, digest, file_sha256, source_hash
from rekindle.spec.imports import INCLUDED, as_import, closure, contents, folders_of, own_folders
from rekindle.spec.model import DataSpec, ModelSpec, TrainSpec, WindowSpec
from rekindle.tasks import TASKS, load_task

# what the source holds is in the hash of the data; the others shape no weights
_DATA_ASIDE = {"source", "window", "slices", "max_bad_rows", *DataSpec.EXECUTION}
# how the work is done and kept, not what it is:
# another layout resumes the same checkpoints
_TRAIN_ASIDE = {
    "activation_checkpointing",
    "budget_hours",
    "checkpoint",
    "compile",
    "entrypoint",
    "grace_seconds",
    "hang_seconds",
    "layout",
    "ledger",
    "max_hours",
    "max_restarts",
    "profile",
    "start_seconds",
    "untested",
}


@dataclasses.dataclass(frozen=True)
class ChampionState:
    """The registry's champion: its keys, where its weights started, what it beat ("" =
    none), and the digests of both models: a registry that was set up again gives out its
    numbers again. `budget_hours`: where they ended its training; with others, the same
    work goes on."""

    version: str
    run_key: str
    work_key: str
    init_from: str
    beaten: str
    digest: str
    beaten_digest: str
    budget_hours: str = ""


def fingerprint(
    task: str, data: DataSpec, model: ModelSpec, train: TrainSpec, *, champion: ChampionState | None
) -> Fingerprint:
    """What the source holds now, and the keys of the work.
    Raises DataError for nothing."""
    window, content, (files, size) = content_in_window(data, load_task(task).modality)
    window_text = str(window or "")
    model_contents = _model_contents(model)
    work_key = _work_key(task, content, window_text, data, model, train, model_contents)
    tokenizing = [model_contents.get(f"{key}_content", "") for key in ("source", "tokenizer")]
    init_from, init_digest = _start(model, champion, work_key)
    run_key = digest([work_key, init_digest or init_from])  # files, wherever they lie
    version, champion_digest = _to_beat(champion, run_key, train)
    return Fingerprint(
        data=content,
        tokenizing=digest(tokenizing) if any(tokenizing) else "",
        window=window_text,
        files=files,
        bytes=size,
        run_key=run_key,
        work_key=work_key,
        init_from=init_from,
        init_digest=init_digest,
        champion=version,
        champion_digest=champion_digest,
    )


def _work_key(
    task: str,
    content: str,
    window: str,
    data: DataSpec,
    model: ModelSpec,
    train: TrainSpec,
    model_contents: Mapping[str, str],
) -> str:
    """The hash of all that shapes the weights but for those that the training starts from."""
    is_own_task = task not in TASKS
    task_identity: str | list[object] = task
    if is_own_task:
        path, _, class_name = task.rpartition(":")
        task_identity = [class_name, *own_files(Path(path))]
    work = {
        "task": task_identity,
        "data": content,
        "window": window,
        "settings": [
            data.model_dump(mode="json", exclude=_DATA_ASIDE),
            {**model.model_dump(mode="json", exclude={"init_from"}), **model_contents},
            {**_identifying(train), "best": train.exports_best},
        ],
        "entrypoint": _own_script(train.entrypoint) if train.entrypoint else [],
        "code": source_hash(TRAINING),
    }
    included = os.environ.get(INCLUDED, "")
    # rekindle's own code reads no file of the author's
    if included and (is_own_task or train.entrypoint):
        work["included"] = included
    return digest(work)


def _start(model: ModelSpec, champion: ChampionState | None, work_key: str) -> tuple[str, str]:
    """Where the weights start: `init_from` with the champion's version in the place of its
    name, and the hash of the files there; "" for a model of the hub.

    Raises RequestError for adapters on a network that is not trained yet."""
    init_from = model.init_from
    digests_of_versions = dict[str, str]()
    if init_from == "champion" and champion is None:
        init_from = "base"
    elif init_from == "champion" and champion is not None:
        # the work that made the champion starts where the champion did
        init_from = champion.init_from if champion.work_key == work_key else champion.version
        digests_of_versions[champion.version] = champion.digest
        digests_of_versions[champion.beaten] = champion.beaten_digest
    if init_from == "base" and model.lora is not None and isinstance(model.source, dict):
        message = "adapters need trained weights: model.source describes a new network"
        if model.init_from == "champion":
            message += ", and there is no champion yet"
        fix = "name a pretrained model as model.source, or train without model.lora first"
        raise RequestError(message, where="model.lora", fix=fix)
    init_digest = digests_of_versions.get(init_from) or content_behind(init_from)
    return init_from, init_digest


def _to_beat(champion: ChampionState | None, run_key: str, train: TrainSpec) -> tuple[str, str]:
    """The version that a candidate is judged against, and its digest; "" where there is none."""
    if champion is None:
        return "", ""
    was_cut_short = champion.budget_hours not in ("", str(train.budget_hours))
    if champion.run_key == run_key and not was_cut_short:
        # the champion's own work again: it is
        # judged by the one that it beat back then
        return champion.beaten, champion.beaten_digest
    return champion.version, champion.digest


def _model_contents(model: ModelSpec) -> dict[str, str]:
    """The hash of what lies behind each name in `model`; "" for names of the hub."""
    names = {"source": model.source, "tokenizer": model.tokenizer}
    if model.teacher:
        names["teacher"] = model.teacher.source
    contents_by_name = dict[str, str]()
    for key, name in names.items():
        if isinstance(name, str):
            contents_by_name[f"{key}_content"] = content_behind(name)
    return contents_by_name


def _identifying(train: TrainSpec) -> dict[str, object]:
    """The settings of a training that shape its weights."""
    settings = train.model_dump(mode="json", exclude=_TRAIN_ASIDE)
    engine = engine_of(train.engine)
    if engine and train.engine_config:
        config = dict(train.engine_config)
        for key in engine.aside:
            config.pop(key, None)
        settings["engine_config"] = config or None
    return settings


def _own_script(words: str) -> list[object]:
    """Hashes of the script or module and of files
    among its arguments; and the arguments."""
    script, *arguments = shlex.split(words)
    if script != "-m":
        code: list[object] = [*own_files(Path(script))]
    else:
        source = {"train.entrypoint": as_import(arguments[0])} if arguments else {}
        code = ["-m", *_hashes([], source, own_folders())]
    file_hashes = list[str]()
    for argument in arguments:
        _, _, value = argument.rpartition("=")  # of `--config=FILE`
        path = Path(value)
        with contextlib.suppress(OSError):  # a text that is too long for a name
            if path.is_file():
                file_hashes.append(file_sha256(path))
    return [*code, *arguments, *file_hashes]


def own_files(path: Path) -> list[list[str]]:
    """A file of the user's and the user's modules that it imports,
    as `contents` gives them."""
    return _hashes([path], {}, (*folders_of(path.absolute()), *own_folders()))


def _hashes(files: list[Path], sources: dict[str, str], folders: Sequence[Path]) -> list[list[str]]:
    try:
        return contents(closure(files, sources, folders, everywhere=True))
    except OSError as error:
        raise RequestError(f"cannot read {error.filename}: {error}", fix="check the path") from None


def content_in_window(data: DataSpec, modality: str) -> tuple[Window | None, str, tuple[int, int]]:
    """The resolved window, the hash of its content, and the number of files and bytes."""
    if data.window is None or any("{window" in part.source for part in data.parts):
        return _content_of_files(data, modality)
    return _content_by_time(data, data.window, modality)


def _content_of_files(data: DataSpec, modality: str) -> tuple[Window | None, str, tuple[int, int]]:
    """As `content_in_window`, of all that the sources hold,
    or of partitions in the window."""
    window = None
    dated = [FileSource(part, modality).files for part in data.parts if part.window]
    if dated:
        assert data.window is not None
        newest_times = [files.newest for files in dated if files.newest is not None]
        window = resolve(data.window, max(newest_times, default=None), dated[0].unit)
    sources = [open_source(part, modality, window) for part in data.parts]
    file_count = 0
    size_bytes = 0
    for source in sources:
        source_files, source_bytes = source.extent()
        file_count += source_files
        size_bytes += source_bytes
    hashes = []
    for source, part in zip(sources, data.parts, strict=True):
        hashes.append(_content(source, part, modality))
    return window, combined(hashes), (file_count, size_bytes)


def _content_by_time(
    data: DataSpec, spec: WindowSpec, modality: str
) -> tuple[Window, str, tuple[int, int]]:
    """As `content_in_window`, where a column tells which records lie in it."""
    source = open_source(data, modality)
    if data.columns.time is None:
        raise RequestError(
            "a window needs to know a record's time",
            where="data.window",
            fix="set data.columns.time",
        )
    span = Span()
    findings = Findings()
    pieces, _ = _map_pieces(source, data, modality, "look_at_times")
    for piece in pieces:
        span.join(Span(*piece["span"]))
        findings.include(Findings.of_json(piece["findings"]), 0)
    if not span.rows:
        findings.raise_if_any()
        raise DataError("the source holds no records", where=data.source, fix="check data.source")
    newest = to_datetime(span.newest) if span.newest is not None else None
    window = resolve(spec, newest)
    # of the records in the window, however they are divided into files
    piece_hashes, _ = _map_pieces(source, data, modality, "hash_window", window)
    hashes = [piece_hash for piece_hash in piece_hashes if piece_hash]
    if not hashes:
        raise DataError(
            f"the window {window} selects none of {span.rows:,} records",
            where=f"they span {span}",
            fix="move data.window.end, or lower data.window.offset",
        )
    return window, combined(hashes), source.extent()


def _content(source: Source, data: DataSpec, modality: str) -> str:
    """The fingerprint of a source, and of the files that its rows name."""
    if not isinstance(source, FileSource) or not source.names_files:
        return source.fingerprint()
    named, contents = _map_pieces(source, data, modality, "hash_named")
    return source.fingerprint_of(contents, combined(named))


def _map_pieces(
    source: Source, data: DataSpec, modality: str, function: str, window: Window | None = None
) -> tuple[list[Any], Mapping[str, str]]:
    """What a function below returns for each piece of a source;
    and the hashes of its files."""
    executor = executor_of(data, PieceStore(""), source.extent()[1] // WORTH_BYTES)
    pieces, contents, location = cut(source, data, executor)
    order = {
        "data": data.model_dump(mode="json"),
        "modality": modality,
        "window": str(window or ""),
        **location,
    }
    items = [piece.item() for piece in pieces] or [dict[str, object]()]
    return executor.map(f"{__name__}:{function}", order, items, ""), contents


def _open(order: Order, item: Mapping[str, Any]) -> tuple[DataSpec, Any]:
    data = DataSpec.model_validate(order["data"])
    return data, source_of(order, item, data, order["modality"])


def look_at_times(order: Order, item: Mapping[str, Any]) -> dict[str, object]:
    """The span of the times of a piece; what is unfit is for `ingest` to refuse."""
    data, source = _open(order, item)
    findings = Findings()
    span = Span()
    column = str(data.columns.time)
    for raw in source.read({column: "scalar"}, findings):
        times, has_time = read_times(raw, column, findings)
        span.include(times[has_time])
    return {"span": dataclasses.astuple(span), "findings": findings.to_json()}


def hash_window(order: Order, item: Mapping[str, Any]) -> str:
    """The hash of the records of a piece in the window; "" where there is none."""
    data, source = _open(order, item)
    window = parse_window(order["window"])
    columns = wanted_columns(data, order["modality"])
    findings = Findings()
    running = RecordsHash(columns)
    assert window is not None
    for raw in source.read(columns, findings):
        times, has_time = read_times(raw, str(data.columns.time), findings)
        running.update(raw.filter(has_time & inside(times, window)))
    return running.digest() if running.rows else ""


def hash_named(order: Order, item: Mapping[str, Any]) -> str:
    """The hash of the files that rows of a piece name."""
    _, source = _open(order, item)
    return str(source.hash_named())


def content_behind(name: str) -> str:
    """Hash of the files behind a URI or an absolute path; "" for names of the hub."""
    path = Path(name).expanduser()
    if "://" in name:
        return content_hash(name)
    if path.is_absolute() and path.exists():
        return content_hash(str(path))
    return ""
