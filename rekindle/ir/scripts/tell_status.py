"""What runs in front of a Python component that reads how others ended, as text of `python3 -c`.

KFP 2.17.0 says COMPLETE or CACHED of what went well (backend/src/v2/driver/resolve.go),
where its SDK and Vertex AI say SUCCEEDED. The first argument names the inputs, with commas between
them; the others are the command, with KFP's ExecutorInput behind `--executor_input`."""

import json
import os
import sys


def started_by(arguments: list[str]) -> list[str]:
    """The command of the component, its inputs as the SDK documents them."""
    names, *command = arguments
    place = command.index("--executor_input") + 1
    executor_input = json.loads(command[place])
    values = executor_input["inputs"]["parameterValues"]
    for name in names.split(","):
        if values.get(name, {}).get("state") in ("COMPLETE", "CACHED"):
            values[name]["state"] = "SUCCEEDED"
    command[place] = json.dumps(executor_input)
    return command


if __name__ == "__main__":
    argv = started_by(sys.argv[1:])
    os.execvp(argv[0], argv)  # noqa: S606 - the component's own command
