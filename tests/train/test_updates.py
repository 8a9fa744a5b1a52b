"""Muon and AdamW in 8 bits: what they compute, in which layouts, and that nothing is lost when they are interrupted."""

import functools
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rekindle.data.ingest import ingest
from rekindle.data.shard import shard
from rekindle.errors import UnsupportedError
from rekindle.plan.updates import scale_blocks
from rekindle.records import TrainingSummary
from rekindle.spec.load import load_target
from rekindle.spec.model import CheckpointSpec, TrainSpec
from rekindle.train import modules, updates
from rekindle.train.checkpoint import newest
from rekindle.train.loop import StopFlag
from rekindle.train.updates import MOMENTS, UPDATES, AdamW, Codes, Muon, orthogonal
from tests.support.train_layouts import MODELS
from tests.support.train_resume import GPT2, LM_TRAIN, Gang, written
from tests.support.train_step import LLAMA, UNSAVED, Collectives, Reads, case, ranks
from tests.train.differential import trainer_of

HERE = Path(__file__).parent
CPU = torch.device("cpu")
OTHERS = ("muon", "adamw8bit")
SHAPES = [(8, 24), (24, 8), (16, 16), (5, 300)]
ONE, YES, NO = torch.ones((), dtype=torch.float64), torch.tensor(True), torch.tensor(False)


def matrices(shapes=SHAPES, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


def gradients_of(weights, step):
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(w.shape, generator=draw).to(w.dtype) * 10.0 ** (step % 3) for w in weights]


def stepped(update, weights, steps, factor=ONE):
    for step in range(steps):
        for weight, gradient in zip(weights, gradients_of(weights, step), strict=True):
            weight.grad = gradient
        update.step(1e-2 / (step + 1), factor, YES)
    return weights


# What they compute


def test_muon_is_torchs_to_the_last_bits():
    """The reference computes the step of the Newton-Schulz iterations in bf16, too, where one bit would be 4e-3 of a step."""
    ours, theirs = matrices(), [torch.nn.Parameter(m) for m in matrices()]
    stepped(Muon(ours, [], TrainSpec(weight_decay=0.1)), ours, 6)
    reference = torch.optim.Muon(theirs, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(6):
        for weight, gradient in zip(theirs, gradients_of(theirs, step), strict=True):
            weight.grad = gradient
        reference.param_groups[0]["lr"] = 1e-2 / (step + 1)
        reference.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=1e-6, atol=1e-7)


def test_a_step_of_muon_is_as_long_as_one_of_adamw_so_that_the_rate_keeps_its_meaning():
    for name, low, high in (("muon", 0.15, 0.25), ("adamw", 0.99, 1.01)):
        (weight,) = matrices([(256, 1024)])
        before = weight.clone()
        update = UPDATES[name]([weight], [], TrainSpec(weight_decay=0.0))
        weight.grad = gradients_of([weight], 0)[0]
        update.step(1e-3, ONE, YES)
        size = float((weight - before).square().mean().sqrt()) / 1e-3
        assert low < size < high, (
            "of AdamW's steps after the first a fifth is usual, which Muon has"
        )


@pytest.mark.parametrize("shape", [(30, 90), (90, 30), (16, 200)])
def test_an_orthogonal_matrix_has_singular_values_near_one(shape):
    draw = torch.Generator().manual_seed(0)
    made = torch.randn(shape, generator=draw, dtype=torch.float64)
    found = torch.linalg.svdvals(orthogonal(made.clone()))
    assert torch.linalg.cond(made) > 1.5
    assert 0.65 < float(found.min()) < float(found.max()) < 1.25


def test_the_first_step_in_8_bits_is_adamws_and_later_ones_differ_by_the_codes_rounding():
    gaps = []
    for steps in (1, 8):
        ours, theirs, spec = matrices(), matrices(), TrainSpec(weight_decay=0.1)
        start = matrices()
        stepped(UPDATES["adamw8bit"](ours, [], spec), ours, steps)
        stepped(AdamW(theirs, [], spec), theirs, steps)
        gaps += [
            float((a - b).norm() / (b - s).norm())
            for a, b, s in zip(ours, theirs, start, strict=True)
        ]
    assert max(gaps[:4]) == 0.0
    assert min(gaps[4:]) > 1e-4
    assert max(gaps[4:]) < 0.05, "of the way that the weights went"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_first_step_in_8_bits_is_adamws_in_whatever_weights_are_stored(dtype):
    ours, theirs = matrices(dtype=dtype), matrices(dtype=dtype)
    update = UPDATES["adamw8bit"](ours, [], TrainSpec())
    stepped(update, ours, 1)
    stepped(AdamW(theirs, [], TrainSpec()), theirs, 1)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    before = [m.clone() for m in ours]
    stepped(update, ours, 3)
    assert not any(torch.equal(a, b) for a, b in zip(ours, before, strict=True))
    assert all(m.dtype == dtype and bool(m.isfinite().all()) for m in ours)


def test_rare_small_gradients_beside_large_ones_do_not_take_steps_of_mean_over_eps():
    """Their mean square is below the smallest code of the block; were it zero, the step would be 1e3 times the rate."""
    weight = torch.zeros(1, 256)
    update = UPDATES["adamw8bit"]([weight], [], TrainSpec(weight_decay=0.0))
    gradient = torch.full((1, 256), 1e-4)
    gradient[0, 0] = 1.0
    before = weight.clone()
    for _ in range(5):
        weight.grad = gradient.clone()
        update.step(1e-3, ONE, YES)
        assert float((weight - before).abs().max()) < 1.1e-3
        before = weight.clone()


def test_a_rank_that_holds_no_row_counts_the_step_all_the_same():
    """Any rank may write the count of a parameter into a checkpoint."""
    none = torch.zeros(0, 300)
    update = UPDATES["adamw8bit"]([none], [], TrainSpec())
    none.grad = torch.zeros(0, 300)
    for _ in range(2):
        update.step(1e-3, ONE, YES)
    assert float(update.state[none]["step"]) == 2.0


def test_a_matrix_in_pieces_is_updated_as_one_is(monkeypatch):
    found = []
    for rows in (5, 1 << 20):
        monkeypatch.setattr(updates, "rows_of_piece", lambda columns, rows=rows: rows)
        weights = matrices([(13, 40), (3, 300)])
        update = UPDATES["adamw8bit"](weights, [], TrainSpec())
        stepped(update, weights, 4)
        assert {float(s["step"]) for s in update.state.values()} == {4.0}
        found.append(weights)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@functools.cache
def codes(signed, dtype):
    return Codes(signed, torch.float64 if dtype == torch.float64 else torch.float32, CPU)


SMALLEST = {"rows": 3, "columns": 300, "seed": 0, "signed": True, "dtype": torch.float32}


@settings(max_examples=60, deadline=None)
@example(power=-33.0, **SMALLEST)
@example(power=-39.0, **SMALLEST)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 700),
    power=st.floats(-40, 15),
    seed=st.integers(0, 99),
    signed=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_codes_of_what_codes_stand_for_are_the_same_codes(
    rows, columns, power, seed, signed, dtype
):
    draw = torch.Generator().manual_seed(seed)
    exact = torch.randn(rows, columns, generator=draw, dtype=torch.float64) * 10.0**power
    exact = (exact if signed else exact.square()).to(dtype)
    count, size = scale_blocks(columns)
    assert count * size - columns < count
    table = codes(signed, dtype)
    assert table.values.numel() <= 256
    held = torch.zeros(rows, count * size, dtype=torch.uint8), exact.new_zeros(rows, count)
    table.write(exact.clone(), *held)
    known = table.read(*held, columns)
    again = held[0].clone(), held[1].clone()
    table.write(known.to(dtype).clone(), *again)
    assert torch.equal(again[0], held[0])
    assert torch.equal(again[1], held[1])
    largest = held[1].double().repeat_interleave(size, 1)[:, :columns]
    off = (known.double() - exact.double()).abs()
    assert bool((off <= 0.0075 * largest + 2.0**-100).all())
    if not signed:
        there = exact.double() > 0
        assert bool((known[there & (largest > 0)] > 0).all())


# In the loop


def steps_of(trainer, count):
    return [
        trainer._launch(step, trainer.batches.make(step), StopFlag(60), UNSAVED).numbers.read()[0]
        for step in range(count)
    ]


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_matrices_of_blocks_are_theirs_and_all_else_is_adamws(name, lora):
    with ranks(1):
        trainer = trainer_of({**case(lora=lora), "optimizer": name})
        optimizer = trainer.optimizer
        theirs = {
            h.name for h in optimizer.trained if "exp_avg" not in optimizer.update.state[h.local]
        }
        wanted = {h.name for h in optimizer.trained if "layers" in h.name and h.parameter.ndim == 2}
        assert theirs == wanted
        assert len(wanted) == 2 * 7 * (1 + lora)
        before = {h.name: h.local.clone() for h in optimizer.trained}
        losses = steps_of(trainer, 8)
        assert losses[-1] < losses[0]
        assert all(not torch.equal(before[h.name], h.local) for h in optimizer.trained)
        assert optimizer.facts()["optimizer"].startswith(name)


def test_8_bits_train_as_adamw_does_within_a_hundredth():
    found = {}
    for name in ("adamw", "adamw8bit"):
        with ranks(1):
            found[name] = steps_of(trainer_of({**case(), "optimizer": name}), 12)
    assert found["adamw8bit"] == pytest.approx(found["adamw"], rel=0.01)
    assert found["adamw8bit"] != found["adamw"]


@pytest.mark.parametrize("done", [0, 3])
@pytest.mark.parametrize("name", OTHERS)
def test_a_step_reads_nothing_and_one_that_is_not_finite_changes_nothing(name, done):
    with ranks(1):
        trainer = trainer_of({**case(precision="fp16"), "optimizer": name})
        optimizer = trainer.optimizer
        steps_of(trainer, done)
        kept = [h.local.clone() for h in optimizer.trained]
        state = [
            {k: v.clone() for k, v in optimizer.update.state[h.local].items()}
            for h in optimizer.trained
        ]
        assert all(float(s["step"]) == done for s in state if "step" in s)
        optimizer.scale.value.fill_(2.0**40)
        works = [trainer.batches.make(step) for step in (done, done + 1)]
        with Reads() as reads, Collectives() as collectives:
            launched = [
                trainer._launch(done + i, work, StopFlag(60), UNSAVED)
                for i, work in enumerate(works)
            ]
        assert (reads.found, collectives.found) == ([], [])
        assert not any(np.isfinite(one.numbers.read()[1]) for one in launched)
        for held, weight, before in zip(optimizer.trained, kept, state, strict=True):
            assert torch.equal(held.local, weight), held.name
            for key, value in optimizer.update.state[held.local].items():
                assert torch.equal(value, before[key]), (held.name, key)


def test_a_network_without_blocks_is_refused():
    given = case("image_classification", MODELS["cnn"])
    with ranks(1), pytest.raises(UnsupportedError, match="muon updates matrices of transformer"):
        trainer_of({**given, "optimizer": "muon"})


def test_fused_projections_and_heads_of_classes_are_known():
    with ranks(1):
        network = trainer_of(case("text_classification", MODELS["distilbert"])).parts.network
        found = modules.matrices(network)
    assert len(found) == 6 * 5
    assert not any("classifier" in name or "embeddings" in name for name in found)


# In other layouts


LAYOUTS = {
    "muon": [("dp",), ("pp",), ("dp", "pp")],
    "adamw8bit": [("dp",), ("shard",), ("pp",), ("cp",), ("dp", "shard")],
}


def in_layout(name, axes, model=LLAMA):
    cell = case(axes=axes)["cell"] | {"schedule": "1f1b" if "pp" in axes else ""}
    return {
        "name": "-".join((name, *(axes or ("one",)))),
        "task": "causal_lm",
        "model": model,
        "cell": cell,
        "exact": True,
        "packing": True,
        "fault": "",
        "world": 2 ** len(axes),
        "micro": 1,
        "check": False,
        "backend": "inductor",
        "export": "",
        "optimizer": name,
    }


@pytest.mark.slow
def test_ranks_of_each_layout_train_as_one_does(tmp_path):
    cases = [in_layout(n, axes) for n, found in LAYOUTS.items() for axes in [(), *found]]
    path = tmp_path / "cases.json"
    path.write_text(json.dumps(sorted(cases, key=lambda one: one["world"])))
    with (tmp_path / "log.txt").open("w") as log:
        subprocess.run(
            [sys.executable, str(HERE / "differential.py"), str(path), str(tmp_path)],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "JE_ARROW_MALLOC_CONF": "background_thread:false",
            },
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=280,
        )
    said = (tmp_path / "log.txt").read_text()[-4000:]
    for one in cases:
        alone, found = (
            tmp_path / f"{name}.pt" for name in (f"{one['optimizer']}-one", one["name"])
        )
        assert found.exists(), said
        ours, theirs = torch.load(found)["adamw"], torch.load(alone)["adamw"]
        print(one["name"], ours)
        assert ours == pytest.approx(theirs, rel=1e-9), one["name"]
        assert len({round(loss, 9) for loss in ours}) == 3


# Interrupted


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return written(tmp_path_factory.mktemp("texts"), "causal_lm", GPT2)


def gang_of(folder, texts, name, **layout):
    train = LM_TRAIN.model_copy(update={"optimizer": name})
    if layout:
        train = TrainSpec.model_validate(
            {**train.model_dump(), "optimizer": name, "layout": layout}
        )
    return Gang(folder, texts, train=train, task="causal_lm", model=GPT2)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), [("muon", {}), ("adamw8bit", {"shard": 2})])
def test_a_killed_training_resumes_to_the_same_bits(tmp_path, texts, name, layout):
    whole = gang_of(tmp_path / "whole", texts, name, **layout).start().finish()
    killed = gang_of(tmp_path / "killed", texts, name, **layout).start().until_committed()
    workers = killed.workers()
    killed.process.kill()
    psutil.wait_procs(workers, timeout=20)
    killed.process.wait()
    killed.start().finish()
    assert re.search(r"resumed from the checkpoint of step (6|12|18) of 24", killed.said)
    assert killed.losses == whole.losses
    assert killed.weights == whole.weights
    summary = TrainingSummary.read(killed.folder / "training-2" / "training.json")
    assert summary.in_effect == {"optimizer": f"{name}, AdamW outside of matrices"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "first", "then"),
    [("muon", {}, {"pp": 2}), ("adamw8bit", {"shard": 2}, {}), ("adamw8bit", {}, {"pp": 2})],
)
def test_another_layout_resumes_it(tmp_path, texts, name, first, then):
    """fp32 adds in another order there, and a code of 8 bits may fall on the other side: 1e-3 is far below what lost moments do."""
    whole = gang_of(tmp_path / "whole", texts, name, **first).start().finish()
    moved = gang_of(tmp_path / "moved", texts, name, **first).start().until_step(9)
    moved.process.send_signal(signal.SIGTERM)
    moved.finish(75)
    step = newest(moved.checkpoints, "key").step
    moved.train = gang_of(tmp_path, texts, name, **then).train
    moved.start().finish()
    assert f"resumed from the checkpoint of step {step} of 24" in moved.said
    ours, theirs = ([loss for _, loss, *_ in gang.losses] for gang in (moved, whole))
    assert ours[step:] == pytest.approx(theirs[step:], rel=1e-3)
    assert math.isfinite(ours[-1])


@pytest.mark.slow
def test_a_checkpoint_of_another_optimizer_is_refused_even_under_the_same_key(tmp_path, texts):
    gang = gang_of(tmp_path / "one", texts, "adamw").start().until_step(9)
    gang.process.send_signal(signal.SIGTERM)
    gang.finish(75)
    for name in OTHERS:
        gang.train = gang_of(tmp_path, texts, name).train
        gang.start().finish(1)
        assert "it holds no optimizer." in gang.said
    assert set(MOMENTS) == {"exp_avg", "exp_avg_sq"}


@pytest.mark.slow
def test_the_reviews_are_learnt_with_each(tmp_path):
    """In 8 bits the curve is AdamW's; Muon's steps are a fifth as long as AdamW's first ones, so a training this short wants a
    rate three times as large (docs/optimizers.md)."""
    spec = load_target(HERE.parents[1] / "configs" / "reviews.yaml")
    ingest(spec.data, "text", "", tmp_path / "examples")
    shard(tmp_path / "examples", spec.data, spec.model, spec.task, tmp_path / "shards")
    means = {}
    for name, lr in (("adamw", 2e-3), ("adamw8bit", 2e-3), ("muon", 6e-3)):
        train = spec.train.model_copy(
            update={"optimizer": name, "lr": lr, "checkpoint": CheckpointSpec()}
        )
        gang = (
            Gang(tmp_path / name, tmp_path / "shards", 1, train, spec.task, spec.model)
            .start()
            .finish()
        )
        losses = [loss for _, loss, *_ in gang.losses]
        means[name] = [sum(losses[start : start + 32]) / 32 for start in (64, len(losses) - 32)]
        print(name, len(losses), means[name])
    assert means["adamw8bit"] == pytest.approx(means["adamw"], rel=0.02)
    assert max(last for _, last in means.values()) < 0.5, "from 1.1"
