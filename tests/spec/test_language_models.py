"""Which columns and metrics a language model's config may name."""

import pytest

from rekindle.errors import SpecError
from rekindle.spec.load import load_target
from rekindle.spec.model import ColumnsSpec

BASE = "name: x\ntask: {task}\ndata: {{source: x.jsonl, columns: {{{columns}}}}}\n{more}"

REFUSED = {
    "a prompt without a completion": (
        "causal_lm",
        "prompt: p",
        "",
        "data.columns.prompt",
        "completion",
    ),
    "a completion without a prompt": (
        "causal_lm",
        "completion: c",
        "",
        "data.columns.completion",
        "prompt",
    ),
    "a chat and a prompt": (
        "causal_lm",
        "messages: m, prompt: p, completion: c",
        "",
        "data.columns.prompt",
        "one form",
    ),
    "a chat for a classifier": (
        "text_classification",
        "messages: m",
        "",
        "data.columns.messages",
        "causal_lm",
    ),
    "a gate that counts classes": (
        "causal_lm",
        "",
        "evaluate: {gate: {metric: accuracy}}",
        "evaluate.gate.metric",
        "log_loss",
    ),
    "a floor that counts classes": (
        "causal_lm",
        "",
        "evaluate: {floor: {macro_f1: 0.5}}",
        "evaluate.floor.macro_f1",
        "perplexity",
    ),
    "a classifier's perplexity": (
        "text_classification",
        "",
        "evaluate: {floor: {perplexity: 9}}",
        "evaluate.floor.perplexity",
        "accuracy",
    ),
    "an accuracy above 1": (
        "causal_lm",
        "",
        "evaluate: {floor: {token_accuracy: 7}}",
        "evaluate.floor.token_accuracy",
        "lower it",
    ),
    "a negative perplexity": (
        "causal_lm",
        "",
        "evaluate: {floor: {perplexity: -1}}",
        "evaluate.floor.perplexity",
        "raise it",
    ),
}


@pytest.mark.parametrize(("task", "columns", "more", "where", "fix"), REFUSED.values(), ids=REFUSED)
def test_what_contradicts_itself_is_refused(task, columns, more, where, fix, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(BASE.format(task=task, columns=columns, more=more))
    with pytest.raises(SpecError) as caught:
        load_target(path)
    (problem,) = caught.value.problems
    assert where in str(problem)
    assert fix in f"{problem.what} {problem.fix}"


def test_labels_are_none_of_a_language_model_s_business(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("name: x\ntask: causal_lm\ndata: {source: x.jsonl, labels: [a, b]}\n")
    with pytest.raises(SpecError, match="no classes"):
        load_target(path)


@pytest.mark.parametrize(
    ("columns", "form"),
    [
        ({}, "text"),
        ({"text": "body"}, "text"),
        ({"prompt": "p", "completion": "c"}, "completion"),
        ({"messages": "m"}, "chat"),
    ],
)
def test_the_columns_say_the_form(columns, form):
    assert ColumnsSpec.model_validate(columns).form == form


@pytest.mark.parametrize("name", ["reviews-lm", "chat"])
def test_the_shipped_configs_are_in_order(name):
    spec = load_target(f"configs/{name}.yaml")
    assert spec.task == "causal_lm"
    assert spec.data.packing
