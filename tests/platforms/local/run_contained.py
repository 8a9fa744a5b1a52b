"""A process that runs one pipeline in containers, to be signalled: HOME RUN_ID PIPELINE."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rekindle.errors import RekindleError
from rekindle.platforms.local.containers import prepare
from tests.platforms.local.runs import graph, run


def main(home: str, run_id: str, name: str) -> int:
    pipeline = graph(name, "containers")
    try:
        run(pipeline, Path(home), run_id=run_id, containers=prepare(pipeline, "auto", os.environ))
    except RekindleError as error:
        print(f"{type(error).__name__}: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
