"""A lower precision is served only where the test split was answered almost as well in it."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from rekindle.data.examples import ExamplesWriter, schema_of
from rekindle.errors import RequestError
from rekindle.records import Evidence
from rekindle.serve.int8 import FULL, Int8Linear, largest_weight
from rekindle.serve.load import load_served
from rekindle.serve.precision import lowered
from rekindle.serve.work import WritingOptions
from rekindle.tasks.pretrained import read_tokenizer
from rekindle.train.modelfolder import open_model
from tests.quick import first
from tests.serve import models
from tests.serve.servers import running

# the classes differ by less than int8 can tell beside the first input
NARROW = (
    models.OWN_TASK.replace("if len(numbers) > 4:", "if len(numbers) > 400:")
    .replace(
        "return torch.stack([numbers, -numbers], -1)",
        "return network(torch.stack([numbers, numbers * 0 + 1e4], -1))",
    )
    .replace(
        "        return network\n",
        """        network.weight.data = torch.tensor([[1.0, 0.5], [-1.0, 0.5]])
        network.bias.data.zero_()
        return network
""",
    )
    .replace(
        "network = torch.nn.Linear(1, 2)\n        network.folder",
        "network = torch.nn.Linear(2, 2)\n        network.folder",
    )
)


def split_of(model, folder):
    """A test split that the model answers rightly."""
    network, _, _ = load_served(model)
    numbers = [str(n) for n in (1, -2, 3, -4, 5, -6, 8, -9)]
    texts = (numbers if (Path(model.path) / "task.py").is_file() else models.TEXTS) * 50
    labels = [answer["label"] for answer in network.answers(texts, WritingOptions())]
    table = pa.table(
        {
            "id": [str(i) for i in range(len(texts))],
            "hash": [bytes(16)] * len(texts),
            "split": ["test"] * len(texts),
            "label": labels,
            "text": texts,
        }
    )
    with ExamplesWriter(folder, schema_of("text", ()), ("test-00000",)) as writer:
        writer.write("test-00000", table)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("precision", first(1, ["int8", "bf16"]))
def test_a_text_model_is_served_in_it_and_proven_by_its_answers(tmp_path, precision):
    model = models.made(tmp_path / "m", "text")
    examples = split_of(model, tmp_path / "examples")
    less = lowered(model, precision, examples, 0.01, tmp_path / "kept")
    evidence = Evidence.read(less.evidence)
    assert evidence.checks[-1].detail.startswith(f"{precision} answers ")
    assert " of 400 held-out labels rightly, before it was 100.00%" in evidence.checks[-1].detail
    assert (less.digest, less.precision) == (model.digest, precision)
    assert less.identity == f"{model.digest}-{precision}"
    before = Evidence.read(model.evidence).smoke
    assert evidence.smoke.tolerance == 0.05
    assert evidence.smoke.rows
    pairs = {row.id: row.answer for row in before.rows}
    assert any(
        row.answer["probability"] != pairs[row.id]["probability"] for row in evidence.smoke.rows
    )
    (tmp_path / "examples" / "test-00000.arrow").unlink()
    assert lowered(model, precision, examples, 0.01, tmp_path / "kept") == less  # measured once
    with running(less) as server:
        answers = server.predict(*models.TEXTS[:2], column="body").json()["predictions"]
    for answer, row in zip(answers, before.rows, strict=False):
        assert answer["label"] == row.answer["label"]
        assert answer["probability"] == pytest.approx(row.answer["probability"], abs=0.05)


def test_what_loses_more_is_refused(tmp_path):
    model = models.own(tmp_path / "m", NARROW)
    examples = split_of(model, tmp_path / "examples")
    with pytest.raises(RequestError, match=r"int8 answers \d\d\.\d\d% of 400 .* 1.00% may be lost"):
        lowered(model, "int8", examples, 0.01, tmp_path / "kept")
    assert lowered(model, "int8", examples, 0.9, tmp_path / "kept").precision == "int8"


def test_what_cannot_be_measured_is_refused(tmp_path):
    model = models.own(tmp_path / "m")
    for change, where in (({"evidence": ""}, tmp_path), ({}, None), ({}, tmp_path / "gone")):
        with pytest.raises(
            RequestError, match="the test split that judged version 3 is not on this"
        ):
            lowered(dataclasses.replace(model, **change), "int8", where, 0.01, tmp_path / "kept")


def documents_in(folder, texts):
    """A test split of plain texts."""
    table = pa.table(
        {
            "id": [str(i) for i in range(len(texts))],
            "hash": [bytes(16)] * len(texts),
            "split": ["test"] * len(texts),
            "document": [json.dumps([["text", text]]) for text in texts],
        }
    )
    with ExamplesWriter(folder, schema_of("document", ()), ("test-00000",)) as writer:
        writer.write("test-00000", table)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_language_model_is_served_in_it_where_its_loss_hardly_grows(tmp_path, precision):
    model = models.made(tmp_path / "m", "text-lm")
    examples = documents_in(tmp_path / "examples", [*models.TEXTS, ""])
    less = lowered(model, precision, examples, 0.5, tmp_path / "kept")
    evidence = Evidence.read(less.evidence)
    check = evidence.checks[-1]
    said = re.fullmatch(
        rf"{precision} has a loss of ([\d.]+) on ([\d,]+) held-out tokens, before it was "
        r"([\d.]+) \(([+-][\d.]+)%\), in [\d.]+ of the time",
        check.detail,
    )
    after, before, more = (float(said[i]) for i in (1, 3, 4))
    assert check.value == pytest.approx(after / before - 1, abs=1e-3)
    assert more == pytest.approx(100 * check.value, abs=0.01)
    assert check.value != 0, "it is in effect"
    assert loss_of(model, models.TEXTS) == pytest.approx(before, abs=1e-4)
    assert {len(row.answer["text"]) for row in evidence.smoke.rows} <= set(range(1, 9))
    with running(less) as server:
        found = server.predict("the parcel came").json()
    assert found["predictions"][0]["tokens"] > 0
    with pytest.raises(RequestError, match=rf"{precision} has a loss of .*% may be lost"):
        lowered(model, precision, examples, min(0.0, check.value - 1e-9), tmp_path / "kept")


def loss_of(model, texts):
    """The mean loss of a token, text by text, as transformers computes it."""
    opened = open_model(Path(model.path), model.code)
    network, tokenizer = opened.network(), read_tokenizer(opened.path)
    nats = count = 0
    for text in texts:
        ids = torch.tensor([[*tokenizer.encode(text).ids]])
        if ids[0, -1] != opened.settings["eos_token_id"]:
            ids = torch.cat([ids, torch.tensor([[opened.settings["eos_token_id"]]])], 1)
        ids = ids[:, : opened.settings["max_length"]]
        with torch.inference_mode():
            nats += float(network(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    return nats / count


@pytest.mark.slow
def test_loading_it_says_nothing_of_packages_that_it_does_not_use(tmp_path):
    model = models.made(tmp_path / "m", "text")
    code = (
        "import sys, torch; from pathlib import Path; from rekindle.serve.load import model_for;"
        "from rekindle.train.modelfolder import open_model;"
        f"model_for(open_model(Path({model.path!r}), {model.code!r}), torch.device('cpu'), 'int8');"
        "assert 'torchao' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_a_layer_in_8_bits_is_close_to_what_it_was():
    torch.manual_seed(0)
    linear, inputs = torch.nn.Linear(64, 24), torch.randn(3, 5, 64)
    torch.nn.init.normal_(linear.bias, std=3.0)
    # half as fine where a processor needs weights of 7 bits
    most = 0.03 * FULL / largest_weight()
    with torch.inference_mode():
        assert (Int8Linear(linear)(inputs) - linear(inputs)).abs().max() < most
        assert torch.equal(Int8Linear(linear)(torch.zeros(1, 64))[0], linear.bias)


def test_no_sum_in_8_bits_is_cut_off():
    """The largest that there can be: all inputs and weights at an end of their range."""
    layer = torch.nn.Linear(64, 2, bias=False)
    with torch.inference_mode():
        layer.weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, 64))
        found = Int8Linear(layer)(torch.ones(1, 64))
    torch.testing.assert_close(found, torch.tensor([[64.0, -64.0]]))


def test_what_shares_a_batch_in_8_bits_changes_no_answer():
    torch.manual_seed(0)
    layer, inputs = Int8Linear(torch.nn.Linear(64, 24, bias=False)), torch.randn(3, 5, 64)
    with torch.inference_mode():
        loud = torch.cat([inputs, 100 * inputs])
        assert torch.equal(layer(loud)[:3], layer(inputs))
