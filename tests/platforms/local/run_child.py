"""A process that runs one pipeline, to be signalled: HOME RUN_ID PIPELINE FOLDER [GRACE]."""

from __future__ import annotations

import sys
from pathlib import Path

from rekindle.errors import RekindleError
from tests.platforms.local.runs import run


def main(home: str, run_id: str, pipeline: str, folder: str, grace: str = "30") -> int:
    try:
        run(pipeline, Path(home), {"folder": folder}, run_id=run_id, grace_seconds=float(grace))
    except RekindleError as error:
        print(f"{type(error).__name__}: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
