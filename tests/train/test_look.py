"""Model folders that cannot be trained, as doctor sees them before a machine is paid."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from rekindle.spec.model import DataSpec, LoraSpec, ModelSpec
from rekindle.train.look import Question, look

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A tiny Llama with its tokenizer."""
    vocabulary = {f"w{i}": i for i in range(60)} | {"<unk>": 60, "<pad>": 61, "</s>": 62}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")
    fast.save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    network.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def problems(source: object, task: str = "causal_lm", **model) -> list[str]:
    data = DataSpec(source="texts.jsonl", max_length=32)
    found = look(Question(task=task, data=data, model=ModelSpec(source=source, **model)))
    return [problem.what for problem in found]


def test_nothing_is_wrong_with_a_folder_that_save_pretrained_wrote(folder):
    assert problems(str(folder)) == []


def rewrite_config(folder: Path, **fields) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def wrap(folder: Path) -> None:
    file = folder / "model.safetensors"
    save_file({f"module.{k}": v for k, v in load_file(file).items()}, file, {"format": "pt"})


def bring_code(folder: Path) -> None:
    rewrite_config(folder, model_type="mine", auto_map={"AutoModel": "modeling.Mine"})


def leave_pickles_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def break_link(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("blobs/none")


WRONG = {
    "pickles only": (leave_pickles_only, "there are no safetensors weights"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "adapters": (
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        "holds adapters",
    ),
    "no tokenizer": (
        lambda folder: [path.unlink() for path in folder.glob("tokenizer*")],
        "cannot load the tokenizer",
    ),
    "custom code": (bring_code, "brings code of its own (auto_map), which is not run"),
    "a wrapper's names": (wrap, "begin with `module.`"),
    "a small vocabulary": (lambda folder: rewrite_config(folder, vocab_size=40), "knows 40 tokens"),
    "heads that do not divide": (
        lambda folder: rewrite_config(folder, num_attention_heads=5),
        "the network cannot be built: ",
    ),
    "a list": (lambda folder: (folder / "config.json").write_text("[1]"), "is not a JSON object"),
    "a link to nothing": (break_link, "model.safetensors is a link to blobs/none, which does not"),
    "more layers": (
        lambda folder: rewrite_config(folder, num_hidden_layers=1),
        "beyond the layers that config.json describes",
    ),
    "few positions": (
        lambda folder: rewrite_config(folder, max_position_embeddings=8),
        "the model has 8 positions",
    ),
}


@pytest.mark.parametrize(("damage", "said"), WRONG.values(), ids=WRONG)
def test_a_folder_that_cannot_be_trained_is_named(folder, damage, said):
    damage(folder)
    (problem,) = problems(str(folder))
    assert said in problem


def test_texts_longer_than_a_classifier_has_positions_for_are_refused(folder):
    rewrite_config(folder, max_position_embeddings=8)
    (problem,) = problems(str(folder), task="text_classification")
    assert problem == "data.max_length is 32, but the model has 8 positions"


def test_adapters_of_an_architecture_without_a_plan_are_refused_where_they_are_asked_for():
    found = look(
        Question(
            task="causal_lm",
            data=DataSpec(source="texts.jsonl", max_length=32),
            model=ModelSpec(source={"model_type": "olmo2", **SIZES}, lora=LoraSpec()),
        )
    )
    assert [(problem.what, problem.where) for problem in found] == [
        ("there is no LoRA plan for olmo2", "model.lora")
    ]
    assert found[0].fix.startswith("leave it out")
    assert problems({"model_type": "llama", **SIZES}, lora=LoraSpec(targets=("embed_tokens",))) == [
        "llama has no layer called embed_tokens"
    ]


def test_an_inline_config_is_built():
    assert problems({"model_type": "llama", **SIZES}) == []
    assert problems({"model_type": "llama", **SIZES, "hiden_size": 3}) == [
        "llama has no setting `hiden_size`"
    ]
    assert problems({"model_type": "distilbert", "dimm": 64}, task="text_classification") == [
        "distilbert has no setting `dimm`"
    ]


@pytest.mark.slow
def test_a_process_answers_as_json(folder):
    wrap(folder)
    data = DataSpec(source="texts.jsonl", max_length=32)
    asked = Question(task="causal_lm", data=data, model=ModelSpec(source=str(folder)))
    answer = subprocess.run(
        [sys.executable, "-P", "-m", "rekindle.train.look"],
        input=asked.model_dump_json(),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    (problem,) = json.loads(answer.stdout.splitlines()[-1])
    assert "begin with `module.`" in problem["what"]
