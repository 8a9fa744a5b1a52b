"""Where a config may ask for another optimizer than AdamW, and that one which does not keeps its key and its definitions."""

import pytest

from rekindle.data.fingerprint import _identifying
from rekindle.errors import SpecError
from rekindle.spec.load import load_target
from rekindle.spec.model import TrainSpec

BASE = """name: x
task: {task}
data: {{source: x.jsonl}}
train:
  optimizer: {name}
  {more}
"""
REFUSED = {
    "muon on shards": ("causal_lm", "muon", "layout: {dp: 2, shard: 2}", "train.layout.shard", "use dp and pp only"),
    "muon on tensor parallel ranks": ("causal_lm", "muon", "layout: {tp: 2}", "train.layout.tp", "whole matrices"),
    "muon on context parallel ranks": ("causal_lm", "muon", "layout: {cp: 2}", "train.layout.cp", "adamw"),
    "8 bits on tensor parallel ranks": ("causal_lm", "adamw8bit", "layout: {tp: 4}", "train.layout.tp", "use dp and shard and pp and cp only"),
    "images": ("image_classification", "muon", "", "train.optimizer", "remove it"),
    "DeepSpeed": ("causal_lm", "muon", "engine: deepspeed", "train.optimizer", "use rekindle's engine"),
    "the Trainer": ("causal_lm", "adamw8bit", "engine: trainer", "train.optimizer", "use rekindle's engine"),
}  # fmt: skip


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
    [("muon", "layout: {dp: 2, pp: 2}"), ("muon", ""), ("adamw8bit", "layout: {shard: 2, pp: 2, cp: 2}")],
)  # fmt: skip
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
