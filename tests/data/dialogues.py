"""Sources for language models of all three forms, and short ways to shard them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rekindle.data.ingest import ingest
from rekindle.data.manifest import Shards, open_shards
from rekindle.data.shard import shard
from rekindle.spec.model import DataSpec, ModelSpec
from tests.data.corpora import write_jsonl

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FORMS: dict[str, dict[str, Any]] = {
    "text": {"columns": {"text": "text"}},
    "completion": {"columns": {"prompt": "question", "completion": "answer"}},
    "chat": {"columns": {"messages": "messages"}},
}


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def dialogues(count: int = 120) -> list[dict[str, Any]]:
    """Records with a column for each form."""
    found = []
    for i in range(count):
        question, answer = f"Question {i}: how large is «{i % 7}»?", f"It is {i % 7} größer, {i}."
        system = [turn("system", "Be brief.")] if i % 3 == 0 else []
        more = [turn("user", f"And {i}?"), turn("assistant", f"{i} it is.")] if i % 4 == 0 else []
        rest = [turn("user", "Thanks!")] if i % 5 == 0 else []
        messages = [*system, turn("user", question), turn("assistant", answer), *more, *rest]
        record = {"id": f"d{i}", "topic": f"t{i % 3}", "month": f"2026-{i % 10 + 1:02}"}
        record |= {"text": f"{question}\n{answer}", "question": question, "answer": f" {answer}"}
        found.append({**record, "messages": messages})
    return found


def model(vocab_size: int = 400, **fields: Any) -> ModelSpec:
    return ModelSpec.model_validate(
        {"source": LLAMA, "tokenizer": {"vocab_size": vocab_size}, **fields}
    )


def source(folder: Path, form: str, **fields: Any) -> DataSpec:
    file = write_jsonl(folder / "dialogues.jsonl", dialogues())
    return DataSpec.model_validate({"source": str(file), "max_length": 96, **FORMS[form], **fields})


def sharded(folder: Path, data: DataSpec, spec: ModelSpec | None = None) -> Shards:
    """Examples in `folder/examples`, shards in `folder/shards`."""
    ingest(data, "document", "", folder / "examples")
    shard(folder / "examples", data, spec or model(), "causal_lm", folder / "shards")
    return open_shards(folder / "shards")
