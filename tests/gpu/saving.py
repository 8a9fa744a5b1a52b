"""Checks of what survives: a save while training goes on, and a run that is killed three times."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from rekindle.spec.model import CheckpointSpec, ModelSpec, TrainSpec
from rekindle.train.checkpoint import Checkpointer, newest
from rekindle.train.dcp import pieces_of
from tests.gpu.here import Here, Row, alone
from tests.gpu.training import Case, losses, plain, step, trainer_of

STEPS, EVERY = 200, 20
KILLS = (4, 60, 130)  # before there is a checkpoint, and twice after


def check_saving(here: Here) -> Iterator[Row]:
    """Saves from the device while training goes on, and restores into a trainer that starts from nothing."""
    many = {"num_hidden_layers": 8, "hidden_size": 1024, "intermediate_size": 3072}
    case = Case(
        {**plain("llama", here), **({} if here.tiny else many)},
        length=64 if here.tiny else 512,
        train={"precision": "bf16"},
    )
    with alone(here), tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(case, here.device)
        losses(trainer, 3)
        kept = {
            name: piece.local.detach().cpu().clone()
            for name, piece in pieces_of(trainer.tensors()).items()
        }
        checkpointer = Checkpointer(folder, CheckpointSpec(every=3), "key", None)
        # the first save allocates the host's memory and pins it
        here.synchronise()
        began = time.perf_counter()
        checkpointer.save(2, trainer.tensors(), trainer.state(2, {}, 1.0))
        allocated = time.perf_counter() - began
        checkpointer.wait()
        here.synchronise()
        began = time.perf_counter()
        checkpointer.save(3, trainer.tensors(), trainer.state(3, {}, 1.0))
        called = time.perf_counter() - began
        curve, during = [], 0
        for number in range(3, 9):
            during += not checkpointer.written()
            curve.append(step(trainer, number)[0])
        checkpointer.wait()
        committed = time.perf_counter() - began
        size = sum(tensor.nbytes for tensor in kept.values())
        text = f"{size / 1e6:.0f} MB: call {called * 1e3:.0f} ms (the first one {allocated * 1e3:.0f}), committed after {committed:.2f} s, {during} steps began meanwhile"
        yield here.on_gpu("a save while training goes on", text, during > 0)
        found = newest(folder, "key")
        assert found is not None
        other = trainer_of(case, here.device)
        first = other.restore(found)
        restored = pieces_of(other.tensors())
        differ = [
            n
            for n, tensor in kept.items()
            if not torch.equal(restored[n].local.detach().cpu(), tensor)
        ]
        right = first == 3 and not differ and restored.keys() == kept.keys()
        yield here.judged(
            "restored",
            f"step {first}, {len(kept)} tensors, {len(differ)} differ from those at the save",
            right,
        )
        counters = {float(s["step"]) for s in other.optimizer.update.state.values()}
        places = {t.device.type for s in other.optimizer.update.state.values() for t in s.values()}
        again = losses(other, 6, 3)
        moved = {float(s["step"]) for s in other.optimizer.update.state.values()}
        text = f"{counters} before and {moved} after 6 steps, on {places}"
        yield here.judged(
            "step counters",
            text,
            counters == {3.0} and moved == {9.0} and places == {here.device.type},
        )
        off = max(abs(a - b) / abs(b) for a, b in zip(again, curve, strict=True))
        text = "equal in every bit" if again == curve else f"differ by {off:.1e}"
        yield here.judged("6 losses after it, against the run that went on", text, off <= 1e-2)


def check_resume(here: Here) -> Iterator[Row]:
    """The real worker under its real supervisor, killed three times, against a run that was left alone."""
    from tests.support.train_resume import Gang, written

    train, promised = _spec(here)
    model = ModelSpec(source=plain("llama", here), tokenizer={"vocab_size": 320})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shards = written(folder, "causal_lm", model)
        whole = Gang(folder / "whole", shards, 1, train, "causal_lm", model).start().finish()
        killed = Gang(folder / "killed", shards, 1, train, "causal_lm", model).start()
        try:
            for number, at in enumerate(KILLS, 1):
                killed.until_phase("step")  # the curve has been cut back to the checkpoint by then
                killed.until_step(at)
                killed.kill_ranks()
                began = f"restarting all ranks ({number} of"
                killed.until(lambda began=began: began in killed.said, began)
            killed.finish()
        finally:
            if killed.process.poll() is None:
                os.killpg(killed.process.pid, signal.SIGKILL)
                killed.process.wait()
        resumed = [
            line for line in killed.said.splitlines() if "resumed from the checkpoint" in line
        ]
        yield here.judged(
            f"killed {len(KILLS)} times",
            f"resumed {len(resumed)} times from a checkpoint",
            len(resumed) >= 2,
        )
        curves = (killed.losses, whole.losses)
        bits = killed.weights == whole.weights and curves[0] == curves[1]
        off = max(abs(a[1] - b[1]) / abs(b[1]) for a, b in zip(*curves, strict=True))
        text = "equal in every bit" if bits else f"bits differ, losses by at most {off:.1e}"
        if promised:
            yield here.judged("weights and curve, train.deterministic", text, bits)
        else:
            yield here.judged("weights and curve, bits not promised", text, off <= 1e-2)


def _spec(here: Here) -> tuple[TrainSpec, bool]:
    """What is trained, and whether the spec promises its bits."""
    promised = "deterministic" in TrainSpec.model_fields
    given = {
        "steps": STEPS,
        "global_batch_size": 8,
        "micro_batch_size": 4,
        "lr": 1e-3,
        "max_restarts": len(KILLS),
        "checkpoint": {"every": EVERY, "keep": 9},
        "precision": "bf16" if here.cuda else "fp32",
        **({"deterministic": True} if promised else {}),
    }
    return TrainSpec.model_validate(given), promised
