"""How many tokens a text may have, against the longest that transformers' own forward takes."""

import pytest
import torch
from transformers import AutoConfig, AutoModel

from rekindle.errors import RequestError
from rekindle.spec.model import DataSpec, ModelSpec
from rekindle.tasks.pretrained import check_positions
from rekindle.train.look import Question, look
from rekindle.train.modules import usable_positions

ROWS = 20
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": ROWS,
    "pad_token_id": 1,
}
KINDS = [
    "roberta",
    "camembert",
    "xlm-roberta",
    "mpnet",
    "data2vec-text",
    "xmod",
    "bert",
    "electra",
    "ibert",
]


def longest_text(network) -> int:
    """By trying."""
    for length in range(1, ROWS + 5):
        ids = torch.full((1, length), 5)
        try:
            with torch.no_grad():
                network(input_ids=ids)
        except (IndexError, RuntimeError):
            return length - 1
    raise AssertionError("texts of any length are taken")


@pytest.mark.parametrize("model_type", KINDS)
def test_as_many_tokens_are_allowed_as_the_architecture_takes(model_type):
    more = {"languages": ["en"], "default_language": "en"} if model_type == "xmod" else {}
    config = AutoConfig.for_model(model_type, **SIZES, **more)
    network = AutoModel.from_config(config).eval()
    assert (usable_positions(network) or ROWS) == longest_text(network)


def test_more_are_refused_before_a_machine_is_paid():
    sizes = {"model_type": "roberta", "hidden_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": ROWS}

    def question(length: int) -> Question:
        data = DataSpec(source="texts.jsonl", max_length=length)
        return Question(task="text_classification", data=data, model=ModelSpec(source=sizes))

    (problem,) = look(question(ROWS))
    usable = int(problem.what.split()[-2])
    assert problem.what == f"data.max_length is {ROWS}, but the model has {usable} positions"
    assert usable < ROWS
    assert look(question(usable)) == []


def test_no_table_of_positions_is_no_limit():
    check_positions(None, 10_000)
    check_positions(-1, 10_000)  # XLNet's configuration
    with pytest.raises(RequestError, match="the model has 8 positions"):
        check_positions(8, 9)
