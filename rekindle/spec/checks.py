"""Contradictions between fields of a spec that each are fine alone. Pure arithmetic and
names, no I/O; what is secret in the environment is asked for, to keep it out."""

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from string import Formatter
from urllib.parse import unquote, urlsplit

from rekindle.engines import engine_of
from rekindle.errors import Problem, did_you_mean
from rekindle.masking import DATABASE_LOGIN, LOOKS_SECRET, masked, tells
from rekindle.objectives import LOWER_IS_BETTER, LOWEST
from rekindle.spec import layout, rates, schedule
from rekindle.spec.deploy import MonitorSpec
from rekindle.spec.installed import platform_names
from rekindle.spec.model import BUILTIN_TASKS, ENTRYPOINT_WORDS, DataSpec, Spec, TrainSpec
from rekindle.spec.tasks import BUILT_IN_TASKS, objective_of_task
from rekindle.spec.yaml_document import KeyPath

Finding = tuple[KeyPath, str, str]
_NUMERIC = [name for name, task in BUILT_IN_TASKS.items() if task.objective.label == "number"]

_NO_TIME = "a window needs to know a record's time"
_ONE_SOURCE = "set data.source, or data.sources for a mixture"
# columns of examples; a test compares the last four with the modalities, which stand above spec
RESERVED = ("id", "hash", "split", "label", "text", "words", "image", "document")

_PASSWORD = re.compile(rf"://[^/?#@]*:[^/?#@]+@|{DATABASE_LOGIN}")
_HTTP_USER = re.compile(r"https?://[^/?#@]+@", re.IGNORECASE)
# name=value of a query, a fragment, or a part of a path; a value may hold such pairs itself
_PARAMETERS = re.compile(r"(?<=[?&#;=])([\w.-]+)=(?=[^&#;])")
_KEYS = frozenset({"sig", "auth", "key", "pwd", "pass", "accountkey", "account_key"})
_ASSIGNED = re.compile(r"(?i)\b(?:password|passwd|pwd)\s?=\s?[^\s$&]")  # of libpq and ODBC


def check(spec: Spec) -> list[Finding]:
    """All contradictions, each as (key path, what, fix)."""
    findings: list[Finding] = []
    for rule in _RULES:
        findings += rule(spec)
    return findings


def _finding(where: str, what: str, fix: str) -> Finding:
    """What is wrong with the field at `where`, such as `data.split.by`."""
    return tuple(where.split(".")), what, fix


def _task(spec: Spec) -> Iterator[Finding]:
    if not spec.task:
        if spec.pipeline is None:
            yield _finding("task", "is missing", f"add `task:`, one of {', '.join(BUILTIN_TASKS)}")
    elif ":" not in spec.task and spec.task not in BUILTIN_TASKS:
        fix = did_you_mean(spec.task, BUILTIN_TASKS, cutoff=0.3)
        fix = fix or f"one of {', '.join(BUILTIN_TASKS)}, or path.py:Class"
        yield _finding("task", f"there is no task `{spec.task}`", fix)


def _pipeline(spec: Spec) -> Iterator[Finding]:
    if spec.data is None and spec.pipeline is None:
        yield _finding("data", "is missing", "add `data: {source: ...}`")
    for field in ("arguments", "receives"):
        if getattr(spec, field) and spec.pipeline is None:
            message = f"`{field}` is for your own pipeline, and there is no `pipeline`"
            yield _finding(field, message, "remove it, or set `pipeline`")
    if spec.receives != "all":
        for name in spec.arguments:
            if name in spec.receives:
                yield ("arguments", name), "`receives` names it, too", "keep one of them"


def _data(spec: Spec) -> Iterator[Finding]:
    data = spec.data
    if data is None:
        return
    yield from _splits(data)
    yield from _sources(spec, data)
    yield from _windows(data)
    for name in set(data.slices).intersection(RESERVED):
        message = f"`{name}` cannot be a slice: the examples have a column of this name"
        yield _finding("data.slices", message, "rename the column")
    yield from _machines(spec, data)
    if len(set(data.labels)) != len(data.labels):
        yield _finding("data.labels", "duplicate label", "name each class once")
    if len(data.labels) == 1:
        message = "one class leaves nothing to learn"
        yield _finding("data.labels", message, "name at least two, or none")
    if "\x00" in data.named or "\n" in data.named:
        yield _finding("data.source", "holds a control character", "write a plain path or URI")
    yield from _rows(spec, data)
    yield from _documents(spec, data)
    yield from _target(spec, data)


def _splits(data: DataSpec) -> Iterator[Finding]:
    split = data.split
    total = split.train + split.validation + split.test
    if split.by != "source" and abs(total - 1) > 1e-6:
        message = f"train + validation + test is {total:g}, not 1"
        yield _finding("data.split", message, "make the shares add up to 1")
    has_times = all(part.columns.time is not None for part in data.parts)
    if split.by == "time" and not has_times:
        message = "a split by time needs to know the time"
        yield _finding("data.split.by", message, "set data.columns.time")


def _windows(data: DataSpec) -> Iterator[Finding]:
    """Whether a window has something to go by: a record's time, or partitions of the source."""
    is_partitioned = any("{window" in part.source for part in data.parts)
    if data.window and not is_partitioned:
        if data.sources:
            fix = "put {window} into one of data.sources"
            yield _finding("data.window", _NO_TIME, fix)
        elif data.columns.time is None:
            fix = "set data.columns.time, or put {window} into data.source"
            yield _finding("data.window", _NO_TIME, fix)
    if is_partitioned and not data.window:
        message = "has a {window} but there is no data.window"
        yield _finding("data.source", message, "add data.window: {size: ...}")


def _rows(spec: Spec, data: DataSpec) -> Iterator[Finding]:
    """How rows are read, and which of them are left out."""
    by = data.split.by
    if data.columns.group is not None and by != "hash":
        message = f"a split by {by} does not keep groups together"
        yield _finding("data.columns.group", message, "remove it, or set data.split.by: hash")
    if data.split.gap is not None and by != "time":
        message = f"a split by {by} knows no time to leave out"
        yield _finding("data.split.gap", message, "remove it, or set data.split.by: time")
    if data.split.salt and by != "hash":
        message = f"a split by {by} hashes nothing"
        yield _finding("data.split.salt", message, "remove it, or set data.split.by: hash")
    if data.duplicates in ("folded", "near") and spec.task == "image_classification":
        yield _finding("data.duplicates", "images have neither case nor white space", "use exact")
    if data.delimiter != "auto" and data.format not in ("auto", "csv"):
        message = f"{data.format} has nothing between its columns"
        yield _finding("data.delimiter", message, "remove it, or set data.format: csv")
    if data.encoding != "utf-8" and data.format not in ("auto", "csv", "jsonl"):
        yield _finding("data.encoding", f"{data.format} is not text", "remove it")
    default_limit = type(data).model_fields["max_bad_rows"].default
    if data.on_bad_rows == "refuse" and data.max_bad_rows != default_limit:
        message = "no bad row is dropped, so there is no limit for them"
        yield _finding("data.max_bad_rows", message, "set data.on_bad_rows: drop, or remove it")


def _sources(spec: Spec, data: DataSpec) -> Iterator[Finding]:
    if data.source and data.sources:
        yield _finding("data.source", "has both `source` and `sources`", _ONE_SOURCE)
    if not data.source and not data.sources:
        yield _finding("data.source", "names no source", _ONE_SOURCE)
    weights = [part.weight for part in data.sources if part.weight is not None]
    if weights and len(weights) < len(data.sources):
        message = "some of the sources have a weight, and some have none"
        yield _finding("data.sources", message, "give each source a weight, or none")
    if data.temperature and (weights or not data.sources):
        message = "shares follow from it where data.sources have no weights"
        yield _finding("data.temperature", message, "remove it, or the weights")
    train = spec.train
    is_drawn = bool(weights or data.temperature)
    if is_drawn and train.sampling == "balanced":
        message = "draws by class, and the sources are drawn by weight"
        yield _finding("train.sampling", message, "remove it, or the weights of data.sources")
    if is_drawn and (train.entrypoint or train.engine == "trainer"):
        message = "what trains draws rows itself, and not by the weights of sources"
        yield _finding("data.sources", message, "remove the weights or data.temperature")


def _machines(spec: Spec, data: DataSpec) -> Iterator[Finding]:
    if data.disk_gb and (spec.train.entrypoint or spec.train.engine == "trainer"):
        reader = "train.entrypoint" if spec.train.entrypoint else "train.engine: trainer"
        message = f"{reader} reads rows of all shards at any time, so a node has to have them all"
        yield _finding("data.disk_gb", message, "remove it")
    elif data.disk_gb and data.disk_gb < 3 * data.shuffle_gb:
        message = f"has to hold three windows of data.shuffle_gb ({data.shuffle_gb:g} GB)"
        yield _finding("data.disk_gb", message, "raise it, or lower data.shuffle_gb")
    if data.executor == "local" and data.executor_address:
        message = "names a cluster, and `local` has none"
        yield _finding("data.executor_address", message, "set data.executor: ray, or spark")
    if data.executor != "local" and data.nodes > 1:
        message = f"{data.executor} has machines of its own"
        yield _finding("data.nodes", message, "leave data.nodes out, or data.executor")


def _documents(spec: Spec, data: DataSpec) -> Iterator[Finding]:
    """Which columns make a text for a language model."""
    columns = data.columns
    forms = []
    for name in ("messages", "prompt", "completion"):
        if getattr(columns, name) is not None:
            forms.append(name)
    if forms and spec.task in BUILTIN_TASKS and spec.task != "causal_lm":
        message = f"`{forms[0]}` is used only by causal_lm"
        yield _finding(f"data.columns.{forms[0]}", message, "remove it, or set task: causal_lm")
    elif "messages" in forms and len(forms) > 1:
        message = "the chat in `messages` holds prompts and answers"
        yield _finding(f"data.columns.{forms[1]}", message, "keep one form")
    elif columns.input is not None and "prompt" not in forms:
        message = "there is no prompt that it goes with"
        yield _finding("data.columns.input", message, "set data.columns.prompt")
    elif len(forms) == 1 and forms != ["messages"]:
        other = "completion" if forms == ["prompt"] else "prompt"
        message = f"needs `{other}` beside it"
        yield _finding(f"data.columns.{forms[0]}", message, f"set data.columns.{other}")
    if spec.task == "causal_lm" and data.labels:
        yield _finding("data.labels", "a language model has no classes", "remove them")


def _target(spec: Spec, data: DataSpec) -> Iterator[Finding]:
    """The number that a regression predicts, and what only models with classes know."""
    is_numeric = objective_of_task(spec.task).label == "number"
    if spec.task in BUILTIN_TASKS:
        for part in data.parts:
            if part.columns.target is not None and not is_numeric:
                message = f"`target` is used only by {' and '.join(_NUMERIC)}"
                yield _finding("data.columns.target", message, "remove it, or change the task")
            elif part.columns.target is None and is_numeric:
                message = f"no column of {part.named} holds the number to predict"
                fix = "name one here, or for each of data.sources"
                yield _finding("data.columns.target", message, fix)
    gate = spec.evaluate.gate
    is_default = gate.mode == "noninferiority" and "margin" not in gate.model_fields_set
    if is_default and gate.metric in ("rmse", "mae"):
        message = f"{gate.metric} has the target's unit, in which {gate.margin:g} may be all or "
        message += "nothing"
        yield _finding("evaluate.gate.margin", message, "name a margin, or compare r2")
    if is_numeric:
        for where, value in (
            ("data.labels", data.labels),
            ("train.label_smoothing", spec.train.label_smoothing),
            ("model.teacher", spec.model.teacher),
            ("deploy.precision", spec.deploy.precision),
            ("deploy.max_disagreement", spec.deploy.max_disagreement),
        ):
            if value:
                yield _finding(where, "a regression has no classes", "remove it")


def _train(spec: Spec) -> Iterator[Finding]:
    train = spec.train
    if train.epochs is not None and train.steps is not None:
        message = "epochs and steps both say how long to train"
        yield _finding("train.steps", message, "keep one of them")
    size = train.micro_batch_size
    total = train.global_batch_size
    if isinstance(size, int) and (size < 1 or total % size):
        divisors = [divisor for divisor in range(1, total + 1) if total % divisor == 0]
        nearest = min(divisors, key=lambda divisor: abs(divisor - size))
        message = f"{size} does not divide the global batch, which is {total}"
        yield _finding("train.micro_batch_size", message, f"use {nearest}, or auto")
    if spec.pipeline is None:
        for field, message, fix in rates.findings(spec.task, spec.model, train):
            yield ("train", field), message, fix
    yield from _rate(spec)
    yield from _objective(spec)
    if spec.resources.spot and train.checkpoint.every is None:
        message = "a spot machine can be reclaimed at any time, and nothing would have been saved"
        yield _finding("resources.spot", message, "set train.checkpoint.every, or spot: false")


def _engine(spec: Spec) -> Iterator[Finding]:
    """What computes the updates, and its own settings; what starts the ranks."""
    train = spec.train
    engine = engine_of(train.engine)
    if engine is None:
        if train.engine_config is not None:
            message = "rekindle's own engine has no settings beside train"
            yield _finding("train.engine_config", message, "remove it, or set train.engine")
    elif train.entrypoint:
        message = "your own script starts its engine itself"
        yield _finding("train.engine", message, "remove it, or train.entrypoint")
    else:
        yield from engine.refuse(spec)


def _optimizer(spec: Spec) -> Iterator[Finding]:
    """What of the network the optimizer cannot update, and what the layout must not divide."""
    train = spec.train
    if spec.task == "image_classification" and train.optimizer != "adamw":
        message = f"{train.optimizer} updates matrices of transformer blocks, and this task has "
        message += "none"
        yield _finding("train.optimizer", message, "remove it")
    if train.layout != "auto":
        divided = layout.whole(train.layout, train.optimizer)
        for problem in (*divided, *layout.undivided(train.layout, spec.model.lora)):
            yield _finding(problem.where, problem.what, problem.fix)


def _quantised(spec: Spec) -> Iterator[Finding]:
    """What does not train on a base in 4 bits."""
    train = spec.train
    lora = spec.model.lora
    if lora is None or lora.base == "full":
        return
    if ":" in spec.task or train.entrypoint or train.engine != "rekindle":
        message = "a base in 4 bits is for rekindle's own tasks and engine"
        yield _finding("model.lora.base", message, "remove it")
    for field, refused, fix in (
        ("weights", train.weights != "fp32", "fp32: adapters are trained in full precision"),
        ("precision", train.precision in ("fp16", "fp8", "fp64"), "bf16 or fp32"),
        ("compile", train.compile, "remove it"),
    ):
        if refused:
            yield ("train", field), f"no test has trained it on a base in 4 bits ({field})", fix


def _entrypoint(spec: Spec) -> Iterator[Finding]:
    """Words of the user's own script that cannot be filled in."""
    entrypoint = spec.train.entrypoint
    if entrypoint is None:
        return
    fields: list[tuple[str, str | None, str | None, str | None]] = []
    try:
        words = shlex.split(entrypoint)
        for word in words:
            fields += Formatter().parse(word)
    except ValueError as error:
        fix = "quote it as for a shell; braces are {{ and }}"
        yield _finding("train.entrypoint", f"cannot be read as words: {error}", fix)
        return
    if not words:
        fix = "name one, such as train.py --data {data}"
        yield _finding("train.entrypoint", "names no script", fix)
    placeholders = [f"{{{name}}}" for name in ENTRYPOINT_WORDS]
    for _, name, form, _ in fields:
        if name is not None and (name not in ENTRYPOINT_WORDS or "{" in (form or "")):
            colon = ":" if form else ""
            unknown = f"{{{name}{colon}{form}}}"
            hint = did_you_mean(unknown, placeholders)
            fix = f"{hint} there are {', '.join(placeholders)}".strip()
            message = f"unknown placeholder `{unknown}`"
            yield _finding("train.entrypoint", message, f"{fix}; braces are {{{{ and }}}}")


def _objective(spec: Spec) -> Iterator[Finding]:
    """What is trained for, and which weights are kept."""
    train = spec.train
    data = spec.data
    objective = objective_of_task(spec.task)
    if train.sampling == "balanced" and objective.label != "class":
        yield _finding("train.sampling", f"an example of {spec.task} has no class", "remove it")
    if train.sampling == "balanced" and train.class_weights == "balanced":
        message = "together with balanced weights, rare classes count too much"
        yield _finding("train.sampling", message, "keep one of them")
    if train.class_weights is not None and not objective.has_classes:
        yield _finding("train.class_weights", f"{objective.noun} has no classes", "remove it")
    if train.exports_best:
        asks_by_patience = train.early_stopping_patience is not None
        where = "train.early_stopping_patience" if asks_by_patience else "train.checkpoint"
        if train.entrypoint:
            yield _finding(where, "your own script decides what it saves", "remove it")
        elif data and not data.split.validation and data.split.by != "source":
            message = "without a validation split no weights are the best"
            yield _finding(where, message, "set data.split.validation, or remove it")
    if train.budget_hours is not None and train.entrypoint:
        message = "your own script decides when it ends"
        yield _finding("train.budget_hours", message, "remove it, or set max_hours")
    if data is not None and data.labels:
        yield from unknown_classes(train, data.labels)


def unknown_classes(train: TrainSpec, labels: Sequence[str]) -> Iterator[Finding]:
    """Classes that have a weight and are not among the `labels` that there are."""
    if not isinstance(train.class_weights, dict):
        return
    for label in train.class_weights:
        if label not in labels:
            fix = did_you_mean(label, labels) or f"one of {', '.join(labels[:20])}"
            yield ("train", "class_weights", label), f"there is no class `{label}`", fix


def _rate(spec: Spec) -> Iterator[Finding]:
    """What of the schedule of the learning rate would be without effect."""
    train = spec.train
    share = train.warmup + train.decay
    is_wsd = train.lr_schedule == "wsd"
    if is_wsd and share > 1:
        message = f"warm-up and decay take {share:g} of the steps"
        yield _finding("train.decay", message, "make warmup + decay at most 1")
    if not is_wsd and train.decay != TrainSpec().decay:
        message = f"the schedule `{train.lr_schedule}` has no decay of its own"
        yield _finding("train.decay", message, "set lr_schedule: wsd, or remove it")
    if train.lr_schedule == "constant" and train.min_lr_ratio:
        fix = "set lr_schedule to linear, cosine or wsd, or remove it"
        yield _finding("train.min_lr_ratio", "a constant rate does not fall", fix)


def _gate(spec: Spec) -> Iterator[Finding]:
    gate = spec.evaluate.gate
    metrics = objective_of_task(spec.task).metrics
    is_builtin = spec.task in BUILTIN_TASKS
    slices = spec.data.slices if spec.data is not None else None
    if slices is not None and gate.cluster is not None and gate.cluster not in slices:
        message = f"`{gate.cluster}` is not among data.slices, which are kept with the scores"
        yield _finding("evaluate.gate.cluster", message, "add it there")
    fix = f"use one of {', '.join(metrics)}"
    if is_builtin and gate.metric is not None and gate.metric not in metrics:
        yield _finding("evaluate.gate.metric", f"{spec.task} has no {gate.metric}", fix)
    if slices is not None and spec.evaluate.slice_floor and not set(slices) - {gate.cluster}:
        fix_of_slices = "name columns in data.slices, or use evaluate.floor"
        yield _finding("evaluate.slice_floor", "there are no slices", fix_of_slices)
    for field in ("floor", "slice_floor"):
        for metric, floor in getattr(spec.evaluate, field).items():
            path = ("evaluate", field, metric)
            if is_builtin and metric not in metrics:
                yield path, f"{spec.task} has no {metric}", fix
            for what, what_to_do in _unreachable(metric, floor):
                yield path, what, what_to_do


def _unreachable(metric: str, floor: float) -> Iterator[tuple[str, str]]:
    """Why no model, or every model, would reach a floor, and what to do."""
    if metric in LOWER_IS_BETTER:
        if floor < 0:
            yield f"{floor:g} cannot be reached: it is never negative", "raise it"
        elif not floor < math.inf:
            yield f"{floor:g} is no limit", "name a number"
        return
    lowest = LOWEST.get(metric, 0.0)
    if not lowest <= floor <= 1:
        span = f"in {lowest:g} to 1" if math.isfinite(lowest) else "at 1 at most"
        yield f"{floor:g} cannot be reached: it lies {span}", "lower it"


def _answers(spec: Spec) -> Iterator[Finding]:
    """What only models that answer with classes can be asked for."""
    if spec.data is None:
        message = "there is no `data`"
    elif not objective_of_task(spec.task).has_classes:
        message = f"{objective_of_task(spec.task).noun} has no classes to predict"
    else:
        return
    fix = "remove it; see evaluate.floor"
    if spec.evaluate.must_pass is not None:
        yield _finding("evaluate.must_pass", message, fix)
    if spec.evaluate.gate.max_churn is not None:
        yield _finding("evaluate.gate.max_churn", message, fix)


def _published(spec: Spec) -> Iterator[Finding]:
    for name in spec.registration.publish:
        section = getattr(spec.platforms, name)
        missing = {problem.where: problem for problem in section.missing()}
        for field in ("artifact_root", "image"):
            where = f"{section.PATH}.{field}"
            if not getattr(section, field) and where not in missing:
                message = f"register.publish needs it for {name}"
                missing[where] = Problem(message, where, f"set {where}")
        for problem in missing.values():
            yield _finding(problem.where, problem.what, problem.fix)
    if spec.registration.publish and spec.data is None:
        message = "without data, columns of inputs are unknown"
        yield _finding("register.publish", message, "name data")


def _schedule(spec: Spec) -> Iterator[Finding]:
    if spec.triggers is not None and spec.data is None:
        yield _finding("triggers", "without data nothing can be watched", "set data.source")
    if spec.schedule is not None:
        for field, message, fix in schedule.findings(spec.schedule):
            yield ("schedule", field), message, fix


def _monitored(spec: Spec) -> Iterator[Finding]:
    monitor = spec.monitor
    triggers = spec.triggers
    if triggers is not None and triggers.watches and monitor is None:
        field = "drift" if triggers.drift else "live_drop"
        fix = "add the section `monitor: {}`"
        yield _finding(f"triggers.{field}", "nothing is monitored", fix)
    if monitor is None:
        return
    if triggers is not None and triggers.live_drop is not None and not monitor.labels:
        yield _finding("triggers.live_drop", "no labels arrive", "set monitor.labels")
    if monitor.labels and spec.data is not None and not spec.data.columns.key:
        message = "labels are joined by a key, and the data have none"
        fix = "name the column of ids in data.columns.key, and send it with each instance"
        yield _finding("monitor.labels", message, fix)


def _secrets(spec: Spec) -> Iterator[Finding]:
    for path, uri in _uris(spec):
        try:
            urlsplit(uri)
        except ValueError:
            yield path, f"{uri!r} is not a URI", "check brackets and port"
    texts = list(_texts(spec.model_dump(mode="json"), ()))
    # masking looks at the whole environment, which takes long for each text of a config
    everything = "\n".join(text for _, text in texts)
    is_suspicious = masked(everything) != everything
    fix = "name an environment variable: platforms.local.secrets: {HF_TOKEN: env:HF_TOKEN}"
    for path, text in texts:
        secret = _secret_in_uri(text)
        if secret:
            message = f"{secret}, and a config is no place for one"
            yield path, message, "put it into the environment"
        elif LOOKS_SECRET.search(text) or _ASSIGNED.search(text):
            yield path, "looks like a secret token, and a config is no place for one", fix
        elif "secrets" in path:
            continue  # a reference, which may well be called what a variable says
        elif is_suspicious and masked(text) != text:
            yield path, "holds what is secret in this environment, and would be written down", fix


def _uris(spec: Spec) -> Iterator[tuple[KeyPath, str]]:
    monitor = spec.monitor or MonitorSpec()
    for platform in platform_names():
        for field, text in spec.platforms.section(platform).uris():
            yield ("platforms", platform, field), text
    if spec.data is not None:
        for part in spec.data.parts:
            yield ("data", "source"), part.source
    yield ("monitor", "log"), monitor.log
    yield ("monitor", "labels"), monitor.labels
    yield ("register", "tracking_uri"), spec.registration.tracking_uri
    yield ("model", "init_from"), spec.model.init_from
    if isinstance(spec.model.source, str):
        yield ("model", "source"), spec.model.source


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
    _task,
    _pipeline,
    _data,
    _train,
    _engine,
    _optimizer,
    _quantised,
    _entrypoint,
    _gate,
    _answers,
    _published,
    _schedule,
    _monitored,
    _secrets,
)
