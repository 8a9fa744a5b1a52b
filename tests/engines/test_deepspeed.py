"""DeepSpeed in the place of rekindle's own arithmetic: the same batches give the same losses and weights, whatever its stage,
and a training that is killed, stopped, or goes on with another stage on other ranks ends the same.

Real torchrun, two ranks on gloo, a GPT-2 with dropout on packed documents, two micro-batches a rank and step.
"""

import importlib.metadata
import json
import re
import signal

import pytest
import torch
from safetensors.torch import load_file

from rekindle.data.fingerprint import fingerprint
from rekindle.engines.deepspeed import _SEEN, DeepSpeed
from rekindle.errors import RequestError, SpecError
from rekindle.plan.request import asked_of
from rekindle.records import TrainingSummary
from rekindle.spec.load import load_target
from rekindle.spec.model import DataSpec, Spec, TrainSpec
from tests.support.train_resume import DISTILBERT, GPT2, LM_EVERY, LM_STEPS, LM_TRAIN, Gang, written

pytest.importorskip("deepspeed", reason="the extra `deepspeed` is not installed")

# as small as the model is, it would not be divided
SMALL = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 1e5}
STAGES = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3, **SMALL},
    "3 offloaded": {
        "stage": 3,
        **SMALL,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return written(tmp_path_factory.mktemp("texts"), "causal_lm", GPT2)


def gang(folder, texts, zero=None, **changed):
    train = LM_TRAIN.model_dump() | changed
    if zero is not None:
        train |= {"engine": "deepspeed", "engine_config": {"zero_optimization": zero}}
    return Gang(folder, texts, train=TrainSpec.model_validate(train), task="causal_lm", model=GPT2)


@pytest.fixture(scope="module")
def ours(tmp_path_factory, texts):
    return gang(tmp_path_factory.mktemp("ours"), texts).start().finish()


def weights(done):
    files = list((done.folder / f"model-{done.attempt}").glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def same(done, ours):
    assert [step for step, *_ in done.losses] == list(range(1, LM_STEPS + 1))
    for got, wanted in zip(done.losses, ours.losses, strict=True):
        assert got == pytest.approx(wanted, rel=1e-5)
    one, other = weights(ours), weights(done)
    assert one.keys() == other.keys()
    assert max(float((one[n] - other[n]).abs().max()) for n in one) <= 1e-5


@pytest.mark.slow
def test_zero_1_trains_as_rekindle_does(tmp_path, texts, ours):
    same(gang(tmp_path, texts, {"stage": 1}).start().finish(), ours)
    summary = TrainingSummary.read(tmp_path / "training-1" / "training.json")
    assert (summary.engine, summary.layout, summary.world_size) == ("deepspeed", "dp 2", 2)
    assert dict(summary.in_effect) == {
        "deepspeed": importlib.metadata.version("deepspeed"),
        "ZeRO stage": "1",
        "optimizer": "AdamW",
        "backend": "gloo",
        "ranks": "2",
        "offload": "none",
        "precision": "fp32",
    }


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["0", "2", "3", "3 offloaded"])
def test_every_other_stage_trains_as_rekindle_does(tmp_path, texts, ours, stage):
    same(gang(tmp_path, texts, STAGES[stage]).start().finish(), ours)
    in_effect = TrainingSummary.read(tmp_path / "training-1" / "training.json").in_effect
    assert in_effect["ZeRO stage"] == stage[0]
    assert in_effect["offload"] == ("optimizer, param" if "offloaded" in stage else "none")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_tensor_parallel_ranks_train_as_rekindle_does(tmp_path, texts, ours, stage):
    same(gang(tmp_path, texts, STAGES[stage], layout={"tp": 2}).start().finish(), ours)
    summary = TrainingSummary.read(tmp_path / "training-1" / "training.json")
    assert (summary.layout, summary.in_effect["tp"]) == ("tp 2", "2")


@pytest.mark.slow
def test_replicas_of_tensor_parallel_ranks_lose_one_and_go_on(tmp_path, texts, ours):
    killed = gang(tmp_path, texts, STAGES["2"], layout={"tp": 2})
    killed.ranks = 4
    killed.start().until_committed().workers()[1].send_signal(signal.SIGKILL)
    killed.finish()
    assert "resumed from the checkpoint of step" in killed.said
    same(killed, ours)


@pytest.mark.slow
def test_matrices_of_two_ranks_go_on_with_other_replicas_and_another_stage_only(
    tmp_path, texts, ours
):
    stopped = gang(tmp_path, texts, STAGES["1"], layout={"tp": 2}).start().until_step(LM_EVERY + 2)
    stopped.process.send_signal(signal.SIGTERM)
    stopped.finish(75)
    undivided = gang(tmp_path, texts, STAGES["1"])
    undivided.attempt = 1
    undivided.start().finish(1)
    assert ", of tp 2, cannot be loaded: it holds no model." in undivided.said
    assert "train in its layout, or remove " in undivided.said
    assert " to begin at step 0" in undivided.said
    resumed = gang(tmp_path, texts, STAGES["3"], layout={"tp": 2})
    resumed.attempt, resumed.ranks = 2, 4
    resumed.start().finish()
    assert f"of {LM_STEPS} on 4 ranks" in resumed.said
    same(resumed, ours)


OTHERWISE = {
    "2": {
        "stage": 2,
        "allgather_bucket_size": 10_000,
        "allgather_partitions": False,
        "contiguous_gradients": False,
        "ignore_unused_parameters": False,
        "overlap_comm": True,
        "reduce_bucket_size": 10_000,
        "reduce_scatter": False,
    },
    "3": {
        "stage": 3,
        "contiguous_gradients": False,
        "log_trace_cache_warnings": True,
        "overlap_comm": True,
        "reduce_bucket_size": 10_000,
        "reduce_scatter": False,
        "stage3_gather_16bit_weights_on_model_save": True,
        "stage3_max_live_parameters": 10_000,
        "stage3_max_reuse_distance": 10_000,
        "stage3_model_persistence_threshold": 100,
        "stage3_param_persistence_threshold": 100,
        "stage3_prefetch_bucket_size": 5_000,
        "sub_group_size": 5_000,
        "offload_optimizer": {
            "device": "cpu",
            "pin_memory": False,
            "buffer_count": 5,
            "ratio": 0.5,
        },
        "offload_param": {
            "device": "cpu",
            "pin_memory": False,
            "buffer_count": 6,
            "buffer_size": 200_000,
            "max_in_cpu": 100_000,
        },
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("stage", OTHERWISE)
def test_settings_that_are_taken_change_nothing_that_is_computed(tmp_path, texts, ours, stage):
    same(gang(tmp_path, texts, OTHERWISE[stage]).start().finish(), ours)


def test_every_setting_of_zero_that_is_taken_has_been_trained_with():
    taken = (
        set(_SEEN[("zero_optimization",)])
        | set(_SEEN["zero_optimization", "offload_optimizer"])
        | set(_SEEN["zero_optimization", "offload_param"])
    )
    offload = [OTHERWISE["3"][f"offload_{part}"] for part in ("optimizer", "param")]
    seen = {key for zero in (*OTHERWISE.values(), *offload) for key in zero}
    assert taken - seen == {"stage3_gather_fp16_weights_on_model_save"}, (
        "an older name of another one"
    )


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["1", "3"])
def test_a_killed_rank_changes_nothing(tmp_path, texts, ours, stage):
    killed = gang(tmp_path, texts, STAGES[stage]).start().until_committed()
    killed.workers()[1].send_signal(signal.SIGKILL)
    killed.finish()
    assert "restarting all ranks (1 of 3)" in killed.said
    assert "resumed from the checkpoint of step" in killed.said
    same(killed, ours)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "ranks", "after"), [("2", 4, "3"), ("3", 1, "1"), ("1", 2, "0")]
)
def test_a_stopped_training_goes_on_with_other_ranks_and_another_stage(
    tmp_path, texts, ours, before, ranks, after
):
    stopped = gang(tmp_path, texts, STAGES[before]).start().until_step(LM_EVERY + 2)
    stopped.process.send_signal(signal.SIGTERM)
    stopped.finish(75)
    resumed = gang(tmp_path, texts, STAGES[after])
    resumed.attempt, resumed.ranks = 1, ranks
    resumed.start().finish()
    assert f"of {LM_STEPS} on {ranks} ranks" in resumed.said
    same(resumed, ours)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["auto", {"tp": 2}], ids=["replicas", "tp"])
def test_bf16_keeps_weights_in_full_precision_beside(tmp_path, texts, ours, layout):
    """DeepSpeed computes in weights of bf16 and updates those of fp32, which are exported."""
    done = gang(tmp_path, texts, {"stage": 2}, precision="bf16", layout=layout).start().finish()
    assert {value.dtype for value in weights(done).values()} == {torch.float32}
    assert done.losses[-1][1] == pytest.approx(ours.losses[-1][1], rel=2e-2)
    in_effect = TrainingSummary.read(tmp_path / "training-1" / "training.json").in_effect
    assert in_effect["precision"] == "bf16"


@pytest.mark.slow
def test_a_setting_that_moves_tensors_to_other_places_ends_the_training(tmp_path, texts):
    """`round_robin_gradients`, which the config would be refused for: weights came out as those of other matrices."""
    moved = gang(tmp_path, texts, {"stage": 2, "round_robin_gradients": True}, max_restarts=0)
    moved.start().finish(1)
    assert re.search("DeepSpeed keeps weights of another tensor for ", moved.said)


@pytest.mark.slow
def test_bf16_without_weights_in_full_precision_is_refused(tmp_path, texts):
    done = gang(tmp_path, texts, {"stage": 0}, precision="bf16", max_restarts=0).start().finish(1)
    assert "stage 0 in bf16 keeps no weights in full precision" in done.said


CONFIG = {
    "train_batch_size": 32,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "Lion", "params": {"lr": "auto", "weight_decay": 0.3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "fp16": {"enabled": False},
    "zero_optimisation": {},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}},
}


def test_what_deepspeed_does_not_do_or_says_twice_is_refused_at_once(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "c.yaml"
    path.write_text(
        "name: x\ntask: causal_lm\ndata: {source: a.jsonl}\nmodel: {source: {model_type: gpt2}}\n"
        "train: {engine: deepspeed, engine_config: ds.json, layout: {pp: 2}, precision: fp16}\n"
    )
    with pytest.raises(SpecError) as caught:
        load_target(path)
    said = [problem.what.split(": ", 1)[1] for problem in caught.value.problems]
    assert said == [
        "DeepSpeed does not divide by pp",
        "the engine deepspeed does not train in fp16",
        "DeepSpeed has no `zero_optimisation`",
        "`scheduler` is not for rekindle",
        "`train_batch_size` is 32 here, and train.global_batch_size is 64",
        "`gradient_accumulation_steps` is 4 here, and rekindle decides it",
        "`weight_decay` is 0.3 here, and train.weight_decay is 0.01",
        "rekindle cannot save and resume the state of Lion",
        "offload to NVMe is not supported",
    ]
    assert all(f"{path}:5" in problem.where for problem in caught.value.problems)


def test_what_deepspeed_s_tensor_parallelism_does_not_do_is_refused():
    ds = {"zero_optimization": {"stage": 0}, "tensor_parallel": {"autotp_size": 4}}
    train = {"engine": "deepspeed", "engine_config": ds, "layout": {"tp": 2}}
    given = {"name": "x", "task": "causal_lm", "model": {"lora": {}}, "train": train}
    found = [*DeepSpeed().refuse(Spec.model_validate(given))]
    assert found[0][2] == "remove it here, and set train.layout.tp"
    assert [what for _, what, _ in found] == [
        "`autotp_size` is 4 here, and train.layout.tp is 2",
        "stage 0 clips each tp rank alone",
        "DeepSpeed divides neither adapters nor networks of images",
    ]
    images = {
        "name": "x",
        "task": "image_classification",
        "train": {**train, "engine_config": {"tensor_parallel": 4}},
    }
    assert [what for _, what, _ in DeepSpeed().refuse(Spec.model_validate(images))] == [
        "DeepSpeed divides neither adapters nor networks of images",
        "`tensor_parallel` is a mapping of settings",
    ]
    ds |= {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": "auto"}}
    del given["model"]
    spec = Spec.model_validate(
        {**given, "data": {"source": "a.jsonl"}, "model": {"source": GPT2.source}}
    )
    assert not [*DeepSpeed().refuse(spec)]
    with pytest.raises(
        RequestError, match="does not know what DeepSpeed's tensor parallelism holds"
    ):
        asked_of(spec)


def test_settings_of_zero_that_ask_for_nothing_are_taken():
    zero = {
        "stage": 2,
        "round_robin_gradients": False,
        "zero_hpz_partition_size": 1,
        "zero_quantized_weights": False,
    }
    train = {
        "engine": "deepspeed",
        "engine_config": {"zero_optimization": zero, "optimizer": {"params": {"amsgrad": False}}},
    }
    assert not [
        *DeepSpeed().refuse(Spec.model_validate({"name": "x", "task": "causal_lm", "train": train}))
    ]


HUGGING_FACE = {
    "bf16": {"enabled": "auto"},
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"},
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}


def test_what_is_auto_in_a_config_of_the_hugging_face_trainer_is_filled_in(tmp_path):
    config = DeepSpeed().config(
        TrainSpec(engine="deepspeed", engine_config=HUGGING_FACE, precision="bf16"), world=4
    )
    assert "auto" not in json.dumps(config)
    train = {"engine": "deepspeed", "engine_config": HUGGING_FACE}
    assert not [
        *DeepSpeed().refuse(Spec.model_validate({"name": "x", "task": "causal_lm", "train": train}))
    ]
    assert config["zero_optimization"] == {"stage": 3}
    assert config["optimizer"]["params"]["betas"] == [0.9, 0.999]
    assert (config["gradient_clipping"], config["bf16"]) == (1.0, {"enabled": True})


@pytest.mark.parametrize(
    "section",
    [
        {"zero_optimization": 3},
        {"zero_optimization": {"stage": 4}},
        {"zero_optimization": {"stage": "two"}},
        {"optimizer": "AdamW"},
        {"activation_checkpointing": {"partition_activations": True}},
        {"torch_autocast": {"enabled": True}},
        {"zero_optimization": {"round_robin_gradients": True}},
        {"zero_optimization": {"offload_param": {"pinned": True}}},
        {"zero_optimization": {"stage": "2"}},
        {"zero_optimization": {"stage": True}},
        {"zero_optimization": {"offload_optimizer": "cpu"}},
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        {"zero_optimization": {"stages": 3}},
        {"zero_optimization": {"stage:3": None}},
        {"data_types": {"grad_accum_dtype": "bf16"}},
        {"optimizer": {"params": {"adam_w_mode": False}}},
        {"optimizer": {"params": {"amsgrad": True}}},
    ],
    ids=str,
)
def test_a_section_that_cannot_be_meant_is_refused(section):
    train = {"engine": "deepspeed", "engine_config": section}
    spec = Spec.model_validate({"name": "x", "task": "causal_lm", "train": train})
    (problem,) = DeepSpeed().refuse(spec)
    assert problem[0][:3] == ("train", "engine_config", next(iter(section)))


@pytest.mark.parametrize(
    ("train", "what"),
    [
        ({"engine_config": "none.json"}, "cannot read"),
        ({"engine_config": "list.json"}, "no JSON object"),
        ({"engine": "rekindle", "engine_config": {}}, "rekindle's own engine has no settings"),
        ({"entrypoint": "x.py"}, "your own script starts its engine itself"),
        ({"engine": "deepsped"}, "deepspeed"),
        ({"engine": "smddp"}, "for torch 2.4"),
        ({"engine": "FSDP"}, "shards with FSDP2"),
        ({"engine": "horovod"}, "train.entrypoint"),
    ],
)
def test_a_config_that_names_no_engine_is_refused(tmp_path, train, what):
    (tmp_path / "list.json").write_text("[1]")
    values = {
        "name": "x",
        "task": "causal_lm",
        "data": {"source": "a.jsonl"},
        "model": {"source": {"model_type": "gpt2"}},
    }
    (tmp_path / "c.yaml").write_text(
        json.dumps(values | {"train": {"engine": "deepspeed", **train}})
    )
    with pytest.raises(SpecError, match=what):
        load_target(tmp_path / "c.yaml")


def test_the_stage_is_no_part_of_what_a_run_is_identified_by(tmp_path):
    """So a training goes on with another one, as with another layout."""
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    data, model = DataSpec(source=str(tmp_path / "a.jsonl")), GPT2
    configs = [
        {"zero_optimization": {"stage": 1}},
        {"zero_optimization": {"stage": 3}},
        {"zero_optimization": {"stage": 1}, "prescale_gradients": True},
    ]
    keys = [
        fingerprint(
            "causal_lm",
            data,
            model,
            TrainSpec(engine="deepspeed", engine_config=one),
            champion=None,
        ).run_key
        for one in configs
    ]
    assert keys[0] == keys[1] != keys[2]


def test_what_a_file_says_identifies_the_work(tmp_path):
    values = {
        "name": "x",
        "task": "causal_lm",
        "data": {"source": "a.jsonl"},
        "model": {"source": {"model_type": "gpt2"}},
    }
    train = {"engine": "deepspeed", "engine_config": "ds.json"}
    (tmp_path / "c.yaml").write_text(json.dumps(values | {"train": train}))
    found = []
    for stage in (1, 2):
        (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))
        found.append(load_target(tmp_path / "c.yaml").train)
    assert found[0] != found[1]
    assert found[1].engine_config == {"zero_optimization": {"stage": 2}}


HEAD_NORMS = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


QWEN3 = GPT2.model_copy(update={"source": HEAD_NORMS})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "model", "kept"),
    [("causal_lm", QWEN3, "selective"), ("text_classification", DISTILBERT, "full")],
    ids=["norms of heads", "texts with a class"],
)
def test_other_networks_are_divided_by_tensor_parallel_ranks(tmp_path, task, model, kept):
    """Each rank has the whole norm of Qwen 3's heads, and a share of its gradient."""
    texts = written(tmp_path, task, model)
    done = []
    for name, more in {
        "ours": {},
        "theirs": {"engine": "deepspeed", "layout": {"tp": 2}, "activation_checkpointing": kept},
    }.items():
        train = TrainSpec.model_validate(LM_TRAIN.model_dump() | more)
        done.append(
            Gang(tmp_path / name, texts, train=train, task=task, model=model).start().finish()
        )
    same(done[1], done[0])
