"""What makes a source unfit, collected while it is read, and refused all at once.

A row with a fault is counted, up to `SHOWN` of a kind are remembered with place and
value, and reading goes on; `raise_if_any` then raises one DataError with a Problem for
each kind. Rows with faults of most kinds can be left out instead: quarantine.py
decides."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self, TypedDict

from rekindle.errors import DataError, Problem, did_you_mean
from rekindle.spec.model import ColumnsSpec

SHOWN = 5
"""Rows of a kind that an error lists."""
MOST = 10_000
"""Rows of a kind that are remembered."""
_VALUE_LENGTH = 60
_LISTED_COLUMNS = 20


class _RowFault(NamedTuple):
    """What follows "3 rows" in an error, and what to do about them."""

    what: str
    fix: str


# by the kinds that `Findings.add` takes, in the order in which `settle` gives them
_ROW_FAULTS = {
    "malformed": _RowFault(
        "that cannot be parsed",
        "correct or remove them; `format` says how a file is read",
    ),
    "undecodable": _RowFault(
        "with bytes that are not UTF-8",
        "save the file as UTF-8, or set data.encoding, such as to cp1252",
    ),
    "type": _RowFault(
        "with a value of the wrong type",
        "texts must be strings, other columns strings or integers",
    ),
    "empty text": _RowFault(
        "with an empty text or none",
        "remove them, or set data.columns.text",
    ),
    "words": _RowFault(
        "without a list of words",
        "words are a list of strings, none of them empty; data.columns.words names the column",
    ),
    "tags": _RowFault(
        "without exactly one tag per word",
        "tags are a list of strings or integers, as many as there are words",
    ),
    "empty prompt": _RowFault(
        "without a prompt",
        "remove them, or set data.columns.prompt",
    ),
    "empty completion": _RowFault(
        "without a completion",
        "remove them, or set data.columns.completion",
    ),
    "chat": _RowFault(
        "without a chat",
        "a chat is a list of {role: ..., content: a text}, with no other keys",
    ),
    "role": _RowFault(
        "with a role that is unknown or out of place",
        "use user and assistant, and system for a first turn",
    ),
    "empty turn": _RowFault(
        "with an empty turn",
        "remove the turn, or the row",
    ),
    "template": _RowFault(
        "whose chat the tokenizer's template refuses or alters",
        "correct their turns, set model.tokenizer to another one, or leave them out: "
        "data.on_bad_rows: drop",
    ),
    "no answer": _RowFault(
        "without a turn of the assistant",
        "remove them: they teach nothing",
    ),
    "empty label": _RowFault(
        "without a label",
        "label or remove them, or set data.columns.label",
    ),
    "no number": _RowFault(
        "with no finite number as target",
        "correct them, remove them, or name another column",
    ),
    "empty key": _RowFault(
        "without a key",
        "give every row one, or unset data.columns.key",
    ),
    "empty group": _RowFault(
        "without a group",
        "give every row one, or unset data.columns.group",
    ),
    "time": _RowFault(
        "with no ISO 8601 time",
        "write times as 2026-03-31 or 2026-03-31T12:00:00Z",
    ),
    "unknown label": _RowFault(
        "with a label that data.labels does not name",
        "correct them, or add the label to data.labels",
    ),
    "image": _RowFault(
        "with an image that cannot be read",
        "replace or remove them",
    ),
    "image size": _RowFault(
        "with an image of another size than the first",
        "set data.image_size: [height, width], or one number",
    ),
    "image colour": _RowFault(
        "with a colour image after grey ones",
        "convert all of them to grey or to colour",
    ),
    "pixel": _RowFault(
        "with pixels that are not whole numbers from 0 to 255",
        "scale pixels to 0..255, and remove NaN",
    ),
    "no class": _RowFault(
        "in no folder that names their class",
        "put each image into a folder named after its class",
    ),
    "leak": _RowFault(
        "whose content stands in more than one split",
        "remove the copies, set data.duplicates: exact, or split by hash without a key",
    ),
}

# columns of rows that language models are tuned
# on, and the roles that they have in a config
_TUNING_ROLES = (
    ({"messages"}, "{messages: messages}"),
    ({"conversations"}, "{messages: conversations}"),
    (
        {"instruction", "input", "output"},
        "{prompt: instruction, input: input, completion: output}",
    ),
    ({"instruction", "output"}, "{prompt: instruction, completion: output}"),
    ({"prompt", "completion"}, "{prompt: prompt, completion: completion}"),
)


@dataclasses.dataclass(frozen=True)
class BadRow:
    """Where `rows` rows with one fault begin, and
    the value at fault, shortened, or ""."""

    place: str
    value: str = ""
    rows: int = 1

    def __str__(self) -> str:
        return f"{self.place} ({self.value})" if self.value else self.place


@dataclasses.dataclass
class Fault:
    """How many rows have one kind of fault, and the first of them."""

    count: int = 0
    first: list[BadRow] = dataclasses.field(default_factory=list)

    def add(self, row: BadRow) -> None:
        self.count += row.rows
        if len(self.first) < MOST:
            self.first.append(row)

    def __str__(self) -> str:
        shown = [str(row) for row in self.first[:SHOWN]]
        listed = ", ".join(shown)
        hidden = self.count - len(shown)
        # the first is "" where a note has no place,
        # and then there is no list to go on with
        if shown[0] and hidden:
            return f"{listed} and {hidden:,} more"
        return listed


class _BadRowJson(TypedDict):
    place: str
    value: str
    rows: int


class _FaultJson(TypedDict):
    count: int
    first: list[_BadRowJson]


class FindingsJson(TypedDict):
    """What `Findings.to_json` gives; a note is a list of what, fix and places."""

    rows: int
    cut: bool
    faults: dict[str, _FaultJson]
    notes: list[list[Any]]


class Findings:
    """The faults of one source. `add` notes rows, `note` anything else; the first `MOST`
    rows of each kind are remembered. `rows` counts rows with faults, each once; `cut`
    says that what comes after a fault was not read. `needed` are columns that each file
    has to have, read or not."""

    def __init__(self, needed: Iterable[str] = ()) -> None:
        self.rows = 0
        self.cut = False
        self._needed = tuple(needed)
        self._faults: dict[str, Fault] = {}
        self._notes: dict[tuple[str, str], Fault] = {}

    def __bool__(self) -> bool:
        return bool(self._faults or self._notes)

    def add(
        self, kind: str, place: str, value: object = None, count: int = 1, *, cut: bool = False
    ) -> None:
        """Note `count` rows with a fault of this kind, the first at `place` with this
        `value`; `cut` where nothing after it can be read."""
        shown = shorten(value) if value is not None else ""
        # shortened at once: a value may be a whole file, and `MOST` of them are kept
        self._faults.setdefault(kind, Fault()).add(BadRow(place, shown, count))
        self.rows += count
        self.cut |= cut

    def count(self, kind: str, rows: int) -> None:
        """Note `rows` more with a fault of a kind, of which some were added."""
        if rows:
            self._faults[kind].count += rows
            self.rows += rows

    def include(self, batch: "Findings", rows: int) -> None:
        """Take over the findings of a batch, of which so many rows have faults."""
        for (what, fix), places in batch._notes.items():
            for place in places.first:
                self.note(what, where=place.place, fix=fix)
        for kind, batch_fault in batch._faults.items():
            fault = self._faults.setdefault(kind, Fault())
            fault.count += batch_fault.count
            fault.first += batch_fault.first[: MOST - len(fault.first)]
        self.rows += rows
        self.cut |= batch.cut

    @property
    def droppable(self) -> bool:
        """Whether all faults are of rows that can be left out, and all rows were read."""
        return bool(self._faults) and not (self._notes or self.cut)

    def settle(self) -> dict[str, Fault]:
        """The faults of rows by kind, in a fixed order; they are no longer findings."""
        return {kind: self._faults.pop(kind) for kind in _ROW_FAULTS if kind in self._faults}

    def shows(self, kind: str) -> bool:
        """Whether the next fault of this kind would be shown, or only counted."""
        return kind not in self._faults or len(self._faults[kind].first) < SHOWN

    def note(self, what: str, *, where: str = "", fix: str = "") -> None:
        """Note a problem that is not one of rows; the same in several files is one."""
        places = self._notes.setdefault((what, fix), Fault())
        # another piece of the same file may have the same problem
        if places.first[-1:] != [BadRow(where)]:
            places.add(BadRow(where))

    def missing_columns(self, file: str, wanted: Iterable[str], present: Sequence[str]) -> bool:
        """Whether `file` lacks wanted columns;
        each is noted with the nearest that exists."""
        required = dict.fromkeys([*self._needed, *wanted])
        absent = [name for name in required if name not in present]
        for name in absent:
            setting = "data.columns"
            if name not in ColumnsSpec.model_fields:
                setting = "data.columns or data.slices"
            self.note(
                f"there is no column `{name}`",
                where=file,
                fix=f"{_advice_on_column(name, present)} {setting}",
            )
        return bool(absent)

    def to_json(self) -> FindingsJson:
        """The findings as JSON, which `of_json` reads in another process."""
        faults: dict[str, _FaultJson] = {}
        for kind, fault in self._faults.items():
            first: list[_BadRowJson] = [
                {"place": row.place, "value": row.value, "rows": row.rows} for row in fault.first
            ]
            faults[kind] = {"count": fault.count, "first": first}
        notes: list[list[Any]] = []
        for (what, fix), places in self._notes.items():
            notes.append([what, fix, [row.place for row in places.first]])
        return {"rows": self.rows, "cut": self.cut, "faults": faults, "notes": notes}

    @classmethod
    def of_json(cls, content: FindingsJson) -> Self:
        """The findings that `to_json` wrote."""
        findings = cls()
        findings.rows = content["rows"]
        findings.cut = content["cut"]
        for kind, fault in content["faults"].items():
            first = [BadRow(**row) for row in fault["first"]]
            findings._faults[kind] = Fault(fault["count"], first)
        for what, fix, places in content["notes"]:
            findings._notes[what, fix] = Fault(len(places), [BadRow(place) for place in places])
        return findings

    def problems(self) -> list[Problem]:
        """A problem for each note, then one for each kind of fault."""
        problems = [Problem(what, str(places), fix) for (what, fix), places in self._notes.items()]
        for kind, fault in self._faults.items():
            what, fix = _ROW_FAULTS[kind]
            noun = "row" if fault.count == 1 else "rows"
            problems.append(Problem(f"{fault.count:,} {noun} {what}", str(fault), fix))
        return problems

    def raise_if_any(self) -> None:
        if self:
            raise DataError(self.problems())


def _advice_on_column(name: str, present: Sequence[str]) -> str:
    """What to do about a column that is not `present`, and which field sets it."""
    # a looser match than for fields: columns of others are named in many ways
    nearest = did_you_mean(name, present, cutoff=0.5)
    if nearest:
        return f"{nearest} set it in"
    if name == "text":
        for columns, roles in _TUNING_ROLES:
            if columns <= {*present}:
                return f"causal_lm reads rows like these with {roles} in"
    listed = ", ".join(f"`{shorten(column)}`" for column in present[:_LISTED_COLUMNS])
    return f"it has {listed or 'none'}; see"


def shorten(value: object) -> str:
    """A value as one short line; strings in quotes."""
    text = value if isinstance(value, str) else repr(value)
    text = " ".join(text.split())
    if len(text) > _VALUE_LENGTH:
        return text[: _VALUE_LENGTH - 1] + "…"
    return text
