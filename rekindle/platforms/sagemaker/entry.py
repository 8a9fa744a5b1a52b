"""What a container of SageMaker starts: where its mounts are, and who the other hosts
are.

    python3 <inputs>/bundle/entry.py

The environment holds the pipeline's parameters that the step reads, as REKINDLE_P0,
REKINDLE_P1..., and names of secrets, as REKINDLE_SECRET_NAME; everything else of it is
the step's own. The hosts of a Training job are in
/opt/ml/input/config/resourceconfig.json, as `hosts` (algo-1, algo-2, ...) and
`current_host`; the first of them leaves the outputs."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the bundle's own rekindle

from rekindle.launch import shim  # noqa: E402
from rekindle.platforms import mounted  # noqa: E402
from rekindle.platforms.mounted import Place  # noqa: E402

if TYPE_CHECKING:
    from rekindle.launch.rendezvous import Rendezvous

SECRET = "REKINDLE_SECRET_"  # noqa: S105 - the beginning of a name
JOB = Path("/opt/ml/config/processingjobconfig.json")
# by kind of job: the folder that the service uploads, and the file whose text it shows if
# the job fails
PROCESSING = Path("/opt/ml/processing/output"), Path("/opt/ml/output/message")
TRAINING = Path("/opt/ml/model"), Path("/opt/ml/output/failure")
RESOURCES = Path("/opt/ml/input/config/resourceconfig.json")
PORT = 29_400


def main() -> int:
    """Run the step of the bundle; returns its exit code."""
    shim.end_when_told()
    task = mounted.load_task(HERE)
    is_training = "training" in task
    folder, message = TRAINING if is_training else PROCESSING
    names = (mounted.RESULT, *task.get("outputs", {}).get("artifacts", ()))
    place = Place(
        inputs={channel.name: channel for channel in HERE.parent.iterdir()},
        outputs={name: folder / name for name in names},
        values=os.environ,
        facts=_facts(),
        message=message,
    )
    if "copies" in task:
        # this job runs no step: it hands on the result of a Training job, which has no
        # property files, so that a Condition step can read it (jobs.py)
        place.outputs[mounted.RESULT].mkdir(parents=True, exist_ok=True)
        result = place.inputs[task["copies"]] / "result.json"
        shutil.copy2(result, place.outputs[mounted.RESULT])
        return 0
    try:
        _read_secrets()
        if is_training:
            training = task["training"]
            job = os.environ.get("TRAINING_JOB_NAME", "")
            node = rendezvous(training["ranks_per_node"])
            rank = mounted.export_rendezvous(node, training["nodes"], "hosts", job)
            place = place.of_node(rank)
    except Exception as error:  # noqa: BLE001 - the service shows nothing but this message
        return mounted.record_failure(place, f"{type(error).__name__}: {error}")
    return mounted.run(task, place)


def rendezvous(gpus: int, resources: Path = RESOURCES) -> Rendezvous:
    """The host's place among the others: its number decides, so algo-2 comes before algo-10."""
    from rekindle.errors import RequestError

    # bundles of Processing jobs do not have this module
    from rekindle.launch.rendezvous import Rendezvous

    try:
        config = json.loads(resources.read_text(encoding="utf-8"))
        hosts = sorted(map(str, config["hosts"]), key=_natural)
        here = str(config["current_host"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{resources} cannot be read: {error!r}") from error
    if here not in hosts:
        message = f"the host {here} is not one of {', '.join(hosts)}"
        raise RequestError(message, where=str(resources))
    node = Rendezvous(len(hosts), hosts.index(here), max(1, gpus), hosts[0], PORT)
    return node.checked(str(resources))


def _natural(host: str) -> list[tuple[int, str]]:
    """A key that sorts numbers within names by their size."""
    parts = re.split(r"(\d+)", host)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _facts() -> dict[str, str]:
    """The facts of the run, which the name of the job tells.

    The service calls it `pipelines-<execution>-<step>-<random>`."""
    name = os.environ.get("TRAINING_JOB_NAME", "")
    if not name and JOB.exists():
        name = str(json.loads(JOB.read_text(encoding="utf-8")).get("ProcessingJobName", ""))
    parts = name.split("-")
    execution = parts[1] if parts[0] == "pipelines" and len(parts) > 2 else name
    return mounted.facts(execution, name)


def _read_secrets() -> None:
    """Replace each variable that names a secret by one that holds the secret."""
    named = [name for name in os.environ if name.startswith(SECRET)]
    if not named:
        return
    import boto3

    store = boto3.client("secretsmanager")
    for name in named:
        value = store.get_secret_value(SecretId=os.environ.pop(name))["SecretString"]
        os.environ[name.removeprefix(SECRET)] = value


if __name__ == "__main__":
    sys.exit(main())
