"""Runs one fine-tune job the way the component does: `python gang.py JOB.json`. Used by test_resume.py."""

import sys
from pathlib import Path

from rekindle.errors import RekindleError
from rekindle.train.finetune import finetune
from rekindle.train.job import Job

if __name__ == "__main__":
    try:
        finetune(
            Job.read(Path(sys.argv[1])),
            on_rows=lambda rows: print(f"rows {[row.step for row in rows]}", flush=True),
        )
    except RekindleError as error:
        print(error, flush=True)
        sys.exit(error.exit_code)
