"""DeepSpeed's ZeRO under rekindle beside a script of its documentation under its own launcher, two
ranks on this machine: what our loop, heartbeats and launcher cost, in seconds from the first step's
start to the last one's end. Every document fills its sequence, so that both compute the same."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import bench_train
import contest
import work
from contest import Row, compared

RANKS, LENGTH, ROWS, BATCH = 2, 256, 160, 8
ALLOWED = 1.03
# as small as the model is, stage 3 would not divide it
ZERO = {1: {"stage": 1}, 2: {"stage": 2}, 3: {"stage": 3, "stage3_param_persistence_threshold": 0}}


def rows(folder: Path, count: int) -> list[Row]:
    """A row a stage."""
    made = work.documents(folder, ROWS, LENGTH, shortest=LENGTH // 12)
    given = dataclasses.replace(
        made,
        train=made.train.model_copy(
            update={"global_batch_size": BATCH, "micro_batch_size": BATCH // RANKS}
        ),
    )
    return [_stage(given, folder, stage, count) for stage in ZERO]


def _stage(given: work.Work, folder: Path, stage: int, count: int) -> Row:
    config = {"zero_optimization": ZERO[stage]}

    def ours(number: int) -> bench_train.Found:
        return bench_train.ours(
            given, folder, RANKS, number, engine="deepspeed", engine_config=config
        )

    def theirs(number: int) -> bench_train.Found:
        output = contest.fresh(folder / "theirs")
        wish = {
            "loop": "deepspeed",
            "shards": str(given.shards),
            "start": str(given.start(number)),
            "output": str(output),
            "seed": number,
            "tokens": True,
            "lr": given.train.lr,
            "batch_size": BATCH,
            "zero": ZERO[stage],
            "pad_token_id": given.opened().manifest.settings["pad_token_id"],
        }
        (output / "wish.json").write_text(json.dumps(wish))
        launcher = str(Path(sys.executable).with_name("deepspeed"))
        words = [launcher, "--no_local_rank", "--num_gpus", str(RANKS), bench_train.PEERS]
        return contest.answer(contest.finished([*words, str(output / "wish.json")], output / "log"))  # type: ignore[no-any-return]

    found = contest.pairs({"ours": ours, "theirs": theirs}, count)
    seconds = [[one["seconds"] / one["steps"] for one in found[name]] for name in found]
    return compared(
        f"DeepSpeed ZeRO {stage}, two ranks, full sequences",
        "a script under its launcher",
        *seconds,
        ALLOWED,
        at_least=False,
        unit="s a step",
    )
