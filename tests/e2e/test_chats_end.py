"""Chats on a tokenizer whose template ends answers with another token than its eos, and on one whose template has no token for
it: what was learnt is written to its end and no further, by `predict`, by the server, and by transformers on the exported folder."""

import html
import json
import random
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.ports import free_port
from tests.serve.servers import Running
from tests.tasks.templates import SHAPES, Shape, tokenizer_for

ANSWERS = {
    "what says the cat": "meow",
    "what says the dog": "woof",
    "where sleeps the cat": "in the house",
    "is the house big": "yes",
}
CONFIG = """\
name: {name}
task: causal_lm
data: {{source: chat.jsonl, columns: {{messages: messages}}, max_length: 64}}
model: {{source: ./{name}}}
train: {{steps: 120, lr: 3e-3, global_batch_size: 16, layout: {{dp: 1}}}}
platforms: {{local: {{ranks: 1}}}}
"""


def made(folder: Path, name: str, shape: Shape) -> None:
    """A model from scratch, chats with many an equal answer, and a config."""
    draw, rows = random.Random(0), []
    for i in range(240):
        question = draw.choice(list(ANSWERS))
        messages = [("user", f"{question} {i}?"), ("assistant", ANSWERS[question])]
        rows.append({"messages": [{"role": r, "content": c} for r, c in messages]})
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = tokenizer_for(shape, [*ANSWERS, *ANSWERS.values()] * 9)
    tokenizer.save_pretrained(folder / name)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder / name)
    (folder / f"{name}.yaml").write_text(CONFIG.format(name=name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "notice"),
    [
        ("chatml", "ChatML whose eos is another token", ""),
        ("plain", "headings without any special token", "each answer gets `</s>` behind it"),
    ],
)
def test_answers_end_wherever_the_model_is_asked(cli, name, shape, notice):
    made(cli.folder, name, SHAPES[shape])
    done = cli("run", f"{name}.yaml", "--home", name, "--json")
    result = json.loads(done.stdout)
    assert result["metrics"]["token_accuracy"] > 0.98
    assert notice in done.stderr
    assert notice in html.unescape(Path(result["card"]).read_text())

    asked = [{"messages": [{"role": "user", "content": f"{q} 999?"}]} for q in ANSWERS]
    (cli.folder / "ask.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    cli(
        "predict",
        f"{name}.yaml",
        "--home",
        name,
        "--input",
        "ask.jsonl",
        "--output",
        f"{name}.jsonl",
    )
    (part,) = (cli.folder / f"{name}.jsonl").glob("part-*.jsonl")
    predicted = [json.loads(line) for line in part.read_text().splitlines()]
    assert {row["finish_reason"] for row in predicted} == {"stop"}
    assert [row["text"].strip() for row in predicted] == list(ANSWERS.values())

    exported = sorted(cli.folder.joinpath(name).rglob("generation_config.json"))[0].parent
    tokenizer = AutoTokenizer.from_pretrained(exported)
    network = AutoModelForCausalLM.from_pretrained(exported)
    stops = json.loads((exported / "generation_config.json").read_text())["eos_token_id"]
    stop = SHAPES[shape].stop or SHAPES[shape].eos
    assert tokenizer.convert_tokens_to_ids(stop) in stops
    assert tokenizer.eos_token_id in stops
    for row, answer in zip(asked, ANSWERS.values(), strict=True):
        given = tokenizer.apply_chat_template(
            row["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        written = network.generate(**given, do_sample=False, max_new_tokens=64)[0]
        new = written[given["input_ids"].shape[1] :].tolist()
        assert new[-1] in stops
        assert tokenizer.decode(new, skip_special_tokens=True).strip() == answer

    port = free_port()
    words = ["serve", name, "--home", name, "--port", str(port)]
    server = Running([sys.executable, "-m", "rekindle.cli.main", *words], port, cli.folder)
    try:
        server.ready()
        for row, answer in zip(asked, ANSWERS.values(), strict=True):
            body = {"model": name, "messages": row["messages"], "max_tokens": 64, "temperature": 0}
            (choice,) = server.client.post("/v1/chat/completions", json=body).json()["choices"]
            assert choice["finish_reason"] == "stop"
            assert choice["message"]["content"].strip() == answer
    finally:
        server.stop()
