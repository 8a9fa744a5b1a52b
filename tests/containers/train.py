"""Runs one fine-tune job in a container the way the component does: `python3 train.py JOB.json`."""

import sys
from pathlib import Path

from rekindle.errors import RekindleError
from rekindle.train.finetune import finetune
from rekindle.train.job import Job

if __name__ == "__main__":
    try:
        finetune(Job.read(Path(sys.argv[1])))
    except RekindleError as error:
        print(error, flush=True)
        sys.exit(error.exit_code)
