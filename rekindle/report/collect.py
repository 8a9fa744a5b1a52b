"""Finds the records that the steps of a run left behind, and sums up what the run came
to.

A step's output artifact says what it holds in `metadata["record"]`; its URI is a file, or
a folder with the file of that kind in it. A run of a user's own pipeline may have none. A
record that is missing, unreadable or of another version becomes a sentence in `notes`,
never an error."""

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

# the kinds of records that a card reads: scores by example are too many
_SHOWN = {kind: record for kind, record in records.RECORD_KINDS.items() if kind != "scores"}
_SHOWN["profile"] = records.Profile


@dataclasses.dataclass(frozen=True)
class RunFindings:
    """The records of one run, as far as they exist, and the file behind each kind;
    `history` by ascending step; `plan` from before it; `notes` says what could not be
    read."""

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
        """What a person should know before trusting the metrics, and what the losses say
        of a model that is below a floor, or no better than always the same answer."""
        warnings = list(self.shards.notices) if self.shards else []
        if self.evidence is None:
            return tuple(warnings)
        warnings += self.evidence.warnings
        failed = [check.name for check in self.evidence.checks if not check.passed]
        if any(name.startswith(("floor_", "beats_")) for name in failed):
            warnings += _loss_warnings(self)
        return tuple(warnings)


def _loss_warnings(findings: RunFindings) -> tuple[str, ...]:
    """Whether the model learnt little, or its training rows by heart,
    or was still learning."""
    rows = findings.history
    # lists collect no histories: one is read for the few models that are below a floor
    if not rows and "training" in findings.files:
        rows = history_beside(findings.files["training"], [])
    if len(rows) < _FEWEST:
        return ()
    # a twentieth of the steps, because the loss of a single one is noise
    end = max(1, len(rows) // 20)
    first = fmean(row.loss for row in rows[:end])
    last = fmean(row.loss for row in rows[-end:])
    last_words = formats.metric(last)
    # the thresholds are rules of thumb: what follows from them is a hint
    if last > 0.9 * first:
        return (
            f"the loss on training rows hardly fell, from {formats.metric(first)} to "
            f"{last_words}: more epochs or another train.lr may teach the model more",
        )
    validated = [row.validation_loss for row in rows if row.validation_loss is not None]
    if validated and validated[-1] > 2 * last:
        return (
            f"the loss is {last_words} on training rows and {formats.metric(validated[-1])} on "
            "the validation split: more rows or a pretrained model (model.source) help more "
            "than epochs",
        )
    if len(validated) > 1 and validated[-1] < 0.98 * min(validated[:-1]):
        return ("the loss on the validation split still fell at the end: more epochs may help",)
    return ()


def collect(run: records.RunRecord, *, history: bool = True) -> RunFindings:
    """Everything the steps of `run` recorded, without the long `history` if so asked."""
    files = _record_files(run)
    notes: list[str] = []
    rows: tuple[records.HistoryRow, ...] = ()
    if "training" in files:
        if history:
            rows = history_beside(files["training"], notes)
        profile = files["training"].with_name(PROFILE)
        if profile.is_file():
            files["profile"] = profile
    fields: dict[str, Any] = {}
    for kind, record_class in _SHOWN.items():
        if kind not in files:
            continue
        try:
            fields[kind] = record_class.read(files[kind])
        except (OSError, ValueError) as error:
            notes.append(f"The {kind} record cannot be shown: {_why(error, files[kind])}.")
    if run.plan:
        try:  # another version may say more of a plan, or less
            fields["plan"] = Planned.model_validate(dict(run.plan))
        except ValidationError as error:
            notes.append(f"The plan cannot be shown: {_why(error, Path('run.json'))}.")
    return RunFindings(**fields, history=rows, notes=tuple(notes), files=files)


def _record_files(run: records.RunRecord) -> dict[str, Path]:
    """The files of records that the artifacts of the steps announce, by kind."""
    files = {}
    for step in run.steps:
        for artifact in step.artifacts.values():
            kind = artifact.metadata.get("record")
            if isinstance(kind, str) and kind in records.RECORD_KINDS and artifact.uri:
                path = local_path(artifact.kept or artifact.uri)
                if path.is_dir():
                    path /= records.RECORD_FILES[kind]
                files[kind] = path
    return files


def local_path(uri: str) -> Path:
    """The path behind a `file://` URI or a plain path."""
    if uri.startswith("file://"):
        return Path(unquote(urlparse(uri).path))
    return Path(uri)


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
                    # a training that was killed leaves a line that is cut short
                    if line.strip():
                        unreadable += 1
                else:
                    # a training that goes on from a checkpoint repeats the steps after it
                    rows[row.step] = row
    except OSError as error:
        notes.append(f"The training history cannot be shown: {_why(error, path)}.")
    if unreadable:
        notes.append(
            f"{unreadable} line(s) of the training history are damaged and left out: {path}."
        )
    return tuple(rows[step] for step in sorted(rows))


def _why(error: Exception, path: Path) -> str:
    """Why a record cannot be read, with its file."""
    if isinstance(error, FileNotFoundError):
        return f"the file is gone: {path}"
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        field_words = f" at `{field}`" if field else ""
        return f"{first['msg'].rstrip('.')}{field_words} in {path}"
    if isinstance(error, OSError):  # it names the file itself
        return str(error)
    return f"{error} in {path}"


def summarised(
    record: records.RunRecord, findings: RunFindings | None = None, card: str = ""
) -> records.RunSummary:
    """The run and what its steps found; `card` is the path of its card."""
    if findings is None:
        findings = collect(record, history=False)
    summary_of = records.StepSummary.model_validate
    steps = tuple(summary_of(step, from_attributes=True) for step in record.steps)
    evidence = findings.evidence
    fingerprint = findings.fingerprint
    return records.RunSummary(
        run_id=record.run_id,
        run_key=fingerprint.run_key if fingerprint else "",
        status=record.status,
        seconds=record.seconds,
        steps=steps,
        metrics=evidence.metrics if evidence else {},
        gate=gate_of(findings),
        model=model_of(findings),
        card=card,
        warnings=findings.warnings,
        window=fingerprint.window if fingerprint else "",
        validation=findings.training.validation if findings.training else {},
        settings=record.settings,
        ignored=record.ignored,
        audit=evidence.audit if evidence else None,
    )


def gate_of(findings: RunFindings) -> records.GateSummary | None:
    """Whether the model of this run is the champion now, and why or why not."""
    evidence = findings.evidence
    if evidence is None:
        return None
    # without a registration nothing has become of it yet
    decision: records.Decision = "pending" if evidence.promote else "refused"
    if findings.registration:
        decision = findings.registration.decision
    return records.GateSummary(
        promoted=decision == "promoted",
        decision=decision,
        passed=evidence.promote,
        reason=evidence.reason,
        champion_version=evidence.champion_version,
        comparison=evidence.comparison,
    )


def model_of(findings: RunFindings) -> records.ModelSummary | None:
    """Where the registry holds the model."""
    if findings.registration is None:
        return None
    return records.ModelSummary.model_validate(findings.registration, from_attributes=True)
