"""Products in 8 bits, emulated on this CPU: they are in effect, train as bf16 does, resume to the same bits, and leave an ordinary
model. Real torchrun, two ranks on gloo.
"""

import importlib.metadata
import importlib.util
import signal
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rekindle.app.preflight.machine import EngineCheck, LayoutCheck
from rekindle.errors import RequestError, SpecError, StepError, UnsupportedError
from rekindle.plan.plan import make
from rekindle.records import TrainingSummary
from rekindle.spec.load import load_target
from rekindle.spec.model import ModelSpec, Spec, TrainSpec
from rekindle.train import quantised, score
from tests.support.plan import ROOT
from tests.support.train_resume import LM_STEPS, LM_TRAIN, Gang, written

LLAMA = ModelSpec(
    source={
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    },
    tokenizer={"vocab_size": 320},
)
installed = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="the extra `fp8` is not installed"
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return written(tmp_path_factory.mktemp("texts"), "causal_lm", LLAMA)


def gang(folder, texts, precision, **more):
    train = TrainSpec.model_validate({**LM_TRAIN.model_dump(), "precision": precision})
    return Gang(folder, texts, train=train, task="causal_lm", model=LLAMA, **more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, texts):
    return gang(tmp_path_factory.mktemp("whole"), texts, "fp8").start().finish()


@installed
@pytest.mark.slow
def test_it_is_in_effect_and_trains_as_bf16_does(tmp_path, texts, whole):
    summary = TrainingSummary.read(whole.folder / "training-1" / "training.json")
    version = importlib.metadata.version("torchao")
    # of two blocks, seven matrices each
    assert dict(summary.in_effect) == {"fp8": f"14 matrices, torchao {version}, emulated"}
    assert summary.precision == "fp8"
    narrow = gang(tmp_path, texts, "bf16").start().finish()
    fp8, bf16 = ([loss for _, loss, *_ in one.losses] for one in (whole, narrow))
    assert len(fp8) == len(bf16) == LM_STEPS
    assert fp8 == pytest.approx(bf16, rel=1e-2)
    assert fp8 != pytest.approx(bf16, rel=1e-5), "other arithmetic gives other losses"
    ordinary = load_file(tmp_path / "model-1" / "model.safetensors")
    found = load_file(whole.folder / "model-1" / "model.safetensors")
    assert {n: (t.dtype, t.shape) for n, t in found.items()} == {
        n: (t.dtype, t.shape) for n, t in ordinary.items()
    }


@installed
@pytest.mark.slow
def test_a_training_that_is_killed_and_stopped_ends_with_the_same_bits(tmp_path, texts, whole):
    one = gang(tmp_path, texts, "fp8").start().until_committed()
    one.workers()[1].kill()
    one.until(lambda: "resumed from the checkpoint" in one.said, "a restart")
    one.process.send_signal(signal.SIGTERM)
    one.finish(75)
    one.start().finish()
    assert one.losses == whole.losses
    assert one.weights == whole.weights


@installed
def test_sides_that_sixteen_does_not_divide_stay_and_none_at_all_is_an_error():
    from transformers import AutoConfig, AutoModelForCausalLM

    def network(**sizes):
        config = AutoConfig.for_model(
            "llama", vocab_size=64, num_hidden_layers=1, num_attention_heads=2, **sizes
        )
        return AutoModelForCausalLM.from_config(config)

    mixed = network(hidden_size=32, intermediate_size=40)
    quantised.convert(mixed, torch.device("cpu"))
    assert quantised.count(mixed) == 4, "those of attention"
    assert type(mixed.lm_head) is nn.Linear
    with pytest.raises(
        UnsupportedError, match="no matrix of a transformer's block has sides that 16 divides"
    ):
        quantised.convert(network(hidden_size=24, intermediate_size=40), torch.device("cpu"))


def test_without_torchao_the_extra_is_named_before_and_in_the_step(tmp_path, monkeypatch):
    spec = Spec.model_validate({"name": "x", "task": "causal_lm", "train": {"precision": "fp8"}})
    monkeypatch.setattr("sys.path", [p for p in sys.path if "site-packages" not in p])
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(StepError, match="fp8 needs torchao") as refused:
        quantised.convert(nn.Linear(16, 16), torch.device("cpu"))
    assert "rekindle[fp8]" in refused.value.problems[0].fix
    monkeypatch.delitem(sys.modules, "torchao")
    problems = [p.what for p in EngineCheck().problems(spec, tmp_path)]
    assert problems == ["fp8 needs the package torchao"]


@pytest.mark.parametrize("engine", ["deepspeed", "trainer"])
def test_other_engines_refuse_it(engine):
    with pytest.raises(SpecError, match=f"the engine {engine} does not train in fp8"):
        load_target(
            ROOT / "configs" / "reviews-lm.yaml", ["train.precision=fp8", f"train.engine={engine}"]
        )


def test_layouts_that_no_test_has_trained_in_it_are_refused(tmp_path):
    spec = load_target(
        ROOT / "configs" / "reviews-lm.yaml",
        ["train.precision=fp8", "train.layout={tp: 2}", "platforms.local.ranks=2"],
    )
    (problem,) = LayoutCheck().problems(spec, tmp_path)
    assert "fp8" in problem.what


def test_gpus_that_multiply_in_it_are_planned_with_it_and_others_named():
    from rekindle.catalog.prices import shipped

    def planned(machine):
        words = ["train.precision=fp8", f"resources.machine={machine}", "resources.gpus_per_node=8"]
        return make(load_target(ROOT / "configs" / "plan" / "7b-spot.yaml", words), shipped())

    option = planned("p5.48xlarge").chosen.option
    assert option.work.precision == "fp8"
    assert option.work.layout.tp == option.work.layout.pp == option.work.layout.cp == 1
    with pytest.raises(RequestError, match="knows no fp8 peak of A100"):
        planned("p4de.24xlarge")


def test_what_was_trained_in_fp8_is_scored_in_bf16_on_a_gpu():
    train = TrainSpec(precision="fp8")
    assert score.settings_of(train, "fp8", gpu=True).precision == "bf16"
    assert score.settings_of(train, "fp8", gpu=False).precision == "fp32"
