"""Token classification: words keep their tags whatever a tokenizer makes of them."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from rekindle.errors import UnsupportedError
from rekindle.spec.model import DataSpec, ModelSpec
from rekindle.tasks.causal_lm import train_bpe
from rekindle.tasks.encoder import TokenClassification, _keeping_words_apart

TASK = TokenClassification()
TEXTS = [
    ["Unbelievably", "Zoë", "lives", "in", "New", "York", "."],
    ["she", "said", "“no”", ",", "twice"],
    ["U.S.A.", "it", "is"],
]
NETWORK = {
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


def batch_of(texts):
    return pa.record_batch({"words": pa.array([json.dumps(words) for words in texts], pa.string())})


def fitted(folder, max_length=64, vocab_size=64):
    folder.mkdir(parents=True)
    data = DataSpec(source="x", max_length=max_length)
    model = ModelSpec(source=NETWORK, tokenizer={"vocab_size": vocab_size, "min_frequency": 1})
    return TASK.fit(lambda: iter([batch_of(TEXTS)]), data, model, folder)


def encoded(texts, folder, **fields):
    settings = fitted(folder, **fields)
    return TASK.encode(batch_of(texts), settings, folder)


def test_a_word_is_tagged_at_its_first_token(tmp_path):
    found = encoded(TEXTS, tmp_path / "a")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "a" / "tokenizer.json"))
    for words, ids, places in zip(TEXTS, *(c.to_pylist() for c in found.values()), strict=True):
        assert ids == tokenizer.encode(" ".join(words)).ids, "as the text itself"
        ends = [*places[1:], len(ids) - 1]
        for word, start, end in zip(words, places, ends, strict=True):
            alone = tokenizer.encode(word, add_special_tokens=False).ids
            assert ids[start:end] == alone, word
    assert len(found["input_ids"][0]) > 2 + len(TEXTS[0]), "some word has several tokens"


def test_words_behind_the_longest_text_have_no_place(tmp_path):
    found = encoded(
        [["it", "is", "in", "New", "York"]], tmp_path / "a", max_length=5, vocab_size=200
    )
    assert len(found["input_ids"][0]) == 5
    assert found["places"].to_pylist()[0] == [1, 2, 3, -1, -1]


def test_a_word_that_is_nothing_to_the_tokenizer_has_no_place_and_a_text_of_such_is_left_out(
    tmp_path,
):
    found = encoded([["it", "\u200b", "is"], ["\u200b"]], tmp_path / "a", vocab_size=200)
    assert found["places"].to_pylist() == [[1, -1, 2], [-1]]
    assert found["input_ids"].to_pylist()[1] is None


def test_words_of_a_user_are_encoded_as_those_of_the_shards(tmp_path):
    settings = fitted(tmp_path / "a")
    expected = TASK.encode(batch_of(TEXTS), settings, tmp_path / "a")
    found = TASK.encode_raw([tuple(words) for words in TEXTS], settings, tmp_path / "a")
    assert found.to_pydict() == {name: column.to_pylist() for name, column in expected.items()}


def test_a_user_may_give_a_text_without_words(tmp_path):
    settings = fitted(tmp_path / "a")
    rows = TASK.encode_raw([["it"], [], ["\u200b"]], settings, tmp_path / "a")
    assert rows.column("places").to_pylist() == [[1], [], [-1]]
    mask = TASK.collate(rows, settings)["attention_mask"]
    assert mask.sum(1).tolist() == [len(rows["input_ids"][0]), 0, 0]


def byte_level(add_prefix_space):
    tokenizer = train_bpe([[" ".join(words)] for words in TEXTS], vocab_size=300, min_frequency=1)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    return tokenizer


def sentence_piece(scheme):
    pieces = ["<unk>", "▁", "▁one", "▁two", "one", "two", *"onetwabcdfghijklmpqrsuvxyz"]
    vocabulary = [(piece, -1.0 - len(piece) % 3) for piece in dict.fromkeys(pieces)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [byte_level(False), byte_level(True), sentence_piece("first"), sentence_piece("always")],
)
def test_tokenizers_that_mark_spaces_mark_them_between_words_too(tokenizer):
    kept = _keeping_words_apart(tokenizer)
    words = ["one", "two", "one"]
    assert kept.encode(words, is_pretokenized=True).ids == kept.encode(" ".join(words)).ids
    assert kept.encode(words, is_pretokenized=True).word_ids.count(1) == len(
        kept.encode(" two", add_special_tokens=False).ids
    )


def test_a_tokenizer_that_would_join_words_is_refused():
    tokenizer = byte_level(False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(r" ?\w+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    changed = _keeping_words_apart(tokenizer)  # here the setting inside of the sequence helps
    assert json.loads(changed.to_str())["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"]
    plain = tokenizers.Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate("onetw ")}, merges=[])
    )
    with pytest.raises(UnsupportedError, match="joins words"):
        _keeping_words_apart(plain)
