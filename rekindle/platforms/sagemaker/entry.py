"""What a container of SageMaker starts: where its mounts are, and who the other hosts are.

    python3 <inputs>/bundle/entry.py

The environment holds the pipeline's parameters that the step reads, as REKINDLE_P0, REKINDLE_P1...,
and names of secrets, as REKINDLE_SECRET_NAME; everything else of it is the step's own. The hosts of
a Training job find a Rendezvous in it; the first of them leaves the outputs."""

import json
import os
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the bundle's own rekindle

from rekindle.launch import shim  # noqa: E402
from rekindle.platforms import mounted  # noqa: E402
from rekindle.platforms.mounted import Place  # noqa: E402

SECRET = "REKINDLE_SECRET_"  # noqa: S105 - the beginning of a name
JOB = Path("/opt/ml/config/processingjobconfig.json")
PROCESSING = Path("/opt/ml/processing/output"), Path("/opt/ml/output/message")
TRAINING = Path("/opt/ml/model"), Path("/opt/ml/output/failure")


def main() -> int:
    """Run the step of the bundle."""
    shim.end_when_told()
    task = mounted.load_task(HERE)
    outputs, message = TRAINING if "training" in task else PROCESSING
    names = (mounted.RESULT, *task.get("outputs", {}).get("artifacts", ()))
    inputs = {folder.name: folder for folder in HERE.parent.iterdir()}
    made = {name: outputs / name for name in names}
    place = Place(inputs, made, values=os.environ, facts=_facts(), message=message)
    if channel := task.get("copies"):
        # what another job left for conditions, as a file of this one
        place.outputs[mounted.RESULT].mkdir(parents=True, exist_ok=True)
        shutil.copy2(place.inputs[channel] / "result.json", place.outputs[mounted.RESULT])
        return 0
    try:
        _read_secrets()
        if "training" in task:
            from rekindle.platforms.sagemaker.rendezvous import rendezvous

            wanted, job = task["training"], os.environ.get("TRAINING_JOB_NAME", "")
            found = rendezvous(wanted["ranks_per_node"])
            place = place.of_node(mounted.met(found, wanted["nodes"], "hosts", job))
    except Exception as error:  # noqa: BLE001 - the service shows nothing but this message
        return mounted.failed(place, f"{type(error).__name__}: {error}")
    return mounted.run(task, place)


def _facts() -> dict[str, str]:
    """The job is called `pipelines-<execution>-<step>-<random>`."""
    name = os.environ.get("TRAINING_JOB_NAME", "")
    if not name and JOB.exists():
        name = str(json.loads(JOB.read_text(encoding="utf-8")).get("ProcessingJobName", ""))
    words = name.split("-")
    execution = words[1] if words[0] == "pipelines" and len(words) > 2 else name
    return mounted.facts(execution, name)


def _read_secrets() -> None:
    """Every secret that the environment names becomes a variable of the step."""
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
