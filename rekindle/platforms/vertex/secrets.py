"""Starts a step of ours with the secrets of the config in its environment:

    python3 -m rekindle.platforms.vertex.secrets NAMES COMMAND...

NAMES is JSON: {"HF_TOKEN": "projects/P/secrets/S/versions/V"}.

Vertex AI knows no secrets of a step, so the step reads them from Secret Manager as the account that
it runs as. What stands in the definition is their names; their values are on no command line and in
no log. Nodes of a distributed step do the same in node.py, in anybody's image; other steps in
anybody's image get none."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence

from rekindle.platforms.vertex.rest import Google, RestError, places, secrets

MODULE = "rekindle.platforms.vertex.secrets"


def main(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Become the command; an exit code only if that is not to be."""
    try:
        found = secrets(Google(places("", environment)), json.loads(argv[1]))
    except RestError as error:
        sys.stderr.write(f"cannot read the secret {error}\n")
        return 1
    os.execvpe(argv[2], list(argv[2:]), {**environment, **found})  # noqa: S606 - the step's own
    return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv, os.environ))
