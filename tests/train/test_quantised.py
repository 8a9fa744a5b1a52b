"""A base in 4 bits under adapters: what it computes, that a killed training resumes, and that the exported model is the one that
was trained."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rekindle.data.manifest import open_shards
from rekindle.errors import StepError
from rekindle.plan.memory import memory
from rekindle.plan.quantised import block_bytes
from rekindle.records import TrainingSummary
from rekindle.spec.model import LoraSpec, ModelSpec
from rekindle.train import modules, quantised
from rekindle.train.checkpoint import load, newest
from rekindle.train.dcp import METADATA, read_metadata
from rekindle.train.quantised import FourBit
from tests.plan.retrace import SMALL, finalist_of, retraced
from tests.plan.traced.finalist import extrapolated
from tests.support.train_resume import LM_TRAIN, Gang, written
from tests.support.train_step import LLAMA, case, ranks
from tests.train.differential import trainer_of

pytest.importorskip("bitsandbytes", reason="the extra `qlora` is not installed")

ROOT = Path(__file__).parents[2]
LORA = LoraSpec(rank=4, base="4bit")
SOURCE = {**LLAMA, "hidden_size": 32, "intermediate_size": 64}
MODEL = ModelSpec(source=SOURCE, tokenizer={"vocab_size": 320}, lora=LORA)


def layer_of(linear):
    made = FourBit(linear)
    for name in ("packed", "scales"):
        setattr(made, name, torch.empty_like(getattr(made, name), device="cpu"))
    made.load(linear.weight.detach())
    return made


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_in_4_bits_is_the_linear_layer_of_what_its_codes_stand_for(half, bias):
    torch.manual_seed(0)
    linear = nn.Linear(40, 23, bias=bias).requires_grad_(False)
    layer = layer_of(linear)
    off = (layer.whole() - linear.weight).abs().max() / linear.weight.abs().max()
    assert 0.01 < float(off) < 0.2
    assert layer.packed.nbytes + layer.scales.nbytes < 0.2 * linear.weight.nbytes
    linear.weight.copy_(layer.whole())
    found = []
    for one in (layer, linear):
        x = torch.randn(5, 40, generator=torch.Generator().manual_seed(1), requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            out = one(x)
        out.float().square().sum().backward()
        found.append((out, x.grad))
    (ours, gradient), (theirs, other) = found
    assert ours.dtype == theirs.dtype == (torch.bfloat16 if half else torch.float32)
    tolerance = 1e-2 if half else 1e-5
    assert torch.allclose(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance)
    assert torch.allclose(
        gradient, other, rtol=tolerance, atol=tolerance * float(other.abs().max())
    )


def test_a_layer_keeps_nothing_of_its_weight_for_the_backward_pass():
    layer, saved = layer_of(nn.Linear(64, 64)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t), lambda t: t):
        layer(torch.randn(2, 64, requires_grad=True))
    assert saved == []


def test_all_matrices_of_blocks_have_4_bits_whatever_has_adapters():
    with ranks(1):
        network = trainer_of(case()).parts.network
    wanted = {name.removesuffix(".weight") for name in modules.matrices(network)}
    modules.inject(network, LoraSpec(rank=2, targets=("q_proj", "v_proj")), {})
    quantised.replace(network)
    found = {name.removesuffix(".base_layer") for name, _ in quantised.layers(network)}
    assert found == wanted
    assert len(found) == 14
    left = [n for n, m in network.named_modules() if isinstance(m, nn.Linear) and "lora_" not in n]
    assert left == ["lm_head"]


def test_without_bitsandbytes_it_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(StepError, match="needs bitsandbytes") as caught:
        quantised.replace(nn.Linear(2, 2))
    assert "rekindle[qlora]" in caught.value.problems[0].fix


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return written(tmp_path_factory.mktemp("texts"), "causal_lm", MODEL)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("whole")
    return Gang(folder, texts, train=LM_TRAIN, task="causal_lm", model=MODEL).start().finish()


@pytest.mark.slow
def test_a_killed_training_on_4_bits_resumes_to_the_same_bits(tmp_path, texts, whole):
    killed = Gang(tmp_path, texts, train=LM_TRAIN, task="causal_lm", model=MODEL).start()
    workers = killed.until_committed().workers()
    killed.process.kill()
    psutil.wait_procs(workers, timeout=20)
    killed.process.wait()
    killed.start().finish()
    assert "resumed from the checkpoint of step" in killed.said
    assert killed.losses == whole.losses
    assert killed.weights == whole.weights


@pytest.mark.slow
def test_it_learns_says_what_is_in_effect_and_saves_adapters_only(whole):
    first, *_, last = whole.losses
    assert last[1] < first[1] - 0.01
    summary = TrainingSummary.read(whole.folder / "training-1" / "training.json")
    assert summary.in_effect["base"].startswith("nf4, 14 matrices, bitsandbytes 0.50")
    kept = newest(whole.checkpoints, "key")
    files = [path.name for path in kept.folder.iterdir()]
    names = read_metadata((kept.folder / METADATA).read_bytes(), files).state_dict_metadata
    assert names
    assert all(".lora_" in name for name in names)


@pytest.mark.slow
def test_the_exported_model_is_the_one_that_was_trained_and_not_the_one_in_full(whole, texts):
    """Its validation loss as the step `score` finds it, by transformers' own network, is that of the last validation."""
    import transformers

    folder = whole.folder / "model-1"
    summary = TrainingSummary.read(whole.folder / "training-1" / "training.json")
    exported = load_file(folder / "model.safetensors")
    assert {t.dtype for t in exported.values()} == {torch.float32}
    assert not any("lora" in name or "packed" in name for name in exported)
    network = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    total = count = 0.0
    for row in open_shards(texts).table("validation").to_pylist():
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            logits = network(ids).logits[0, :-1]
        marks = (
            torch.tensor(row["supervised"][1:]).bool()
            if "supervised" in row
            else torch.ones(ids.shape[1] - 1).bool()
        )
        found = nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")[marks]
        total, count = total + float(found.sum()), count + int(marks.sum())
    assert total / count == pytest.approx(summary.validation["loss"], rel=1e-5)
    print(total / count, summary.validation["loss"])


@pytest.mark.slow
def test_what_is_exported_is_adapters_merged_into_what_codes_stand_for(whole):
    """Without the adapters' update, which the last checkpoint has, a matrix of it is the one that its own codes stand for."""
    exported = load_file(whole.folder / "model-1" / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj"
    a, b = torch.zeros(4, 32), torch.zeros(32, 4)
    sides = {f"{name}.lora_A.default.weight": a, f"{name}.lora_B.default.weight": b}
    load(newest(whole.checkpoints, "key"), {"model": sides})
    update = LORA.alpha / LORA.rank * b @ a
    base = exported[f"{name}.weight"] - update
    layer = layer_of(nn.Linear(32, 32, bias=False).requires_grad_(False))
    layer.load(base)
    assert torch.allclose(layer.whole(), base, rtol=0, atol=1e-6)
    layer.load(exported[f"{name}.weight"])
    assert not torch.allclose(layer.whole(), exported[f"{name}.weight"], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_the_gate_judges_the_scores_of_the_exported_model(tmp_path):
    """A whole run on the reviews; what it scored is what transformers' own network makes of the folder, row by row."""
    import pyarrow.parquet as pq
    import transformers

    wanted = {
        "model.lora.base": "4bit",
        "model.lora.rank": "8",
        "train.steps": "40",
        "train.epochs": "null",
        "train.lr": "1e-2",
        "platforms.local.ranks": "1",
    }
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "rekindle.cli.main",
            "run",
            "configs/reviews.yaml",
            "--home",
            str(tmp_path),
        ]
        + [word for name, value in wanted.items() for word in ("--set", f"{name}={value}")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    def found(pattern):
        (path,) = tmp_path.glob(f"artifacts/continuous-training.{pattern}")
        return path

    summary = TrainingSummary.read(found("finetune/*/training/training.json"))
    assert summary.in_effect["base"].startswith("nf4, 6 matrices")
    scored = {
        row["id"]: row["candidate"]["logits"]
        for row in pq.read_table(found("score/*/scores/scores.parquet")).to_pylist()
    }
    folder = found("finetune/*/network")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    network = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with pa.memory_map(str(found("ingest/*/examples/test-00000.arrow"))) as source:
        rows = pa.ipc.open_file(source).read_all().select(["id", "text"]).to_pylist()
    assert len(scored) == len(rows) > 200
    for row in rows[:50]:
        inputs = tokenizer(row["text"], truncation=True, max_length=64, return_tensors="pt")
        with torch.no_grad():
            (logits,) = network(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
            ).logits
        assert logits.tolist() == pytest.approx(scored[row["id"]], abs=1e-5)


CASES = {
    "one": (SMALL, {"micro_batch_size": 1}, 2048, 1, {"lora": 16, "quantised": True}),
    "fp32 ddp full": (
        SMALL,
        {"dp": 2, "micro_batch_size": 2},
        1024,
        1,
        {"lora": 16, "quantised": True, "precision": "fp32", "checkpointing": "full"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_memory_that_is_planned_is_that_of_a_trace(name):
    one = finalist_of(CASES[name])
    one = dataclasses.replace(one, lora=one.lora.model_copy(update={"base": "4bit"}))
    found, planned = retraced(one), memory(one.work)
    peak = extrapolated(found["pair"], one.work, found["pp_rank"])
    print(json.dumps(planned.terms), json.dumps(peak.terms))
    assert -0.03 <= planned.peak_bytes / peak.peak_bytes - 1 <= 0.05
    assert planned.terms["parameters"] == pytest.approx(peak.terms["parameters"], rel=0.001)
    plain = memory(dataclasses.replace(one.work, quantised=False))
    assert planned.terms["parameters"] < 0.4 * plain.terms["parameters"]
    assert block_bytes(one.work) * 22 < planned.terms["parameters"]
