"""WordPiece: the same vocabulary in every process, the same ids with and without the cache."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from rekindle.tasks import causal_lm, encoder
from rekindle.tasks.encoder import WordCache, is_separable, train_wordpiece

TEXTS = [
    f"Review {i}: the Größe is {i % 7}.{i % 3} cm, naïve 好的 über-{chr(97 + i % 26)}x!"
    for i in range(400)
]
TRAIN = """
import json, sys
from rekindle.tasks.encoder import train_wordpiece
texts = json.loads(sys.stdin.read())
print(train_wordpiece(lambda: [texts[:50], texts[50:]], vocab_size=300, min_frequency=2).to_str())
"""
ODD = st.sampled_from(
    [
        " ",
        "  ",
        "\n",
        "\t",
        "\u00a0",
        "\u3000",
        "\x1c",
        "\x00",
        "\u0301",
        "İ",
        "Σ",
        "ς",
        "가",
        "[MASK]",
        "[CLS]",
        "##a",
        "好",
        "!?",
        "a" * 120,
    ]
)


@pytest.fixture(scope="module")
def tokenizer():
    learnt = train_wordpiece(lambda: [TEXTS], vocab_size=300, min_frequency=2)
    learnt.enable_truncation(24)
    return learnt


@pytest.mark.slow
def test_every_process_learns_the_same_tokenizer():
    def train(seed):
        command = [sys.executable, "-c", TRAIN]
        done = subprocess.run(
            command, input=json.dumps(TEXTS), capture_output=True, text=True, check=True
        )
        return hashlib.sha256(done.stdout.encode()).hexdigest()

    assert len({train(i) for i in range(3)}) == 1


def test_only_true_special_tokens_are_special(tokenizer):
    assert [token["content"] for token in json.loads(tokenizer.to_str())["added_tokens"]] == [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
    ]
    assert tokenizer.decode(tokenizer.encode("the naïve").ids).replace(" ", "") == "thenaive"


@settings(max_examples=300)
@given(
    st.lists(st.lists(st.one_of(st.text(max_size=8), ODD), max_size=30).map("".join), max_size=5)
)
def test_the_cache_gives_the_ids_of_the_tokenizer(tokenizer, texts):
    assert is_separable(tokenizer)
    expected = [row.ids for row in tokenizer.encode_batch(texts)]
    assert WordCache(tokenizer).encode(texts) == expected


def test_a_tokenizer_that_looks_across_spaces_is_told_apart(tokenizer):
    other = Tokenizer.from_str(tokenizer.to_str())
    other.pre_tokenizer = pre_tokenizers.Metaspace()
    assert not is_separable(other)
    spaced = Tokenizer.from_str(tokenizer.to_str())
    spaced.add_tokens(["two words"])
    assert not is_separable(spaced)


@pytest.mark.parametrize(
    "encoded",
    [
        lambda assets, text: encoder._encoder(assets)([text])[0],
        lambda assets, text: encoder._tokenizer(assets).encode(text).ids,
        lambda assets, text: causal_lm._tokenizer(assets).encode(text).ids,
    ],
)
def test_a_tokenizer_that_is_written_again_is_read_again(tmp_path, encoded):
    """As by a notebook that fits twice into one folder."""
    for ids in ([0, 1], [1, 0]):
        words = models.WordLevel(dict(zip("ab", ids, strict=True)), unk_token="a")
        made = Tokenizer(words)
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        made.save(str(tmp_path / "tokenizer.json"))
        assert [encoded(tmp_path, "a b") for _ in range(2)] == [ids] * 2
