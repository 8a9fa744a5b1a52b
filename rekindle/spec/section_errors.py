"""What pydantic found wrong with a section of a YAML file, in terms of its fields and lines."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from rekindle.errors import Problem, SpecError, did_you_mean
from rekindle.spec.model import Delimiter, Name, PartialDate
from rekindle.spec.schedule import Duration
from rekindle.spec.yaml_document import KeyPath
from rekindle.tables import rows

Error = Mapping[str, Any]
S = TypeVar("S", bound=BaseModel)

_SAYS = rows(Path(__file__).with_suffix(".yaml"))
# what a pattern asks for
_FORMS: Mapping[str, str] = {
    get_args(form)[1].pattern: _SAYS["forms"][name]
    for name, form in {
        "Name": Name,
        "Duration": Duration,
        "Delimiter": Delimiter,
        "PartialDate": PartialDate,
    }.items()
}


def strict(section: type[S], values: Any) -> S:
    """Validated as JSON: a list may fill a tuple, "3" is not a number. Raises ValidationError."""
    return section.model_validate_json(json.dumps(values, default=str), strict=True)


def checked(section: type[S], values: Any, lines: Mapping[KeyPath, str], origin: str) -> S:
    """The section from plain values; raises SpecError with all problems, each at its line."""
    try:
        return strict(section, values)
    except ValidationError as error:
        raise SpecError(Told(section, lines, origin).problems(error)) from None


def key_path(location: tuple[str | int, ...]) -> KeyPath:
    """Pydantic's location without the names it adds for the members of a union."""
    prefixes = ("literal[", "dict[", "constrained-")
    noise = {"str", "int", "float", "LayoutSpec", "TokenizerSpec", "[key]"}
    return tuple(
        part
        for part in location
        if not (isinstance(part, str) and (part in noise or part.startswith(prefixes)))
    )


class Told:
    """Problems of a document: the section at its root, where its keys stand, and its name."""

    def __init__(self, root: type[BaseModel], lines: Mapping[KeyPath, str], origin: str) -> None:
        self.root, self.lines, self.origin = root, lines, origin

    def problem(self, path: KeyPath, what: str, fix: str) -> Problem:
        """What is wrong with the value at a path, with its line or that of what holds it."""
        ends = (path[:end] for end in range(len(path), 0, -1))
        where = next((self.lines[end] for end in ends if end in self.lines), self.origin)
        return Problem(f"{'.'.join(map(str, path))}: {what}" if path else what, where, fix)

    def problems(self, error: ValidationError) -> list[Problem]:
        """One a place: of the members of a union, those that a section's own errors leave."""
        places: dict[KeyPath, list[Error]] = {}
        for each in error.errors(include_url=False):
            places.setdefault(key_path(each["loc"]), []).append(each)
        outer = [p for p in places if not any(p != o and p == o[: len(p)] for o in places)]
        return [self._problem(path, places[path]) for path in outer]

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
        shown = repr(error.get("input"))
        said = [str(e["msg"]).removeprefix("Input ").removeprefix("String ") for e in members]
        message = " or ".join([said[0], *(text.removeprefix("should be ") for text in said[1:])])
        what = f"{message}, not {shown[:80]}"
        if error["type"] == "string_pattern_mismatch":
            what = f"{shown[:80]} has the wrong form"
        return self.problem(path, what, self._fix(members, path))

    def _fix(self, errors: list[Error], path: KeyPath) -> str:
        """The word that was meant, or what to write, and what the field is."""
        writes = []
        for error in errors:
            if error["type"] in ("literal_error", "enum"):
                given = str(error.get("input")).lower()
                if path[-1:] == ("engine",) and given in _SAYS["engines"]:
                    return str(_SAYS["engines"][given])
                words = re.findall(r"'([^']*)'", str(error["ctx"]["expected"]))
                if meant := did_you_mean(str(error.get("input")), words, cutoff=0.5):
                    return meant
                among = f"one of {', '.join(words)}" if words[1:] else words[0]
                writes.append(f"write {among}")
            elif error["type"] == "string_pattern_mismatch":
                return _FORMS.get(error["ctx"]["pattern"]) or self._hint(path)
            elif error["type"] in _SAYS["within"]:
                word, name = _SAYS["within"][error["type"]]
                bound = error["ctx"][name]
                number = int(bound) if bound == int(bound) else bound
                writes.append(f"write a number {word} {number:,}")
            else:
                writes.append(_SAYS["write"].get(error["type"].partition("_")[0], ""))
        write = ", or ".join(filter(None, writes)).replace(", or write ", ", or ")
        return ": ".join(filter(None, (write, self._hint(path))))

    def _hint(self, path: KeyPath) -> str:
        """The first sentence on the field, or on the list or mapping that it is in."""
        field = None
        while path and field is None:
            field = _fields(self._section_at(path[:-1])).get(str(path[-1]))
            path = path[:-1]
        text = " ".join((field.description or "").split()) if field else ""
        first = re.split(r"(?<=[.;]) (?![^(]*\))", text)[0]  # not inside parentheses
        return first.rstrip(".;") if text else "see configs/README.md"

    def _unknown_key(self, path: KeyPath) -> Problem:
        name, known = str(path[-1]), list(_fields(self._section_at(path[:-1])))
        meant = _SAYS["elsewhere"].get(name, "")
        fix = f"did you mean `{meant}`?" if meant in known else did_you_mean(name, known)
        for section, field in _fields(self.root).items():
            if not fix and name in _fields(_model_of(field.annotation)):
                fix = f"did you mean `{section}.{name}`?"
        return self.problem(path, "unknown key", fix or f"known here: {', '.join(known)}")

    def _section_at(self, path: KeyPath) -> type[BaseModel] | None:
        model: type[BaseModel] | None = self.root
        for part in path:
            if isinstance(part, str):  # not the place in a list
                field = _fields(model).get(part)
                model = _model_of(field.annotation) if field else None
        return model


def _fields(section: type[BaseModel] | None) -> dict[str, Any]:
    """By the names that a config has for them."""
    fields = section.model_fields.items() if section else ()
    return {field.alias or name: field for name, field in fields}


def _model_of(annotation: Any) -> type[BaseModel] | None:
    candidates: Iterable[Any] = [annotation, *getattr(annotation, "__args__", ())]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
