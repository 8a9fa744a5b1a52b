"""What ranks of DeepSpeed hold while they train rekindle's network and loss on this machine: real torchrun, real updates, every
storage counted. `python -m tests.plan.zero_ranks` measures all CASES and keeps them in zero.json.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from rekindle.spec.layout import Layout
from rekindle.spec.model import TrainSpec
from rekindle.train.parts import autocast
from rekindle.train.stepped import start_engine
from rekindle.train.weights import local_of
from tests.plan.traced.engine import Trace, _Run
from tests.plan.traced.fakes import Live


class Counted(Live):
    def note(self, tensor: torch.Tensor, made_by: str = "") -> None:
        if tensor.device.type != "meta":
            super().note(tensor, made_by)


class Zero(_Run):
    """As a trace runs it, but with values, and DeepSpeed's updates."""

    def held(self) -> dict[str, Any]:
        live = self.live = Counted()
        parts = self._parts()
        self.joined = parts.stages[0].part.joins_texts
        with torch.no_grad():
            for _, parameter in parts.parameters():
                parameter.normal_(std=0.02)
        with live.counting():
            for _, parameter in parts.parameters():
                live.note(local_of(parameter))
            live.begin()
            live.phase = "start"
            parts = start_engine(parts, self.trace.train)
            stepper, found = parts.stepper, {"start": live.peak}
            for last in (False, False, True):
                live.begin(live.at if last else 0)
                found["static"] = live.bytes
                self._updated(parts, stepper)
        return found | {"peak": live.peak, "phases": live.peaks}

    def _updated(self, parts: Any, stepper: Any) -> None:
        live, turns = self.live, self.trace.accumulation
        for turn in range(turns):
            live.phase = "forward"
            with autocast(self.trace.train.precision, self.mesh.device):
                result = stepper.module(micro=self._batch())
                live.phase = "backward"
                stepper.backward(result[0, 0], turn + 1 == turns)
            del result
        live.phase = "optimizer"
        stepper.step(1e-4)


SHAPE = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}
# buckets that the states would not be seen beside otherwise
_BARE = {"reduce_bucket_size": 1000}
_GATHERED = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 1000,
    "stage3_max_reuse_distance": 1000,
}
STAGES = {
    "0": {"stage": 0},
    "1": {"stage": 1, **_BARE},
    "2": {"stage": 2, **_BARE},
    "3": {"stage": 3, **_BARE, **_GATHERED},
    "2, overlapping": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5_000_000},
    "3, all gathered": {"stage": 3, "reduce_bucket_size": 5_000_000},
}
KEPT = Path(__file__).with_name("zero.json")


def case(stage: str, precision: str, ranks: int, sequence: int) -> Trace:
    given = {
        "engine": "deepspeed",
        "engine_config": {"zero_optimization": STAGES[stage]},
        "precision": precision,
    }
    train = TrainSpec.model_validate({**given, "global_batch_size": 2 * ranks})
    return Trace(SHAPE, "causal_lm", Layout(dp=ranks), train, sequence, 2, device="cpu")


# one sequence is so short that states decide, the other so long that activations do
CASES = {
    f"{stage}: {precision}, {ranks} ranks, {sequence} tokens": case(
        stage, precision, ranks, sequence
    )
    for ranks in (2, 4)
    for precision in ("bf16", "fp32")
    for stage in STAGES
    for sequence in (16, 256)
    if (stage, precision) != ("0", "bf16")
}


def measured(cases: dict[str, Trace], folder: Path) -> dict[str, Any]:
    """By case bytes: `peak`, that of each phase, `static`. One launch for all that have as many ranks."""
    found: dict[str, Any] = {}
    for ranks in sorted({one.layout.world for one in cases.values()}):
        some = {name: one for name, one in cases.items() if one.layout.world == ranks}
        given, out = folder / "cases.json", folder / "found.json"
        given.write_bytes(TypeAdapter(dict[str, Trace]).dump_json(some))
        words = [
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            "-m",
            "tests.plan.zero_ranks",
        ]
        env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", *words, str(given), str(out)],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found |= json.loads(out.read_text())
    return found


def _keep() -> None:
    import deepspeed

    with tempfile.TemporaryDirectory() as folder:
        found = measured(CASES, Path(folder))
    KEPT.write_text(
        json.dumps({"deepspeed": deepspeed.__version__, "cases": found}, indent=1) + "\n"
    )


def rank() -> None:
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    cases, out = (Path(word) for word in sys.argv[1:])
    given = TypeAdapter(dict[str, Trace]).validate_json(cases.read_text())
    found = {name: Zero(one).held() for name, one in given.items()}
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # DeepSpeed's threads


if __name__ == "__main__":
    rank() if sys.argv[1:] else _keep()
