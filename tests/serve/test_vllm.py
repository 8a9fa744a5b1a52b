"""Language models written by vLLM: its real engine, in an environment of its own (`make test-vllm`)."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import safetensors.torch

pytest.importorskip("vllm", reason="`make test-vllm` runs it where vLLM is")

from rekindle.serve.load import load_served
from rekindle.serve.vllm_writer import VLLM, VllmWriter
from rekindle.serve.work import PendingInstance, WritingOptions
from rekindle.train.modelfolder import open_model
from tests.serve import models, servers
from tests.serve.servers import Running, running

pytestmark = pytest.mark.slow
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", VLLM: "--enforce-eager --max-num-seqs 8"}
CONFIG = """
name: tickets
task: causal_lm
data: {source: train.jsonl, columns: {text: body, key: id}, max_length: 32}
model: {source: {model_type: llama}, tokenizer: {vocab_size: 300}}
train: {lr: 1e-3}
"""
PROMPTS = [[("text", text[: 2 + 3 * i])] for i, text in enumerate(models.TEXTS * 3)]


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.DECODER, "hidden_size", 64)  # vLLM has no heads of 16 for CPUs
        return models.made(tmp_path_factory.mktemp("lm"), "text-lm", seed=3)


@pytest.fixture(scope="module")
def writer(text_model):
    return load_served(text_model)[0]


@pytest.fixture(scope="module")
def by_vllm(text_model):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CPU.items():
            patch.setenv(name, value)
        return load_served(text_model)[0]


def test_it_writes_what_the_model_was_judged_by(writer, by_vllm):
    """More prompts than its scheduler takes at once, of which some end by themselves."""
    options = WritingOptions(max_new_tokens=40)
    assert len(PROMPTS) > by_vllm.room == 8
    expected = writer.answers(PROMPTS, options)
    assert by_vllm.answers(PROMPTS, options) == expected
    assert {one["finish_reason"] for one in expected} == {"stop", "length"}
    assert by_vllm.room == 8
    assert not by_vllm.busy


def test_a_long_prompt_is_cut_in_front(writer, by_vllm):
    prompt = [[("text", "word " * 4_000)]]
    options = WritingOptions(max_new_tokens=4)
    found = by_vllm.answers(prompt, options)
    assert found == writer.answers(prompt, options)
    assert found[0]["truncated"]


def test_a_seed_draws_the_same_text_alone_and_together(by_vllm):
    drawn = WritingOptions(max_new_tokens=8, temperature=1.0, seed=5)
    together = by_vllm.answers(PROMPTS, drawn)
    assert together == [by_vllm.answers([prompt], drawn)[0] for prompt in PROMPTS]
    other = by_vllm.answers(PROMPTS, drawn.model_copy(update={"seed": 6}))
    assert sum(a != b for a, b in zip(together, other, strict=True)) > 12


def test_tokens_come_one_after_another_and_a_client_that_left_makes_room(by_vllm):
    works = [PendingInstance(prompt, WritingOptions(max_new_tokens=30)) for prompt in PROMPTS[:2]]
    events = by_vllm.turn(works)
    while not events:
        events = by_vllm.turn([])
    assert all(isinstance(event, int) for _, event in events)
    assert by_vllm.room == 6
    works[0].gone = True
    found = []
    while by_vllm.busy:
        found += by_vllm.turn([])
        assert by_vllm.room == 7 or not by_vllm.busy
    assert {work for work, _ in found} == {works[1]}
    *tokens, (_, answer) = found
    assert len(tokens) >= 28
    assert answer["tokens"] == 30


@pytest.fixture
def environment(monkeypatch):
    for name, value in CPU.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(models.DECODER, "hidden_size", 64)
    monkeypatch.setattr(servers, "PATIENCE_SECONDS", 300)
    return monkeypatch


ASKED = {"instances": [{"body": "once upon"}], "parameters": {"max_new_tokens": 30}}


def test_a_server_is_proven_answers_every_form_and_drains(text_model, environment):
    body = {"model": text_model.name, "prompt": "once upon", "max_tokens": 30}
    with running(text_model) as server, ThreadPoolExecutor(16) as pool:
        whole = server.client.post("/predict", json=ASKED).json()["predictions"][0]["text"]
        same = server.client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        streamed = server.client.post("/v1/completions", json={**body, "stream": True}).text
        events = [
            json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")
        ]
        assert same == whole == "".join(event["choices"][0]["text"] for event in events)
        long = {**ASKED, "parameters": {"max_new_tokens": 400}}
        answers = [pool.submit(server.client.post, "/predict", json=long) for _ in range(16)]
        server.until(lambda: answers[0].done())
        server.process.send_signal(signal.SIGTERM)
        assert {answer.result().status_code for answer in answers} == {200}
        assert server.ended() == 0


def test_a_signal_to_all_processes_of_a_terminal_loses_no_request(text_model, environment):
    server = Running.of(text_model, session=True)
    try:
        with ThreadPoolExecutor(8) as pool:
            server.ready()
            long = {**ASKED, "parameters": {"max_new_tokens": 400}}
            taken = "rekindle_batch_instances_sum"
            before = server.figure(taken)  # the rows that prove it
            answers = [pool.submit(server.client.post, "/predict", json=long) for _ in range(8)]
            server.until(lambda: server.figure(taken) == before + 8)
            os.killpg(server.process.pid, signal.SIGINT)
            assert {answer.result().status_code for answer in answers} == {200}
            assert server.ended() == 0
    finally:
        server.stop()


def test_a_server_is_one_process_so_that_its_kill_leaves_none(text_model, environment):
    with running(text_model) as server:
        assert psutil.Process(server.process.pid).children(recursive=True) == []


BREAKS = """
import sys
import rekindle.serve.server as server
from rekindle.serve.__main__ import main
from rekindle.serve.messages import ServeJob
from pydantic import TypeAdapter

def load_served(served, load=server.load_served):
    model, *rest = load(served)
    model.engine.engine_core.engine_core.model_executor = None
    return model, *rest

server.load_served = load_served
sys.exit(main(lambda: TypeAdapter(ServeJob).validate_json(sys.argv[1])))
"""


def test_an_engine_that_fails_answers_and_ends_the_server_with_an_error(text_model, environment):
    server = Running.of(text_model, smoke=False, program=["-c", BREAKS])
    try:
        server.ready()
        assert "the model failed" in server.predict("once upon").json()["error"]
        assert server.ended() == 1
        assert "the model's engine failed" in server.log.read_text()
    finally:
        server.stop()


def test_an_engine_that_fails_ends_no_other_process(text_model, environment, monkeypatch):
    by_vllm = load_served(text_model)[0]
    monkeypatch.setattr(by_vllm.engine.engine_core.engine_core, "model_executor", None)
    answers = by_vllm.answers(PROMPTS[:3], WritingOptions(max_new_tokens=4))
    assert [answer.reason for answer in answers] == ["internal"] * 3


def test_a_file_is_predicted_to_its_end(text_model, environment, tmp_path):
    models.champion(tmp_path / "home", text_model)
    (tmp_path / "tickets.yaml").write_text(CONFIG)
    rows = [{"id": f"t{i}", "body": text} for i, text in enumerate(models.TEXTS)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "predict",
        "tickets.yaml",
        "--home",
        "home",
        "--input",
        "in.jsonl",
        "--output",
        "out.jsonl",
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "rekindle.cli.main", *words],
        cwd=tmp_path,
        timeout=300,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == len(rows)


def test_end_tokens_of_a_generation_config_end_no_text_and_nan_is_no_answer(
    text_model, environment, tmp_path, writer
):
    """Both loops judge a text by the end token of the task alone."""
    copy = shutil.copytree(text_model.path, tmp_path / "model")
    options = WritingOptions(max_new_tokens=20)
    expected = writer.answers(PROMPTS[:4], options)
    tokens = json.loads((copy / "tokenizer.json").read_text())["model"]["vocab"]
    path = copy / "generation_config.json"
    told = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**told, "eos_token_id": sorted(tokens.values())[5:]}))
    opened = open_model(copy, text_model.code)
    assert VllmWriter(opened, opened.task, "").answers(PROMPTS[:4], options) == expected
    weights = safetensors.torch.load_file(copy / "model.safetensors")
    weights["model.norm.weight"] *= float("nan")
    safetensors.torch.save_file(weights, copy / "model.safetensors", {"format": "pt"})
    broken = VllmWriter(opened, opened.task, "").answers(PROMPTS[:1], options)
    assert [answer.reason for answer in broken] == ["not_finite"]


def test_other_weights_are_not_served(text_model, environment, tmp_path):
    other = models.made(tmp_path, "text-lm", seed=4)
    server = Running.of(dataclasses.replace(other, evidence=text_model.evidence))
    try:
        assert server.ended() == 1
        assert "smoke: to row" in server.log.read_text()
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("arguments", "precision", "reason"),
    [
        ("--no-such-thing", "", "vLLM does not start"),
        ("--max-model-len 1000000", "", "vLLM does not start"),
        ("", "int8", "vLLM does not serve rekindle's int8"),
        ("", "shadow", "vLLM serves one version in a process"),
    ],
)
def test_what_vllm_does_not_take_is_refused(text_model, environment, arguments, precision, reason):
    environment.setenv(VLLM, arguments)
    model = text_model.with_shadow(text_model)
    if precision != "shadow":
        model = dataclasses.replace(text_model, precision=precision)
    server = Running.of(model)
    try:
        assert server.ended() == 2
        assert f"error: {reason}" in server.log.read_text()
    finally:
        server.stop()
