"""What pydantic found wrong with a section of a YAML file, in terms of its fields and lines."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from rekindle.errors import Problem, SpecError, did_you_mean
from rekindle.spec.model import Delimiter, Name, PartialDate
from rekindle.spec.schedule import Duration
from rekindle.spec.yaml_document import KeyPath

Error = Mapping[str, Any]
S = TypeVar("S", bound=BaseModel)

# what to write, by the beginning of pydantic's name of the error
_WRITE = {
    "int": "write a whole number",
    "float": "write a number",
    "bool": "write true or false",
    "string": "write text",
    "dict": "write a mapping, {a: b}",
    "list": "write a list, [a, b]",
    "tuple": "write a list, [a, b]",
    "model": "write a section, {field: value}",
    "date": "write a date, such as 2026-11-23",
    "finite": "write a number",
}
# by the whole name: a word, and what pydantic calls the bound of the field
_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("of at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("of at most", "le"),
}


def _pattern_of(annotated: Any) -> str:
    pattern: str = get_args(annotated)[1].pattern
    return pattern


# what a pattern asks for
_FORMS = {
    _pattern_of(Name): "use lower-case letters, digits, `.`, `_`, `-`, at most 63; begin and end "
    "with a letter or digit",
    _pattern_of(Duration): "use a number and a unit, such as `6 months`",
    _pattern_of(Delimiter): "use one character that is no letter, digit or quote, such as `;`, or "
    "auto",
    _pattern_of(PartialDate): "use `latest`, or a date such as 2026-06 or 2026-06-30",
}
_SMDDP = (
    "its last release (2.5, October 2024) is for torch 2.4, which rekindle does not run on: use "
    "rekindle's own engine, whose NCCL uses EFA; an image that has it can start it from a script "
    "(train.entrypoint)"
)
_SCRIPT = "start it from a script of yours: train.entrypoint"
# engines that people ask for by name, and what to use in their place
_ENGINES = {
    "ddp": "leave it out: rekindle's own engine replicates the model (train.layout: {dp: N})",
    "fsdp": "leave it out: rekindle's own engine shards with FSDP2 (train.layout: {shard: N})",
    "smdistributed": _SMDDP,
    "smddp": _SMDDP,
    "smdataparallel": _SMDDP,
    "accelerate": _SCRIPT,
    "horovod": _SCRIPT,
    "keras": _SCRIPT,
    "lightning": _SCRIPT,
    "megatron": _SCRIPT,
    "ray": _SCRIPT,
    "tensorflow": _SCRIPT,
}
# what other trainers call a field
_ELSEWHERE = {
    "learning_rate": "lr",
    "batch_size": "global_batch_size",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "patience": "early_stopping_patience",
    "max_seq_length": "max_length",
    "warmup_ratio": "warmup",
    "bf16": "precision",
}


def strict(section: type[S], values: Any) -> S:
    """Validated as JSON: a list may fill a tuple, "3" is not a number. Raises ValidationError."""
    return section.model_validate_json(json.dumps(values, default=str), strict=True)


def checked(section: type[S], values: Any, lines: Mapping[KeyPath, str], origin: str) -> S:
    """The section from plain values; raises SpecError with all problems, each at its line."""
    try:
        return strict(section, values)
    except ValidationError as error:
        raise SpecError(SectionErrors(section, lines, origin).problems(error)) from None


def key_path(location: tuple[str | int, ...]) -> KeyPath:
    """Pydantic's location without the names it adds for the members of a union."""
    prefixes = ("literal[", "dict[", "constrained-")
    noise = {"str", "int", "float", "LayoutSpec", "TokenizerSpec", "[key]"}

    def is_noise(part: str | int) -> bool:
        return isinstance(part, str) and (part in noise or part.startswith(prefixes))

    return tuple(part for part in location if not is_noise(part))


class SectionErrors:
    """Problems of a document: the section at its root, where its keys stand, and its name."""

    def __init__(self, root: type[BaseModel], lines: Mapping[KeyPath, str], origin: str) -> None:
        self.root = root
        self.lines = lines
        self.origin = origin

    def problem(self, path: KeyPath, what: str, fix: str) -> Problem:
        """What is wrong with the value at a path, with its line or that of what holds it."""
        message = f"{'.'.join(map(str, path))}: {what}" if path else what
        return Problem(message, self._where(path), fix)

    def _where(self, path: KeyPath) -> str:
        for end in range(len(path), 0, -1):
            if path[:end] in self.lines:
                return self.lines[path[:end]]
        return self.origin

    def problems(self, error: ValidationError) -> list[Problem]:
        """One a place: of the members of a union, those that a section's own errors leave."""
        errors_at: dict[KeyPath, list[Error]] = {}
        for entry in error.errors(include_url=False):
            errors_at.setdefault(key_path(entry["loc"]), []).append(entry)

        def holds_another(path: KeyPath) -> bool:
            return any(path != other and path == other[: len(path)] for other in errors_at)

        problems = []
        for path, errors in errors_at.items():
            if not holds_another(path):
                problems.append(self._problem(path, errors))
        return problems

    def _problem(self, path: KeyPath, members: list[Error]) -> Problem:
        error = members[0]
        if error["type"] == "extra_forbidden":
            return self._unknown_key(path)
        if error["type"] == "missing":
            return self.problem(path, "is missing", f"add `{path[-1]}:`")
        if error["type"] == "value_error":
            return self.problem(path, str(error["ctx"]["error"]), self._hint(path))
        if "secrets" in path or path[-1:] == ("token",):  # it may be one, and errors end up in logs
            fix = f"{self._hint(path[:-1]).rstrip(':')}; keep the value out of the config"
            return self.problem(path, "is not a secret reference", fix)
        shown = repr(error.get("input"))[:80]
        if error["type"] == "string_pattern_mismatch":
            message = f"{shown} has the wrong form"
        else:
            message = f"{_joined_messages(members)}, not {shown}"
        return self.problem(path, message, self._fix(members, path))

    def _fix(self, errors: list[Error], path: KeyPath) -> str:
        """The word that was meant, or what to write, and what the field is."""
        writes = []
        for error in errors:
            if error["type"] in ("literal_error", "enum"):
                value = str(error.get("input"))
                if path[-1:] == ("engine",) and value.lower() in _ENGINES:
                    return _ENGINES[value.lower()]
                choices = re.findall(r"'([^']*)'", str(error["ctx"]["expected"]))
                if meant := did_you_mean(value, choices, cutoff=0.5):
                    return meant
                listed = f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
                writes.append(f"write {listed}")
            elif error["type"] == "string_pattern_mismatch":
                return _FORMS.get(error["ctx"]["pattern"]) or self._hint(path)
            elif error["type"] in _BOUNDS:
                word, name = _BOUNDS[error["type"]]
                bound = error["ctx"][name]
                number = int(bound) if bound == int(bound) else bound
                writes.append(f"write a number {word} {number:,}")
            else:
                writes.append(_WRITE.get(error["type"].partition("_")[0], ""))
        write = ", or ".join(filter(None, writes)).replace(", or write ", ", or ")
        return ": ".join(filter(None, (write, self._hint(path))))

    def _hint(self, path: KeyPath) -> str:
        """The first sentence on the field, or on the list or mapping that it is in."""
        field = None
        while path and field is None:
            field = _fields(self._section_at(path[:-1])).get(str(path[-1]))
            path = path[:-1]
        if field is None or not field.description:
            return "see configs/README.md"
        text = " ".join(field.description.split())
        first = re.split(r"(?<=[.;]) (?![^(]*\))", text)[0]  # not inside parentheses
        return first.rstrip(".;")

    def _unknown_key(self, path: KeyPath) -> Problem:
        name = str(path[-1])
        names = list(_fields(self._section_at(path[:-1])))
        return self.problem(path, "unknown key", self._meant(name, names))

    def _meant(self, name: str, names: Sequence[str]) -> str:
        """The question after the key that was meant, here or in another section."""
        our_name = _ELSEWHERE.get(name, "")
        if our_name in names:
            return f"did you mean `{our_name}`?"
        if near := did_you_mean(name, names):
            return near
        for section, field in _fields(self.root).items():
            if name in _fields(_model_of(field.annotation)):
                return f"did you mean `{section}.{name}`?"
        return f"known here: {', '.join(names)}"

    def _section_at(self, path: KeyPath) -> type[BaseModel] | None:
        model: type[BaseModel] | None = self.root
        for part in path:
            if isinstance(part, str):  # not the place in a list
                field = _fields(model).get(part)
                model = _model_of(field.annotation) if field else None
        return model


def _joined_messages(errors: Sequence[Error]) -> str:
    """What pydantic says of each member of a union, as one sentence."""
    messages: list[str] = []
    for error in errors:
        message = str(error["msg"]).removeprefix("Input ").removeprefix("String ")
        messages.append(message.removeprefix("should be ") if messages else message)
    return " or ".join(messages)


def _fields(section: type[BaseModel] | None) -> dict[str, FieldInfo]:
    """By the names that a config has for them."""
    if section is None:
        return {}
    return {field.alias or name: field for name, field in section.model_fields.items()}


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, if it is one, or may be one."""
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
