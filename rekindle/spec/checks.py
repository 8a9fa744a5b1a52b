"""Contradictions between fields of a spec that each are fine alone. Pure arithmetic and names, no
I/O; what is secret in the environment is asked for, to keep it out. What most of them say stands in
checks.yaml, under a name."""

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import Formatter
from urllib.parse import unquote, urlsplit

from rekindle import records
from rekindle.engines import engine_of
from rekindle.errors import did_you_mean
from rekindle.masking import DATABASE_LOGIN, LOOKS_SECRET, masked, tells
from rekindle.spec import layout, rates, schedule
from rekindle.spec.deploy import MonitorSpec
from rekindle.spec.model import BUILTIN_TASKS, ENTRYPOINT_WORDS, DataSpec, Spec, TrainSpec
from rekindle.spec.yaml_document import KeyPath
from rekindle.tables import rows

Finding = tuple[KeyPath, str, str]

NUMERIC = "text_regression"
CLASSLESS = {"causal_lm": "a language model", NUMERIC: "a regression"}
_WORDS = Path(__file__).with_suffix(".yaml")
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


def _finding(name: str, /, **about: object) -> Finding:
    """The row of that name in checks.yaml, with the braces filled in from what it is about."""
    where, what, fix = (text.format(**about) for text in rows(_WORDS)[name])
    return tuple(where.split(".")), what, fix


def _findings(spec: Spec, wrong: Mapping[str, object], /, **about: object) -> Iterator[Finding]:
    """The rows of checks.yaml that are `wrong`, about the parts of the spec and what else it is."""
    known = {"data": spec.data, "train": spec.train, "gate": spec.evaluate.gate, **about}
    return (_finding(name, **known) for name, is_so in wrong.items() if is_so)


def _task(spec: Spec) -> Iterator[Finding]:
    if not spec.task:
        if spec.pipeline is None:
            yield _finding("no task", tasks=", ".join(BUILTIN_TASKS))
    elif ":" not in spec.task and spec.task not in BUILTIN_TASKS:
        fix = did_you_mean(spec.task, BUILTIN_TASKS, cutoff=0.3)
        fix = fix or f"one of {', '.join(BUILTIN_TASKS)}, or path.py:Class"
        yield ("task",), f"there is no task `{spec.task}`", fix


def _pipeline(spec: Spec) -> Iterator[Finding]:
    if spec.data is None and spec.pipeline is None:
        yield _finding("no data")
    for field in ("arguments", "receives"):
        if getattr(spec, field) and spec.pipeline is None:
            yield _finding("of a pipeline", field=field)
    for name in spec.arguments if spec.receives != "all" else ():
        if name in spec.receives:
            yield ("arguments", name), "`receives` names it, too", "keep one of them"


def _data(spec: Spec) -> Iterator[Finding]:
    if (data := spec.data) is None:
        return
    split, own_time = data.split, data.columns.time is not None
    total = split.train + split.validation + split.test
    timed = all(part.columns.time is not None for part in data.parts)
    wrong: dict[str, object] = {
        "shares": split.by != "source" and abs(total - 1) > 1e-6,
        "split by time": split.by == "time" and not timed,
    }
    yield from _findings(spec, wrong, total=total)
    yield from _sources(spec, data)
    partitioned = any("{window" in part.source for part in data.parts)
    unplaced = data.window and not partitioned
    wrong = {
        "window of sources": unplaced and data.sources,
        "window": unplaced and not data.sources and not own_time,
        "no window": partitioned and not data.window,
    }
    yield from _findings(spec, wrong)
    for name in set(data.slices).intersection(RESERVED):
        yield _finding("reserved slice", name=name)
    yield from _machines(spec, data)
    wrong = {
        "label twice": len(set(data.labels)) != len(data.labels),
        "one label": len(data.labels) == 1,
        "control character": "\x00" in data.named or "\n" in data.named,
    }
    yield from _findings(spec, wrong)
    yield from _rows(spec, data)
    yield from _documents(spec, data)
    yield from _target(spec, data)


def _rows(spec: Spec, data: DataSpec) -> Iterator[Finding]:
    """How rows are read, and which of them are left out."""
    by, is_image = data.split.by, spec.task == "image_classification"
    most_bad = type(data).model_fields["max_bad_rows"].default
    wrong = {
        "group": data.columns.group is not None and by != "hash",
        "gap": data.split.gap is not None and by != "time",
        "salt": data.split.salt and by != "hash",
        "images alike": data.duplicates in ("folded", "near") and is_image,
        "delimiter": data.delimiter != "auto" and data.format not in ("auto", "csv"),
        "encoding": data.encoding != "utf-8" and data.format not in ("auto", "csv", "jsonl"),
        "bad rows": data.on_bad_rows == "refuse" and data.max_bad_rows != most_bad,
    }
    return _findings(spec, wrong)


def _sources(spec: Spec, data: DataSpec) -> Iterator[Finding]:
    weights = [part.weight for part in data.sources if part.weight is not None]
    drawn, train = bool(weights or data.temperature), spec.train
    wrong = {
        "two sources": data.source and data.sources,
        "no source": not data.source and not data.sources,
        "some weights": weights and len(weights) < len(data.sources),
        "temperature": data.temperature and (weights or not data.sources),
        "drawn twice": drawn and train.sampling == "balanced",
        "drawn otherwise": drawn and (train.entrypoint or train.engine == "trainer"),
    }
    return _findings(spec, wrong)


def _machines(spec: Spec, data: DataSpec) -> Iterator[Finding]:
    if data.disk_gb and (spec.train.entrypoint or spec.train.engine == "trainer"):
        who = "train.entrypoint" if spec.train.entrypoint else "train.engine: trainer"
        yield _finding("all shards", who=who)
    elif data.disk_gb and data.disk_gb < 3 * data.shuffle_gb:
        yield _finding("little disk", data=data)
    wrong = {
        "cluster": data.executor == "local" and data.executor_address,
        "nodes": data.executor != "local" and data.nodes > 1,
    }
    yield from _findings(spec, wrong)


def _documents(spec: Spec, data: DataSpec) -> Iterator[Finding]:
    """Which columns make a text for a language model."""
    forms = ("messages", "prompt", "completion")
    given = [name for name in forms if getattr(data.columns, name) is not None]
    if given and spec.task in BUILTIN_TASKS and spec.task != "causal_lm":
        yield _finding("of causal_lm", name=given[0])
    elif "messages" in given and len(given) > 1:
        yield _finding("two forms", name=given[1])
    elif data.columns.input is not None and "prompt" not in given:
        yield _finding("no prompt")
    elif len(given) == 1 and given != ["messages"]:
        other = "completion" if given == ["prompt"] else "prompt"
        yield _finding("half a form", name=given[0], other=other)
    if spec.task == "causal_lm" and data.labels:
        yield _finding("labels of texts")


def _target(spec: Spec, data: DataSpec) -> Iterator[Finding]:
    """The number that a regression predicts, and what only models with classes know."""
    numeric, gate = spec.task == NUMERIC, spec.evaluate.gate
    for part in data.parts if spec.task in BUILTIN_TASKS else ():
        if part.columns.target is not None and not numeric:
            yield _finding("target", task=NUMERIC)
        elif part.columns.target is None and numeric:
            yield _finding("no target", part=part)
    unset = gate.mode == "noninferiority" and "margin" not in gate.model_fields_set
    yield from _findings(spec, {"margin": unset and gate.metric in ("rmse", "mae")})
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
        yield _finding("epochs and steps")
    size, total = train.micro_batch_size, train.global_batch_size
    if isinstance(size, int) and (size < 1 or total % size):
        divisors = (d for d in range(1, total + 1) if total % d == 0)
        nearest = min(divisors, key=lambda divisor: abs(divisor - size))
        yield _finding("micro-batch", size=size, total=total, nearest=nearest)
    if spec.pipeline is None:
        for field, what, fix in rates.findings(spec.task, spec.model, train):
            yield ("train", field), what, fix
    yield from _rate(spec)
    yield from _objective(spec)
    yield from _findings(spec, {"spot": spec.resources.spot and train.checkpoint.every is None})


def _engine(spec: Spec) -> Iterator[Finding]:
    """What computes the updates, and its own settings; what starts the ranks."""
    train, engine = spec.train, engine_of(spec.train.engine)
    if engine is None:
        if train.engine_config is not None:
            yield _finding("engine config")
    elif train.entrypoint:
        yield _finding("engine of a script")
    else:
        yield from engine.refuse(spec)


def _optimizer(spec: Spec) -> Iterator[Finding]:
    """What of the network the optimizer cannot update, and what the layout must not divide."""
    train, is_image = spec.train, spec.task == "image_classification"
    yield from _findings(spec, {"optimizer": is_image and train.optimizer != "adamw"})
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
        yield _finding("4 bits")
    for field, refused, fix in (
        ("weights", train.weights != "fp32", "fp32: adapters are trained in full precision"),
        ("precision", train.precision in ("fp16", "fp8", "fp64"), "bf16 or fp32"),
        ("compile", train.compile, "remove it"),
    ):
        if refused:
            yield ("train", field), f"no test has trained it on a base in 4 bits ({field})", fix


def _entrypoint(spec: Spec) -> Iterator[Finding]:
    """Words of the user's own script that cannot be filled in."""
    given = spec.train.entrypoint
    if given is None:
        return
    try:
        words = shlex.split(given)
        fields = [field for word in words for field in Formatter().parse(word)]
    except ValueError as error:
        yield _finding("no words", error=error)
        return
    if not words:
        yield _finding("no script")
    known = [f"{{{name}}}" for name in ENTRYPOINT_WORDS]
    for _, name, form, _ in fields:
        if name is not None and (name not in ENTRYPOINT_WORDS or "{" in (form or "")):
            unknown = f"{{{name}{':' if form else ''}{form}}}"
            fix = f"{did_you_mean(unknown, known)} there are {', '.join(known)}".strip()
            yield _finding("placeholder", unknown=unknown, fix=fix)


def _objective(spec: Spec) -> Iterator[Finding]:
    """What is trained for, and which weights are kept."""
    train, data, task = spec.train, spec.data, spec.task
    classless = train.class_weights is not None and task in CLASSLESS
    wrong = {
        "no class": train.sampling == "balanced" and task in (*CLASSLESS, "token_classification"),
        "balanced twice": train.sampling == train.class_weights == "balanced",
        "class weights": classless,
    }
    yield from _findings(spec, wrong, task=task, model=CLASSLESS.get(task))
    path = "early_stopping_patience" if train.early_stopping_patience is not None else "checkpoint"
    if train.exports_best and train.entrypoint:
        yield _finding("best of a script", path=path)
    elif train.exports_best and data and not data.split.validation and data.split.by != "source":
        yield _finding("no best", path=path)
    yield from _findings(spec, {"budget": train.budget_hours is not None and train.entrypoint})
    if data is not None and data.labels:
        yield from unknown_classes(train, data.labels)


def unknown_classes(train: TrainSpec, labels: Sequence[str]) -> Iterator[Finding]:
    """Classes that have a weight and are not among the `labels` that there are."""
    for label in train.class_weights if isinstance(train.class_weights, dict) else ():
        if label not in labels:
            fix = did_you_mean(label, labels) or f"one of {', '.join(labels[:20])}"
            yield ("train", "class_weights", label), f"there is no class `{label}`", fix


def _rate(spec: Spec) -> Iterator[Finding]:
    """What of the schedule of the learning rate would be without effect."""
    train, taken = spec.train, spec.train.warmup + spec.train.decay
    is_wsd = train.lr_schedule == "wsd"
    wrong = {
        "warm-up and decay": is_wsd and taken > 1,
        "no decay": not is_wsd and train.decay != TrainSpec().decay,
        "constant": train.lr_schedule == "constant" and train.min_lr_ratio,
    }
    return _findings(spec, wrong, taken=taken)


def _gate(spec: Spec) -> Iterator[Finding]:
    other = {
        "causal_lm": records.TOKEN_METRICS,
        "token_classification": records.TAG_METRICS,
        "text_regression": records.NUMBER_METRICS,
    }
    known, is_builtin = other.get(spec.task, records.METRICS), spec.task in BUILTIN_TASKS
    gate, slices = spec.evaluate.gate, spec.data.slices if spec.data else ()
    fix = f"use one of {', '.join(known)}"
    lacking = gate.cluster is not None and gate.cluster not in slices
    wrong = {
        "cluster column": spec.data and lacking,
        "metric": is_builtin and gate.metric is not None and gate.metric not in known,
        "no slices": spec.evaluate.slice_floor and spec.data and not {*slices} - {gate.cluster},
    }
    yield from _findings(spec, wrong, task=spec.task, known=", ".join(known))
    for field in ("floor", "slice_floor"):
        for metric, floor in getattr(spec.evaluate, field).items():
            place = "evaluate", field, metric
            if is_builtin and metric not in known:
                yield place, f"{spec.task} has no {metric}", fix
            lowest = -math.inf if metric == "r2" else 0
            if metric not in records.LOWER_IS_BETTER and not lowest <= floor <= 1:
                yield place, f"{floor:g} cannot be reached: it lies in 0 to 1", "lower it"
            if metric in records.LOWER_IS_BETTER and not 0 <= floor < math.inf:
                if floor < 0:
                    yield place, f"{floor:g} cannot be reached: it is never negative", "raise it"
                else:
                    yield place, f"{floor:g} is no limit", "name a number"


def _answers(spec: Spec) -> Iterator[Finding]:
    """What only models that answer with classes can be asked for."""
    if spec.task in CLASSLESS or spec.data is None:
        what = f"{CLASSLESS.get(spec.task)} has no classes to predict"
        what = what if spec.data else "there is no `data`"
        wrong = {
            "must pass": spec.evaluate.must_pass is not None,
            "churn": spec.evaluate.gate.max_churn is not None,
        }
        yield from _findings(spec, wrong, what=what)


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
    yield from _findings(spec, {"publish": spec.registration.publish and spec.data is None})


def _schedule(spec: Spec) -> Iterator[Finding]:
    yield from _findings(spec, {"triggers": spec.triggers is not None and spec.data is None})
    if spec.schedule is not None:
        for field, what, fix in schedule.findings(spec.schedule):
            yield ("schedule", field), what, fix


def _monitored(spec: Spec) -> Iterator[Finding]:
    monitor, triggers, data = spec.monitor, spec.triggers, spec.data
    if triggers is not None and triggers.watches and monitor is None:
        yield _finding("no monitor", field="drift" if triggers.drift else "live_drop")
    labels = monitor.labels if monitor else ""
    is_live = monitor and triggers is not None and triggers.live_drop is not None
    wrong = {
        "no labels": is_live and not labels,
        "no key": labels and data is not None and not data.columns.key,
    }
    yield from _findings(spec, wrong)


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
