"""Contradictions between fields of a spec that each are fine alone. Pure arithmetic and names, no
I/O; what is secret in the environment is asked for, to keep it out."""

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from string import Formatter
from urllib.parse import unquote, urlsplit

from rekindle.engines import engine_of
from rekindle.errors import did_you_mean
from rekindle.masking import DATABASE_LOGIN, LOOKS_SECRET, masked, tells
from rekindle.records import (
    LOWER_IS_BETTER,
    METRICS,
    NUMBER_METRICS,
    TAG_METRICS,
    TOKEN_METRICS,
)  # fmt: skip
from rekindle.spec import layout, rates, schedule
from rekindle.spec.deploy import MonitorSpec
from rekindle.spec.model import BUILTIN_TASKS, ENTRYPOINT_WORDS, DataSpec, Spec, TrainSpec
from rekindle.spec.yaml_document import KeyPath

Finding = tuple[KeyPath, str, str]

NUMERIC = "text_regression"
CLASSLESS = {"causal_lm": "a language model", NUMERIC: "a regression"}
RESERVED = ("id", "hash", "split", "label", "text", "words", "image", "document")

_PASSWORD = re.compile(rf"://[^/?#@]*:[^/?#@]+@|{DATABASE_LOGIN}")
_HTTP_USER = re.compile(r"https?://[^/?#@]+@", re.IGNORECASE)
# name=value of a query, a fragment, or a part of a path; a value may hold such pairs itself
_PARAMETERS = re.compile(r"(?<=[?&#;=])([\w.-]+)=(?=[^&#;])")
_KEYS = frozenset({"sig", "auth", "key", "pwd", "pass", "accountkey", "account_key"})
_ASSIGNED = re.compile(r"(?i)\b(?:password|passwd|pwd)\s?=\s?[^\s$&]")  # of libpq and ODBC


def check(spec: Spec) -> list[Finding]:
    """All contradictions, each as (key path, what, fix)."""
    return [finding for rule in _RULES for finding in rule(spec)]


def _task(spec: Spec) -> Iterator[Finding]:
    if not spec.task:
        if spec.pipeline is None:
            yield ("task",), "is missing", f"add `task:`, one of {', '.join(BUILTIN_TASKS)}"
    elif ":" not in spec.task and spec.task not in BUILTIN_TASKS:
        fix = did_you_mean(spec.task, BUILTIN_TASKS, cutoff=0.3)
        fix = fix or f"one of {', '.join(BUILTIN_TASKS)}, or path.py:Class"
        yield ("task",), f"there is no task `{spec.task}`", fix


def _pipeline(spec: Spec) -> Iterator[Finding]:
    if spec.data is None and spec.pipeline is None:
        yield ("data",), "is missing", "add `data: {source: ...}`"
    for field in ("arguments", "receives"):
        if getattr(spec, field) and spec.pipeline is None:
            what = f"`{field}` is for your own pipeline, and there is no `pipeline`"
            yield (field,), what, "remove it, or set `pipeline`"
    for name in spec.arguments if spec.receives != "all" else ():
        if name in spec.receives:
            yield ("arguments", name), "`receives` names it, too", "keep one of them"


def _data(spec: Spec) -> Iterator[Finding]:
    if (data := spec.data) is None:
        return
    total = data.split.train + data.split.validation + data.split.test
    if data.split.by != "source" and abs(total - 1) > 1e-6:
        what = f"train + validation + test is {total:g}, not 1"
        yield ("data", "split"), what, "make the shares add up to 1"
    if data.split.by == "time" and any(part.columns.time is None for part in data.parts):
        what = "a split by time needs to know the time"
        yield ("data", "split", "by"), what, "set data.columns.time"
    yield from _sources(spec, data)
    partitioned = any("{window" in part.source for part in data.parts)
    if data.window and not partitioned and (data.sources or data.columns.time is None):
        fix = "set data.columns.time, or put {window} into data.source"
        fix = "put {window} into one of data.sources" if data.sources else fix
        yield ("data", "window"), "a window needs to know a record's time", fix
    if partitioned and not data.window:
        what = "has a {window} but there is no data.window"
        yield ("data", "source"), what, "add data.window: {size: ...}"
    for name in set(data.slices).intersection(RESERVED):
        what = f"`{name}` cannot be a slice: the examples have a column of this name"
        yield ("data", "slices"), what, "rename the column"
    yield from _machines(spec, data)
    if len(set(data.labels)) != len(data.labels):
        yield ("data", "labels"), "duplicate label", "name each class once"
    if len(data.labels) == 1:
        yield ("data", "labels"), "one class leaves nothing to learn", "name at least two, or none"
    if "\x00" in data.named or "\n" in data.named:
        yield ("data", "source"), "holds a control character", "write a plain path or URI"
    yield from _rows(spec, data)
    yield from _documents(spec, data)
    yield from _target(spec, data)


def _rows(spec: Spec, data: DataSpec) -> Iterator[Finding]:
    """How rows are read, and which of them are left out."""
    by = data.split.by
    if data.columns.group is not None and by != "hash":
        what = f"a split by {by} does not keep groups together"
        yield ("data", "columns", "group"), what, "remove it, or set data.split.by: hash"
    if data.split.gap is not None and by != "time":
        what = f"a split by {by} knows no time to leave out"
        yield ("data", "split", "gap"), what, "remove it, or set data.split.by: time"
    if data.split.salt and by != "hash":
        what = f"a split by {by} hashes nothing"
        yield ("data", "split", "salt"), what, "remove it, or set data.split.by: hash"
    if data.duplicates in ("folded", "near") and spec.task == "image_classification":
        yield ("data", "duplicates"), "images have neither case nor white space", "use exact"
    if data.delimiter != "auto" and data.format not in ("auto", "csv"):
        what = f"{data.format} has nothing between its columns"
        yield ("data", "delimiter"), what, "remove it, or set data.format: csv"
    if data.encoding != "utf-8" and data.format not in ("auto", "csv", "jsonl"):
        yield ("data", "encoding"), f"{data.format} is not text", "remove it"
    default = type(data).model_fields["max_bad_rows"].default
    if data.on_bad_rows == "refuse" and data.max_bad_rows != default:
        what = "no bad row is dropped, so there is no limit for them"
        yield ("data", "max_bad_rows"), what, "set data.on_bad_rows: drop, or remove it"


def _sources(spec: Spec, data: DataSpec) -> Iterator[Finding]:
    if bool(data.source) == bool(data.sources):
        what = "has both `source` and `sources`" if data.source else "names no source"
        yield ("data", "source"), what, "set data.source, or data.sources for a mixture"
    weights = [part.weight for part in data.sources if part.weight is not None]
    if weights and len(weights) < len(data.sources):
        what = "some of the sources have a weight, and some have none"
        yield ("data", "sources"), what, "give each source a weight, or none"
    if data.temperature and (weights or not data.sources):
        what = "shares follow from it where data.sources have no weights"
        yield ("data", "temperature"), what, "remove it, or the weights"
    if (weights or data.temperature) and spec.train.sampling == "balanced":
        what = "draws by class, and the sources are drawn by weight"
        yield ("train", "sampling"), what, "remove it, or the weights of data.sources"
    if (weights or data.temperature) and (spec.train.entrypoint or spec.train.engine == "trainer"):
        what = "draws rows itself, and not by the weights of sources"
        yield ("data", "sources"), f"what trains {what}", "remove the weights or data.temperature"


def _machines(spec: Spec, data: DataSpec) -> Iterator[Finding]:
    if data.disk_gb and (spec.train.entrypoint or spec.train.engine == "trainer"):
        what = "reads rows of all shards at any time, so a node has to have them all"
        who = "train.entrypoint" if spec.train.entrypoint else "train.engine: trainer"
        yield ("data", "disk_gb"), f"{who} {what}", "remove it"
    elif data.disk_gb and data.disk_gb < 3 * data.shuffle_gb:
        what = f"has to hold three windows of data.shuffle_gb ({data.shuffle_gb:g} GB)"
        yield ("data", "disk_gb"), what, "raise it, or lower data.shuffle_gb"
    if data.executor == "local" and data.executor_address:
        what = "names a cluster, and `local` has none"
        yield ("data", "executor_address"), what, "set data.executor: ray, or spark"
    if data.executor != "local" and data.nodes > 1:
        what = f"{data.executor} has machines of its own"
        yield ("data", "nodes"), what, "leave data.nodes out, or data.executor"


def _documents(spec: Spec, data: DataSpec) -> Iterator[Finding]:
    """Which columns make a text for a language model."""
    columns = data.columns
    forms = ("messages", "prompt", "completion")
    given = [name for name in forms if getattr(columns, name) is not None]
    path = ("data", "columns")
    if given and spec.task in BUILTIN_TASKS and spec.task != "causal_lm":
        what = f"`{given[0]}` is used only by causal_lm"
        yield (*path, given[0]), what, "remove it, or set task: causal_lm"
    elif "messages" in given and len(given) > 1:
        yield (*path, given[1]), "the chat in `messages` holds prompts and answers", "keep one form"
    elif columns.input is not None and "prompt" not in given:
        yield (*path, "input"), "there is no prompt that it goes with", "set data.columns.prompt"
    elif len(given) == 1 and given != ["messages"]:
        other = "completion" if given == ["prompt"] else "prompt"
        yield (*path, given[0]), f"needs `{other}` beside it", f"set data.columns.{other}"
    if spec.task == "causal_lm" and data.labels:
        yield ("data", "labels"), "a language model has no classes", "remove them"


def _target(spec: Spec, data: DataSpec) -> Iterator[Finding]:
    """The number that a regression predicts, and what only models with classes know."""
    numeric, place = spec.task == NUMERIC, ("data", "columns", "target")
    for part in data.parts if spec.task in BUILTIN_TASKS else ():
        if part.columns.target is not None and not numeric:
            yield place, f"`target` is used only by {NUMERIC}", "remove it, or change the task"
        elif part.columns.target is None and numeric:
            fix = "name one here, or for each of data.sources"
            yield place, f"no column of {part.named} holds the number to predict", fix
    gate = spec.evaluate.gate
    unset = gate.mode == "noninferiority" and "margin" not in gate.model_fields_set
    if unset and gate.metric in ("rmse", "mae"):
        what = (
            f"{gate.metric} has the target's unit, in which {gate.margin:g} may be all or nothing"
        )
        yield ("evaluate", "gate", "margin"), what, "name a margin, or compare r2"
    for path, given in (
        (("data", "labels"), data.labels),
        (("train", "label_smoothing"), spec.train.label_smoothing),
        (("model", "teacher"), spec.model.teacher),
        (("deploy", "precision"), spec.deploy.precision),
        (("deploy", "max_disagreement"), spec.deploy.max_disagreement),
    ):
        if numeric and given:
            yield path, "a regression has no classes", "remove it"


def _train(spec: Spec) -> Iterator[Finding]:
    train = spec.train
    if train.epochs is not None and train.steps is not None:
        yield ("train", "steps"), "epochs and steps both say how long to train", "keep one of them"
    size, total = train.micro_batch_size, train.global_batch_size
    if isinstance(size, int) and (size < 1 or total % size):
        what = f"{size} does not divide the global batch, which is {total}"
        divisors = (d for d in range(1, total + 1) if total % d == 0)
        nearest = min(divisors, key=lambda divisor: abs(divisor - size))
        yield ("train", "micro_batch_size"), what, f"use {nearest}, or auto"
    if spec.pipeline is None:
        for field, what, fix in rates.findings(spec.task, spec.model, train):
            yield ("train", field), what, fix
    yield from _rate(train)
    yield from _objective(spec)
    if spec.resources.spot and train.checkpoint.every is None:
        what = "a spot machine can be reclaimed at any time, and nothing would have been saved"
        yield ("resources", "spot"), what, "set train.checkpoint.every, or spot: false"


def _engine(spec: Spec) -> Iterator[Finding]:
    """What computes the updates, and its own settings; what starts the ranks."""
    train, engine = spec.train, engine_of(spec.train.engine)
    if engine is None:
        if train.engine_config is not None:
            what = "rekindle's own engine has no settings beside train"
            yield ("train", "engine_config"), what, "remove it, or set train.engine"
    elif train.entrypoint:
        what = "your own script starts its engine itself"
        yield ("train", "engine"), what, "remove it, or train.entrypoint"
    else:
        yield from engine.refuse(spec)


def _optimizer(spec: Spec) -> Iterator[Finding]:
    """What of the network the optimizer cannot update, and what the layout must not divide."""
    train = spec.train
    if spec.task == "image_classification" and train.optimizer != "adamw":
        what = f"{train.optimizer} updates matrices of transformer blocks, and this task has none"
        yield ("train", "optimizer"), what, "remove it"
    if train.layout != "auto":
        divided = layout.whole(train.layout, train.optimizer)
        for problem in (*divided, *layout.undivided(train.layout, spec.model.lora)):
            yield tuple(problem.where.split(".")), problem.what, problem.fix


def _quantised(spec: Spec) -> Iterator[Finding]:
    """What does not train on a base in 4 bits."""
    train, lora = spec.train, spec.model.lora
    if lora is None or lora.base == "full":
        return
    if ":" in spec.task or train.entrypoint or train.engine != "rekindle":
        what = "a base in 4 bits is for rekindle's own tasks and engine"
        yield ("model", "lora", "base"), what, "remove it"
    for field, refused, fix in (
        ("weights", train.weights != "fp32", "fp32: adapters are trained in full precision"),
        ("precision", train.precision in ("fp16", "fp8", "fp64"), "bf16 or fp32"),
        ("compile", train.compile, "remove it"),
    ):
        if refused:
            yield ("train", field), f"no test has trained it on a base in 4 bits ({field})", fix


def _entrypoint(spec: Spec) -> Iterator[Finding]:
    """Words of the user's own script that cannot be filled in."""
    path, given = ("train", "entrypoint"), spec.train.entrypoint
    if given is None:
        return
    try:
        words = shlex.split(given)
        fields = [field for word in words for field in Formatter().parse(word)]
    except ValueError as error:
        fix = "quote it as for a shell; braces are {{ and }}"
        yield path, f"cannot be read as words: {error}", fix
        return
    if not words:
        yield path, "names no script", "name one, such as train.py --data {data}"
    known = [f"{{{name}}}" for name in ENTRYPOINT_WORDS]
    for _, name, form, _ in fields:
        if name is not None and (name not in ENTRYPOINT_WORDS or "{" in (form or "")):
            unknown = f"{{{name}{':' if form else ''}{form}}}"
            fix = f"{did_you_mean(unknown, known)} there are {', '.join(known)}".strip()
            yield path, f"unknown placeholder `{unknown}`", f"{fix}; braces are {{{{ and }}}}"


def _objective(spec: Spec) -> Iterator[Finding]:
    """What is trained for, and which weights are kept."""
    train, data = spec.train, spec.data
    if train.sampling == "balanced" and spec.task in (*CLASSLESS, "token_classification"):
        yield ("train", "sampling"), f"an example of {spec.task} has no class", "remove it"
    if train.sampling == train.class_weights == "balanced":
        what = "together with balanced weights, rare classes count too much"
        yield ("train", "sampling"), what, "keep one of them"
    if train.class_weights is not None and spec.task in CLASSLESS:
        yield ("train", "class_weights"), f"{CLASSLESS[spec.task]} has no classes", "remove it"
    path = "early_stopping_patience" if train.early_stopping_patience is not None else "checkpoint"
    if train.exports_best and train.entrypoint:
        yield ("train", path), "your own script decides what it saves", "remove it"
    elif train.exports_best and data and not data.split.validation and data.split.by != "source":
        what = "without a validation split no weights are the best"
        yield ("train", path), what, "set data.split.validation, or remove it"
    if train.budget_hours is not None and train.entrypoint:
        what, fix = "your own script decides when it ends", "remove it, or set max_hours"
        yield ("train", "budget_hours"), what, fix
    if data is not None and data.labels:
        yield from unknown_classes(train, data.labels)


def unknown_classes(train: TrainSpec, labels: Sequence[str]) -> Iterator[Finding]:
    """Classes that have a weight and are not among the `labels` that there are."""
    for label in train.class_weights if isinstance(train.class_weights, dict) else ():
        if label not in labels:
            fix = did_you_mean(label, labels) or f"one of {', '.join(labels[:20])}"
            yield ("train", "class_weights", label), f"there is no class `{label}`", fix


def _rate(train: TrainSpec) -> Iterator[Finding]:
    """What of the schedule of the learning rate would be without effect."""
    if train.lr_schedule == "wsd":
        if train.warmup + train.decay > 1:
            what = f"warm-up and decay take {train.warmup + train.decay:g} of the steps"
            yield ("train", "decay"), what, "make warmup + decay at most 1"
    elif train.decay != TrainSpec().decay:
        what = f"the schedule `{train.lr_schedule}` has no decay of its own"
        yield ("train", "decay"), what, "set lr_schedule: wsd, or remove it"
    if train.lr_schedule == "constant" and train.min_lr_ratio:
        fix = "set lr_schedule to linear, cosine or wsd, or remove it"
        yield ("train", "min_lr_ratio"), "a constant rate does not fall", fix


def _gate(spec: Spec) -> Iterator[Finding]:
    other = {
        "causal_lm": TOKEN_METRICS, "token_classification": TAG_METRICS,
        "text_regression": NUMBER_METRICS,
    }  # fmt: skip
    known = other.get(spec.task, METRICS)
    cluster = spec.evaluate.gate.cluster
    if cluster is not None and spec.data is not None and cluster not in spec.data.slices:
        what = f"`{cluster}` is not among data.slices, which are kept with the scores"
        yield ("evaluate", "gate", "cluster"), what, "add it there"
    fix = f"use one of {', '.join(known)}"
    compared = spec.evaluate.gate.metric
    if spec.task in BUILTIN_TASKS and compared is not None and compared not in known:
        yield ("evaluate", "gate", "metric"), f"{spec.task} has no {compared}", fix
    if spec.evaluate.slice_floor and spec.data and not {*spec.data.slices} - {cluster}:
        instead = "name columns in data.slices, or use evaluate.floor"
        yield ("evaluate", "slice_floor"), "there are no slices", instead
    for field in ("floor", "slice_floor"):
        for metric, floor in getattr(spec.evaluate, field).items():
            place = "evaluate", field, metric
            if spec.task in BUILTIN_TASKS and metric not in known:
                yield place, f"{spec.task} has no {metric}", fix
            lowest = -math.inf if metric == "r2" else 0
            if metric not in LOWER_IS_BETTER and not lowest <= floor <= 1:
                yield place, f"{floor:g} cannot be reached: it lies in 0 to 1", "lower it"
            if metric in LOWER_IS_BETTER and not 0 <= floor < math.inf:
                if floor < 0:
                    yield place, f"{floor:g} cannot be reached: it is never negative", "raise it"
                else:
                    yield place, f"{floor:g} is no limit", "name a number"


def _answers(spec: Spec) -> Iterator[Finding]:
    """What only models that answer with classes can be asked for."""
    if spec.task in CLASSLESS or spec.data is None:
        what = f"{CLASSLESS.get(spec.task)} has no classes to predict"
        what = what if spec.data else "there is no `data`"
        if spec.evaluate.must_pass is not None:
            yield ("evaluate", "must_pass"), what, "remove it; see evaluate.floor"
        if spec.evaluate.gate.max_churn is not None:
            yield ("evaluate", "gate", "max_churn"), what, "remove it; see evaluate.floor"


def _published(spec: Spec) -> Iterator[Finding]:
    for name in spec.registration.publish:
        section = getattr(spec.platforms, name)
        lacking = {problem.where: (problem.what, problem.fix) for problem in section.missing()}
        for field in ("artifact_root", "image"):
            where, what = f"{section.PATH}.{field}", f"register.publish needs it for {name}"
            if not getattr(section, field):
                lacking.setdefault(where, (what, f"set {where}"))
        for where, (what, fix) in lacking.items():
            yield tuple(where.split(".")), what, fix
    if spec.registration.publish and spec.data is None:
        yield ("register", "publish"), "without data, columns of inputs are unknown", "name data"


def _schedule(spec: Spec) -> Iterator[Finding]:
    if spec.triggers is not None and spec.data is None:
        yield ("triggers",), "without data nothing can be watched", "set data.source"
    if spec.schedule is not None:
        for field, what, fix in schedule.findings(spec.schedule):
            yield ("schedule", field), what, fix


def _monitored(spec: Spec) -> Iterator[Finding]:
    monitor, triggers, data = spec.monitor, spec.triggers, spec.data
    if triggers is not None and triggers.watches and monitor is None:
        field = "drift" if triggers.drift else "live_drop"
        yield ("triggers", field), "nothing is monitored", "add the section `monitor: {}`"
    labels = monitor.labels if monitor else ""
    if monitor and triggers is not None and triggers.live_drop is not None and not labels:
        yield ("triggers", "live_drop"), "no labels arrive", "set monitor.labels"
    if labels and data is not None and not data.columns.key:
        fix = "name the column of ids in data.columns.key, and send it with each instance"
        yield ("monitor", "labels"), "labels are joined by a key, and the data have none", fix


def _secrets(spec: Spec) -> Iterator[Finding]:
    monitor = spec.monitor or MonitorSpec()
    places: tuple[tuple[KeyPath, str], ...] = (
        (("platforms", "kubeflow", "host"), spec.platforms.kubeflow.host),
        *((("data", "source"), part.source) for part in (spec.data.parts if spec.data else ())),
        (("monitor", "log"), monitor.log),
        (("monitor", "labels"), monitor.labels),
        (("register", "tracking_uri"), spec.registration.tracking_uri),
        (("model", "init_from"), spec.model.init_from),
        (("model", "source"), spec.model.source if isinstance(spec.model.source, str) else ""),
    )
    for path, uri in places:
        try:
            urlsplit(uri)
        except ValueError:
            yield path, f"{uri!r} is not a URI", "check brackets and port"
    texts = list(_texts(spec.model_dump(mode="json"), ()))
    everything = "\n".join(text for _, text in texts)
    suspicious = masked(everything) != everything
    for path, text in texts:
        fix = "name an environment variable: platforms.local.secrets: {HF_TOKEN: env:HF_TOKEN}"
        if what := _secret_in_uri(text):
            yield path, f"{what}, and a config is no place for one", "put it into the environment"
        elif LOOKS_SECRET.search(text) or _ASSIGNED.search(text):
            yield path, "looks like a secret token, and a config is no place for one", fix
        elif "secrets" in path:
            continue  # a reference, which may well be called what a variable says
        elif suspicious and masked(text) != text:
            yield path, "holds what is secret in this environment, and would be written down", fix


def _secret_in_uri(text: str) -> str:
    """What lets a reader of the URIs in a text in; a name does not, but over HTTP."""
    for word in text.split():
        if "://" not in word and not word.startswith("hub:"):
            continue
        if _PASSWORD.search(word):
            return "holds a password"
        if _HTTP_USER.search(word):
            return "names a user or a token before the host"
        for name in _PARAMETERS.findall(unquote(unquote(unquote(word)))):
            if tells(name) or name.lower() in _KEYS or name.lower().endswith("signature"):
                return f"holds a secret, `{name}`"
    return ""


def _texts(value: object, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from _texts(child, (*path, key))
    elif isinstance(value, list):
        for i, child in enumerate(value):
            yield from _texts(child, (*path, i))


_RULES = (
    _task, _pipeline, _data, _train, _engine, _optimizer, _quantised, _entrypoint, _gate, _answers,
    _published, _schedule, _monitored, _secrets,
)  # fmt: skip
