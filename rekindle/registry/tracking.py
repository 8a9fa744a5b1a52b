"""Training metrics to MLflow: one MLflow run a run key, each optimizer step logged once.

The supervising process logs, not a rank, so a slow or lost tracking server never stops training. A
resumed run continues the same MLflow run and skips the steps that are there already."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rekindle.errors import RegistryError
from rekindle.records import HistoryRow
from rekindle.registry.client import PREFIX, experiment_id, registry

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger(__name__)

BATCH = 1_000
METRICS = (
    "loss", "lr", "grad_norm", "samples_per_second", "tokens_per_second", "step_seconds",
    "data_wait", "memory_bytes", "mfu", "validation_loss", "validation_accuracy",
)  # fmt: skip


class Tracker:
    """Logs to the MLflow run of one run key; after a first failure it says so and stays silent."""

    def __init__(
        self, tracking_uri: str, artifact_root: str, name: str, run_key: str,
        parameters: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.tracking_uri, self.artifact_root = tracking_uri, artifact_root
        self.name, self.run_key, self.parameters = name, run_key, parameters
        self.run_id = ""
        self.logged = 0
        self.silent = False

    def log(self, rows: Sequence[HistoryRow]) -> None:
        """Log the steps in `rows` that are not logged yet."""
        if self.silent:
            return
        try:
            with registry(self.tracking_uri, self.artifact_root, "log training metrics") as client:
                if not self.run_id:
                    self.run_id = self._open(client)
                    known = client.get_metric_history(self.run_id, "loss")
                    self.logged = max((int(metric.step) for metric in known), default=0)
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

        now = int(time.time() * 1000)
        values = ((name, getattr(row, name), row.step) for row in rows for name in METRICS)
        metrics = [Metric(n, value, now, step) for n, value, step in values if value is not None]
        for start in range(0, len(metrics), BATCH):
            client.log_batch(self.run_id, metrics=metrics[start : start + BATCH])
        if rows:
            self.logged = rows[-1].step


def tracking_run(
    client: MlflowClient, tracking_uri: str, artifact_root: str, name: str, run_key: str
) -> str:
    """Id of the MLflow run that belongs to `run_key`, created when there is none."""
    experiment = experiment_id(client, name, tracking_uri, artifact_root)
    found = client.search_runs([experiment], f"tags.`{PREFIX}run_key` = '{run_key}'", max_results=1)
    if found:
        return str(found[0].info.run_id)
    run = client.create_run(experiment, run_name=run_key[:12], tags={f"{PREFIX}run_key": run_key})
    return str(run.info.run_id)
