"""Two ranks score as one process does, in every way to divide a model or the examples; and a champion that the layout cannot
hold is sharded instead. One launch for all cases."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rekindle.spec.model import DataSpec, ModelSpec
from rekindle.train import score_rank
from tests.data import tagged
from tests.data.corpora import rows as reviews
from tests.data.corpora import write_jsonl
from tests.data.dialogues import LLAMA, sharded, source
from tests.evaluate.scoring import one_rank
from tests.evaluate.two_ranks import SMALL, case
from tests.support.evaluate_score_layouts import GPT2, classifier
from tests.support.evaluate_scores import SLICES, model_of

DISTILBERT = {
    "model_type": "distilbert",
    "dim": 20,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 36,
    "max_position_embeddings": 32,
}
ODD = {**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 36}
CASES = {
    "fsdp": ("llama", {"shard": 2}),
    "tp": ("llama", {"tp": 2}),
    "cnn-replicas": ("cnn", {"dp": 2}),
    "replicas": ("llama", {"dp": 2}),
    "cp": ("llama", {"cp": 2}),
    "pp": ("llama", {"pp": 2}),
    "gpt2-fsdp": ("gpt2", {"shard": 2}),
    "gpt2-tp": ("gpt2", {"tp": 2}),
    "distilbert-replicas": ("distilbert", {"dp": 2}),
    "distilbert-fsdp": ("distilbert", {"shard": 2}),
    "distilbert-tp": ("distilbert", {"tp": 2}),
    "tags-replicas": ("tags", {"dp": 2}),
    "tags-fsdp": ("tags", {"shard": 2}),
    "cnn-fsdp": ("cnn", {"shard": 2}),
    "cnn-tp": ("cnn", {"tp": 2}),
    "cnn-pp": ("cnn", {"pp": 2}),
    "three-heads-tp": ("odd", {"tp": 2}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """By name: a model's folder and its examples."""
    folder = tmp_path_factory.mktemp("models")
    data = source(folder, "chat", **SLICES)
    found = {}
    for i, (name, network) in enumerate({"llama": LLAMA, "gpt2": GPT2, "odd": ODD}.items()):
        spec = ModelSpec.model_validate({"source": network, "tokenizer": {"vocab_size": 401}})
        shards = sharded(folder / name, data, spec)
        made = model_of("causal_lm", spec, shards, folder / name / "model", i)
        found[name] = made, folder / name / "examples"
    data = data.model_validate(
        {
            "source": str(write_jsonl(folder / "reviews.jsonl", reviews())),
            "max_length": 32,
            "columns": {"text": "text", "label": "label"},
            "split": {"train": 0.4, "validation": 0.1, "test": 0.5},
        }
    )
    spec = ModelSpec.model_validate({"source": DISTILBERT, "tokenizer": {"vocab_size": 300}})
    found["distilbert"] = classifier("text_classification", folder / "distilbert", data, spec)
    data = tagged.source(folder / "words", max_length=12, split=SLICES["split"])
    found["tags"] = classifier("token_classification", folder / "tags", data, spec)
    data = DataSpec.model_validate(
        {"source": "sklearn:digits", "split": {"train": 0.7, "validation": 0.1, "test": 0.2}}
    )
    spec = ModelSpec.model_validate({"source": {"channels": [4, 6], "hidden": 10}})
    found["cnn"] = classifier("image_classification", folder / "cnn", data, spec)
    return found


@pytest.fixture(scope="module")
def ranks(models, request, tmp_path_factory):
    """The folder with what two ranks left, of the cases that this session tests."""
    folder = tmp_path_factory.mktemp("ranks")
    here = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in here if hasattr(item, "callspec")]
    cases = {name: words(models, *CASES[name]) for name in names}
    (folder / "cases.json").write_text(json.dumps(cases))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "--local-addr=127.0.0.1",
            str(Path(__file__).with_name("two_ranks.py")),
            str(folder / "cases.json"),
            str(folder),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return folder, done.stdout


def words(models, name, layout):
    # a pipeline starts with as many micro-batches as it has stages
    train = {"micro_batch_size": 4} if "pp" in layout else {}
    model, examples = models[name]
    return {"model": str(model), "examples": str(examples), "layout": layout, "train": train}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_score_as_one_process_does(name, models, ranks, monkeypatch):
    folder, log = ranks
    model, layout = CASES[name]
    for limit, value in SMALL.items():
        monkeypatch.setattr(score_rank, limit, value)
    with one_rank():
        expected, alone = case(**words(models, model, "auto"))
    found = np.load(folder / f"{name}.npy")
    facts = json.loads((folder / f"{name}.json").read_text())
    assert np.abs(expected).sum() > 1
    if model not in (
        "distilbert",
        "tags",
        "cnn",
    ):  # right predictions and targets are whole numbers
        assert found[:, 1:].tolist() == expected[:, 1:].tolist()
    assert found == pytest.approx(expected, rel=2e-6, abs=1e-6)
    assert facts["texts"] == alone["texts"]
    replicates = "dp" in layout
    assert (facts["held"] < 0.9 * alone["held"]) != replicates
    data_ranks = 2 if {"dp", "shard"} & layout.keys() or name == "three-heads-tp" else 1
    assert facts["turns"] == -(-alone["turns"] // data_ranks)
    assert alone["turns"] > 4
    assert facts["left"] == 0, "no weight is left when the next contender comes"
    if name == "three-heads-tp":
        assert facts["layout"] == "shard 2"
        assert "scored with its weights sharded over 2 ranks: tp 2 does not divide 3 heads" in log
