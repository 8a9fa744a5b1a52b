"""The evidence as plain arithmetic gives it: one process, one example at a time, transformers' own forward passes, in full
precision. Shares the metrics and the gate with the library, and nothing of how models are loaded, divided or scored."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pyarrow as pa
import torch

from rekindle.data.examples import open_examples
from rekindle.evaluate.gate import judge
from rekindle.objectives.classes.scores import ClassScores
from rekindle.objectives.tags.scores import Scheme, TagScores
from rekindle.objectives.tokens.scores import TokenScores
from rekindle.records import Sample
from rekindle.train.modelfolder import open_model


def held_out(examples):
    return pa.Table.from_batches(list(open_examples(examples, "test")))


def encoded(opened, rows):
    batch = rows.combine_chunks().to_batches()[0]
    return pa.table(opened.task.encode(batch, opened.settings, opened.path))


def unseen(rows, folders):
    """Rows that no model was trained on, by the first 8 bytes of their hash."""
    trained = set()
    for folder in folders:
        trained |= set(np.load(folder / "trained_on.npy").tolist())
    return [int.from_bytes(h[:8], "big") not in trained for h in rows.column("hash").to_pylist()]


@torch.no_grad()
def class_scores(folder, rows):
    opened = open_model(folder)
    network, table, found = opened.task.load(folder), encoded(opened, rows), []
    for i in range(len(rows)):
        inputs = opened.task.collate(table.slice(i, 1), opened.settings)
        found.append(torch.softmax(opened.task.logits(network, inputs).double(), -1)[0].numpy())
    labels = [opened.labels.index(label) for label in rows.column("label").to_pylist()]
    return ClassScores(np.array(found), np.array(labels), opened.labels)


def targets_of(row):
    return [
        -100 if not i or not m else t
        for i, (t, m) in enumerate(zip(row["input_ids"], row["supervised"], strict=True))
    ]


@torch.no_grad()
def token_sums(folder, rows):
    """[N, 3]: nats, right predictions and targets of each text, by transformers' loss."""
    opened = open_model(folder)
    network, found = opened.task.load(folder), []
    for row in encoded(opened, rows).to_pylist():
        labels = torch.tensor([targets_of(row)])
        out = network(input_ids=torch.tensor([row["input_ids"]]), labels=labels)
        count = int((labels[0, 1:] != -100).sum())
        right = (out.logits[0, :-1].argmax(-1) == labels[0, 1:]).sum()
        found.append((float(out.loss) * count, int(right), count))
    return np.array(found, float).reshape(-1, 3)


def token_scores(folder, rows):
    opened = open_model(folder)
    table, sums = encoded(opened, rows), token_sums(folder, rows)
    targets = [t for row in table.to_pylist() for t in targets_of(row) if t != -100]
    counts = np.unique(np.array(targets), return_counts=True)[1]
    entropy = -sum(c / len(targets) * np.log(c / len(targets)) for c in counts)
    return TokenScores(*sums.T, np.array(table.column("target_bytes"), float), entropy)


@torch.no_grad()
def tag_scores(folder, rows):
    opened = open_model(folder)
    network, table, tags = opened.task.load(folder), encoded(opened, rows), opened.labels
    true, predicted, nats = [], [], []
    for row, labels in zip(table.to_pylist(), rows.column("label").to_pylist(), strict=True):
        logits_TC = network(input_ids=torch.tensor([row["input_ids"]])).logits[0].double()
        for place, label in zip(row["places"], labels, strict=True):
            logits_C = logits_TC[place] if place >= 0 else torch.zeros(len(tags))
            true.append(tags.index(label))
            predicted.append(int(logits_C.argmax()) if place >= 0 else -1)
            nats.append(-float(torch.log_softmax(logits_C, -1)[true[-1]]))
    lengths = [len(labels) for labels in rows.column("label").to_pylist()]
    return TagScores(*map(np.array, (true, predicted, nats, lengths)), Scheme.of(tags))


def samples(folder, documents):
    opened = open_model(folder)
    chats = [json.loads(document) for document in documents]
    prompts = [
        [tuple(t) for t in chat[:-1]] if chat[-1][0] == "assistant" else None for chat in chats
    ]
    assert None not in prompts
    texts = opened.task.generate(opened.task.load(folder), prompts, opened.settings, folder, 32)
    return tuple(
        Sample(prompt=p[-1][1], generated=text, expected=chat[-1][1])
        for p, text, chat in zip(prompts, texts, chats, strict=True)
    )


def unlike(folders, row):
    """Whether one of the models sees more of a text than the other."""
    cuts, whole = set(), True
    for opened in map(open_model, folders):
        found = encoded(opened, row).to_pylist()[0]
        ids = found["input_ids"] or []
        cuts.add((tuple(ids), tuple(found["supervised"] or [])))
        whole &= len(ids) < opened.settings["max_length"]
    return len(cuts) > 1 and not whole


def confusion_of(scores):
    if isinstance(scores, TokenScores):
        return []
    if isinstance(scores, ClassScores):
        return [list(row) for row in scores.confusion()]
    tags = len(scores.scheme.type_C)
    pairs = list(zip(scores.true_W.tolist(), scores.predicted_W.tolist(), strict=True))
    return [[pairs.count((i, j)) for j in range(tags)] for i in range(tags)]


def evidence(spec, slice_columns, candidate, examples, champion=None):
    """What the evidence on `candidate` has to hold, by field."""
    everything = held_out(examples)
    folders = [folder for folder in (candidate, champion) if folder]
    objective = open_model(candidate).task.objective
    tokens = objective == "tokens"
    keep = np.array(unseen(everything, folders))
    if tokens:
        for folder in folders:
            column = encoded(open_model(folder), everything).column("input_ids")
            keep &= np.array(column.is_valid(), bool)
        keep &= [not unlike(folders, everything.slice(i, 1)) for i in range(len(everything))]
    rows = everything.filter(pa.array(keep))
    read = {"tokens": token_scores, "tags": tag_scores, "classes": class_scores}[objective]
    ours = read(candidate, rows)
    theirs = read(champion, rows) if champion else None
    tables = [encoded(open_model(f), rows).select([0]) for f in folders]
    same = all(t.equals(tables[0]) for t in tables)
    usual = ("log_loss" if same else "bits_per_byte") if tokens else "accuracy"
    usual = "entity_f1" if objective == "tags" else usual
    metric = spec.gate.metric or usual if same or not tokens else usual
    slices = []
    for name in slice_columns:
        values = np.array(rows.column(name).to_pylist())
        for value in sorted(set(values)):
            pick = values == value
            sides = [scores.picked(pick).metrics if scores else {} for scores in (ours, theirs)]
            slices.append((name, value, int(pick.sum()), *sides))
    comparison = judge(spec, metric, ours, theirs, (), usual).comparison if len(rows) else None
    return {
        "metrics": ours.metrics,
        "champion_metrics": theirs.metrics if theirs else {},
        "slices": slices,
        "comparison": comparison,
        "confusion": confusion_of(ours),
        "calibration": ours.calibration() if objective == "classes" else (),
        "rows": len(rows),
        "excluded": len(everything) - len(rows),
        "examples": hashlib.sha256(b"".join(rows.column("hash").to_pylist())).hexdigest(),
        "trivial": ours.trivial(ours.METRIC),
    }
