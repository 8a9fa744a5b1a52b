"""What families say, against the networks of transformers that they speak of."""

import pytest

from rekindle.families import DIVISIBLE, FAMILIES, config_of
from rekindle.families.family import ROW
from rekindle.plan.shape import shape_of
from rekindle.spec.layout import Shape


@pytest.mark.parametrize("kind", DIVISIBLE)
def test_names_and_sizes_are_those_of_the_network(kind):
    import torch
    from transformers import AutoConfig, AutoModel

    from rekindle.train.modules import backbone, blocks, unfused

    known = DIVISIBLE[kind]
    with torch.device("meta"):
        network = AutoModel.from_config(AutoConfig.for_model(kind))
    unfused(network)
    shape, body = shape_of({"model_type": kind}), backbone(network)
    assert len(blocks(network)) == shape.layers
    _, block = blocks(network)[0]
    found = {name: block.get_submodule(module) for name, module in known.matrices.items()}
    sizes = {m.name: (m.inputs, m.outputs, m.bias) for m in shape.matrices}
    assert sizes == {
        n: (m.in_features, m.out_features, m.bias is not None) for n, m in found.items()
    }
    assert {m.name for m in shape.matrices if m.divided == "row"} == set(ROW)
    inside = [*known.regions, *known.per_head, *known.sequence, known.attention]
    for name in filter(None, [*inside, known.behind]):
        block.get_submodule(name)
    for name in filter(
        None, [*known.first, *known.last, known.table, known.positions, known.summary]
    ):
        assert hasattr(body, name)


@pytest.mark.parametrize("kind", FAMILIES)
def test_defaults_are_those_of_the_class(kind):
    from transformers import AutoConfig

    made, family = AutoConfig.for_model(kind), FAMILIES[kind]
    for name, value in family.defaults.items():
        theirs = getattr(made, family.names.get(name, name), 0)  # ViT has no vocabulary
        if name != "intermediate_size" or theirs:  # GPT-2's is 4 times the width where it is None
            assert theirs == value, name
    shape = Shape.of({"model_type": kind})
    assert (shape.layers, shape.heads) == (made.num_hidden_layers, made.num_attention_heads)
    assert shape.kv_heads == (
        getattr(made, "num_key_value_heads", None) or made.num_attention_heads
    )


def test_a_config_of_an_unknown_architecture_is_read_in_the_words_of_all():
    config = config_of({"model_type": "new", "n_layer": 3, "num_attention_heads": 4})
    assert [config.get(n) for n in ("num_hidden_layers", "num_attention_heads", "hidden_size")] == [
        3,
        4,
        None,
    ]
    assert Shape.of({"model_type": "new", "n_layers": 3}) == Shape("new", 3, 0, 0)
