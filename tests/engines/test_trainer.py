"""The Trainer of transformers as an engine: real torchrun, two ranks on gloo, a small BERT on texts and a GPT-2 on documents.

Its loop draws its own order and dropout and has no packing, so its losses are not rekindle's; that it learns, resumes to the same
bits, and leaves a model that rekindle opens is what these tests hold.
"""

import json
import math
import re
import signal

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from rekindle.errors import SpecError
from rekindle.records import TrainingSummary
from rekindle.spec.load import load_target
from rekindle.spec.model import ModelSpec, TrainSpec
from rekindle.train.history import read_history
from rekindle.train.modelfolder import open_model
from tests.quick import first
from tests.support.s3 import s3_server
from tests.support.train_resume import DISTILBERT, GPT2, LM_STEPS, LM_TRAIN, Gang, written
from tests.tasks.templates import SHAPES, tokenizer_for

TRAINER = {
    **LM_TRAIN.model_dump(),
    "engine": "trainer",
    "engine_config": {"dataloader_num_workers": 0},
}


@pytest.fixture(scope="module", params=first(1, ["text_classification", "causal_lm"]))
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def texts(tmp_path_factory, kind):
    model = GPT2 if kind == "causal_lm" else DISTILBERT
    return written(tmp_path_factory.mktemp("texts"), kind, model), kind, model


def gang(folder, texts, **changed):
    shards, task, model = texts
    return Gang(
        folder, shards, train=TrainSpec.model_validate(TRAINER | changed), task=task, model=model
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory, texts):
    return gang(tmp_path_factory.mktemp("whole"), texts).start().finish()


def weights(done):
    return load_file(done.folder / f"model-{done.attempt}" / "model.safetensors")


@pytest.mark.slow
def test_it_learns_and_says_what_is_in_effect(whole, kind):
    summary = TrainingSummary.read(whole.folder / "training-1" / "training.json")
    assert (summary.engine, summary.world_size, summary.steps) == ("trainer", 2, LM_STEPS)
    expected = {
        "distributed": "MULTI_CPU",
        "wrapped": "DistributedDataParallel",
        "optimizer": "AdamW",
        "backend": "gloo",
        "ranks": "2",
    }
    assert {name: summary.in_effect[name] for name in expected} == expected
    rows = list(read_history(whole.folder / "training-1" / "history.jsonl"))
    assert [row.step for row in rows] == list(range(1, LM_STEPS + 1))
    # a mean over the whole batch, whatever each rank accumulates of it
    chance = pytest.approx(math.log(320 if kind == "causal_lm" else 3), rel=0.1)
    assert (rows[0].loss, rows[0].validation_loss or rows[0].loss) == (chance, chance)
    assert rows[-1].validation_loss is not None
    assert summary.validation == {"loss": rows[-1].validation_loss}
    assert rows[-1].validation_loss <= chance.expected * 1.1
    assert (
        rows[-1].loss < rows[0].loss or kind == "text_classification"
    )  # whose classes are made up
    model = open_model(whole.folder / "model-1")
    assert {n: v.shape for n, v in model.network().state_dict().items()}.keys() >= weights(
        whole
    ).keys()


@pytest.mark.slow
def test_a_killed_rank_changes_nothing(tmp_path, texts, whole):
    killed = gang(tmp_path, texts).start()
    killed.until(
        lambda: next((killed.checkpoints / "trainer").glob("*/complete.json"), None), "a save"
    )
    killed.workers()[1].send_signal(signal.SIGKILL)
    killed.finish()
    assert "restarting all ranks (1 of 3)" in killed.said
    assert re.search(r"resumed from the checkpoint of step \d+ of 24 on 2 ranks", killed.said)
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(killed)[name], value, rtol=0, atol=0)


@pytest.mark.slow
def test_a_request_to_stop_saves_and_another_number_of_ranks_goes_on(tmp_path, texts):
    stopped = gang(tmp_path, texts).start().until_step(8)
    stopped.process.send_signal(signal.SIGTERM)
    stopped.finish(75)
    stopped.ranks = 1
    stopped.start().finish()
    assert re.search(r"resumed from the checkpoint of step \d+ of 24 on 1 ranks", stopped.said)
    assert [step for step, *_ in stopped.losses] == list(range(1, LM_STEPS + 1))


@pytest.mark.slow
def test_a_training_that_was_complete_is_exported_as_it_was(tmp_path, texts, whole):
    done = gang(tmp_path, texts).start().finish()
    done.start().finish()  # its checkpoint is that of the last step
    assert "resumed from the checkpoint of step 24 of 24" in done.said
    assert done.losses == whole.losses
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(done)[name], value, rtol=0, atol=0)


@pytest.mark.slow
def test_in_an_object_store_another_machine_goes_on(tmp_path, texts, whole, monkeypatch):
    server, reaches = s3_server()
    try:
        # the first machine comes back with a curve that the second one has gone beyond
        for machine, until in ((1, 4), (2, 12), (1, None)):
            place = tmp_path / f"machine-{machine}"
            place.mkdir(exist_ok=True)
            monkeypatch.setattr("tempfile.tempdir", str(place))
            one = gang(tmp_path / "job", texts)
            one.root, one.environment = "s3://lake/run", {**reaches, "TMPDIR": str(place)}
            one.start()
            if until:
                one.until_step(until)
                one.process.send_signal(signal.SIGTERM)
            one.finish(75 if until else 0)
    finally:
        server.kill()
        server.wait()
    assert re.search(r"resumed from the checkpoint of step \d+ of 24 on 2 ranks", one.said)
    assert one.losses == whole.losses
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(one)[name], value, rtol=0, atol=0)


@pytest.mark.slow
def test_a_loss_that_is_no_number_ends_the_training(tmp_path, texts):
    config = {
        "engine_config": {"optim": "sgd"},
        "lr": 100,
        "clip_norm": None,
        "warmup": 0,
        "max_restarts": 0,
    }
    done = gang(tmp_path, texts, **config).start().finish(1)
    assert re.search(r"the loss is \S+ and the gradient's norm \S+ at step \d+", done.said)


@pytest.mark.slow
def test_what_accelerate_reads_from_the_environment_changes_nothing(tmp_path, texts, whole):
    one = gang(tmp_path, texts)
    one.environment = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    one.start().finish()
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(one)[name], value, rtol=0, atol=0)


@pytest.mark.slow
def test_half_a_checkpoint_is_not_there(tmp_path, texts, whole):
    folder = tmp_path / "checkpoints" / "key" / "trainer" / "checkpoint-18"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text("{")
    done = gang(tmp_path, texts).start().finish()
    assert "24 steps from the start on 2 ranks" in done.said
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(done)[name], value, rtol=0, atol=0)


@pytest.mark.slow
def test_smoothed_losses_are_those_of_rekindles_engine(tmp_path):
    """The first step over all rows, before anything is learnt: the order of rows does not matter."""
    tokenizer_for(SHAPES["headers between tokens"]).save_pretrained(tmp_path / "base")
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "vocab_size": 600}
    torch.manual_seed(0)
    config = AutoConfig.for_model(**GPT2.source, **quiet)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    model = ModelSpec(source=str(tmp_path / "base"))
    shards = written(tmp_path, "causal_lm", model)
    rows = json.loads((shards / "manifest.json").read_text())["rows"]["train"]
    found = {}
    for engine in ("trainer", "rekindle"):
        for smoothing in (0.0, 0.3):
            changed = {"engine": engine, "label_smoothing": smoothing, "steps": 1, "warmup": 0}
            changed |= {"global_batch_size": rows, "micro_batch_size": rows}
            changed |= {"lr": 1e-9, "checkpoint": {"every": 1}, "engine_config": None}
            train = TrainSpec.model_validate(TRAINER | changed)
            folder, about = tmp_path / f"{engine}-{smoothing}", {"train": train, "model": model}
            done = Gang(folder, shards, ranks=1, task="causal_lm", **about).start().finish()
            (row,) = read_history(done.folder / "training-1" / "history.jsonl")
            found[engine, smoothing] = (row.loss, row.validation_loss)
    for smoothing in (0.0, 0.3):
        ours, theirs = found["rekindle", smoothing], found["trainer", smoothing]
        assert ours[0] == pytest.approx(theirs[0], rel=1e-4)
        assert ours[1] == pytest.approx(found["rekindle", 0.0][1], rel=1e-5), "not smoothed"
        assert theirs[1] == pytest.approx(found["trainer", 0.0][1], rel=1e-5), "not smoothed"
    assert found["rekindle", 0.3][0] != pytest.approx(found["rekindle", 0.0][0], rel=1e-3)


def test_what_the_trainer_does_not_do_or_says_twice_is_refused_at_once(tmp_path):
    (tmp_path / "args.json").write_text(
        json.dumps(
            {
                "max_steps": 5,
                "fsdp": "full_shard",
                "learning_rate": 1e-3,
                "seed": "auto",
                "bf16": True,
                "optim": "adafactor",
            }
        )
    )
    path = tmp_path / "c.yaml"
    path.write_text(
        "name: x\ntask: causal_lm\ndata: {source: a.jsonl}\nmodel: {source: {model_type: gpt2}, lora: {rank: 4}}\n"
        "train: {engine: trainer, engine_config: args.json, ledger: true, checkpoint: {keep_best: true}, lr_schedule: wsd, lr: 2e-3}\n"
    )
    with pytest.raises(SpecError) as caught:
        load_target(path)
    assert [problem.what.split(": ", 1)[1] for problem in caught.value.problems] == [
        "the engine trainer does not take model.lora",
        "the engine trainer does not take train.ledger",
        "the engine trainer does not take train.checkpoint.keep_best",
        "the engine trainer has no schedule wsd",
        "rekindle does not hand on `fsdp`",
        "rekindle does not hand on `max_steps`",
        "`learning_rate` is 0.001 here, and train.lr is 0.002",
        "`bf16` is True here, and train.precision is auto",
    ]
