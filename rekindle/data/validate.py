"""What makes a source unfit, collected while it is read, and refused all at once.

A row with a fault is counted, up to `SHOWN` of a kind are remembered with place and value, and
reading goes on; `raise_if_any` then raises one DataError with a Problem for each kind. Rows with
faults of most kinds can be left out instead: quarantine.py decides."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rekindle.errors import DataError, Problem, did_you_mean
from rekindle.spec.model import ColumnsSpec
from rekindle.tables import rows

SHOWN, MOST = 5, 10_000  # rows of a kind in an error, and remembered
_VALUE_LENGTH = 60

_TABLES = rows(Path(__file__).with_suffix(".yaml"))
_FAULTS, _NOTES, _FORMS = _TABLES["faults"], _TABLES["notes"], _TABLES["forms"]


def refusal(name: str, /, **about: object) -> Problem:
    """Why a source is refused as a whole, by the row of that name in validate.yaml."""
    return Problem(*(text.format(**about) for text in _TABLES["refusals"][name]))


@dataclasses.dataclass(frozen=True)
class BadRow:
    """Where `rows` rows with one fault begin, and the value at fault, shortened; "" for none."""

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
        more = self.count - len(shown)
        return ", ".join(shown) + (f" and {more:,} more" if shown[0] and more else "")


class Findings:
    """The faults of one source. `add` notes rows, `say` anything else; the first `MOST` rows of
    each kind are remembered. `rows` counts rows with faults, each once; `cut` says that what comes
    after a fault was not read. `needed` are columns that each file has to have, read or not."""

    def __init__(self, needed: Iterable[str] = ()) -> None:
        self.rows, self.cut = 0, False
        self._needed = tuple(needed)
        self._faults: dict[str, Fault] = {}
        self._notes: dict[tuple[str, str], Fault] = {}

    def __bool__(self) -> bool:
        return bool(self._faults or self._notes)

    def add(
        self, kind: str, place: str, value: object = None, count: int = 1, *, cut: bool = False
    ) -> None:
        """Note `count` rows with a fault of this kind, the first at `place` with this `value`;
        `cut` where nothing after it can be read."""
        shown = shorten(value) if value is not None else ""
        self._faults.setdefault(kind, Fault()).add(BadRow(place, shown, count))
        self.rows += count
        self.cut |= cut

    def count(self, kind: str, rows: int) -> None:
        """Note `rows` more with a fault of a kind, of which some were added."""
        if rows:
            self._faults[kind].count += rows
            self.rows += rows

    def include(self, batch: "Findings", rows: int) -> None:
        """Take over what was found in a batch, of which so many rows have faults."""
        for (what, fix), places in batch._notes.items():
            for place in places.first:
                self.note(what, where=place.place, fix=fix)
        for kind, fault in batch._faults.items():
            mine = self._faults.setdefault(kind, Fault())
            mine.count += fault.count
            mine.first += fault.first[: MOST - len(mine.first)]
        self.rows += rows
        self.cut |= batch.cut

    @property
    def droppable(self) -> bool:
        """Whether all faults are of rows that can be left out, and all others were read."""
        return bool(self._faults) and not (self._notes or self.cut)

    def settle(self) -> dict[str, Fault]:
        """The faults of rows by kind, in a fixed order; they are no longer findings."""
        return {kind: self._faults.pop(kind) for kind in _FAULTS if kind in self._faults}

    def shows(self, kind: str) -> bool:
        """Whether the next fault of this kind would be shown, or only counted."""
        return kind not in self._faults or len(self._faults[kind].first) < SHOWN

    def say(self, name: str, where: str = "", /, **about: object) -> None:
        """Note what validate.yaml says under that name, about a file or another place."""
        what, fix = (text.format(**about) for text in _NOTES[name])
        self.note(what, where=where, fix=fix)

    def note(self, what: str, *, where: str = "", fix: str = "") -> None:
        """Note a problem that is not one of rows; the same in several files is one."""
        places = self._notes.setdefault((what, fix), Fault())
        if places.first[-1:] != [BadRow(where)]:  # else another piece of the same file said so
            places.add(BadRow(where))

    def missing_columns(self, file: str, wanted: Iterable[str], present: Sequence[str]) -> bool:
        """Whether `file` lacks wanted columns, each noted with the nearest that exists."""
        every = dict.fromkeys([*self._needed, *wanted])
        absent = [name for name in every if name not in present]
        for name in absent:
            listed = ", ".join(f"`{shorten(column)}`" for column in present[:20]) or "none"
            meant = did_you_mean(name, present, cutoff=0.5)
            fix = f"{meant} set it in" if meant else f"it has {listed}; see"
            known = (roles for names, roles in _FORMS.items() if {*names.split()} <= {*present})
            if name == "text" and not meant and (roles := next(known, "")):
                fix = f"causal_lm reads rows like these with {roles} in"
            place = "data.columns" + " or data.slices" * (name not in ColumnsSpec.model_fields)
            self.note(f"there is no column `{name}`", where=file, fix=f"{fix} {place}")
        return bool(absent)

    def to_json(self) -> dict[str, Any]:
        """What was found, for `of_json` elsewhere."""
        faults = {kind: dataclasses.asdict(fault) for kind, fault in self._faults.items()}
        notes = [[*key, [row.place for row in one.first]] for key, one in self._notes.items()]
        return {"rows": self.rows, "cut": self.cut, "faults": faults, "notes": notes}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Self:
        made = cls()
        made.rows, made.cut = found["rows"], found["cut"]
        for kind, fault in found["faults"].items():
            made._faults[kind] = Fault(fault["count"], [BadRow(**row) for row in fault["first"]])
        for what, fix, places in found["notes"]:
            made._notes[what, fix] = Fault(len(places), [BadRow(place) for place in places])
        return made

    def problems(self) -> list[Problem]:
        found = [Problem(what, str(places), fix) for (what, fix), places in self._notes.items()]
        for kind, fault in self._faults.items():
            what, fix = _FAULTS[kind]
            rows = f"{fault.count:,} {'row' if fault.count == 1 else 'rows'} {what}"
            found.append(Problem(rows, str(fault), fix))
        return found

    def raise_if_any(self) -> None:
        if self:
            raise DataError(self.problems())


def shorten(value: object) -> str:
    """A value as one short line; strings in quotes."""
    text = value if isinstance(value, str) else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= _VALUE_LENGTH else text[: _VALUE_LENGTH - 1] + "…"


def check_splits(
    rows: Mapping[str, int],
    class_rows: Mapping[str, Mapping[str, int]],
    labels: Sequence[str],
    required: Sequence[str],
    complete: Sequence[str],
    findings: Findings,
    left_out: Mapping[str, int],
) -> None:
    """Note `required` splits that are empty, and classes that a split of `complete` lacks; `rows`
    counts per split, `class_rows` per split and label, `left_out` those of no split."""
    if len(labels) == 1:
        findings.say("one class", label=shorten(labels[0]))
    sizes = ", ".join(f"{split} {count:,}" for split, count in rows.items())
    sizes += "".join(f"; left out: {kind} {count:,}" for kind, count in left_out.items())
    for split, count in rows.items():
        if count and split in complete:
            counts = class_rows[split]
            if absent := [label for label in labels if not counts.get(label)]:
                listed = ", ".join(f"`{shorten(label)}`" for label in absent[:SHOWN])
                listed += f" and {len(absent) - SHOWN} more" if len(absent) > SHOWN else ""
                found = (f"{shorten(label)} {counts.get(label, 0):,}" for label in labels[:20])
                findings.say("class not in split", ", ".join(found), split=split, classes=listed)
        elif not count and split in required:
            findings.say("empty split", sizes, split=split)
