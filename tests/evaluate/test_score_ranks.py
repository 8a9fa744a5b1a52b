"""Two ranks that score as the step has them: samples that cannot be written cost no scores, and nodes that would compute
unlike each other are refused."""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rekindle.launch import heartbeats
from rekindle.launch.rendezvous import Rendezvous
from rekindle.records import Scores
from rekindle.spec.model import ModelSpec, TrainSpec
from rekindle.train.modelfolder import ANY_CODE, describe
from rekindle.train.score import job_of
from tests.data.dialogues import model, sharded, source
from tests.ports import free_port
from tests.support.evaluate_score_layouts import GPT2
from tests.support.evaluate_scores import OWN, SLICES, model_of

STEP = Path(__file__).with_name("step.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}
WRITES = "return [f"
TASKS = {
    "raises": f"raise ValueError('no words'); {WRITES}",
    "is slow": f"import time; time.sleep(8); {WRITES}",
    "hangs": f"import time; time.sleep(600); {WRITES}",
}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Models by what their `generate` does; the examples lie beside them."""
    folder = tmp_path_factory.mktemp("worlds")
    (folder / "own.py").write_text(OWN)
    shards = sharded(folder, source(folder, "chat", **SLICES), model(400))
    name = f"{folder / 'own.py'}:Bigrams"
    found = {"writes": model_of(name, model(400), shards, folder / "writes", 0)}
    for number, (kind, code) in enumerate(TASKS.items()):
        task = folder / f"own{number}.py"
        task.write_text(OWN.replace(WRITES, code))
        found[kind] = folder / kind
        shutil.copytree(found["writes"], found[kind])
        describe(f"{task}:Bigrams", shards, found[kind], "key")
    # fewer places than a prompt and 32 tokens behind it take
    short = ModelSpec.model_validate(
        {"source": {**GPT2, "n_positions": 24}, "tokenizer": {"vocab_size": 400}}
    )
    shards = sharded(folder / "short", source(folder, "text", max_length=24, **SLICES), short)
    found["fails"] = model_of("causal_lm", short, shards, folder / "short" / "model", 0)
    return found


def step(state, folder, hang_seconds=5):
    """The step's exit code and log; its record in `state`."""
    examples = folder.parent / "examples"
    train = TrainSpec(hang_seconds=hang_seconds, max_restarts=0).model_dump_json()
    done = subprocess.run(
        [
            sys.executable,
            str(STEP),
            str(folder),
            str(examples),
            str(state),
            str(state / "out"),
            train,
        ],
        capture_output=True,
        text=True,
        timeout=150,
        env={**ENVIRONMENT, **Rendezvous(ranks_per_node=2).environment()},
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("raises", "rank 0 failed in score at step 1: ValueError: no words"),
        ("fails", "IndexError: index out of range in self"),
        ("hangs", "`generate` has not ended within 15 s"),
    ],
)
def test_samples_that_cannot_be_written_cost_no_scores(worlds, tmp_path, kind, says):
    code, log = step(tmp_path, worlds[kind])
    assert code == 0, log
    (notice,) = (line for line in log.splitlines() if "no samples were written: " in line)
    assert says in notice
    record = Scores.read(tmp_path / "out" / "scores.json")
    assert record.rows > 0
    assert record.samples == ()
    assert not list(tmp_path.glob("scores/*/samples-*")), "the next time they are tried again"


@pytest.mark.slow
def test_a_task_that_writes_slowly_is_waited_for(worlds, tmp_path):
    code, log = step(tmp_path, worlds["is slow"])
    assert code == 0, log
    assert len(Scores.read(tmp_path / "out" / "scores.json").samples) == 3, log


@pytest.mark.slow
def test_a_failure_before_everything_is_scored_fails(worlds, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(worlds["writes"], broken)
    shutil.copytree(worlds["writes"].parent / "examples", tmp_path / "examples")
    (broken / "model.safetensors").write_bytes(b"")
    code, log = step(tmp_path / "state", broken)
    assert code == 1, log
    assert "no samples were written" not in log


@pytest.mark.slow
def test_nodes_that_would_compute_unlike_each_other_are_refused(worlds, tmp_path):
    folder = worlds["writes"]
    job = job_of(
        folder, None, "", "", folder.parent / "examples", TrainSpec(), str(tmp_path), ANY_CODE
    )
    port = free_port()
    ranks = []
    for rank, precision in enumerate(("bf16", "fp32")):
        train = job.train.model_copy(update={"precision": precision})
        own = dataclasses.replace(job, train=train, status=str(tmp_path / f"node{rank}"))
        own.write(tmp_path / f"{rank}.json")
        place = {
            "RANK": rank,
            "LOCAL_RANK": 0,
            "WORLD_SIZE": 2,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-m", "rekindle.train.score_rank", str(tmp_path / f"{rank}.json")],
                env={**ENVIRONMENT, **{name: str(value) for name, value in place.items()}},
                stdout=subprocess.DEVNULL,
            )
        )
    assert [rank.wait(60) for rank in ranks] == [1, 1]
    for rank in (0, 1):
        (sign,) = heartbeats.read(tmp_path / f"node{rank}")
        assert (
            sign.words["message"]
            == "the nodes that score differ: they would compute in bf16 and fp32"
        )
        assert sign.words["where"] == "train.precision"
    assert not list(tmp_path.glob("scores/*/piece-*"))
