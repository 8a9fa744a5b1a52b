"""Small models in folders of their own, with the evidence that a server proves them by: fresh weights
answer as well as trained ones. What they have to answer is computed here, an example at a time."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from PIL import Image

from rekindle.records import Evidence, Fingerprint, Smoke, SmokeRow, TrainingSummary
from rekindle.serve.messages import ServedModel
from rekindle.spec.model import ColumnsSpec, DataSpec, ModelSpec, RegisterSpec
from rekindle.tasks import load_task
from rekindle.train.modelfolder import ANY_CODE, digest_of, open_model, weights_sha256

TEXTS = [
    "the parcel came open",
    "where is my order",
    "a refund please",
    "the box was wet and torn",
    "I was charged twice",
    "how do I change the address",
    "thank you for the quick help",
    "it beeps and turns itself off",
]
LABELS = ("billing", "other", "shipping")
ENCODER = {
    "model_type": "distilbert",
    "dim": 32,
    "n_layers": 1,
    "n_heads": 2,
    "hidden_dim": 64,
    "max_position_embeddings": 32,
}
DECODER = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4_096,
}
CHATS = [[["user", text], ["assistant", TEXTS[-1 - i]]] for i, text in enumerate(TEXTS)]

OWN_TASK = '''
import time
from pathlib import Path

import pyarrow as pa
import torch
from rekindle.tasks import Task


class Numbers(Task):
    """The number in a text decides: 7 waits for the file `open` beside the model's folder, `nan` is one, and more than 4 at
    once do not fit into the memory."""

    modality = "text"

    def encode(self, batch, settings, assets):
        return {"number": pa.array([float(text) for text in batch.column("text").to_pylist()])}

    def build(self, model, labels, settings, assets):
        return torch.nn.Linear(1, 2)

    def collate(self, table, settings):
        return {"number": torch.tensor(table.column("number").to_pylist())}

    def logits(self, network, inputs):
        numbers = inputs["number"]
        if len(numbers) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        while (numbers == 7).any() and not (network.folder.parent / "open").exists():
            time.sleep(0.01)
        return torch.stack([numbers, -numbers], -1)

    def save(self, network, folder, labels, settings):
        pass

    def load(self, folder):
        network = torch.nn.Linear(1, 2)
        network.folder = Path(folder)
        while (folder.parent / "hold").exists():
            time.sleep(0.01)
        return network
'''


def made(folder: Path, kind: str, seed: int = 0) -> ServedModel:
    """A model of `kind` (text, words, image, text-lm, chat) in `folder`/model, proven by rows in
    `folder`/evidence.json."""
    task = load_task(
        {
            "text": "text_classification",
            "words": "token_classification",
            "image": "image_classification",
        }.get(kind, "causal_lm")
    )
    names = {"text": "body"} | ({"messages": "messages"} if kind == "chat" else {})
    data = DataSpec(source="x", columns=ColumnsSpec(**names), max_length=32)
    spec = ModelSpec(source=ENCODER, tokenizer={"vocab_size": 200})
    if kind == "image":
        spec = ModelSpec(source={"channels": [8], "hidden": 16, "dropout": 0.0})
    if kind in ("text-lm", "chat"):
        spec = ModelSpec(source=DECODER, tokenizer={"vocab_size": 300})
    model = folder / "model"
    model.mkdir(parents=True)
    settings = {"image_shape": [8, 8, 1]}
    if kind != "image":
        settings = task.fit(lambda: iter([_examples(kind)]), data, spec, model)
    torch.manual_seed(seed)
    labels = () if kind in ("text-lm", "chat") else LABELS
    network = task.build(spec, labels, settings, model)
    with torch.no_grad():  # fresh heads hardly decide
        for parameter in network.parameters():
            parameter.mul_(12 if parameter.ndim == 2 else 1)
    task.save(network, model, labels, settings)
    _describe(model, {v: k for k, v in _TASKS.items()}[type(task).__name__], labels, settings)
    return served(model, data.columns, rows_of(model, kind))


_TASKS = {
    "text_classification": "TextClassification",
    "token_classification": "TokenClassification",
    "image_classification": "ImageClassification",
    "causal_lm": "CausalLM",
}


def own(folder: Path, code: str = OWN_TASK, version: str = "3") -> ServedModel:
    """A version of a model of a task of a user's; see OWN_TASK."""
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "task.py").write_text(code)
    _describe(model, "task.py:Numbers", ("high", "low"), {})
    row = SmokeRow(id="1", content="1", answer={"label": "high", "probability": 0.8807970779778824})
    return dataclasses.replace(served(model, ColumnsSpec(), [row]), version=version)


def served(model: Path, columns: ColumnsSpec, rows: list[SmokeRow]) -> ServedModel:
    writes = any("text" in row.answer for row in rows)
    smoke = Smoke(tolerance=0.002, tokens=8 * writes, rows=tuple(rows))
    evidence = Evidence(
        run_key="k",
        model_digest=digest_of(model),
        promote=True,
        reason="judged",
        checks=(),
        metrics={},
        rows=9,
        examples="e",
        smoke=smoke,
    )
    file = model.parent / "evidence.json"
    evidence.write(file)
    return ServedModel(
        name="tickets",
        version="3",
        digest=digest_of(model),
        path=str(model),
        evidence=str(file),
        code=ANY_CODE,
        columns=columns,
        image_size=None,
    )


def rows_of(model: Path, kind: str) -> list[SmokeRow]:
    """What the model answers, computed without the server."""
    opened, found = open_model(model), []
    network = opened.network()
    for i, (content, raw) in enumerate(contents(kind)):
        if kind in ("text-lm", "chat"):
            turns = json.loads(content)
            text = opened.task.generate(network, [turns], opened.settings, model, 8)[0]
            found.append(SmokeRow(id=str(i), content=content, answer={"text": text}))
            continue
        table = opened.task.encode_raw([raw], opened.settings, model)
        with torch.inference_mode():
            logits = opened.task.logits(network, opened.task.collate(table, opened.settings))
        odds = torch.softmax(logits.double(), -1)[0]
        tops, labels = odds.max(-1).values.tolist(), odds.argmax(-1).tolist()
        if kind == "words":
            places = table.column("places")[0].as_py()
            answer = {
                "tags": [LABELS[labels[p]] for p in places],
                "probabilities": [tops[p] for p in places],
            }
        else:
            answer = {"label": LABELS[labels], "probability": tops}
        found.append(SmokeRow(id=str(i), content=content, answer=answer))
    return found


def contents(kind: str) -> list[tuple[str, object]]:
    """Examples as the evidence keeps them, and as tasks take them."""
    if kind == "image":
        pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 1), np.uint8)
        return [(png(image), image) for image in pixels]
    if kind == "words":
        return [(json.dumps(text.split()), text.split()) for text in TEXTS]
    if kind == "chat":
        return [(json.dumps(chat[:1]), None) for chat in CHATS]
    if kind == "text-lm":
        return [(json.dumps([["text", text[:12]]]), None) for text in TEXTS]
    return [(text, text) for text in TEXTS]


def png(pixels: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels[:, :, 0]).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def again(model: ServedModel) -> ServedModel:
    """The same after its files were changed, as a copy that another user registered would be: its digest is right."""
    return dataclasses.replace(model, digest=digest_of(Path(model.path)))


def _examples(kind: str) -> pa.RecordBatch:
    if kind == "words":
        return pa.record_batch({"words": [json.dumps(text.split()) for text in TEXTS]})
    if kind == "text":
        return pa.record_batch({"text": TEXTS})
    documents = CHATS if kind == "chat" else [[["text", text]] for text in TEXTS]
    return pa.record_batch({"document": [json.dumps(one) for one in documents]})


def _describe(model: Path, task: str, labels: tuple[str, ...], settings: object) -> None:
    told = {"task": task, "labels": labels, "settings": settings, "run_key": "k"}
    (model / "rekindle.json").write_text(json.dumps(told))
    np.save(model / "trained_on.npy", np.zeros(0, np.uint64))


def champion(home: Path, model: ServedModel, reason: str = "") -> None:
    """A home whose registry has this model as the champion of `tickets`; of a later one, for a `reason`."""
    from rekindle.registry.models import Registry, register
    from rekindle.registry.promotion import promote
    from tests.registry.versions import registry_in

    if not (home / "mlflow.db").exists():
        registry_in(home)
    where = Registry(RegisterSpec(), "tickets", str(home))
    folder, evidence = Path(model.path), Path(model.evidence)
    known = Fingerprint(
        data="d",
        window="",
        files=1,
        bytes=1,
        run_key="k",
        work_key="k",
        init_from="base",
        champion="",
    )
    training = TrainingSummary(
        run_key="k",
        task="text_classification",
        engine="native",
        world_size=1,
        steps=1,
        epochs=1,
        global_batch_size=8,
        seed=0,
        precision="fp32",
        parameters=1,
        init_from="base",
        weights_sha256=weights_sha256(folder),
        train_rows=9,
    )
    promote(where, register(where, folder, evidence, known, training, ""), evidence, reason)
