"""`python -m rekindle.serve.container`: the server in a container of a platform, which
says by its environment where the model lies (as `staging.stage` left it), and what it
asks on which port.

| platform | model | port and routes |
|---|---|---|
| any | `REKINDLE_MODEL`, a folder or a URI | 8080; see docs/serving.md |
| Vertex AI | `AIP_STORAGE_URI` | `AIP_HTTP_PORT`, `AIP_HEALTH_ROUTE`, `AIP_PREDICT_ROUTE` |
| Azure ML | somewhere below `AZUREML_MODEL_DIR` | as configured |
| SageMaker | `/opt/ml/model` | 8080, `/ping`, `/invocations` |
| KServe | `/mnt/models` | 8080 |"""

import os
import sys
import tempfile
from pathlib import Path

from rekindle.errors import RequestError
from rekindle.launch.process import compute_threads
from rekindle.serve.__main__ import main
from rekindle.serve.messages import ServeJob
from rekindle.serve.staging import SERVED, staged_in
from rekindle.storage import about, storage_of

_MOUNTED = ("/opt/ml/model", "/mnt/models", "/var/azureml-app/azureml-models")


def model_folder() -> Path:
    """The folder of the staged version, downloaded if the platform names a URI. Raises
    RequestError where the platform names none."""
    # what is named goes before what a platform mounts
    named = os.environ.get("REKINDLE_MODEL") or os.environ.get("AIP_STORAGE_URI")
    if named and "://" in named:
        folder = Path(tempfile.mkdtemp(prefix="model-"))
        storage_of(named, about("the model")).download("", folder)
        return folder
    if named:
        return Path(named)
    # Azure ML puts the name and the version of
    # its model between this folder and the files
    azure_folder = os.environ.get("AZUREML_MODEL_DIR")
    for place in filter(None, (azure_folder, *_MOUNTED)):
        staged_files = sorted(Path(place).rglob(SERVED))
        if staged_files:
            return staged_files[0].parent
    message = "the platform names no folder with a model"
    raise RequestError(message, fix="set REKINDLE_MODEL to a folder or URI that was staged")


def job() -> ServeJob:
    """What the platform asks for. Raises RekindleError."""
    model = staged_in(model_folder())
    environment = os.environ
    return ServeJob(
        model=model,
        host="0.0.0.0",  # noqa: S104 - a container is reached from outside
        port=int(environment.get("AIP_HTTP_PORT", "8080")),
        smoke=bool(model.evidence),
        health_route=environment.get("AIP_HEALTH_ROUTE", ServeJob.health_route),
        predict_route=environment.get("AIP_PREDICT_ROUTE", ServeJob.predict_route),
    )


if __name__ == "__main__":
    os.environ.update(compute_threads())  # before torch is imported
    sys.exit(main(job))
