"""Where a config may ask for another optimizer than AdamW, and that one which does not keeps its key and its definitions."""

import pytest

from rekindle.data.fingerprint import _identifying
from rekindle.errors import RequestError, SpecError
from rekindle.spec.layout import Layout, resolve, undivided
from rekindle.spec.load import load_target
from rekindle.spec.model import LoraSpec, TrainSpec

BASE = """name: x
task: {task}
data: {{source: x.jsonl}}
train:
  optimizer: {name}
  {more}
"""
REFUSED = {
    "muon on shards": (
        "causal_lm",
        "muon",
        "layout: {dp: 2, shard: 2}",
        "train.layout.shard",
        "use dp and pp only",
    ),
    "muon on tensor parallel ranks": (
        "causal_lm",
        "muon",
        "layout: {tp: 2}",
        "train.layout.tp",
        "whole matrices",
    ),
    "muon on context parallel ranks": (
        "causal_lm",
        "muon",
        "layout: {cp: 2}",
        "train.layout.cp",
        "adamw",
    ),
    "8 bits on tensor parallel ranks": (
        "causal_lm",
        "adamw8bit",
        "layout: {tp: 4}",
        "train.layout.tp",
        "use dp and shard and pp and cp only",
    ),
    "images": ("image_classification", "muon", "", "train.optimizer", "remove it"),
    "DeepSpeed": (
        "causal_lm",
        "muon",
        "engine: deepspeed",
        "train.optimizer",
        "use rekindle's engine",
    ),
    "the Trainer": (
        "causal_lm",
        "adamw8bit",
        "engine: trainer",
        "train.optimizer",
        "use rekindle's engine",
    ),
}


def written(tmp_path, task, name, more):
    path = tmp_path / "c.yaml"
    path.write_text(BASE.format(task=task, name=name, more=more))
    return path


@pytest.mark.parametrize(("task", "name", "more", "where", "fix"), REFUSED.values(), ids=REFUSED)
def test_what_an_optimizer_cannot_do_is_refused_at_its_line(tmp_path, task, name, more, where, fix):
    with pytest.raises(SpecError) as caught:
        load_target(written(tmp_path, task, name, more))
    (problem,) = caught.value.problems
    assert where in str(problem)
    assert f"c.yaml:{6 if 'layout' in where else 5}" in problem.where
    assert fix in f"{problem.what} {problem.fix}"


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("muon", "layout: {dp: 2, pp: 2}"),
        ("muon", ""),
        ("adamw8bit", "layout: {shard: 2, pp: 2, cp: 2}"),
    ],
)
def test_layouts_that_leave_whole_what_it_needs_are_taken(tmp_path, name, more):
    assert load_target(written(tmp_path, "causal_lm", name, more)).train.optimizer == name


def test_the_key_of_a_training_with_adamw_is_what_it_was_and_another_optimizer_has_another():
    plain = _identifying(TrainSpec(optimizer="adamw"))
    assert "optimizer" not in plain
    assert plain == _identifying(TrainSpec())
    assert '"optimizer"' not in TrainSpec().model_dump_json()
    found = {
        str(_identifying(TrainSpec(optimizer=name))) for name in ("adamw", "muon", "adamw8bit")
    }
    assert len(found) == 3
    kept = TrainSpec.model_validate_json(TrainSpec(optimizer="muon").model_dump_json())
    assert kept.optimizer == "muon"


def test_ranks_refuse_it_too_and_name_layouts_of_their_number():
    train = TrainSpec(optimizer="muon", layout={"shard": 2, "pp": 2})
    with pytest.raises(RequestError, match="muon needs whole matrices, and shard 2") as caught:
        resolve(train, 4)
    assert caught.value.problems[0].fix.endswith(
        "on 4 ranks, use {dp: 2, pp: 2} or {pp: 4} or {dp: 4}"
    )
    assert resolve(TrainSpec(optimizer="muon"), 4).only_replicates
    (problem,) = undivided(Layout(dp=2, shard=2), LoraSpec(base="4bit"))
    assert problem.where == "train.layout.shard"
    assert list(undivided(Layout(dp=4), LoraSpec(base="4bit"))) == []


QLORA = """name: x
task: {task}
data: {{source: x.jsonl}}
model: {{source: tiny, lora: {{base: 4bit}}}}
train:
  lr: 1e-4
  {more}
"""
NOT_ON_4_BITS = {
    "shards": ("causal_lm", "layout: {shard: 2}", "train.layout.shard", "use dp only"),
    "pipeline stages": (
        "causal_lm",
        "layout: {dp: 2, pp: 2}",
        "train.layout.pp",
        "pp 2 divides it",
    ),
    "tensor parallel ranks": ("text_classification", "layout: {tp: 2}", "train.layout.tp", "full"),
    "context parallel ranks": ("causal_lm", "layout: {cp: 2}", "train.layout.cp", "full"),
    "adapters in bf16": ("causal_lm", "weights: bf16", "train.weights", "full precision"),
    "fp16": ("causal_lm", "precision: fp16", "train.precision", "bf16 or fp32"),
    "compiled blocks": ("causal_lm", "compile: true", "train.compile", "remove it"),
    "DeepSpeed": ("causal_lm", "engine: deepspeed", "model.lora.base", "own tasks and engine"),
}


@pytest.mark.parametrize(
    ("task", "more", "where", "fix"), NOT_ON_4_BITS.values(), ids=NOT_ON_4_BITS
)
def test_what_does_not_train_on_a_base_in_4_bits_is_refused_at_its_line(
    tmp_path, task, more, where, fix
):
    path = tmp_path / "c.yaml"
    path.write_text(QLORA.format(task=task, more=more))
    with pytest.raises(SpecError) as caught:
        load_target(path)
    (problem,) = caught.value.problems
    assert where in str(problem)
    assert f"c.yaml:{4 if 'lora' in where else 7}" in problem.where
    assert fix in f"{problem.what} {problem.fix}"


def test_a_base_in_full_is_not_in_what_identifies_a_training_and_one_in_4_bits_is():
    assert "base" not in LoraSpec().model_dump()
    assert LoraSpec(base="4bit").model_dump()["base"] == "4bit"
