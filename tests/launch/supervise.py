"""Runs ranks the way the fine-tune step does: `python supervise.py FOLDER TRAIN [SCRIPT WORDS]`. Used by test_torchrun.py."""

import logging
import sys
from pathlib import Path

from rekindle.errors import RekindleError
from rekindle.launch.torchrun import torchrun
from rekindle.spec.model import TrainSpec

if __name__ == "__main__":
    folder, train, *script = sys.argv[1:]
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    try:
        torchrun(script, TrainSpec.model_validate_json(train), status=Path(folder) / "status")
        print("done")
    except RekindleError as error:
        print(error, flush=True)
        sys.exit(error.exit_code)
