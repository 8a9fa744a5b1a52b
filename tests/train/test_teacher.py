"""A large teacher is divided among the ranks, holds half precision where the student computes in it, and scores as a whole one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.teacher_rank import CASES

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            str(HERE / "teacher_rank.py"),
            str(folder),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])},
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_a_divided_teacher_scores_as_a_whole_one_and_each_rank_holds_half_of_its_blocks(
    name, precision, ranks
):
    for facts in (found[f"{name} {precision}"] for found in ranks):
        assert facts["gap"] <= (1e-5 if precision == "fp32" else 2e-2) * facts["scale"]
        assert facts["again"]
        assert facts["types"] == ["torch.float32" if precision == "fp32" else "torch.bfloat16"]
        assert facts["divided"] == pytest.approx(facts["whole"] - facts["blocks"] / 2, rel=0.05)
        # weights of a block are gathered while the one before computes, by streams that all share
        assert (facts["roots"], facts["streams"]) == (1, 1)
