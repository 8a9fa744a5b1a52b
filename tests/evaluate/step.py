"""Scores the way the component does: `python step.py CANDIDATE EXAMPLES STATE OUTPUT [TRAIN]`."""

import sys
from pathlib import Path

from rekindle.errors import RekindleError
from rekindle.spec.model import TrainSpec
from rekindle.train.modelfolder import ANY_CODE
from rekindle.train.score import job_of, score

if __name__ == "__main__":
    candidate, examples, state, output = map(Path, sys.argv[1:5])
    train = TrainSpec.model_validate_json(sys.argv[5] if len(sys.argv) > 5 else "{}")
    try:
        score(job_of(candidate, None, "", "", examples, train, str(state), ANY_CODE), output)
    except RekindleError as error:
        print(error, flush=True)
        sys.exit(error.exit_code)
