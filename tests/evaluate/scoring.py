"""Scoring without a launch: this process is the only rank."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist

from rekindle.evaluate.evaluate import evaluate
from rekindle.spec.model import DataSpec, TrainSpec
from rekindle.train.loop import StopFlag
from rekindle.train.modelfolder import ANY_CODE, digest_of
from rekindle.train.score import hand_over, job_of
from rekindle.train.score_rank import Scoring

CPU = torch.device("cpu")


@contextlib.contextmanager
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def scored(state, candidate, examples, champion=None, version="", must_pass=None, **train):
    """The folder with the scores; `state` is the artifact root."""
    spec = TrainSpec.model_validate(train)
    digest = digest_of(champion) if champion else ""
    known = (candidate, champion, version, digest, examples, spec, str(state), ANY_CODE)
    job = job_of(*known, must_pass)
    with one_rank():
        scoring = Scoring(job, CPU, StopFlag(60), lambda step, phase: None)
        assert all(scoring.score_contender(turn) for turn in job.turns)
    output = Path(state) / "scores-out" / job.candidate.kept.rpartition("/")[2]
    hand_over(job, output)
    return output


def judged(spec, slices, candidate, examples, champion, version, state):
    """The evidence on `candidate`."""
    return evaluate(
        spec,
        DataSpec(source="-", slices=slices),
        scored(state, candidate, examples, champion, version),
    )
