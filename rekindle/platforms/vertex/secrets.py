"""Starts a step with secrets of the config in its environment:

    python3 -m rekindle.platforms.vertex.secrets NAMES COMMAND...

NAMES is JSON: {"HF_TOKEN": "projects/P/secrets/S/versions/V"}.

Vertex AI knows no secrets of a step, so the step reads them from Secret Manager as the
account that it runs as. What stands in the definition is their names; their values are on
no command line and in no log. Steps in our image get every secret of the config; a step
in another image gets those that it asks for by kfp-kubernetes' `use_secret_as_env`, from
`program` in place of the module, for which the image needs python3. Nodes of a
distributed step do the same in node.py."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rekindle.platforms.vertex.rest import Google, VertexSecretError, places, secrets

MODULE = "rekindle.platforms.vertex.secrets"


def starting(names: Mapping[str, str], ours: bool) -> list[str]:
    """What stands in front of the command of a step;
    `ours` says that its image has rekindle."""
    code = ["-m", MODULE] if ours else ["-c", program()]
    return ["python3", *code, json.dumps(names, sort_keys=True)]


def program() -> str:
    """This module and those that it imports, as one text."""
    here = Path(__file__)
    future = "from __future__ import annotations\n"
    lines = [future]  # which has to be the first
    for file in (here.parents[2] / "http.py", here.with_name("rest.py"), here):
        code = file.read_text(encoding="utf-8").partition(future)[2]
        # what is imported stands in the same text
        lines += [line for line in code.splitlines() if not line.startswith("from rekindle.")]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Become the command; an exit code only if that is not to be."""
    try:
        values = secrets(Google(places("", environment)), json.loads(argv[1]))
    except VertexSecretError as error:
        sys.stderr.write(f"cannot read the secret {error}\n")
        return 1
    os.execvpe(argv[2], list(argv[2:]), {**environment, **values})  # noqa: S606 - the step's own
    return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv, os.environ))
