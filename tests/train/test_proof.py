"""What a training proves of its model before the first step, on networks of transformers' own making: their forward and their
`from_pretrained` are the authority, and networks that are wrong on purpose have to be refused."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from rekindle.data.manifest import Shards
from rekindle.errors import StepError, UnsupportedError
from rekindle.objectives import scoring_of
from rekindle.objectives.loss import Goal
from rekindle.records import ShardManifest
from rekindle.spec.layout import Layout
from rekindle.spec.model import ModelSpec, TrainSpec
from rekindle.tasks import load_task
from rekindle.train import modules, parallel, proof, weights
from rekindle.train.evaluation import Evaluation
from rekindle.train.mesh import Mesh
from rekindle.train.parts import Parts
from rekindle.train.proof import (
    describe_left_out,
    prove_forward,
    prove_packing,
    prove_scores,
)
from rekindle.train.routers import check_losses
from tests.support.proof import made_shards

TASK = load_task("causal_lm")
VOCABULARY = 96
LENGTH = 48
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": VOCABULARY,
}
FALCON = {**SIZES, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
GRANITE_HYBRID = {
    **SIZES,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "layer_types": ["mamba", "attention"],
    "num_local_experts": 0,
    "shared_intermediate_size": 96,
    "logits_scaling": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 0.25,
}


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    meet = tmp_path_factory.mktemp("ranks") / "meet"
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shards(packing: bool = True) -> Shards:
    random = np.random.default_rng(0)
    texts = [random.integers(3, VOCABULARY, int(n)).tolist() for n in random.integers(5, 20, 24)]
    marks = [[1] * len(text) for text in texts]
    table = pa.table(
        {
            "id": pa.array([str(row) for row in range(len(texts))]),
            "hash": pa.array([bytes(16)] * len(texts), pa.binary(16)),
            "input_ids": pa.array(texts, pa.list_(pa.int32())),
            "supervised": pa.array(marks, pa.list_(pa.uint8())),
        }
    )
    settings = {
        "pad_token_id": 0,
        "eos_token_id": 1,
        "vocab_size": VOCABULARY,
        "max_length": LENGTH,
        "packing": packing,
        "form": "text",
    }
    manifest = ShardManifest(
        task="causal_lm", source="random", labels=(), rows={"train": len(texts)}, settings=settings
    )
    return Shards.of_tables(Path(), manifest, {"train": table})


@dataclasses.dataclass(frozen=True)
class Given:
    """A network as a training has it before its first step."""

    parts: Parts
    train: TrainSpec
    shards: Shards

    @property
    def arguments(self):
        evaluation = Evaluation(self.parts, self.train.precision)
        return TASK, self.shards, self.parts, self.train, evaluation

    def forward(self) -> str:
        return prove_forward(*self.arguments, small=lambda: None)

    def packing(self):
        return prove_packing(*self.arguments)


def given(source: dict, louder: float = 1.0, **train) -> Given:
    """Fresh weights, matrices times `louder`: trained ones are larger."""
    spec = TrainSpec(**{"steps": 1, "global_batch_size": 4, "precision": "fp32", **train})
    made = shards()
    with weights.deferred() as recorder:
        network = TASK.build(ModelSpec(source=source), (), made.manifest.settings, Path())
    start = weights.WeightSource(network, recorder, 0)
    origins = modules.unfused(network)
    mesh = Mesh.of(Layout(), torch.device("cpu"))
    parts = parallel.build(TASK, network, origins, spec, Goal(), mesh)
    weights.fill([parts.network], start, parts.origins)
    with torch.no_grad():
        for parameter in parts.network.parameters():
            if parameter.ndim > 1:
                parameter.mul_(louder)
    return Given(parallel.settle(parts), spec, made)


HONEST = {
    "llama": {"model_type": "llama", **SIZES},
    "llama, tied": {"model_type": "llama", **SIZES, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gemma": {"model_type": "gemma", **SIZES, "head_dim": 16},
    "mixtral": {"model_type": "mixtral", **SIZES, "num_local_experts": 4},
    "opt": {
        "model_type": "opt",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 96,
        "word_embed_proj_dim": 64,
        "max_position_embeddings": 64,
    },
    "lfm2": {"model_type": "lfm2", **SIZES, "layer_types": ["conv", "full_attention"]},
}


@pytest.mark.parametrize("source", HONEST.values(), ids=HONEST)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_loss_of_an_architecture_with_a_plain_head_is_proven(source, precision):
    assert "the architecture's own, within" in given(source, 3.0, precision=precision).forward()


OTHER_SCORES = {
    "falcon_h1 multiplies": {"model_type": "falcon_h1", **FALCON, "lm_head_multiplier": 0.1},
    "granite divides": {"model_type": "granite", **SIZES, "logits_scaling": 8.0},
    "cohere multiplies": {"model_type": "cohere", **SIZES, "logit_scale": 0.0625},
    "gemma2 caps": {
        "model_type": "gemma2",
        **SIZES,
        "head_dim": 16,
        "final_logit_softcapping": 30.0,
    },
}


@pytest.mark.parametrize("source", OTHER_SCORES.values(), ids=OTHER_SCORES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_architecture_that_changes_its_scores_is_refused_with_both_losses(source, precision):
    with pytest.raises(
        UnsupportedError, match=r"computes another loss .*: [\d.]+ by its own forward, [\d.]+ by"
    ):
        given(source, precision=precision).forward()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_network_that_sees_what_it_is_to_predict_is_refused(precision):
    looks_ahead = {
        "model_type": "gemma3_text",
        **SIZES,
        "head_dim": 16,
        "layer_types": ["full_attention", "full_attention"],
    }
    assert given(looks_ahead, precision=precision).forward()
    looks_ahead["use_bidirectional_attention"] = True
    with pytest.raises(UnsupportedError, match="gemma3_text sees the tokens that it is to predict"):
        given(looks_ahead, precision=precision).forward()


def test_the_weights_keep_every_bit_while_their_output_layer_is_louder():
    trained = given(HONEST["llama, tied"])
    before = [p.detach().clone() for p in trained.parts.network.parameters()]
    trained.forward()
    assert all(map(torch.equal, before, trained.parts.network.parameters()))


KEEPS_APART = [HONEST["llama"], HONEST["gpt2"], HONEST["gemma"], HONEST["mixtral"]]
SEES_OTHERS = {
    "lfm2": HONEST["lfm2"],
    "falcon_h1": {"model_type": "falcon_h1", **FALCON},
    "granitemoehybrid": {"model_type": "granitemoehybrid", **GRANITE_HYBRID},
    "opt, by its own count of positions": HONEST["opt"],
}


@pytest.mark.parametrize("source", KEEPS_APART, ids=lambda source: source["model_type"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_documents_that_keep_apart_in_every_bit_are_packed(source, precision):
    found = given(source, 3.0, precision=precision).packing()
    assert found.packs, found.finding


@pytest.mark.parametrize("source", SEES_OTHERS.values(), ids=SEES_OTHERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("louder", [1.0, 5.0], ids=["fresh", "trained"])
def test_documents_that_see_each_other_are_not_packed(source, precision, louder, capsys):
    found = given(source, louder, precision=precision).packing()
    assert not found.packs
    assert "documents are not packed: " in found.finding
    assert found.finding in capsys.readouterr().out


@pytest.mark.parametrize("task", ["text_classification", "token_classification"])
def test_a_network_may_have_no_more_positions_than_the_longest_text(task):
    few = 8
    sizes = {
        "model_type": "distilbert",
        "dim": 32,
        "n_layers": 1,
        "n_heads": 2,
        "hidden_dim": 32,
        "max_position_embeddings": few,
    }
    kind, made = load_task(task), made_shards(task, longest=few)
    train = TrainSpec(steps=1, global_batch_size=4, precision="fp32")
    labels = made.manifest.labels
    with weights.deferred() as recorder:
        network = kind.build(ModelSpec(source=sizes), labels, made.manifest.settings, Path())
    start = weights.WeightSource(network, recorder, 0)
    origins = modules.unfused(network)
    mesh = Mesh.of(Layout(), torch.device("cpu"))
    parts = parallel.build(kind, network, origins, train, Goal(), mesh)
    weights.fill([parts.network], start, parts.origins)
    evaluation = Evaluation(parts, "fp32")
    assert "own" in prove_forward(kind, made, parts, train, evaluation, small=lambda: None)


@pytest.fixture
def short_of_memory(monkeypatch):
    """A llama whose own forward asks for more memory than there is, as logits of many tokens do."""
    model = given({"model_type": "llama", **SIZES})
    network = model.parts.network
    small = network.forward

    def forward(*args, **options):
        torch.empty(1 << 46, dtype=torch.uint8)
        return small(*args, **options)

    monkeypatch.setattr(network, "forward", forward)
    return model


def test_a_probe_that_runs_out_of_memory_is_said_and_stops_nothing(short_of_memory, capsys):
    said = short_of_memory.forward()
    assert (
        said == "its loss was not compared with the architecture's own: the probe ran out of memory"
    )
    assert said in capsys.readouterr().out


def test_packing_that_could_not_be_proven_for_want_of_memory_is_said(monkeypatch, capsys):
    model = given({"model_type": "llama", **SIZES})
    monkeypatch.setattr(
        model.parts.network.model, "forward", lambda *args, **options: torch.empty(1 << 46)
    )
    packing = model.packing()
    assert packing.packs
    assert packing.finding == "packing was not proven: the probe ran out of memory"
    assert packing.finding in capsys.readouterr().out


def test_a_configuration_that_asks_for_a_loss_of_routers_is_refused():
    experts = {**HONEST["mixtral"], "router_aux_loss_coef": 0.5}
    quiet = AutoModelForCausalLM.from_config(
        TASK.build(ModelSpec(source=experts), (), shards().manifest.settings, Path()).config
    )
    assert "router_aux_loss_coef 0.5" in check_losses(quiet)
    quiet.config.output_router_logits = True
    with pytest.raises(
        UnsupportedError, match=r"auxiliary loss of its experts \(router_aux_loss_coef 0.5\)"
    ):
        check_losses(quiet)


def test_what_an_optimizer_leaves_out_of_experts_is_said():
    trained = given(HONEST["mixtral"], optimizer="muon")
    assert "muon leaves out" in describe_left_out(trained.parts, trained.train)
    assert json.dumps(describe_left_out(given(HONEST["llama"]).parts, trained.train)) == '""'


def test_scores_are_proven_on_no_longer_text_than_the_model_has_positions_for(monkeypatch):
    start = given(HONEST["gpt2"])
    (stage,) = start.parts.stages
    scoring = stage.part.scoring = scoring_of("tokens")
    settings = start.shards.manifest.settings
    monkeypatch.setattr(proof, "PROBE_TOKENS", 100)  # of a model with 64
    prove_scores(TASK, {**settings, "max_length": 64}, (), start.parts, start.train)
    assert stage.part.scoring is scoring
    with pytest.raises(StepError, match="forward fails on a text of 100 tokens"):
        prove_scores(TASK, {**settings, "max_length": 128}, (), start.parts, start.train)
