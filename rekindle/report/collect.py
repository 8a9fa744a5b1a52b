"""Finds the records that the steps of a run left behind, and sums up what the run came to.

A step's output artifact says what it holds in `metadata["record"]`; its URI is a file, or a folder
with the file of that kind in it. A run of a user's own pipeline may have none. A record that is
missing, unreadable or of another version becomes a sentence in `notes`, never an error."""

import dataclasses
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import unquote, urlparse

from pydantic import ValidationError

from rekindle import formats, records
from rekindle.outputs import Planned

HISTORY = "history.jsonl"
PROFILE = "profile.json"
_FEWEST = 20  # steps that losses are looked at

_SHOWN = {kind: record for kind, record in records.RECORD_KINDS.items() if kind != "scores"}
_SHOWN["profile"] = records.Profile


@dataclasses.dataclass(frozen=True)
class Findings:
    """The records of one run, as far as they exist, and the file behind each kind; `history` by
    ascending step; `plan` from before it; `notes` says what could not be read."""

    fingerprint: records.Fingerprint | None = None
    shards: records.ShardManifest | None = None
    training: records.TrainingSummary | None = None
    evidence: records.Evidence | None = None
    registration: records.Registration | None = None
    history: tuple[records.HistoryRow, ...] = ()
    profile: records.Profile | None = None
    plan: Planned | None = None
    notes: tuple[str, ...] = ()
    files: dict[str, Path] = dataclasses.field(default_factory=dict)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know before trusting the metrics, and what the losses say of a model
        that is below a floor, or no better than always the same answer."""
        notices = self.shards.notices if self.shards else ()
        if (evidence := self.evidence) is None:
            return notices
        failed = (check.name for check in evidence.checks if not check.passed)
        below = any(name.startswith(("floor_", "beats_")) for name in failed)
        return (*notices, *evidence.warnings, *(_of_losses(self) if below else ()))


def _of_losses(found: Findings) -> tuple[str, ...]:
    """Whether the model learnt little, or its training rows by heart, or was still learning."""
    rows = found.history
    if not rows and "training" in found.files:
        rows = history_beside(found.files["training"], [])
    if len(rows) < _FEWEST:
        return ()
    end = max(1, len(rows) // 20)
    first, last = (fmean(row.loss for row in part) for part in (rows[:end], rows[-end:]))
    checked = [row.validation_loss for row in rows if row.validation_loss is not None]
    was, now, held = map(formats.metric, (first, last, checked[-1] if checked else None))
    if last > 0.9 * first:
        what = f"the loss on training rows hardly fell, from {was} to {now}"
        return (f"{what}: more epochs or another train.lr may teach the model more",)
    if checked and checked[-1] > 2 * last:
        what = f"the loss is {now} on training rows and {held} on the validation split"
        return (f"{what}: more rows or a pretrained model (model.source) help more than epochs",)
    if len(checked) > 1 and checked[-1] < 0.98 * min(checked[:-1]):
        return ("the loss on the validation split still fell at the end: more epochs may help",)
    return ()


def collect(run: records.RunRecord, *, history: bool = True) -> Findings:
    """Everything the steps of `run` recorded, without the long `history` if so asked."""
    files = {}
    for step in run.steps:  # what the artifacts announce
        for artifact in step.artifacts.values():
            kind = artifact.metadata.get("record")
            if isinstance(kind, str) and kind in records.RECORD_KINDS and artifact.uri:
                path = local_path(artifact.kept or artifact.uri)
                files[kind] = path / records.RECORD_FILES[kind] if path.is_dir() else path
    notes: list[str] = []
    rows = history_beside(files["training"], notes) if history and "training" in files else ()
    if "training" in files and (beside := files["training"].with_name(PROFILE)).is_file():
        files["profile"] = beside
    found: dict[str, Any] = {}
    for name, cls in _SHOWN.items():
        if name in files:
            try:
                found[name] = cls.read(files[name])
            except (OSError, ValueError) as error:
                notes.append(f"The {name} record cannot be shown: {_why(error, files[name])}.")
    try:  # another version may say more of a plan, or less
        found["plan"] = Planned.model_validate(dict(run.plan)) if run.plan else None
    except ValidationError as error:
        notes.append(f"The plan cannot be shown: {_why(error, Path('run.json'))}.")
    return Findings(**found, history=rows, notes=tuple(notes), files=files)


def local_path(uri: str) -> Path:
    """The path behind a `file://` URI or a plain path."""
    return Path(unquote(urlparse(uri).path)) if uri.startswith("file://") else Path(uri)


def history_beside(training: Path, notes: list[str]) -> tuple[records.HistoryRow, ...]:
    """The rows in the folder of the file `training`; of a repeated step the later one."""
    path = training.with_name(HISTORY)
    if not path.is_file():
        return ()
    rows: dict[int, records.HistoryRow] = {}
    unreadable = 0
    try:
        with path.open("rb") as lines:
            for line in lines:
                try:
                    row = records.HistoryRow.model_validate_json(line)
                except ValidationError:
                    unreadable += bool(line.strip())
                else:
                    rows[row.step] = row
    except OSError as error:
        notes.append(f"The training history cannot be shown: {_why(error, path)}.")
    if unreadable:
        what = "line(s) of the training history are damaged and left out"
        notes.append(f"{unreadable} {what}: {path}.")
    return tuple(rows[step] for step in sorted(rows))


def _why(error: Exception, path: Path) -> str:
    if isinstance(error, FileNotFoundError):
        return f"the file is gone: {path}"
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        place = f" at `{field}`" if field else ""
        return f"{first['msg'].rstrip('.')}{place} in {path}"
    return f"{error}" if isinstance(error, OSError) else f"{error} in {path}"


def summarised(
    record: records.RunRecord, findings: Findings | None = None, card: str = ""
) -> records.RunSummary:
    """The run and what its steps found; `card` is the path of its card."""
    found = findings or collect(record, history=False)
    summed_up = records.StepSummary.model_validate
    steps = tuple(summed_up(step, from_attributes=True) for step in record.steps)
    evidence, source = found.evidence, found.fingerprint
    return records.RunSummary(
        run_id=record.run_id,
        run_key=source.run_key if source else "",
        status=record.status,
        seconds=record.seconds,
        steps=steps,
        metrics=evidence.metrics if evidence else {},
        gate=gate_of(found),
        model=model_of(found),
        card=card,
        warnings=found.warnings,
        window=source.window if source else "",
        validation=found.training.validation if found.training else {},
        settings=record.settings,
        ignored=record.ignored,
        audit=evidence.audit if evidence else None,
    )


def gate_of(found: Findings) -> records.GateSummary | None:
    """Whether the model of this run is the champion now, and why or why not."""
    if found.evidence is None:
        return None
    waits: records.Decision = "pending" if found.evidence.promote else "refused"
    decision = found.registration.decision if found.registration else waits
    return records.GateSummary(
        promoted=decision == "promoted",
        decision=decision,
        passed=found.evidence.promote,
        reason=found.evidence.reason,
        champion_version=found.evidence.champion_version,
        comparison=found.evidence.comparison,
    )


def model_of(found: Findings) -> records.ModelSummary | None:
    """Where the registry holds the model."""
    if (where := found.registration) is None:
        return None
    return records.ModelSummary.model_validate(where, from_attributes=True)
