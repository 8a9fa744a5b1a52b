"""Where versions and training metrics live: MLflow, embedded by default.

An empty `tracking_uri` means `mlflow.db` and `mlartifacts/` under the artifact root
(MLflow's own file store is gone since 3.x; sqlite it is). MLflow makes the tables of that
database one migration after the other, for seconds; one whose making was interrupted can
neither be opened nor finished, so it is made aside and renamed. Its rows name files by
absolute URIs, which are updated where the home was moved or copied. Every failure of the
registry leaves here as a RegistryError that names it without credentials."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle.errors import RegistryError, RekindleError, first_line
from rekindle.launch.process import owned
from rekindle.masking import masked
from rekindle.records import HistoryRow
from rekindle.telemetry import Telemetry

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger(__name__)

DATABASE = "mlflow.db"
ARTIFACTS = "mlartifacts"
_PLACES = {
    "experiments": "artifact_location",
    "runs": "artifact_uri",
    "logged_models": "artifact_location",
    "model_versions": "storage_location",
}
_PATIENCE_SECONDS = 60.0
PREFIX = "rekindle."
AGAIN = "run the same command again: nothing is trained twice"
BATCH = 1_000
_WHEN = ("step", "epoch", "tokens")  # of a row on the curve; the others are its values
METRICS = tuple(name for name in HistoryRow.model_fields if name not in _WHEN)


def _prepare() -> None:
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")


_prepare()  # MLflow reads some of it while it is imported, which need not be by us


def resolve_uri(tracking_uri: str, artifact_root: str) -> str:
    """`tracking_uri`, or the embedded database under `artifact_root`."""
    return tracking_uri or f"sqlite:///{Path(artifact_root).absolute() / DATABASE}"


@contextlib.contextmanager
def registry(tracking_uri: str, artifact_root: str, doing: str) -> Iterator[MlflowClient]:
    """A client for the registry; errors say `cannot <doing>`."""
    _prepare()
    import mlflow

    logging.getLogger("alembic").setLevel(logging.WARNING)
    uri = resolve_uri(tracking_uri, artifact_root)
    try:
        root = Path(artifact_root).absolute()
        lock = root / "locks" / "registry"  # one process at a time makes the embedded database
        if not tracking_uri:
            alone: contextlib.AbstractContextManager[Any] = owned(lock, lambda: None)
        else:
            alone = contextlib.nullcontext()
        with alone:
            if not tracking_uri:
                _make(root)
                _settle(root)
            client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
            client.search_experiments(max_results=1)  # so that it has had an answer
        with _mlflow_means(uri):
            yield client
    except RekindleError:
        raise
    except Exception as error:
        # MLflow lets SQLAlchemy's, requests' and the file system's errors through as they are
        message = f"cannot {doing}: {first_line(error)[:300]}"
        fix = _fix(tracking_uri, error)
        raise RegistryError(message, where=masked(uri), fix=fix) from error


@contextlib.contextmanager
def _mlflow_means(uri: str) -> Iterator[None]:
    """Have MLflow's functions without a client mean this registry, and then what they
    meant before: in a notebook they are the user's."""
    import mlflow

    tracking = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else None
    registry = os.environ.get("MLFLOW_REGISTRY_URI")
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(tracking)
        mlflow.set_registry_uri(registry)
        if registry is None:  # which MLflow leaves in the environment
            os.environ.pop("MLFLOW_REGISTRY_URI", None)


def _make(root: Path) -> None:
    """Make the database under `root` unless it is there. The caller keeps others out."""
    final = root / DATABASE
    if final.exists() and final.stat().st_size:
        return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    for draft_of_a_killed_process in root.glob(f".{DATABASE}.*"):
        draft_of_a_killed_process.unlink(missing_ok=True)
    draft = root / f".{DATABASE}.{os.getpid()}"
    SqlAlchemyStore(f"sqlite:///{draft}", (root / ARTIFACTS).as_uri()).engine.dispose()
    draft.replace(final)


def _settle(root: Path) -> None:
    """Update the URIs in the database to the files in this home. The caller keeps others out."""
    now = f"{(root / ARTIFACTS).as_uri()}/"
    database = sqlite3.connect(root / DATABASE, timeout=_PATIENCE_SECONDS)
    with contextlib.closing(database), database:
        # MLflow makes the experiment 0 with the database, where we tell it to keep files
        query = "select artifact_location from experiments where experiment_id = 0"
        row = database.execute(query).fetchone()
        before = str(row[0]).removesuffix("0") if row else ""
        if before == now or not before.endswith(f"/{ARTIFACTS}/"):
            return
        for table, column in _PLACES.items():
            database.execute(
                f"update {table} set {column} = ? || substr({column}, ?) "  # noqa: S608 - ours
                f"where substr({column}, 1, ?) = ?",
                (now, len(before) + 1, len(before), before),
            )


def experiment_id(client: MlflowClient, name: str, tracking_uri: str, artifact_root: str) -> str:
    """The experiment called `name`, created when it is not there."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        location = None  # a server has one of its own
        if not tracking_uri:
            location = (Path(artifact_root).absolute() / ARTIFACTS / name).as_uri()
        try:
            return str(client.create_experiment(name, artifact_location=location))
        except MlflowException:  # another process was faster
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
    return str(experiment.experiment_id)


def _fix(tracking_uri: str, error: BaseException) -> str:
    """What to do about an error of the registry, by its words: it has no common kind."""
    text = str(error).lower()
    if "readonly" in text or "read-only" in text or isinstance(error, PermissionError):
        return "make the registry's database and artifact folder writable"
    if "disk is full" in text or "no space left" in text:
        return f"free some space where the registry lives, then {AGAIN}"
    if tracking_uri:
        return f"check register.tracking_uri, the server and its credentials, then {AGAIN}"
    return f"check the home folder, then {AGAIN}"


def tags_of(version: Any) -> dict[str, str]:
    """Tags of a model version without our prefix."""
    tags = {}
    for key, value in version.tags.items():
        if key.startswith(PREFIX):
            tags[key.removeprefix(PREFIX)] = str(value)
    return tags


class Tracker:
    """Logs training metrics to the MLflow run of one run key, each optimizer step once.

    The supervising process logs, not a rank, so a slow or lost tracking server never
    stops training: after a first failure it says so and stays silent. A resumed run
    continues the same MLflow run and skips the steps that are there already."""

    def __init__(
        self,
        tracking_uri: str,
        artifact_root: str,
        name: str,
        run_key: str,
        parameters: Mapping[str, Any],
    ) -> None:
        self.tracking_uri = tracking_uri
        self.artifact_root = artifact_root
        self.name = name
        self.run_key = run_key
        self.parameters = parameters
        self.run_id = ""
        self.logged = 0  # the last step that is there
        self.silent = False
        self.telemetry = Telemetry(config=name, run_key=run_key[:12])

    def close(self) -> None:
        """End what goes to a monitoring system."""
        self.telemetry.close()

    def log(self, rows: Sequence[HistoryRow]) -> None:
        """Log the steps in `rows` that are not logged yet; the last of them also as telemetry."""
        figures = {f"train.{name}": getattr(rows[-1], name) for name in ("step", "epoch", *METRICS)}
        self.telemetry.set(figures)
        if self.silent:
            return
        try:
            with registry(self.tracking_uri, self.artifact_root, "log training metrics") as client:
                if not self.run_id:
                    self.run_id = self._open(client)
                    history = client.get_metric_history(self.run_id, "loss")
                    self.logged = max((int(metric.step) for metric in history), default=0)
                self._send(client, [row for row in rows if row.step > self.logged])
        except RegistryError as error:
            log.warning("%s\nTraining goes on without tracking.", error)
            self.silent = True

    def _open(self, client: MlflowClient) -> str:
        run = tracking_run(client, self.tracking_uri, self.artifact_root, self.name, self.run_key)
        if not client.get_run(run).data.params:
            for key, value in self.parameters.items():
                client.log_param(run, key, value)
        return run

    def _send(self, client: MlflowClient, rows: Sequence[HistoryRow]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = []
        for row in rows:
            for name in METRICS:
                value = getattr(row, name)
                if value is not None:
                    metrics.append(Metric(name, value, now_ms, row.step))
        for start in range(0, len(metrics), BATCH):
            client.log_batch(self.run_id, metrics=metrics[start : start + BATCH])
        if rows:
            self.logged = rows[-1].step


def tracking_run(
    client: MlflowClient, tracking_uri: str, artifact_root: str, name: str, run_key: str
) -> str:
    """Id of the MLflow run that belongs to `run_key`, created when there is none."""
    experiment = experiment_id(client, name, tracking_uri, artifact_root)
    has_run_key = f"tags.`{PREFIX}run_key` = '{run_key}'"
    runs = client.search_runs([experiment], has_run_key, max_results=1)
    if runs:
        return str(runs[0].info.run_id)
    tags = {f"{PREFIX}run_key": run_key}
    run = client.create_run(experiment, run_name=run_key[:12], tags=tags)
    return str(run.info.run_id)
