"""What a run leaves behind: versioned plain JSON, written by steps and platforms, read by
report/ and the CLI.

Two kinds. A **run record** (`run.json`, one a run) says what was executed and what came
of it; the platform rewrites it atomically whenever a step changes state, so that a killed
run still tells its story. **Step records** are files inside a step's output artifacts
(evidence, history, data summary, registration); the artifact carries `metadata["record"]
= <kind>`, which survives on every platform, and that is how readers find them: see
`RECORD_KINDS`.

Records hold no secrets. Those that a cacheable step writes hold no timestamps, so that
the same work gives the same bytes.

One module a subject; all names are here."""

from pydantic import ValidationError

from rekindle.records.base import (
    SCHEMA_VERSION,
    Record,
    VersionedRecord,
    canonical_json,
    moved,
    write_atomically,
)
from rekindle.records.data import Fingerprint, MixedRows, ShardFile, ShardManifest
from rekindle.records.evidence import (
    Audit,
    CalibrationBin,
    ChampionDrop,
    Check,
    Churn,
    ClassResult,
    Comparison,
    Contender,
    Evidence,
    Objective,
    Reference,
    Sample,
    Scores,
    Slice,
    Smoke,
    SmokeRow,
)
from rekindle.records.registry import (
    ROLLED_BACK_BY_HAND,
    ChampionChange,
    ChampionRecord,
    ChangeKind,
    Decision,
    Registration,
)
from rekindle.records.run import (
    WAITING,
    ArtifactRecord,
    Ignored,
    RunRecord,
    RunStatus,
    StepRecord,
    StepStatus,
    Submission,
)
from rekindle.records.serving import (
    Deployment,
    Monitored,
    RolloutEvent,
    RolloutState,
    Signal,
    VersionTraffic,
)
from rekindle.records.summary import GateSummary, ModelSummary, RunSummary, StepSummary, Turn
from rekindle.records.training import (
    HistoryRow,
    OperatorShare,
    Profile,
    Rehearsal,
    RehearsalRecord,
    TrainingSummary,
)

__all__ = [
    "RECORD_FILES",
    "RECORD_KINDS",
    "ROLLED_BACK_BY_HAND",
    "SCHEMA_VERSION",
    "WAITING",
    "ArtifactRecord",
    "Audit",
    "CalibrationBin",
    "ChampionChange",
    "ChampionDrop",
    "ChampionRecord",
    "ChangeKind",
    "Check",
    "Churn",
    "ClassResult",
    "Comparison",
    "Contender",
    "Decision",
    "Deployment",
    "Evidence",
    "Fingerprint",
    "GateSummary",
    "HistoryRow",
    "Ignored",
    "MixedRows",
    "ModelSummary",
    "Monitored",
    "Objective",
    "OperatorShare",
    "Profile",
    "Record",
    "Reference",
    "Registration",
    "Rehearsal",
    "RehearsalRecord",
    "RolloutEvent",
    "RolloutState",
    "RunRecord",
    "RunStatus",
    "RunSummary",
    "Sample",
    "Scores",
    "ShardFile",
    "ShardManifest",
    "Signal",
    "Slice",
    "Smoke",
    "SmokeRow",
    "StepRecord",
    "StepStatus",
    "StepSummary",
    "Submission",
    "TrainingSummary",
    "Turn",
    "VersionTraffic",
    "VersionedRecord",
    "canonical_json",
    "kind_of",
    "moved",
    "write_atomically",
]

RECORD_KINDS: dict[str, type[Record]] = {
    "fingerprint": Fingerprint,
    "shards": ShardManifest,
    "training": TrainingSummary,
    "scores": Scores,
    "evidence": Evidence,
    "registration": Registration,
}

# what a record is called in an artifact that is a folder
RECORD_FILES = {kind: f"{kind}.json" for kind in RECORD_KINDS} | {"shards": "manifest.json"}


def kind_of(content: bytes) -> str:
    """The kind of record that `content` is; "" for anything else. Kinds share no set of fields."""
    for kind, record in RECORD_KINDS.items():
        try:
            record.model_validate_json(content)
        except ValidationError:
            continue
        return kind
    return ""
