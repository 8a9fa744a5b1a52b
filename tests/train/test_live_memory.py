"""The trace of memory against ranks that really train here, with values and over gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 128,
    "n_layer": 4,
    "n_head": 4,
    "vocab_size": 500,
    "n_positions": 128,
}
DISTILBERT = {
    "model_type": "distilbert",
    "dim": 128,
    "hidden_dim": 512,
    "n_layers": 4,
    "n_heads": 4,
    "vocab_size": 500,
}
TEACHER = {**CONFIG, "hidden_size": 256, "intermediate_size": 688}
LAYOUT = {"micro_batch_size": 2}
# name: layout, accumulation, what of train differs
CASES = {
    "dp": ({"dp": 2}, 1, {}),
    "one": ({}, 1, {}),
    "one bf16": ({}, 1, {"precision": "bf16"}),
    "shard": ({"shard": 2}, 1, {}),
    "shard bf16": ({"shard": 2}, 2, {"precision": "bf16"}),
    "shard full": ({"shard": 2}, 1, {"activation_checkpointing": "full", "precision": "bf16"}),
    "tp": ({"tp": 2}, 1, {}),
    "pp": ({"pp": 2}, 4, {}),
    "pp zero bubble": ({"pp": 2, "schedule": "zero_bubble"}, 4, {}),
    "shard tp": ({"shard": 2, "tp": 2}, 1, {"precision": "bf16"}),
    "dp twice": ({"dp": 2}, 2, {"precision": "bf16"}),
    "one full": ({}, 1, {"activation_checkpointing": "full"}),
    "pp interleaved": ({"pp": 2, "schedule": "interleaved"}, 4, {"precision": "bf16"}),
    "pp shard": ({"pp": 2, "shard": 2}, 4, {"precision": "bf16"}),
    "shard selective": (
        {"shard": 2},
        1,
        {"activation_checkpointing": "selective", "precision": "bf16"},
    ),
    "cp": ({"cp": 2}, 1, {}),
    "gpt2": ({"dp": 2}, 1, {"config": GPT2, "precision": "bf16"}),
    "gpt2 pp zero bubble": ({"pp": 2, "schedule": "zero_bubble"}, 4, {"config": GPT2}),
    "distilbert": ({"dp": 2}, 1, {"config": DISTILBERT, "task": "text_classification"}),
    "lora": ({"dp": 2}, 1, {"lora": {"rank": 4}}),
    "taught": ({}, 1, {"teacher": TEACHER}),
    "taught bf16": ({"dp": 2}, 1, {"teacher": TEACHER, "precision": "bf16"}),
}
FAST = ("shard bf16",)


def case_of(name):
    layout, accumulation, train = CASES[name]
    train = dict(train)
    return {
        "name": name.replace(" ", "_"),
        "config": train.pop("config", CONFIG),
        "task": train.pop("task", "causal_lm"),
        "layout": {**LAYOUT, **layout},
        "lora": train.pop("lora", None),
        "teacher": train.pop("teacher", None),
        "train": train,
        "sequence": 128,
        "accumulation": accumulation,
    }


def child(*words, **more):
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(root),
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
    }
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        env=environment,
        timeout=500,
        **more,
    )
    said = done.stdout + done.stderr[-3000:]
    assert not done.returncode, said
    assert "Traceback" not in done.stdout, said
    return done.stdout


def compared(names, folder):
    """Every rank of the cases, real and traced."""
    cases = [case_of(name) for name in names]
    (folder / "cases.json").write_text(json.dumps(cases))
    child(str(Path(__file__).with_name("live_memory.py")), str(folder / "cases.json"), str(folder))
    jobs = []
    for case in cases:
        pp, cp = (case["layout"].get(axis, 1) for axis in ("pp", "cp"))
        case["place"] = len(jobs)
        jobs += [
            {**case, "pp_rank": place, "cp_rank": peer, "device": "cpu"}
            for place in range(pp)
            for peer in range(cp)
        ]
    lines = "".join(
        json.dumps({k: v for k, v in job.items() if k not in ("name", "place")}) + "\n"
        for job in jobs
    )
    traced = [
        json.loads(line)
        for line in child("-m", "tests.plan.traced.engine", input=lines).splitlines()
    ]
    for case, name in zip(cases, names, strict=True):
        paths = sorted(folder.glob(f"{case['name']}-*.json"))
        assert paths, name
        each = len(paths) // (case["layout"].get("pp", 1) * case["layout"].get("cp", 1))
        for rank, path in enumerate(paths):
            yield name, rank, json.loads(path.read_text()), traced[case["place"] + rank // each]


def check(names, folder):
    for name, rank, real, traced in compared(names, folder):
        off = traced["peak"] / real["peak"] - 1
        independent = real["peak"] / real["allocated"] - 1
        said = f"{name}, rank {rank}: traced {off:+.2%} of {real['peak']} in {traced['phase']}; counted {independent:+.2%} of what the allocator gave"
        print(said, real["phases"], traced["phases"])
        assert abs(off) <= 0.02, said
        # threads of gloo give back what the profiler then thinks is there, so of several ranks it only knows a limit
        assert -0.015 <= independent <= 0.001 or (CASES[name][0] and independent < 0), said
        assert abs(traced["static"] / real["static"] - 1) <= 0.01, said


@pytest.mark.slow
def test_a_trace_is_within_two_percent_of_what_two_shards_really_hold(tmp_path):
    check(FAST, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trace_is_within_two_percent_of_what_ranks_really_hold_in_every_layout(tmp_path):
    check([name for name in CASES if name not in FAST], tmp_path)
