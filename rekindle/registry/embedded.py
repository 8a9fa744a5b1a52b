"""The embedded registry: MLflow's database as one file, which is there whole or not at all.

MLflow makes its tables one migration after the other, for seconds; a database whose making was
interrupted can neither be opened nor finished. So it is made aside and renamed. Its rows name files
by absolute URIs, which are updated where the home was moved or copied."""

import contextlib
import os
import sqlite3
from pathlib import Path

DATABASE = "mlflow.db"
ARTIFACTS = "mlartifacts"
_PLACES = {
    "experiments": "artifact_location",
    "runs": "artifact_uri",
    "logged_models": "artifact_location",
    "model_versions": "storage_location",
}
_PATIENCE_SECONDS = 60.0


def make(root: Path) -> None:
    """Make the database under `root` unless it is there. The caller keeps others out."""
    final = root / DATABASE
    if final.exists() and final.stat().st_size:
        return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    for left in root.glob(f".{DATABASE}.*"):
        left.unlink(missing_ok=True)
    draft = root / f".{DATABASE}.{os.getpid()}"
    SqlAlchemyStore(f"sqlite:///{draft}", (root / ARTIFACTS).as_uri()).engine.dispose()
    draft.replace(final)


def settle(root: Path) -> None:
    """Update the URIs in the database to the files in this home. The caller keeps others out."""
    now = f"{(root / ARTIFACTS).as_uri()}/"
    database = sqlite3.connect(root / DATABASE, timeout=_PATIENCE_SECONDS)
    with contextlib.closing(database), database:
        # MLflow makes the experiment 0 with the database, where we tell it to keep files
        asked = "select artifact_location from experiments where experiment_id = 0"
        before = str((database.execute(asked).fetchone() or ("",))[0]).removesuffix("0")
        if before == now or not before.endswith(f"/{ARTIFACTS}/"):
            return
        for table, column in _PLACES.items():
            database.execute(
                f"update {table} set {column} = ? || substr({column}, ?) "  # noqa: S608 - ours
                f"where substr({column}, 1, ?) = ?",
                (now, len(before) + 1, len(before), before),
            )
